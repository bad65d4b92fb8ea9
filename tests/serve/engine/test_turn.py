"""Prompts that queue load in turn what the host has, and block nobody else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.memory.allocator import PageAllocator
from kvflow.proof.sim.swap import swapped
from kvflow.protocols.cache.choices import PrefetchPolicy
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.serve.config.settings import Settings
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.scheduler import prefetch
from kvflow.serve.engine.scheduler.prefill import PrefillEngine
from kvflow.serve.engine.scheduler.prefill_steps import PrefillRequest
from kvflow.serve.engine.scheduler.turn import Turn
from kvflow.serve.launch.parts import Parts
from kvflow.serve.launch.services import prefill_engine
from tests.memory.gate import CopyGate
from tests.serve.engine.pair import EnginePair, greedy, prompt_of, until
from tests.serve.engine.storm import turns

PAGE, WHOLE, LENGTH = 4, 20, 23
PROMPTS = [prompt_of(LENGTH, salt) for salt in range(14)]
# Turns of the event loop in which nothing has changed and nothing runs that could change it. A
# client pauses for 60 at most.
STANDS_STILL = 1000


def small_pair(model: LoadedModel, pages: int = 8, **options: Any) -> EnginePair:
    return EnginePair(
        model, page_size=PAGE, source_pages=pages, cache="lru", cache_host_pages=200, **options
    )


@asynccontextmanager
async def only_on_the_host(model: LoadedModel, **options: Any) -> AsyncIterator[EnginePair]:
    async with small_pair(model, **options) as pair:
        for prompt in PROMPTS:
            await pair.outputs(prompt, greedy(1))
        await until(lambda: pair.home and not any(cache.busy for cache in pair.caches))
        await pair.evict_all()
        pair.caches[1].flush()
        yield pair


async def cached_tokens(pair: EnginePair, prompt: list[int], priority: int = 0) -> int:
    return (await pair.outputs(prompt, greedy(2, priority=priority)))[0].cached_tokens


def holders(engine: PrefillEngine) -> list[PrefillRequest]:
    """Requests that hold pages of the cache, and have no places."""
    waiting = [*engine._waiting, *engine._early._waiting]
    return [
        r for r in waiting if not r.sequence.page_count and r.prefix is not None and r.prefix.held
    ]


@pytest.mark.parametrize("policy", ["best_effort", "timeout", "wait_complete"])
async def test_prompts_that_queue_lose_nothing_of_what_the_host_has(
    policy: PrefetchPolicy, llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "TIMEOUT_S", 60.0)
    async with only_on_the_host(llama, prefetch=policy) as pair:
        before = pair.caches[0].stats().loaded_pages
        found = await asyncio.gather(*(cached_tokens(pair, prompt) for prompt in PROMPTS))
        assert found == [WHOLE] * len(PROMPTS)
        assert pair.caches[0].stats().loaded_pages - before == len(PROMPTS) * WHOLE // PAGE


async def test_who_comes_before_takes_the_turn_and_both_have_their_pages(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with only_on_the_host(llama) as pair:
        gate = CopyGate(monkeypatch)
        later = asyncio.create_task(cached_tokens(pair, PROMPTS[0]))
        await gate.reached()
        first = asyncio.create_task(cached_tokens(pair, PROMPTS[1], priority=1))
        await until(lambda: len(pair.prefill._waiting) == 2)
        gate.go.set()
        done, _ = await asyncio.wait([first, later], return_when=asyncio.FIRST_COMPLETED)
        assert done == {first} and first.result() == await later == WHOLE


async def test_a_prompt_that_loads_is_left_to_load(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with only_on_the_host(llama) as pair:
        gate = CopyGate(monkeypatch)
        asked = asyncio.create_task(cached_tokens(pair, PROMPTS[0]))
        await gate.reached()
        for _ in range(3):
            pair.prefill.wake()
            await until(lambda: not pair.prefill._wake.is_set())
        gate.go.set()
        assert await asked == WHOLE
        stats = pair.caches[0].stats()
        assert (stats.loaded_pages, stats.failed_copies) == (WHOLE // PAGE, 0)


async def test_a_prompt_that_waits_for_places_holds_nothing_of_the_cache(
    llama: LoadedModel,
) -> None:
    async with small_pair(llama, pages=12) as pair:
        await pair.outputs(PROMPTS[0], greedy(1))
        await until(lambda: pair.home)
        pair.on_room = lambda room: room.gate.clear()
        running = asyncio.create_task(cached_tokens(pair, PROMPTS[1]))
        await until(lambda: pair.source.pages.free_pages == 1)
        pair.on_room = lambda room: None
        longer = PROMPTS[0] + prompt_of(12, 99)
        waiting = asyncio.create_task(cached_tokens(pair, longer))
        await until(lambda: len(pair.prefill._waiting) == 1 and not pair.prefill._wake.is_set())
        assert not holders(pair.prefill) and pair.caches[0].evictable_pages == WHOLE // PAGE
        pair.rooms[1].gate.set()
        assert (await running, await waiting) == (0, WHOLE)


@pytest.mark.parametrize(
    "how", ["prefill is cancelled", "decode aborts", "the engine closes", "flush"]
)
async def test_who_ends_while_it_loads_holds_nothing(
    how: str, llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with only_on_the_host(llama) as pair:
        gate = CopyGate(monkeypatch)
        room = pair.room(PROMPTS[0])
        leg = pair.send(room, PROMPTS[0], greedy(1))
        await gate.reached()
        closing = None
        if how == "prefill is cancelled":
            leg.cancel()
        elif how == "decode aborts":
            room.close(Cause(Code.DEADLINE, "it took too long"))
        elif how == "flush":
            pair.prefill.flush()
        else:
            closing = asyncio.create_task(pair.prefill.close())
            await asyncio.wait([leg])
        for _ in range(10):
            await asyncio.sleep(0)
        assert not pair.source.places.at_rest(), "a thread copies into its pages"
        assert closing is None or not closing.done()
        gate.go.set()
        (answer,) = await asyncio.gather(leg, return_exceptions=True)
        room.close()
        if closing is not None:
            await closing
        assert isinstance(answer, asyncio.CancelledError | KvflowError) is (how != "flush")
        await until(lambda: pair.home)
        cache = pair.caches[0]
        assert cache.stats().pages == cache.evictable_pages and not holders(pair.prefill)
        if closing is None:
            assert await cached_tokens(pair, PROMPTS[1]) == (0 if how == "flush" else WHOLE)


async def test_an_early_prompt_that_loads_gives_way_to_one_that_is_matched(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with only_on_the_host(llama, optimistic_tries=1) as pair:
        gate = CopyGate(monkeypatch)
        room = pair.room(PROMPTS[0], late=True)
        early = pair.send(room, PROMPTS[0], greedy(1))
        await gate.reached()
        other = asyncio.create_task(cached_tokens(pair, PROMPTS[1]))
        await until(lambda: len(pair.prefill._waiting) == 1)
        gate.go.set()
        assert await other == WHOLE
        room.meet()
        assert (await early).cached_tokens == WHOLE


# --- any order, and bugs planted into it


class Queue:
    """Prompts of which the host has all; some leave. `broken` names broken rules."""

    def __init__(self, pair: EnginePair, seed: int) -> None:
        self._pair, self._chance = pair, random.Random(seed)
        self.broken: set[str] = set()

    async def play(self) -> None:
        look = PrefillEngine._take_places

        def looked(engine: PrefillEngine) -> None:
            look(engine)
            self._look(engine)

        with swapped(PrefillEngine, "_take_places", looked):
            clients = [asyncio.create_task(self._client(prompt)) for prompt in PROMPTS]
            watching = asyncio.create_task(self._watch())
            await asyncio.wait(clients)
            watching.cancel()
        for client in clients:
            if not client.cancelled() and client.exception() is not None and not self.broken:
                raise AssertionError from client.exception()

    def _look(self, engine: PrefillEngine) -> None:
        if len(holders(engine)) > 1:
            self.broken.add("one holder")

    async def _watch(self) -> None:
        engine, still, last = self._pair.prefill, 0, None
        assert engine.cache is not None
        while still < STANDS_STILL:
            await asyncio.sleep(0)
            state = len(engine._waiting), engine.cache.stats()
            # A client that leaves during a step leaves pages that the model's thread still uses.
            in_threads = engine.cache.busy or engine.steps.pages.returning_pages
            moves = engine._running or in_threads or not engine._waiting
            still = 0 if moves or state != last else still + 1
            last = state
        self.broken.add("progress")
        engine.end_requests()

    async def _client(self, prompt: list[int]) -> None:
        await self._turns()
        pair, params = self._pair, greedy(1, priority=self._chance.randrange(3))
        room = pair.room(prompt, late=True)
        leg = pair.send(room, prompt, params)
        leaves = self._chance.random() < 0.2
        try:
            await self._turns()
            room.meet()
            if leaves:
                await self._turns()
                leg.cancel()
            (answer,) = await asyncio.gather(leg, return_exceptions=True)
        finally:
            room.close()
        if not isinstance(answer, BaseException) and answer.cached_tokens != WHOLE:
            self.broken.add("hits")
        elif isinstance(answer, Exception) and not self.broken:
            raise answer

    async def _turns(self) -> None:
        await turns(self._chance, 0, 1, 5, 20, 60)


def _keeps_what_it_has() -> AbstractContextManager[object]:
    """A prompt that cannot begin keeps what it has loaded locked."""

    def over(self: Turn, request: PrefillRequest) -> None:
        self.taken(request)

    return swapped(Turn, "over", over)


def _loads_at_once() -> AbstractContextManager[object]:
    """A prompt loads when it comes, and holds nothing until its turn."""
    match = PrefillEngine._match

    async def matched(self: PrefillEngine, request: PrefillRequest, into: Any) -> int:
        assert self.cache is not None
        prefix = await self.cache.load(request.sequence.tokens[:LENGTH], request.most_cached)
        prefix.release()
        return await match(self, request, into)

    stack = ExitStack()
    stack.enter_context(swapped(PrefillEngine, "_match", matched))
    stack.enter_context(swapped(Turn, "begins", lambda self, request: True))
    return stack


PLANTS: dict[str, tuple[Callable[[], AbstractContextManager[object]], str]] = {
    "waiting prompts keep what they have loaded": (_keeps_what_it_has, "progress"),
    "prompts load before their turn": (_loads_at_once, "hits"),
}


async def _broken(
    model: LoadedModel, seed: int, plant: AbstractContextManager[object], tries: int
) -> set[str]:
    async with only_on_the_host(model, optimistic_tries=tries) as pair:
        queue = Queue(pair, seed)
        with plant:
            await queue.play()
        pair.has_to_rest = not queue.broken
        return queue.broken


@pytest.mark.parametrize("tries", [0, 2])
async def test_any_order_of_prompts_ends_with_every_hit(
    tries: int, llama: LoadedModel, seed: int
) -> None:
    assert await _broken(llama, seed, nullcontext(), tries) == set()


@pytest.mark.parametrize("name", PLANTS)
async def test_a_planted_bug_is_found(name: str, llama: LoadedModel) -> None:
    install, rule = PLANTS[name]
    found = set[str]()
    for seed in range(8):
        found |= await _broken(llama, seed, install(), 0)
        if rule in found:
            break
    assert rule in found


async def test_what_cannot_be_loaded_is_computed_and_not_loaded_again(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with only_on_the_host(llama) as pair:
        gate = CopyGate(monkeypatch, fails_at=1)
        gate.go.set()
        assert await cached_tokens(pair, PROMPTS[0]) == 0


async def test_a_request_whose_turn_was_taken_from_it_loads_again_when_it_comes_back() -> None:
    forgotten: list[Any] = []
    steps = SimpleNamespace(
        lacks=lambda _: True,
        short_of=lambda _: (1, 0),
        forget_prefix=forgotten.append,
        pages=PageAllocator(1),
        rows=None,
    )
    turn = Turn(steps, "wait_complete", lambda: None)  # type: ignore[arg-type]
    request: Any = SimpleNamespace()
    assert not turn.begins(request) and turn.begins(request), "it holds its turn"
    turn.over(request)
    assert forgotten == [request] and not turn.begins(request)
    await turn.close()


@pytest.mark.parametrize(("policy", "found"), [("timeout", 0), ("wait_complete", WHOLE)])
async def test_a_prefill_waits_for_its_host_as_long_as_its_setting_says(
    policy: PrefetchPolicy, found: int, llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and as the first of several ranks: both have their engine from one place."""
    monkeypatch.setattr(prefetch, "TIMEOUT_S", 0.0)
    monkeypatch.setattr(prefetch, "TIMEOUT_PER_TOKEN_S", 0.0)
    async with only_on_the_host(llama) as pair:
        await pair.prefill.close()
        parts = Parts(llama, pair.source.pool, pair._threads[0])
        settings = Settings(cache_prefetch_policy=policy)
        pair.prefill = prefill_engine(parts, settings, pair.caches[0])
        await pair.prefill.start()
        assert await cached_tokens(pair, PROMPTS[0]) == found
