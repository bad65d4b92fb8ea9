"""Prompts that begin before their room is matched: what leaves when, who gives way to whom, and
what is left behind.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvflow.node.handoff import HandOff
from kvflow.protocols.errors import Cause, Code, KvflowError, room_error
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.scheduler.optimistic import OptimisticStarts
from kvflow.serve.engine.scheduler.params import EngineOptimism, SamplingParams, TokenOut
from tests.engine.pair import EnginePair, FakeRoom, greedy, prompt_of, until


class LateRoom(FakeRoom):
    """A room whose decode comes when the test says so."""

    def expect(self) -> LateRoom:
        self._met: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.prefill_half.matched = self.wait
        self.on_end(self._give_up)
        return self

    def meet(self, prefix_tokens: int = 0) -> None:
        if not self._met.done():
            self._sent = 0
            self._met.set_result(prefix_tokens)

    async def wait(self) -> int:
        return await asyncio.shield(self._met)

    def _give_up(self) -> None:
        if not self._met.done():
            self._met.set_exception(room_error(self.cause or Cause(Code.CLIENT_GONE)))
            self._met.exception()


class Early:
    """A pair whose prefill begins early, with the requests that were begun."""

    def __init__(self, pair: EnginePair) -> None:
        self.pair, self.prefill = pair, pair.prefill
        # Per step, the owner and new tokens of every row.
        self.steps: list[list[tuple[Any, int]]] = []
        self.before_step: Callable[[], object] = lambda: None
        honest = pair.prefill.steps.runner.forward

        def forward(rows: list[Row]) -> torch.Tensor:
            self.steps.append([(r.sequence.owner[1], r.new) for r in rows])  # type: ignore[index]
            self.before_step()
            return honest(rows)

        pair.prefill.steps.runner.forward = forward  # type: ignore[method-assign]

    def begin(
        self, prompt: list[int], params: SamplingParams | None = None
    ) -> tuple[LateRoom, asyncio.Future[TokenOut]]:
        room = LateRoom(self.pair.source, self.pair.target, len(prompt)).expect()
        self.pair.rooms.append(room)
        leg = self.prefill.prefill(room.prefill_half, prompt, params or greedy(1))
        return room, asyncio.ensure_future(leg)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        found: EngineOptimism = self.prefill.optimism
        return found.starts, found.hits, found.lost, found.holding_now

    def computed(self, tokens: int) -> bool:
        return (
            sum(new for step in self.steps for _, new in step) >= tokens
            and not self.source.held_pages
        )

    @property
    def source(self) -> Any:
        return self.pair.source.pages


async def test_a_prompt_that_is_computed_leaves_at_once_when_decode_comes(
    llama: LoadedModel,
) -> None:
    async with EnginePair(llama, page_size=4, chunk_tokens=10, optimistic_tries=1) as pair:
        early = Early(pair)
        expected = (await pair.outputs(prompt_of(27), greedy(1)))[0].token_id
        early.steps.clear()
        room, leg = early.begin(prompt_of(27))
        await until(lambda: early.computed(27))
        assert early.counts == (1, 0, 0, 1) and not room.sends and not leg.done()
        load = pair.prefill.load()
        assert (load.running, load.waiting) == (1, 0)
        room.meet()
        assert (await leg).token_id == expected
        assert [[new for _, new in step] for step in early.steps] == [[10], [10], [7]], (
            "nothing was computed after it"
        )
        assert room.sends == [(7, True)] and early.counts == (1, 1, 0, 0)
        assert HandOff.decode(await room.landed()).first_token == expected
        room.close()
        assert pair.home


async def test_without_tries_nothing_begins_before_decode_comes(llama: LoadedModel) -> None:
    async with EnginePair(llama, page_size=4) as pair:
        early = Early(pair)
        room, leg = early.begin(prompt_of(27))
        other, second = early.begin(prompt_of(9, 1))
        other.meet()
        await second
        assert not pair.source.pages.held_pages and pair.prefill.load().waiting == 1
        assert [owner for step in early.steps for owner, _ in step] == [1]
        room.meet()
        await leg
        assert early.counts == (0, 0, 0, 0)
        for one in (room, other):
            one.close()
        assert pair.home


async def test_decode_comes_in_the_middle_of_a_step(llama: LoadedModel) -> None:
    """What was computed before leaves at once, what the step computes after it."""
    entered, gate = threading.Event(), threading.Event()

    async with EnginePair(llama, page_size=4, chunk_tokens=10, optimistic_tries=1) as pair:
        early = Early(pair)

        def block() -> None:
            if len(early.steps) == 2:
                entered.set()
                assert gate.wait(20)

        early.before_step = block
        room, leg = early.begin(prompt_of(27))
        await until(entered.is_set)
        room.meet()
        await until(lambda: bool(room.sends))
        assert room.sends == [(2, False)], "10 tokens were computed: two whole pages"
        gate.set()
        await leg
        assert room.sends == [(2, False), (3, False), (2, True)]
        room.close()
        assert pair.home


@pytest.mark.parametrize(("prefix_tokens", "sends"), [(12, [(4, True)]), (24, [(1, True)])])
async def test_tokens_decode_has_already_are_computed_and_not_sent(
    prefix_tokens: int, sends: list[Any], llama: LoadedModel
) -> None:
    async with EnginePair(llama, page_size=4, chunk_tokens=10, optimistic_tries=1) as pair:
        early = Early(pair)
        room, leg = early.begin(prompt_of(27))
        await until(lambda: early.computed(27))
        pages = prefix_tokens // 4
        room.pages, held = room.pages[pages:], room.pages[:pages]
        room.meet(prefix_tokens)
        await leg
        assert room.sends == sends
        pair.target.pages.give_back(held, room._owner)
        room.close()
        assert pair.home


async def test_a_pool_of_one_prompt_is_for_whoever_has_both_halves(llama: LoadedModel) -> None:
    """The early prompt has the whole pool, and its decode waits behind that of the other: no
    deadlock.
    """
    async with EnginePair(
        llama, page_size=4, source_pages=6, num_pages=64, optimistic_tries=2
    ) as pair:
        early = Early(pair)
        alone = [(await pair.outputs(prompt_of(24, n), greedy(1)))[0].token_id for n in range(2)]
        early.steps.clear()
        first, first_leg = early.begin(prompt_of(24))
        await until(lambda: early.computed(24))
        second, second_leg = early.begin(prompt_of(24, 1))
        second.gate.clear()
        second.meet()
        await until(lambda: bool(second.sends))
        assert early.counts == (1, 0, 1, 0) and not first.sends
        second.gate.set()
        assert (await second_leg).token_id == alone[1]
        await until(lambda: early.computed(72))
        assert early.counts == (2, 0, 1, 1), "it began once more when the pool was free"
        first.meet()
        assert (await first_leg).token_id == alone[0]
        assert early.counts == (2, 1, 1, 0)
        for room in (first, second):
            room.close()
        assert pair.home


async def test_after_its_last_try_a_prompt_waits_for_its_match(llama: LoadedModel) -> None:
    async with EnginePair(
        llama, page_size=4, source_pages=6, num_pages=256, optimistic_tries=3
    ) as pair:
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
        room.close()
        assert early.counts == (3, 0, 3, 0) and pair.home


async def test_those_with_the_least_work_give_way_and_none_in_vain(llama: LoadedModel) -> None:
    """Early prompts of 16, 8, 24 and 4 tokens in a pool of 13 pages; matched ones need pages, one
    after the other.
    """
    lengths = [16, 8, 24, 4]
    async with EnginePair(
        llama, page_size=4, source_pages=13, num_pages=64, optimistic_tries=1
    ) as pair:
        early = Early(pair)
        begun = [early.begin(prompt_of(n, n)) for n in lengths]
        await until(lambda: early.computed(sum(lengths)))

        async def lost_to(tokens: int) -> set[int]:
            """Whose places a matched prompt of so many tokens takes; its own stay taken."""
            before = {owner[1] for owner in pair.source.pages.owned()}  # type: ignore[index]
            room, leg = early.begin(prompt_of(tokens, tokens + 50))
            room.gate.clear()
            room.meet()
            await until(lambda: bool(room.sends) and room.sends[-1][1])
            begun.append((room, leg))
            return before - {owner[1] for owner in pair.source.pages.owned()}  # type: ignore[index]

        assert await lost_to(4) == {3}, "one page: the prompt of four tokens is enough"
        assert await lost_to(12) == {0}, (
            "three pages: with eight tokens lost first there would be one too few"
        )
        assert await lost_to(4) == set(), "the page that was left over"
        assert await lost_to(28) == {1, 2}
        for room, leg in begun[4:]:
            room.gate.set()
            await leg
        for room, leg in begun[:4]:
            room.meet()
            await leg
        for room, _ in begun:
            room.close()
        assert early.counts == (4, 0, 4, 0) and pair.home


async def test_no_place_is_taken_from_a_running_step(llama: LoadedModel) -> None:
    """I13: the matched prompt has to wait for the end of the step that writes into them."""
    entered, gate = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        assert gate.wait(20)

    async with EnginePair(
        llama, page_size=4, source_pages=6, num_pages=64, optimistic_tries=1
    ) as pair:
        early = Early(pair)
        early.before_step = block
        first, first_leg = early.begin(prompt_of(24))
        await until(entered.is_set)
        second, second_leg = early.begin(prompt_of(24, 1))
        second.meet()
        await until(lambda: pair.prefill.load().waiting == 1)
        assert pair.source.pages.held_pages == 6 and not pair.source.pages.free_pages
        gate.set()
        await second_leg
        assert [owner for step in early.steps for owner, _ in step] == [0, 1]
        first.meet()
        await first_leg
        for room in (first, second):
            room.close()
        assert pair.home


async def test_matched_prompts_come_first_in_a_step_and_at_the_pages(llama: LoadedModel) -> None:
    entered, gate = threading.Event(), threading.Event()
    async with EnginePair(llama, chunk_tokens=16, max_batch_tokens=24, optimistic_tries=1) as pair:
        early = Early(pair)

        def block() -> None:
            entered.set()
            assert gate.wait(20)

        early.before_step = block
        urgent, urgent_leg = early.begin(prompt_of(40), greedy(1, priority=9))
        await until(entered.is_set)
        plain, plain_leg = early.begin(prompt_of(20, 1))
        plain.meet()
        await until(lambda: pair.prefill.load().waiting == 1)
        gate.set()
        await plain_leg
        await until(lambda: early.computed(60))
        assert early.steps == [[(0, 16)], [(1, 16), (0, 8)], [(1, 4), (0, 16)]]
        urgent.meet()
        await urgent_leg
        for room in (urgent, plain):
            room.close()
        assert pair.home


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
async def test_a_prompt_that_was_computed_twice_gives_what_it_would_have(
    family: str, loaded: Callable[..., LoadedModel]
) -> None:
    """First token (drawn by its seed), log-probabilities and hidden states of the prompt, pages and
    row.
    """
    params = SamplingParams(
        temperature=0.8,
        seed=11,
        max_new_tokens=1,
        logprobs=2,
        prompt_logprobs_from=3,
        hidden_states=True,
    )
    model = loaded(family)
    prompt = prompt_of(24)
    pages = 16 if model.has_rows else 6
    async with EnginePair(
        model,
        page_size=4,
        source_pages=pages,
        num_pages=64,
        source_rows=1,
        chunk_tokens=10,
        optimistic_tries=2,
    ) as pair:
        early = Early(pair)
        room, leg = early.begin(prompt, params)
        room.meet()
        await leg
        expected = HandOff.decode(await room.landed())
        layout = pair.target.pool.layout
        kept = layout.split(room.pages)

        def state(places: Any) -> list[np.ndarray[Any, Any]]:
            tensors = [(c, pair.target.pool.tensor(c.name)) for c in layout.components]
            return [
                t[torch.from_numpy((places.rows if c.in_rows else places.pages).astype(np.int64))]
                .float()
                .numpy()
                for c, t in tensors
            ]

        before = state(kept)
        entered, gate = threading.Event(), threading.Event()

        def block() -> None:
            if early.steps[-1] == [(1, 10)] == early.steps[-2]:
                entered.set()
                assert gate.wait(20)

        early.before_step = block
        again, leg = early.begin(prompt, params)
        await until(entered.is_set)
        other, done = early.begin(prompt_of(24, 5))
        other.meet()
        await until(lambda: pair.prefill.load().waiting == 1)
        gate.set()
        await done
        await until(lambda: early.counts[0] == 2 and early.computed(24 + 20 + 24 + 24))
        again.meet()
        await leg
        found = HandOff.decode(await again.landed())
        assert early.counts == (2, 1, 1, 0)
        assert (found.first_token, found.logprob, found.prompt_logprobs) == (
            expected.first_token,
            expected.logprob,
            expected.prompt_logprobs,
        )
        assert found.hidden_states is not None and found.hidden_states == expected.hidden_states
        valid = [(a, b) for a, b in zip(before, state(layout.split(again.pages)), strict=True)]
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in valid)
        for one in (room, again, other):
            one.close()
        assert pair.home


MOMENTS = ["waiting for pages", "in a step", "computed", "lost", "matched"]
ENDS = [(moment, how) for moment in MOMENTS for how in ("cancelled", "room ended", "engine closed")]


@pytest.mark.parametrize(
    ("moment", "how"), [*ENDS, ("in a step", "step failed"), ("matched", "step failed")]
)
async def test_an_end_at_any_moment_leaves_nothing(
    moment: str, how: str, llama: LoadedModel
) -> None:
    entered, gate = threading.Event(), threading.Event()
    gate.set()
    failing = False

    async with EnginePair(
        llama, page_size=4, source_pages=6, num_pages=64, optimistic_tries=1
    ) as pair:
        early = Early(pair)

        def block() -> None:
            entered.set()
            assert gate.wait(20)
            if failing and len(early.steps) == 1:
                raise RuntimeError("out of something")

        early.before_step = block
        others: list[tuple[LateRoom, asyncio.Future[TokenOut]]] = []
        if moment == "waiting for pages":
            others.append(early.begin(prompt_of(24, 1)))
            others[0][0].gate.clear()
            others[0][0].meet()
            await until(lambda: bool(others[0][0].sends))
        elif moment in ("in a step", "matched"):
            gate.clear()
        room, leg = early.begin(prompt_of(24))
        if moment == "computed":
            await until(lambda: early.computed(24))
        elif moment in ("in a step", "matched"):
            await until(entered.is_set)
            if moment == "matched":
                room.meet()
                await until(lambda: pair.prefill.optimism.hits == 1)
        elif moment == "lost":
            await until(lambda: early.computed(24))
            others.append(early.begin(prompt_of(24, 1)))
            others[0][0].gate.clear()
            others[0][0].meet()
            await until(lambda: bool(others[0][0].sends))
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
            failing = True
            others.append(early.begin(prompt_of(24, 1)))
            others[0][0].meet()
            await until(lambda: pair.prefill.load().waiting == 1)
        if how != "step failed":
            await asyncio.wait([leg])
        gate.set()
        await asyncio.wait([leg])
        assert leg.cancelled() or isinstance(leg.exception(), KvflowError)
        if how == "step failed":
            assert room.cause is not None and room.cause.code is Code.ENGINE_ERROR
            assert [type(await leg) for _, leg in others] == [TokenOut], (
                "which waited for the pages"
            )
        if closing is not None:
            await closing
        for other, other_leg in others:
            other.gate.set()
            await asyncio.wait([other_leg])
            other.close()
        await until(pair.source.pages.at_rest)
        room.close()
        assert pair.prefill.optimism.holding_now == 0 and pair.prefill._early.first is None
        assert not pair.prefill._early._losses and not pair.prefill._early._holding
        assert not (moment == "lost" and others[0][1].cancelled())
        assert pair.home


async def test_a_storm_in_a_small_pool(seed: int, llama: LoadedModel) -> None:
    """Matches and aborts in any order, far more prompts than pages: whoever is matched gets its
    token.
    """
    chance = random.Random(seed)
    async with EnginePair(
        llama,
        page_size=4,
        source_pages=14,
        num_pages=2048,
        chunk_tokens=8,
        max_batch_tokens=16,
        optimistic_tries=2,
    ) as pair:
        early = Early(pair)
        lengths = [chance.choice((3, 12, 24, 40, 56)) for _ in range(60)]
        expected = {
            n: (await pair.outputs(prompt_of(n), greedy(1)))[0].token_id for n in set(lengths)
        }
        counted = early.counts
        begun: list[tuple[int, LateRoom, asyncio.Future[TokenOut]]] = []
        undecided: list[tuple[LateRoom, asyncio.Future[TokenOut]]] = []
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
        assert len(tokens) == ends.count("match") and all(
            token == expected[n] for n, token in tokens
        )
        starts, hits, lost, holding = early.counts
        print(f"seed {seed}: {starts - counted[0]} starts, {hits} hits, {lost} lost")
        assert starts >= hits + lost and holding == 0
        for _, room, _ in begun:
            room.close()
        await until(lambda: pair.home)
        assert not pair.prefill._early._losses and pair.prefill._early.first is None


class Held:
    """An early request that holds its `own` pages, of which the first ones are `shared`."""

    def __init__(self, own: Any, shared: int = 0) -> None:
        places = SimpleNamespace(pages=own[shared:])
        self.sequence = SimpleNamespace(
            rows=own[:0], prompt_pages=len(own), places=places, pages=own
        )
        self.sequence.shared, self.sequence.computed, self.sequence.page_size = (
            shared,
            len(own),
            1,
        )
        self.params = SamplingParams()


def holding(*requests: Any) -> OptimisticStarts[Any]:
    starts: OptimisticStarts[Any] = OptimisticStarts(tries=1)
    for one in requests:
        starts.add(one)
        starts.began(one)
    return starts


def test_as_many_pages_as_are_missing_are_enough() -> None:
    """Of a prompt that shares pages, those count that no other one keeps."""
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
