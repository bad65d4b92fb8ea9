"""Prompts that begin before their room is matched: what leaves when, and who gives way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvflow.protocols.errors import Code, KvflowError
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.scheduler.optimistic import OptimisticStarts
from kvflow.serve.engine.scheduler.params import EngineOptimism, SamplingParams, TokenOut
from tests.serve.engine.pair import EnginePair, FakeRoom, Watched, greedy, prompt_of, until
from tests.serve.engine.tiny_models import Loaded

Begun = tuple[FakeRoom, asyncio.Task[TokenOut]]


class Early(Watched):
    """The prefill steps of a pair that begins early, and such requests."""

    def __init__(self, pair: EnginePair, *, held: bool = False) -> None:
        super().__init__(pair.prefill.steps.runner, held=held)
        self.pair, self.pages = pair, pair.source.pages

    def begin(self, prompt: list[int], params: SamplingParams | None = None) -> Begun:
        room = self.pair.room(prompt, late=True)
        return room, self.pair.send(room, prompt, params or greedy(1))

    async def matched(self, prompt: list[int]) -> Begun:
        """Begin a matched prompt that is computed and keeps its places, because nothing lands."""
        room, leg = self.begin(prompt)
        room.gate.clear()
        room.meet()
        await room.sent()
        return room, leg

    async def first_tokens(self, *prompts: list[int]) -> list[int]:
        found = [(await self.pair.outputs(prompt, greedy(1)))[0].token_id for prompt in prompts]
        self.steps.clear()
        return found

    @property
    def counts(self) -> tuple[int, int, int, int]:
        found: EngineOptimism = self.pair.prefill.optimism
        return found.starts, found.hits, found.lost, found.holding_now

    @property
    def owners(self) -> list[int]:
        return [owner[1] for step in self.steps for owner, _ in step]

    async def computed(self, tokens: int) -> None:
        await until(lambda: sum(map(sum, self.new)) >= tokens and not self.pages.held_pages)


def of_one_prompt(model: LoadedModel, tries: int = 1, **options: Any) -> EnginePair:
    given = {"source_pages": 6, "num_pages": 64, **options}
    return EnginePair(model, page_size=4, optimistic_tries=tries, **given)


async def test_a_prompt_that_is_computed_leaves_at_once_when_decode_comes(
    llama: LoadedModel,
) -> None:
    async with EnginePair(llama, page_size=4, chunk_tokens=10, optimistic_tries=1) as pair:
        early = Early(pair)
        [expected] = await early.first_tokens(prompt_of(27))
        room, leg = early.begin(prompt_of(27))
        await early.computed(27)
        assert early.counts == (1, 0, 0, 1) and not room.sends and not leg.done()
        load = pair.prefill.load()
        assert (load.running, load.waiting) == (1, 0)
        room.meet()
        assert (await leg).token_id == expected
        assert early.new == [[10], [10], [7]], "nothing was computed after it"
        assert room.sends == [(7, True)] and early.counts == (1, 1, 0, 0)
        assert room.handoff.first_token == expected


async def test_without_tries_nothing_begins_before_decode_comes(llama: LoadedModel) -> None:
    async with EnginePair(llama, page_size=4) as pair:
        early = Early(pair)
        room, leg = early.begin(prompt_of(27))
        other, second = early.begin(prompt_of(9, 1))
        other.meet()
        await second
        assert not pair.source.pages.held_pages and pair.prefill.load().waiting == 1
        assert early.owners == [1]
        room.meet()
        await leg
        assert early.counts == (0, 0, 0, 0)


async def test_decode_comes_in_the_middle_of_a_step(llama: LoadedModel) -> None:
    async with EnginePair(llama, page_size=4, chunk_tokens=10, optimistic_tries=1) as pair:
        early = Early(pair, held=True)
        early.waits = lambda: len(early.steps) == 2
        room, leg = early.begin(prompt_of(27))
        await until(early.entered.is_set)
        room.meet()
        await until(lambda: bool(room.sends))
        assert room.sends == [(2, False)], "10 tokens were computed: two whole pages"
        early.gate.set()
        await leg
        assert room.sends == [(2, False), (3, False), (2, True)]


@pytest.mark.parametrize(("prefix_tokens", "sends"), [(12, [(4, True)]), (24, [(1, True)])])
async def test_tokens_decode_has_already_are_computed_and_not_sent(
    prefix_tokens: int, sends: list[Any], llama: LoadedModel
) -> None:
    async with EnginePair(llama, page_size=4, chunk_tokens=10, optimistic_tries=1) as pair:
        early = Early(pair)
        room, leg = early.begin(prompt_of(27))
        await early.computed(27)
        room.known(prefix_tokens // 4)
        room.meet(prefix_tokens)
        await leg
        assert room.sends == sends


async def test_a_pool_of_one_prompt_is_for_whoever_has_both_halves(llama: LoadedModel) -> None:
    """The decode of the early prompt waits behind that of the other: no deadlock."""
    async with of_one_prompt(llama, tries=2) as pair:
        early = Early(pair)
        alone = await early.first_tokens(prompt_of(24), prompt_of(24, 1))
        first, first_leg = early.begin(prompt_of(24))
        await early.computed(24)
        second, second_leg = await early.matched(prompt_of(24, 1))
        assert early.counts == (1, 0, 1, 0) and not first.sends
        second.gate.set()
        assert (await second_leg).token_id == alone[1]
        await early.computed(72)
        assert early.counts == (2, 0, 1, 1), "it began once more when the pool was free"
        first.meet()
        assert (await first_leg).token_id == alone[0]
        assert early.counts == (2, 1, 1, 0)


async def test_after_its_last_try_a_prompt_waits_for_its_match(llama: LoadedModel) -> None:
    async with of_one_prompt(llama, tries=3, num_pages=256) as pair:
        early = Early(pair)
        room, leg = early.begin(prompt_of(24))
        for number in range(1, 5):
            counts = (min(number, 3), 0, min(number, 4) - 1, number < 4)
            await until(lambda counts=counts: early.counts == counts)  # type: ignore[misc]
            other, done = early.begin(prompt_of(24, number))
            other.meet()
            await done
            other.close()
        assert early.counts == (3, 0, 3, 0) and pair.source.pages.at_rest()
        room.meet()
        await leg
        assert early.counts == (3, 0, 3, 0)


async def test_those_with_the_least_work_give_way_and_none_in_vain(llama: LoadedModel) -> None:
    lengths = [16, 8, 24, 4]
    async with of_one_prompt(llama, source_pages=13) as pair:
        early = Early(pair)
        begun = [early.begin(prompt_of(n, n)) for n in lengths]
        await early.computed(sum(lengths))

        def owners() -> set[int]:
            return {owner[1] for owner in pair.source.pages.owned()}  # type: ignore[index]

        async def lost_to(tokens: int) -> set[int]:
            before = owners()
            begun.append(await early.matched(prompt_of(tokens, tokens + 50)))
            return before - owners()

        assert await lost_to(4) == {3}, "one page: the prompt of four tokens is enough"
        assert await lost_to(12) == {0}, "three pages, and none lost in vain"
        assert await lost_to(4) == set(), "the page that was left over"
        assert await lost_to(28) == {1, 2}
        for room, leg in [*begun[4:], *begun[:4]]:
            room.gate.set()
            room.meet()
            await leg
        assert early.counts == (4, 0, 4, 0)


async def test_no_place_is_taken_from_a_running_step(llama: LoadedModel) -> None:
    """The step still writes into these places (I13)."""
    async with of_one_prompt(llama) as pair:
        early = Early(pair, held=True)
        first, first_leg = early.begin(prompt_of(24))
        await until(early.entered.is_set)
        second, second_leg = early.begin(prompt_of(24, 1))
        second.meet()
        await until(lambda: pair.prefill.load().waiting == 1)
        assert pair.source.pages.held_pages == 6 and not pair.source.pages.free_pages
        early.gate.set()
        await second_leg
        assert early.owners == [0, 1]
        first.meet()
        await first_leg


async def test_matched_prompts_come_first_in_a_step_and_at_the_pages(llama: LoadedModel) -> None:
    async with EnginePair(llama, chunk_tokens=16, max_batch_tokens=24, optimistic_tries=1) as pair:
        early = Early(pair, held=True)
        urgent, urgent_leg = early.begin(prompt_of(40), greedy(1, priority=9))
        await until(early.entered.is_set)
        plain, plain_leg = early.begin(prompt_of(20, 1))
        plain.meet()
        await until(lambda: pair.prefill.load().waiting == 1)
        early.gate.set()
        await plain_leg
        await early.computed(60)
        assert early.new == [[16], [16, 8], [4, 16]] and early.owners == [0, 1, 0, 1, 0]
        urgent.meet()
        await urgent_leg


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
async def test_a_prompt_that_was_computed_twice_gives_what_it_would_have(
    family: str, loaded: Loaded
) -> None:
    params = SamplingParams(
        temperature=0.8,
        seed=11,
        max_new_tokens=1,
        logprobs=2,
        prompt_logprobs_from=3,
        hidden_states=True,
    )
    model, prompt = loaded(family), prompt_of(24)
    options = {"source_pages": 16 if model.has_rows else 6, "source_rows": 1, "chunk_tokens": 10}
    async with of_one_prompt(model, tries=2, **options) as pair:
        early = Early(pair)
        pool = pair.target.pool

        def landed(room: FakeRoom) -> list[np.ndarray[Any, Any]]:
            places = pool.layout.split(room.pages)
            tensors = [(c, pool.tensor(c.name)) for c in pool.layout.components]
            return [
                t[torch.from_numpy(places[c.space].astype(np.int64))].float().numpy()
                for c, t in tensors
            ]

        room, leg = early.begin(prompt, params)
        room.meet()
        await leg
        before = landed(room)
        early.entered.clear()
        early.gate.clear()
        early.waits = lambda: early.owners[-2:] == [1, 1] and early.new[-2:] == [[10], [10]]
        again, leg = early.begin(prompt, params)
        await until(early.entered.is_set)
        other, done = early.begin(prompt_of(24, 5))
        other.meet()
        await until(lambda: pair.prefill.load().waiting == 1)
        early.gate.set()
        await done
        await until(lambda: early.counts[0] == 2)
        await early.computed(24 + 20 + 24 + 24)
        again.meet()
        await leg
        assert early.counts == (2, 1, 1, 0)
        found, expected = again.handoff, room.handoff
        assert (found.first_token, found.logprob, found.prompt_logprobs) == (
            expected.first_token,
            expected.logprob,
            expected.prompt_logprobs,
        )
        assert found.hidden_states is not None and found.hidden_states == expected.hidden_states
        valid = zip(before, landed(again), strict=True)
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in valid)


MOMENTS = ["waiting for pages", "in a step", "computed", "lost", "matched"]
ENDS = [(moment, how) for moment in MOMENTS for how in ("cancelled", "room ended", "engine closed")]


@pytest.mark.parametrize(
    ("moment", "how"), [*ENDS, ("in a step", "step failed"), ("matched", "step failed")]
)
async def test_an_end_at_any_moment_leaves_nothing(
    moment: str, how: str, llama: LoadedModel
) -> None:
    async with of_one_prompt(llama) as pair:
        early = Early(pair, held=moment in ("in a step", "matched"))
        others: list[Begun] = []
        if moment == "waiting for pages":
            others.append(await early.matched(prompt_of(24, 1)))
        room, leg = early.begin(prompt_of(24))
        if moment in ("computed", "lost"):
            await early.computed(24)
        elif moment in ("in a step", "matched"):
            await until(early.entered.is_set)
        if moment == "matched":
            room.meet()
            await until(lambda: pair.prefill.optimism.hits == 1)
        elif moment == "lost":
            others.append(await early.matched(prompt_of(24, 1)))
            assert early.counts == (1, 0, 1, 0)
        closing: asyncio.Future[Any] | None = None
        if how == "cancelled":
            leg.cancel()
        elif how == "room ended":
            room.close()
        elif how == "engine closed":
            closing = asyncio.ensure_future(pair.prefill.close())
            if not pair.prefill.optimism.holding_now and moment in ("waiting for pages", "lost"):
                # It is refused then: of what only waits for its match, the node ends the room.
                room.meet()
        else:

            def fail() -> None:
                if len(early.steps) == 1:
                    raise RuntimeError("out of something")

            early.before = fail
            others.append(early.begin(prompt_of(24, 1)))
            others[0][0].meet()
            await until(lambda: pair.prefill.load().waiting == 1)
        if how != "step failed":
            await asyncio.wait([leg])
        early.gate.set()
        await asyncio.wait([leg])
        assert leg.cancelled() or isinstance(leg.exception(), KvflowError)
        if how == "step failed":
            assert room.cause is not None and room.cause.code is Code.ENGINE_ERROR
            assert [type(await leg) for _, leg in others] == [TokenOut]
        if closing is not None:
            await closing
        for other, other_leg in others:
            other.gate.set()
            await asyncio.wait([other_leg])
        await until(pair.source.pages.at_rest)
        assert pair.prefill.optimism.holding_now == 0 and pair.prefill._early.first is None
        assert not pair.prefill._early._losses and not pair.prefill._early._holding
        assert not (moment == "lost" and others[0][1].cancelled())


async def test_a_storm_in_a_small_pool(seed: int, llama: LoadedModel) -> None:
    chance = random.Random(seed)
    options = {"source_pages": 14, "num_pages": 2048, "chunk_tokens": 8, "max_batch_tokens": 16}
    async with of_one_prompt(llama, tries=2, **options) as pair:
        early = Early(pair)
        lengths = [chance.choice((3, 12, 24, 40, 56)) for _ in range(60)]
        kinds = sorted(set(lengths))
        expected = dict(zip(kinds, await early.first_tokens(*map(prompt_of, kinds)), strict=True))
        counted = early.counts
        begun: list[tuple[int, FakeRoom, asyncio.Task[TokenOut]]] = []
        undecided: list[Begun] = []
        ends: list[str] = []
        while len(begun) < len(lengths) or undecided:
            while len(begun) < len(lengths) and len(undecided) < 6:
                n = lengths[len(begun)]
                undecided.append(early.begin(prompt_of(n), greedy(1, priority=chance.randrange(3))))
                begun.append((n, *undecided[-1]))
            room, leg = undecided.pop(chance.randrange(len(undecided)))
            ends.append(chance.choice(("match", "match", "match", "end", "cancel")))
            ways: dict[str, Callable[[], object]] = {
                "match": room.meet,
                "end": room.close,
                "cancel": leg.cancel,
            }
            ways[ends[-1]]()
            steps = len(early.steps) + chance.randrange(6)

            def is_idle() -> bool:
                engine, first = pair.prefill, pair.prefill._early.first
                fits = (
                    first is not None
                    and first.sequence.pages_missing(first.sequence.prompt_length)
                    <= pair.source.pages.free_pages
                )
                return not (fits or engine._waiting or any(engine._pick()[0]))

            for _ in range(8):  # the request hears of it, and the engine of the request
                await asyncio.sleep(0)
            # It is awaited here.
            await until(lambda: is_idle() or len(early.steps) >= steps)  # noqa: B023
        done = await asyncio.gather(*(leg for _, _, leg in begun), return_exceptions=True)
        tokens = [
            (n, out.token_id)
            for (n, _, _), out in zip(begun, done, strict=True)
            if isinstance(out, TokenOut)
        ]
        assert len(tokens) == ends.count("match")
        assert all(token == expected[n] for n, token in tokens)
        starts, hits, lost, holding = early.counts
        print(f"seed {seed}: {starts - counted[0]} starts, {hits} hits, {lost} lost")
        assert starts >= hits + lost and holding == 0
        for room in pair.rooms:
            room.close()
        await until(lambda: pair.home)
        assert not pair.prefill._early._losses and pair.prefill._early.first is None


class Held:
    """An early request that holds its `own` pages, of which the first ones are `shared`."""

    def __init__(self, own: Any, shared: int = 0) -> None:
        places = own[shared:], own[:0]
        self.sequence = SimpleNamespace(
            rows=own[:0], prompt_pages=len(own), places=places, pages=own
        )
        self.sequence.shared, self.sequence.computed = shared, len(own)
        self.sequence.page_size = 1
        self.params = SamplingParams()


def holding(*requests: Any, tries: int = 1) -> OptimisticStarts[Any]:
    starts: OptimisticStarts[Any] = OptimisticStarts(tries)
    for one in requests:
        starts.add(one)
        starts.began(one)
    return starts


def test_as_many_pages_as_are_missing_are_enough() -> None:
    pages = np.arange(6, dtype=np.int32)
    first, second = Held(pages[[0, 1, 2, 3]], 2), Held(pages[[0, 4]], 1)
    # The first has two pages of its own, and page 1 is cached for it alone; page 0 is the second
    # one's, too.
    assert holding(first, second).give_way(4, 0, 0, pages[:0]) == [second, first]
    assert holding(first, second).give_way(3, 0, 0, pages[:0]) == [first]


def test_of_two_that_are_not_both_needed_the_one_that_has_computed_more_stays() -> None:
    pages = np.arange(6, dtype=np.int32)
    least, more, most = Held(pages[:1]), Held(pages[1:3]), Held(pages[3:])
    assert holding(least, more, most).give_way(4, 0, 0, pages[:0]) == [least, most]


def test_a_request_that_is_added_again_waits_once_and_takes_places_once() -> None:
    request = Held(np.arange(3, dtype=np.int32))
    starts = holding(request, tries=2)
    starts.add(request)
    assert starts.first is None and starts.holds(request)
    assert starts.give_way(3, 0, 0, request.sequence.pages[:0]) == [request]
    starts.add(request)
    starts.began(request)
    assert starts.first is None
