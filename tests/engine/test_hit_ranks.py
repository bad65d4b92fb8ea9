"""The prefix caches of two ranks: a prompt begins where both can,
whatever one of them has alone.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.memory.copies import host_layout
from kvflow.protocols.cache.hashes import Namespace
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.pages.layout import build_layout
from kvflow.serve.cache.prefix import PrefixCache
from kvflow.serve.cache.storage.identity import identity_of
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.ranks import wire
from kvflow.serve.engine.ranks.following import StepFollower
from kvflow.serve.engine.ranks.hits import Agreed, HitVotes
from kvflow.serve.engine.ranks.leading import StepLeader
from kvflow.serve.engine.scheduler.beginnings import Beginnings
from kvflow.serve.engine.scheduler.prefill import PrefillEngine
from kvflow.serve.engine.scheduler.prefill_steps import PrefillSteps
from tests.engine import tiny_models
from tests.engine.pair import greedy, prompt_of, until
from tests.engine.stages import PAGE_SIZE, Stages, group
from tests.engine.test_early_storm import played
from tests.memory.gate import CopyGate

PROMPT = prompt_of(30, 1)
WHOLE = 28  # tokens of its whole pages


# --- votes


@given(
    own=st.integers(0, 9),
    answers=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_the_rank_that_has_the_least_decides_in_any_order(
    own: int, answers: list[int], order: Any
) -> None:
    votes = HitVotes(len(answers) + 1)
    number = votes.ask(7, own)
    ranks = list(range(1, len(answers) + 1))
    order.shuffle(ranks)
    for rank in ranks[:-1]:
        assert votes.answer(rank, number, answers[rank - 1]) is None
        assert votes.answer(rank, number, 0) is None, "the first answer holds"
    assert votes.answer(ranks[-1], number, answers[ranks[-1] - 1]) == Agreed(7, min(own, *answers))
    assert not len(votes)


def test_answers_that_nobody_waits_for_change_nothing() -> None:
    votes = HitVotes(3)
    first = votes.ask(7, 12)
    assert votes.answer(1, first, 4) is None
    second = votes.ask(7, 8)  # it was preempted, and begins again
    assert votes.answer(2, first, 4) is None, "of the question before"
    assert votes.answer(1, second, 8) is None
    assert votes.answer(9, second, 0) is None, "no rank of this group"
    assert votes.answer(2, second, 12) == Agreed(7, 8)
    third = votes.ask(7, 8)
    votes.drop(7)
    votes.drop(7)
    assert votes.answer(1, third, 8) is votes.answer(2, third, 8) is None
    votes.ask(8, 4)
    votes.clear()
    assert not len(votes)


# --- two ranks


def cached(ranks: Stages) -> list[int]:
    found = [cache.stats().pages for cache in ranks.caches if cache is not None]
    assert len(found) == 2
    return found


def cache_at(ranks: Stages, rank: int) -> PrefixCache:
    cache = ranks.caches[rank]
    assert cache is not None
    return cache


async def tokens_and_cached(
    ranks: Stages, prompt: list[int], **options: Any
) -> tuple[list[int], int]:
    """Its tokens, and how many of its prompt were cached."""
    room, legs = next(ranks.rooms), []
    found = await ranks.decoded(
        room,
        prompt,
        greedy(4),
        lambda: legs.append(ranks.prefill(room, prompt, greedy(4), **options)),
    )
    first = await legs[0]
    assert first.token_id == found[0]
    return found, first.cached_tokens


@pytest.mark.parametrize("tries", [0, 2])
async def test_a_prompt_begins_with_what_both_ranks_have(
    tries: int, stages: list[LoadedModel], llama: LoadedModel, stock: Callable[[str], Any]
) -> None:
    expected = tiny_models.generate(stock("llama"), PROMPT, 4)
    async with group(stages, llama, caches=True, optimistic_tries=tries, chunk_tokens=8) as ranks:
        for cached_before in (0, WHOLE):
            assert await tokens_and_cached(ranks, PROMPT) == (expected, cached_before)
        await ranks.rest()
        assert cached(ranks) == [WHOLE // PAGE_SIZE] * 2
        for rank, left in ((1, 3), (0, 2)):  # the other one has more
            cache_at(ranks, rank).evict(WHOLE // PAGE_SIZE - left)
            assert await tokens_and_cached(ranks, PROMPT) == (expected, left * PAGE_SIZE)
            await ranks.rest()
            assert cached(ranks) == [WHOLE // PAGE_SIZE] * 2, "both have it again"
        cache_at(ranks, 1).evict(99)
        assert await tokens_and_cached(ranks, PROMPT) == (expected, 0)
        longer = [*PROMPT[:20], *prompt_of(20, 2)]
        assert await tokens_and_cached(ranks, longer) == (
            tiny_models.generate(stock("llama"), longer, 4),
            20,
        )
        assert (await tokens_and_cached(ranks, PROMPT, namespace=Namespace("salt")))[1] == 0
        assert (await tokens_and_cached(ranks, PROMPT, namespace=Namespace("salt")))[1] == WHOLE
        ranks.engine.flush()
        assert await tokens_and_cached(ranks, PROMPT) == (expected, 0)
        await ranks.rest()
        stats = [cache_at(ranks, rank).stats() for rank in range(2)]
        assert (
            stats[0].asked_tokens == stats[1].asked_tokens
            and stats[0].hit_tokens == stats[1].hit_tokens > 0
        )
        assert [stat.pages - stat.evictable_pages for stat in stats] == [0, 0]


@pytest.mark.parametrize("tries", [0, 2])
async def test_ranks_send_what_decode_lacks(
    tries: int, stages: list[LoadedModel], llama: LoadedModel, stock: Callable[[str], Any]
) -> None:
    """Of prompts of whole pages and others, whoever has more of them."""
    async with group(
        stages, llama, caches=True, decode_caches=True, optimistic_tries=tries, chunk_tokens=8
    ) as ranks:
        for length in (1, 4, 5, 16, 17, 30):
            prompt = prompt_of(length, length)
            expected, whole = (
                tiny_models.generate(stock("llama"), prompt, 4),
                (length - 1) // PAGE_SIZE * PAGE_SIZE,
            )
            cold, warm = (
                await tokens_and_cached(ranks, prompt),
                await tokens_and_cached(ranks, prompt),
            )
            assert (cold, warm) == ((expected, 0), (expected, whole))
            ranks.engine.flush()
            assert await tokens_and_cached(ranks, prompt) == (expected, 0)
            assert ranks.decode_cache is not None
            ranks.decode_cache.flush()
            assert await tokens_and_cached(ranks, prompt) == (expected, whole)
        await ranks.rest()


async def test_who_has_lost_its_places_asks_again(
    stages: list[LoadedModel], llama: LoadedModel, stock: Callable[[str], Any]
) -> None:
    expected, other = tiny_models.generate(stock("llama"), PROMPT, 4), prompt_of(24, 5)
    async with group(stages, llama, caches=True, optimistic_tries=2, pages=(10, 10)) as ranks:
        await tokens_and_cached(ranks, PROMPT)
        await ranks.rest()
        room = next(ranks.rooms)
        leg = ranks.prefill(room, PROMPT, greedy(4))
        await until(lambda: any(request.has_begun for request in ranks.engine._placed.values()))
        await tokens_and_cached(ranks, other)
        assert ranks.engine.optimism.lost == 1
        assert await ranks.decoded(room, PROMPT, greedy(4)) == expected
        await leg
        await ranks.rest()


async def test_both_lose_what_is_flushed_before_its_first_step(
    stages: list[LoadedModel],
    llama: LoadedModel,
    stock: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At whatever moment: while the ranks are asked, when one has answered, and when all have."""
    expected = tiny_models.generate(stock("llama"), PROMPT, 4)
    async with group(stages, llama, caches=True, chunk_tokens=8) as ranks:

        def flush_at(where: type, name: str, *, before: bool) -> None:
            original = getattr(where, name)

            def planted(self: Any, *args: Any, **kwargs: Any) -> Any:
                monkeypatch.setattr(where, name, original)
                if before:
                    ranks.engine.flush()
                    return original(self, *args, **kwargs)
                result = original(self, *args, **kwargs)
                ranks.engine.flush()
                return result

            monkeypatch.setattr(where, name, planted)

        flush_at(StepLeader, "announce", before=False)
        assert await tokens_and_cached(ranks, PROMPT) == (expected, 0), "flushed between its steps"
        await ranks.rest()
        assert cached(ranks) == [0, 0]
        for where, name, before, found in (
            (StepLeader, "find", False, 0),
            (PrefillEngine, "agreed", True, 0),
            (Beginnings, "_begin", False, 0),
            (StepLeader, "announce", False, WHOLE),
        ):
            assert (await tokens_and_cached(ranks, PROMPT))[0] == expected
            await ranks.rest()
            flush_at(where, name, before=before)
            assert await tokens_and_cached(ranks, PROMPT) == (expected, found), (where, name)
            await ranks.rest()
            assert len(set(cached(ranks))) == 1


