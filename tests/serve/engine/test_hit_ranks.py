"""The prefix caches of two ranks: a prompt begins where both can."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.memory.copies import host_layout
from kvflow.protocols.cache.hashes import Namespace
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.pages.layout import build_layout
from kvflow.serve.cache.storage.identity import identity_of
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.ranks import wire
from kvflow.serve.engine.ranks.following import StepFollower
from kvflow.serve.engine.ranks.hits import Agreed, HitVotes
from kvflow.serve.engine.ranks.leading import StepLeader
from kvflow.serve.engine.scheduler.beginnings import Beginnings
from kvflow.serve.engine.scheduler.params import TokenOut
from kvflow.serve.engine.scheduler.prefill import PrefillEngine
from kvflow.serve.engine.scheduler.prefill_steps import PrefillRequest, PrefillSteps
from tests.memory.gate import CopyGate
from tests.serve.engine.pair import greedy, prompt_of, until
from tests.serve.engine.stages import PAGE_SIZE, Grouped, Stages
from tests.serve.engine.test_early_storm import played
from tests.serve.engine.tiny_models import Expected, Generated

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


class Cached:
    """Two ranks with caches, whose requests must get the tokens of the whole model."""

    def __init__(self, ranks: Stages, expected: Expected) -> None:
        self.ranks, self._expected = ranks, expected
        self.caches = [cache for cache in ranks.caches if cache is not None]
        assert len(self.caches) == 2

    async def hits(self, prompt: list[int] = PROMPT, **options: Any) -> int:
        """Return how many tokens both ranks have cached, for a request that runs alone."""
        room, legs = next(self.ranks.rooms), list[asyncio.Task[TokenOut]]()
        found = await self.ranks.decoded(
            room,
            prompt,
            greedy(4),
            lambda: legs.append(self.ranks.prefill(room, prompt, greedy(4), **options)),
        )
        first = await legs[0]
        assert first.token_id == found[0] and found == self._expected(prompt)
        return first.cached_tokens

    def begin(self) -> tuple[asyncio.Task[TokenOut], asyncio.Task[list[int]]]:
        room = next(self.ranks.rooms)
        half = asyncio.create_task(self.ranks.decoded(room, PROMPT, greedy(4)))
        return self.ranks.prefill(room, PROMPT, greedy(4)), half

    def locked(self) -> None:
        assert [cache.evictable_pages for cache in self.caches] == [0, 0], "locked at both"

    async def lose(self, rank: int) -> None:
        await until(lambda: not any(cache.busy for cache in self.caches))
        self.caches[rank].evict(99)
        assert self.caches[rank].stats().pages == 0

    @property
    def pages(self) -> list[int]:
        return [cache.stats().pages for cache in self.caches]

    def count(self, name: str) -> list[int]:
        return [getattr(cache.stats(), name) for cache in self.caches]


Caching = Callable[..., AbstractAsyncContextManager[Cached]]


@pytest.fixture
def caching(grouped: Grouped, expected: Expected) -> Caching:
    @asynccontextmanager
    async def made(**options: Any) -> AsyncIterator[Cached]:
        async with grouped(caches=True, **options) as ranks:
            yield Cached(ranks, expected)

    return made


async def ended(*legs: asyncio.Task[Any]) -> None:
    results = await asyncio.gather(*legs, return_exceptions=True)
    assert all(isinstance(r, KvflowError | asyncio.CancelledError) for r in results), results


@pytest.mark.parametrize("tries", [0, 2])
async def test_a_prompt_begins_with_what_both_ranks_have(tries: int, caching: Caching) -> None:
    async with caching(optimistic_tries=tries, chunk_tokens=8) as both:
        ranks = both.ranks
        for cached_before in (0, WHOLE):
            assert await both.hits() == cached_before
        await ranks.rest()
        assert both.pages == [WHOLE // PAGE_SIZE] * 2
        for rank, left in ((1, 3), (0, 2)):  # the other one has more
            both.caches[rank].evict(WHOLE // PAGE_SIZE - left)
            assert await both.hits() == left * PAGE_SIZE
            await ranks.rest()
            assert both.pages == [WHOLE // PAGE_SIZE] * 2, "both have it again"
        both.caches[1].evict(99)
        assert await both.hits() == 0
        assert await both.hits([*PROMPT[:20], *prompt_of(20, 2)]) == 20
        for cached_before in (0, WHOLE):
            assert await both.hits(namespace=Namespace("salt")) == cached_before
        ranks.engine.flush()
        assert await both.hits() == 0
        await ranks.rest()
        assert len(set(both.count("asked_tokens"))) == len(set(both.count("hit_tokens"))) == 1
        assert both.count("hit_tokens")[0] > 0


@pytest.mark.parametrize("tries", [0, 2])
async def test_ranks_send_what_decode_lacks(tries: int, caching: Caching) -> None:
    async with caching(decode_caches=True, optimistic_tries=tries, chunk_tokens=8) as both:
        assert both.ranks.decode_cache is not None
        for length in (1, 4, 5, 16, 17, 30):
            prompt, whole = prompt_of(length, length), (length - 1) // PAGE_SIZE * PAGE_SIZE
            assert (await both.hits(prompt), await both.hits(prompt)) == (0, whole)
            both.ranks.engine.flush()
            assert await both.hits(prompt) == 0
            both.ranks.decode_cache.flush()
            assert await both.hits(prompt) == whole


async def test_who_has_lost_its_places_asks_again(caching: Caching, expected: Expected) -> None:
    async with caching(optimistic_tries=2, pages=(10, 10)) as both:
        ranks = both.ranks
        await both.hits()
        await ranks.rest()
        room = next(ranks.rooms)
        leg = ranks.prefill(room, PROMPT, greedy(4))
        await until(lambda: any(request.has_begun for request in ranks.engine._placed.values()))
        await both.hits(prompt_of(24, 5))
        assert ranks.engine.optimism.lost == 1
        assert await ranks.decoded(room, PROMPT, greedy(4)) == expected(PROMPT)
        await leg


async def test_both_lose_what_is_flushed_before_its_first_step(
    caching: Caching, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with caching(chunk_tokens=8) as both:
        ranks = both.ranks

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
        assert await both.hits() == 0, "flushed between its steps"
        await ranks.rest()
        assert both.pages == [0, 0]
        for where, name, before, found in (
            (StepLeader, "find", False, 0),
            (PrefillEngine, "agreed", True, 0),
            (Beginnings, "_begin", False, 0),
            (StepLeader, "announce", False, WHOLE),
        ):
            await both.hits()
            await ranks.rest()
            flush_at(where, name, before=before)
            assert await both.hits() == found, (where, name)
            await ranks.rest()
            assert len(set(both.pages)) == 1


async def test_each_rank_loads_what_it_has_in_host_memory(caching: Caching) -> None:
    async with caching(host_pages=32) as both:
        await both.hits()
        for rank in range(2):
            await both.lose(rank)
            assert await both.hits() == WHOLE
            assert both.count("loaded_pages")[rank] == WHOLE // PAGE_SIZE
            await both.ranks.rest()


async def test_prompts_that_queue_lose_nothing_of_what_the_hosts_of_both_ranks_have(
    caching: Caching,
) -> None:
    prompts = [prompt_of(30, salt) for salt in range(6)]
    async with caching(host_pages=64, pages=(12, 13), chunk_tokens=8) as both:
        for prompt in prompts:
            await both.hits(prompt)
        await both.ranks.rest()
        for rank in range(2):
            await both.lose(rank)
        assert await asyncio.gather(*map(both.hits, prompts)) == [WHOLE] * len(prompts)
        await both.ranks.rest()
        assert both.count("loaded_pages") == [len(prompts) * WHOLE // PAGE_SIZE] * 2


@pytest.mark.parametrize("how", ["the client leaves", "flush", "the rank ends"])
async def test_a_rank_that_loads_for_a_request_that_ends_holds_nothing(
    how: str, caching: Caching, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with caching(host_pages=32, drops_frames=True) as both:
        ranks = both.ranks
        await both.hits()
        await both.lose(1)
        gate = CopyGate(monkeypatch)
        leg, half = both.begin()
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
        if how == "flush":
            await leg
            assert await half == expected(PROMPT)
        else:
            await ended(leg, half)
        if ending is not None:
            await ending
        await ranks.home()
        await Cached(ranks, expected).hits()


def test_what_ranks_store_is_not_taken_for_one_anothers(
    stages: list[LoadedModel], llama: LoadedModel
) -> None:
    parts = [llama.streams]
    for stage in stages:
        heads, *rest = map(int, stage.streams[0].shape)
        half = heads // 2
        parts.append(stage.streams)
        for n in range(2):
            divided = {"shape": (half, *rest), "start": n * half, "whole": heads}
            for changes in (divided, {"replica": n, "replicas": 2}):
                parts.append([kind._replace(**changes) for kind in stage.streams])
    identities = set()
    for streams in parts:
        layout = build_layout(
            streams, page_size=PAGE_SIZE, num_pages=8, fingerprint=llama.fingerprint
        )
        identities.add(identity_of(host_layout(layout, 1 << 16)))
    assert len(identities) == len(parts) == 11


@pytest.mark.parametrize("failing", [0, 1], ids=["the first rank", "the second rank"])
async def test_pages_of_a_room_that_failed_enter_no_cache(
    failing: int, caching: Caching, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with caching(drops_frames=True) as both:
        ranks, original = both.ranks, PrefillSteps.send
        where = (ranks.engine.steps, ranks.follower.steps)[failing]

        def planted(self: PrefillSteps, request: Any) -> None:
            original(self, request)
            if self is where and request.sequence.computed == request.sequence.prompt_length:
                request.room.close(Cause(Code.ENGINE_ERROR, "planted"))

        monkeypatch.setattr(PrefillSteps, "send", planted)
        await ended(*both.begin())
        await ranks.home()
        assert both.pages == [0, 0]


async def test_a_rank_that_does_not_answer_holds_nothing_once_the_client_has_left(
    caching: Caching,
) -> None:
    async with caching() as both:
        ranks = both.ranks
        await both.hits()
        await ranks.rest()
        answers = ranks.hold(wire.Found)
        leg, half = both.begin()
        await until(lambda: bool(answers))
        both.locked()
        assert not any(request.has_begun for request in ranks.engine._placed.values())
        # It has nothing cached: nobody is asked.
        assert await both.hits(prompt_of(9, 5)) == 0
        leg.cancel()
        await ended(leg, half)
        ranks.dealer.send(answers[0])  # late
        assert await both.hits() == WHOLE


async def agreed_on(both: Cached) -> tuple[asyncio.Task[TokenOut], asyncio.Task[list[int]]]:
    """Return both legs of a request whose ranks agreed, before a step names it."""
    await both.hits()
    await both.ranks.rest()
    agreed: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefillEngine, "agreed", lambda self, request, tokens: agreed.append(tokens))
        legs = both.begin()
        await until(lambda: bool(agreed))
    return legs


async def test_a_rank_that_is_lost_between_its_answer_and_the_step(
    caching: Caching, expected: Expected
) -> None:
    async with caching(drops_frames=True) as both:
        legs = await agreed_on(both)
        await both.ranks.replace_second()
        await ended(*legs)
        await both.ranks.home()
        now = Cached(both.ranks, expected)
        assert now.pages == [WHOLE // PAGE_SIZE, 0], "the new process has nothing"
        assert (await now.hits(), await now.hits()) == (0, WHOLE)


@pytest.mark.parametrize("how", ["another rank has less", "a flush"])
async def test_a_request_begins_again_when_its_pages_come_back_later(
    how: str, caching: Caching, expected: Expected
) -> None:
    async with caching(pages=(10, 10)) as both:
        await both.hits()
        await both.ranks.rest()
        if how == "another rank has less":
            await both.lose(1)
        answers: list[tuple[PrefillRequest, int]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PrefillEngine, "agreed", lambda self, *answer: answers.append(answer))
            leg, half = both.begin()
            await until(lambda: bool(answers))
        request, tokens = answers[0]
        assert request.prefix is not None
        engine, pages = both.ranks.engine, both.ranks.nodes[0].pool.pages
        others, read = pages.take(pages.free_pages, "another"), request.prefix.pages.copy()
        pages.hold(read)  # as a step or a copy does, so that they are not free once evicted
        if how == "a flush":
            engine.flush()
        else:
            engine.agreed(request, tokens)
        assert engine._beginnings.are_short
        for _ in range(100):
            await asyncio.sleep(0)
        pages.unhold(read)
        async with asyncio.timeout(60):
            assert await half == expected(PROMPT)
        assert (await leg).cached_tokens == 0
        pages.give_back(others, "another")


async def test_a_flush_that_finds_a_rank_gone_begins_nothing_anew(
    caching: Caching, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with caching(drops_frames=True) as both:
        legs = await agreed_on(both)
        with monkeypatch.context() as patch:
            patch.setattr(both.ranks.steps._socket, "send", lambda frame, peer: False)
            both.ranks.engine.flush()
        await ended(*legs)
        await both.ranks.replace_second()


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
    how: str, seed: int, grouped: Grouped, generated: Generated, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorter: list[int] = []
    start_again = PrefillSteps.start_again

    def counted(self: PrefillSteps, request: Any) -> None:
        if request.is_asking:
            shorter.append(request.agreed)
        start_again(self, request)

    monkeypatch.setattr(PrefillSteps, "start_again", counted)
    options: dict[str, Any] = {"requests": 60, "within_s": 60, "caches": True, **STORMS[how]}
    ended, _ = await played(grouped, generated, seed, {50: "a rank is lost"}, **options)
    print(
        f"seed {seed}: {dict(ended)}; {len(shorter)} began with less than the first rank had: "
        f"{shorter}"
    )
    assert ended["meets"]


# --- planted bugs: what finds them is checked on every run


async def unlike_caches(both: Cached) -> None:
    """Either rank has more than the other, and a simulated third one less than both."""
    await both.hits()
    for rank in range(2):
        await both.ranks.rest()
        both.caches[rank].evict(99)
        assert await both.hits() == 0
    await both.ranks.rest()
    answer = HitVotes.answer

    def of_three(self: HitVotes, rank: int, number: int, tokens: int) -> Agreed | None:
        return answer(self, rank, number, min(tokens, 12))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HitVotes, "answer", of_three)
        assert await both.hits() == 12
    await both.ranks.rest()


async def left_before_a_step(both: Cached, within_s: float = 20.0) -> None:
    leg, half = await agreed_on(both)
    both.locked()
    leg.cancel()
    await ended(leg, half)
    await both.ranks.home(within_s)


def begin_with_ones_own(patch: pytest.MonkeyPatch) -> None:
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
    answer = StepFollower._answer

    def planted(self: StepFollower, request: Any) -> None:
        answer(self, request)
        self.steps.forget_prefix(request)

    patch.setattr(StepFollower, "_answer", planted)


Scenario = Callable[[Cached], Any]

left_soon = functools.partial(left_before_a_step, within_s=0.5)  # what is left stays

FOUND_BY: dict[Callable[[pytest.MonkeyPatch], None], tuple[Scenario, str]] = {
    begin_with_ones_own: (
        unlike_caches,
        "a step begins at token 0 of request 2, and this rank at 28",
    ),
    begin_where_the_first_rank_does: (
        unlike_caches,
        "a step begins at token 28 of request 3, and this rank at 0",
    ),
    forget_a_lock: (left_soon, "left: "),
    lock_no_more: (left_soon, "locked at both"),
}


@pytest.mark.parametrize("scenario", [unlike_caches, left_before_a_step])
async def test_what_finds_planted_bugs_finds_none_in_what_is_there(
    scenario: Scenario, caching: Caching
) -> None:
    async with caching(drops_frames=True) as both:
        await scenario(both)


@pytest.mark.parametrize("plant", FOUND_BY)
async def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], caching: Caching, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    scenario, text = FOUND_BY[plant]
    async with caching() as both:
        with pytest.raises((AssertionError, KvflowError), match=re.escape(text)):
            await scenario(both)
        both.ranks.has_to_rest = False