async def test_each_rank_loads_what_it_has_in_host_memory(
    stages: list[LoadedModel], llama: LoadedModel, stock: Callable[[str], Any]
) -> None:
    """When the first rank asks: so a pool that has lost a prefix is no reason for the others to
    compute theirs.
    """
    expected = tiny_models.generate(stock("llama"), PROMPT, 4)
    async with group(stages, llama, caches=True, host_pages=32) as ranks:
        await tokens_and_cached(ranks, PROMPT)
        for rank in range(2):
            await until(lambda: not any(cache_at(ranks, r).busy for r in range(2)))
            cache_at(ranks, rank).evict(99)
            assert cache_at(ranks, rank).stats().pages == 0
            assert await tokens_and_cached(ranks, PROMPT) == (expected, WHOLE)
            assert cache_at(ranks, rank).stats().loaded_pages == WHOLE // PAGE_SIZE
            await ranks.rest()


async def test_prompts_that_queue_lose_nothing_of_what_the_hosts_of_both_ranks_have(
    stages: list[LoadedModel], llama: LoadedModel
) -> None:
    """Either pool has room for one prompt."""
    prompts = [prompt_of(30, salt) for salt in range(6)]
    async with group(
        stages, llama, caches=True, host_pages=64, pages=(12, 13), chunk_tokens=8
    ) as ranks:
        expected = [(await tokens_and_cached(ranks, prompt))[0] for prompt in prompts]
        await ranks.rest()
        for rank in range(2):
            await until(lambda rank=rank: not cache_at(ranks, rank).busy)  # type: ignore[misc]
            cache_at(ranks, rank).evict(99)
        found = await asyncio.gather(*(tokens_and_cached(ranks, prompt) for prompt in prompts))
        assert found == [(tokens, WHOLE) for tokens in expected]
        await ranks.rest()
        stats = [cache_at(ranks, rank).stats() for rank in range(2)]
        assert [stat.loaded_pages for stat in stats] == [len(prompts) * WHOLE // PAGE_SIZE] * 2
        assert [stat.pages - stat.evictable_pages for stat in stats] == [0, 0]


@pytest.mark.parametrize("how", ["the client leaves", "flush", "the rank ends"])
async def test_a_rank_that_loads_for_a_request_that_ends_holds_nothing(
    how: str, stages: list[LoadedModel], llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with group(stages, llama, caches=True, host_pages=32) as ranks:
        expected, _ = await tokens_and_cached(ranks, PROMPT)
        await until(lambda: not cache_at(ranks, 1).busy)
        cache_at(ranks, 1).evict(99)
        gate = CopyGate(monkeypatch)
        room = next(ranks.rooms)
        half = asyncio.create_task(ranks.decoded(room, PROMPT, greedy(4)))
        leg = ranks.prefill(room, PROMPT, greedy(4))
        await gate.reached()
        ending = None
        if how == "the client leaves":
            leg.cancel()
        elif how == "flush":
            ranks.engine.flush()
        else:
            ending = asyncio.create_task(ranks.replace_second())
        await until(lambda: not ranks.follower._loads._running)
        gate.go.set()
        results = await asyncio.gather(leg, half, return_exceptions=True)
        if how == "flush":
            assert results[1] == expected
        else:
            assert all(
                isinstance(result, KvflowError | asyncio.CancelledError) for result in results
            ), results
        if ending is not None:
            await ending
        await ranks.home()
        for rank in range(2):
            await until(lambda rank=rank: not cache_at(ranks, rank).busy)  # type: ignore[misc]
            assert cache_at(ranks, rank).stats().pages == cache_at(ranks, rank).evictable_pages
        assert (await tokens_and_cached(ranks, PROMPT))[0] == expected


def test_what_ranks_store_is_not_taken_for_one_anothers(
    stages: list[LoadedModel], llama: LoadedModel
) -> None:
    """Whether they share a store or not: stages, the shards of each, and shards that have copies of
    the same.
    """
    parts = [llama.streams]
    for stage in stages:
        heads, *rest = map(int, stage.streams[0].shape)
        parts.append(stage.streams)
        for n in range(2):
            half = (heads // 2, *rest)
            parts.append(
                [
                    kind._replace(shape=half, start=n * half[0], whole=heads)
                    for kind in stage.streams
                ]
            )
            parts.append([kind._replace(replica=n, replicas=2) for kind in stage.streams])
    identities = set()
    for streams in parts:
        layout = build_layout(
            streams, page_size=PAGE_SIZE, num_pages=8, fingerprint=llama.fingerprint
        )
        identities.add(identity_of(host_layout(layout, 1 << 16)))
    assert len(identities) == len(parts) == 11


async def fails_without_a_trace(ranks: Stages, end: Callable[[int], Any]) -> None:
    """A request of which `end`, called with its room once both ranks compute, ends a part."""
    room = next(ranks.rooms)
    half = asyncio.create_task(ranks.decoded(room, PROMPT, greedy(4)))
    leg = ranks.prefill(room, PROMPT, greedy(4))
    end(room)
    results = await asyncio.gather(leg, half, return_exceptions=True)
    assert all(isinstance(result, KvflowError) for result in results), results
    await ranks.home()


async def test_pages_of_a_room_that_failed_enter_no_cache(
    stages: list[LoadedModel], llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails at one rank after its last chunk has landed at the other."""
    async with group(stages, llama, caches=True) as ranks:
        for failing in range(2):

            def close_at_last(room: int, failing: int = failing) -> None:
                original = PrefillSteps.send

                def planted(self: PrefillSteps, request: Any) -> None:
                    original(self, request)
                    mine = self is (ranks.engine.steps, ranks.follower.steps)[failing]
                    if mine and request.sequence.computed == request.sequence.prompt_length:
                        request.room.close(Cause(Code.ENGINE_ERROR, "planted"))

                monkeypatch.setattr(PrefillSteps, "send", planted)

            await fails_without_a_trace(ranks, close_at_last)
            monkeypatch.undo()
            assert cached(ranks) == [0, 0]


async def test_a_rank_that_does_not_answer_holds_nothing_once_the_client_has_left(
    stages: list[LoadedModel], llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with group(stages, llama, caches=True) as ranks:
        await tokens_and_cached(ranks, PROMPT)
        await ranks.rest()
        answers: list[bytes] = []
        send = ranks.dealer.send

        def held(frame: bytes, *args: Any, **kwargs: Any) -> bool:
            if not isinstance(wire.parse_at_first(frame), wire.Found):
                return send(frame, *args, **kwargs)
            answers.append(frame)
            return True

        monkeypatch.setattr(ranks.dealer, "send", held)
        room = next(ranks.rooms)
        half = asyncio.create_task(ranks.decoded(room, PROMPT, greedy(4)))
        leg = ranks.prefill(room, PROMPT, greedy(4))
        await until(lambda: bool(answers))
        assert [cache_at(ranks, rank).evictable_pages for rank in range(2)] == [0, 0], (
            "locked at both"
        )
        assert not any(request.has_begun for request in ranks.engine._placed.values())
        other = prompt_of(9, 5)  # has nothing cached: nobody is asked
        assert (await tokens_and_cached(ranks, other))[1] == 0
        leg.cancel()
        await asyncio.gather(leg, half, return_exceptions=True)
        monkeypatch.undo()
        send(answers[0])  # late
        assert (await tokens_and_cached(ranks, PROMPT))[1] == WHOLE
        await ranks.rest()


async def agreed_on(
    ranks: Stages, monkeypatch: pytest.MonkeyPatch
) -> tuple[asyncio.Task[Any], asyncio.Task[Any]]:
    """Both legs of a request whose ranks have answered how much they have of it, and no step has
    named it.
    """
    agreed: list[int] = []
    monkeypatch.setattr(
        PrefillEngine, "agreed", lambda self, request, tokens: agreed.append(tokens)
    )
    room = next(ranks.rooms)
    half = asyncio.create_task(ranks.decoded(room, PROMPT, greedy(4)))
    leg = ranks.prefill(room, PROMPT, greedy(4))
    await until(lambda: bool(agreed))
    monkeypatch.undo()
    return leg, half


async def test_a_rank_that_is_lost_between_its_answer_and_the_step(
    stages: list[LoadedModel],
    llama: LoadedModel,
    stock: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = tiny_models.generate(stock("llama"), PROMPT, 4)
    async with group(stages, llama, caches=True) as ranks:
        await tokens_and_cached(ranks, PROMPT)
        await ranks.rest()
        leg, half = await agreed_on(ranks, monkeypatch)
        await ranks.replace_second()
        results = await asyncio.gather(leg, half, return_exceptions=True)
        assert all(isinstance(result, KvflowError) for result in results), results
        await ranks.home()
        assert cached(ranks) == [WHOLE // PAGE_SIZE, 0], "the new process has nothing"
        assert await tokens_and_cached(ranks, PROMPT) == (expected, 0)
        assert await tokens_and_cached(ranks, PROMPT) == (expected, WHOLE)
        await ranks.home()


async def test_a_flush_that_finds_a_rank_gone_begins_nothing_anew(
    stages: list[LoadedModel], llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with group(stages, llama, caches=True) as ranks:
        await tokens_and_cached(ranks, PROMPT)
        await ranks.rest()
        leg, half = await agreed_on(ranks, monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(ranks.steps._socket, "send", lambda frame, peer: False)
            ranks.engine.flush()
        results = await asyncio.gather(leg, half, return_exceptions=True)
        assert all(isinstance(result, KvflowError) for result in results), results
        await ranks.replace_second()
        await ranks.home()


# --- storms

STORMS: dict[str, dict[str, Any]] = {
    "all are matched first": {"tries": 0},
    "some begin early": {"tries": 2},
    "host memory": {"tries": 2, "host_pages": 24},
    "little host memory": {"tries": 0, "host_pages": 6, "write_policy": "write_back"},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", STORMS)
async def test_a_storm_over_caches_leaves_no_lock(
    how: str,
    seed: int,
    stages: list[LoadedModel],
    llama: LoadedModel,
    stock: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shorter: list[int] = []
    start_again = PrefillSteps.start_again

    def counted(self: PrefillSteps, request: Any) -> None:
        if request.is_asking:
            shorter.append(request.agreed)
        start_again(self, request)

    monkeypatch.setattr(PrefillSteps, "start_again", counted)
    breaks = {50: "a rank is lost"}
    ended, _ = await played(
        stages,
        llama,
        seed,
        stock("llama"),
        breaks,
        requests=60,
        within_s=60,
        caches=True,
        **STORMS[how],
    )
    print(
        f"seed {seed}: {dict(ended)}; {len(shorter)} began with less than the first rank had: "
        f"{shorter}"
    )
    assert ended["meets"]


# --- planted bugs: what finds them is checked on every run


async def unlike_caches(ranks: Stages) -> None:
    """Either rank has more than the other, and a third one, of which only the answer is there, less
    than both.
    """
    await tokens_and_cached(ranks, PROMPT)
    for rank in range(2):
        await ranks.rest()
        cache_at(ranks, rank).evict(99)
        assert (await tokens_and_cached(ranks, PROMPT))[1] == 0
    await ranks.rest()
    answer = HitVotes.answer

    def of_three(self: HitVotes, rank: int, number: int, tokens: int) -> Agreed | None:
        return answer(self, rank, number, min(tokens, 12))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HitVotes, "answer", of_three)
        assert (await tokens_and_cached(ranks, PROMPT))[1] == 12
    await ranks.rest()


async def left_before_a_step(ranks: Stages) -> None:
    """A client that leaves when the ranks have locked what they have, and none has begun."""
    await tokens_and_cached(ranks, PROMPT)
    await ranks.rest()
    with pytest.MonkeyPatch.context() as patch:
        told: list[int] = []
        patch.setattr(PrefillEngine, "agreed", lambda self, request, tokens: told.append(tokens))
        room = next(ranks.rooms)
        half = asyncio.create_task(ranks.decoded(room, PROMPT, greedy(4)))
        leg = ranks.prefill(room, PROMPT, greedy(4))
        await until(lambda: bool(told))
        assert [cache_at(ranks, rank).evictable_pages for rank in range(2)] == [0, 0], (
            "locked at both"
        )
    leg.cancel()
    await asyncio.gather(leg, half, return_exceptions=True)
    await ranks.home(0.5)


def begin_with_ones_own(patch: pytest.MonkeyPatch) -> None:
    """The second rank."""
    patch.setattr(
        PrefillSteps, "agree", lambda self, request, tokens: setattr(request, "agreed", None)
    )


def begin_where_the_first_rank_does(patch: pytest.MonkeyPatch) -> None:
    answer = HitVotes.answer

    def planted(self: HitVotes, rank: int, number: int, tokens: int) -> Agreed | None:
        return answer(self, rank, number, 1 << 20)

    patch.setattr(HitVotes, "answer", planted)


def forget_a_lock(patch: pytest.MonkeyPatch) -> None:
    drop = StepFollower._drop

    def planted(self: StepFollower, ticket: int, **how: Any) -> None:
        found = self.requests.get(ticket)
        if (
            found is not None
            and found.request is not None
            and not found.request.sequence.page_count
        ):
            found.request = None
        drop(self, ticket, **how)

    patch.setattr(StepFollower, "_drop", planted)


def lock_no_more(patch: pytest.MonkeyPatch) -> None:
    """What was found may be evicted before the step."""
    answer = StepFollower._answer

    def planted(self: StepFollower, request: Any) -> None:
        answer(self, request)
        self.steps.forget_prefix(request)

    patch.setattr(StepFollower, "_answer", planted)


FOUND_BY: dict[Callable[[pytest.MonkeyPatch], None], tuple[Callable[[Stages], Any], str]] = {
    begin_with_ones_own: (
        unlike_caches,
        "a step begins at token 0 of request 2, and this rank at 28",
    ),
    begin_where_the_first_rank_does: (
        unlike_caches,
        "a step begins at token 28 of request 3, and this rank at 0",
    ),
    forget_a_lock: (left_before_a_step, "left: "),
    lock_no_more: (left_before_a_step, "locked at both"),
}


@pytest.mark.parametrize("scenario", [unlike_caches, left_before_a_step])
async def test_what_finds_planted_bugs_finds_none_in_what_is_there(
    scenario: Callable[[Stages], Any], stages: list[LoadedModel], llama: LoadedModel
) -> None:
    async with group(stages, llama, caches=True) as ranks:
        await scenario(ranks)


@pytest.mark.parametrize("plant", FOUND_BY)
async def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    stages: list[LoadedModel],
    llama: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    scenario, text = FOUND_BY[plant]
    async with group(stages, llama, caches=True) as ranks:
        with pytest.raises((AssertionError, KvflowError), match=re.escape(text)):
            await scenario(ranks)
