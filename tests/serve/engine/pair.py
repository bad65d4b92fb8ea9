"""A prefill and a decode engine in one process, each with its own pool; rooms without a network."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable
from contextlib import aclosing
from typing import Any, Self

import numpy as np
import torch

from kvflow.aio import Threads
from kvflow.memory.pool import PagedPool
from kvflow.memory.snapshot import SnapshotStore
from kvflow.node.handoff import HandOff
from kvflow.protocols.arguments import pages_wanted
from kvflow.protocols.errors import Cause, Code, KvflowError, room_error
from kvflow.protocols.pages.components import Component
from kvflow.protocols.pages.layout import Order, PageIndices, build_layout
from kvflow.serve.cache.host import HostTier
from kvflow.serve.cache.prefix import Prefix, PrefixCache
from kvflow.serve.cache.states import StateStore
from kvflow.serve.cache.tiers import OWNER
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.model.runner import Runner
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.scheduler.decode import DecodeEngine
from kvflow.serve.engine.scheduler.params import SamplingParams, TokenOut
from kvflow.serve.engine.scheduler.prefill import PrefillEngine


def poisoned_pool(
    model: LoadedModel,
    num_pages: int,
    page_size: int = 4,
    order: Order = "page_first",
    num_rows: int = 6,
    copies: int = 1,
) -> PagedPool:
    """Return a pool of NaN, so that reading what was never written shows.

    `num_rows` counts if the model keeps rows. `copies` is the number of shards with all streams.
    """
    streams = [
        kind._replace(replica=n, replicas=copies) for n in range(copies) for kind in model.streams
    ]
    rows = num_rows if model.has_rows else 0
    layout = build_layout(
        streams, page_size=page_size, num_pages=num_pages, num_rows=rows, order=order
    )
    pool = PagedPool.allocate(layout, shared=copies > 1)
    poison(pool)
    return pool


def poison(pool: PagedPool) -> None:
    for component in pool.layout.components:
        pool.tensor(component.name, replica=component.replica).fill_(float("nan"))


def sequence_of(prompt: list[int], pages: Any, row: int = 0) -> Sequence:
    """Return a sequence over these pages of four tokens, with up to eight new ones."""
    found = Sequence("test", prompt, 8, 4)
    found.add_pages(np.array(pages, dtype=np.int32))
    found.rows = np.array([row], dtype=np.int32)
    return found


class Watched:
    """Records each step of a runner before it is computed.

    While `gate` is closed, the steps for which `waits()` is true wait in the model thread.
    """

    def __init__(
        self, runner: Runner, before: Callable[[], object] = lambda: None, *, held: bool = False
    ) -> None:
        """The model thread calls `before` before each step. `held` closes the gate."""
        # Per step, the owner and the new tokens of every row.
        self.steps: list[list[tuple[Any, int]]] = []
        self.entered, self.gate = threading.Event(), threading.Event()
        if not held:
            self.gate.set()
        self.waits: Callable[[], bool] = lambda: True
        self.before = before
        self._runner, self._honest = runner, runner.forward
        runner.forward = self._forward  # type: ignore[method-assign]

    def _forward(self, rows: list[Row]) -> torch.Tensor:
        self.steps.append([(row.sequence.owner, row.new) for row in rows])
        if self.waits():
            self.entered.set()
            assert self.gate.wait(20)
        self.before()
        return self._honest(rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self._runner.forward = self._honest  # type: ignore[method-assign]

    @property
    def new(self) -> list[list[int]]:
        return [[new for _, new in step] for step in self.steps]


class Side:
    def __init__(
        self,
        model: LoadedModel,
        num_pages: int,
        page_size: int,
        order: Order,
        num_rows: int = 32,
        copies: int = 1,
    ) -> None:
        self.pool = poisoned_pool(model, num_pages, page_size, order, num_rows, copies)
        self.pages, self.places = self.pool.pages, self.pool.places

    def snapshots(self, host_pages: int) -> SnapshotStore:
        layout = self.pool.layout
        limit = host_pages * layout.page_bytes + layout.num_rows * layout.row_bytes
        return SnapshotStore(self.pool, limit, num_rows=layout.num_rows)

    def scatter(self) -> None:
        for store in (self.pages, self.pool.rows) if self.pool.layout.num_rows else (self.pages,):
            count = store.free_pages
            store._stack[:count] = np.random.default_rng(3).permutation(store._stack[:count])


class PrefillHalf:
    def __init__(self, room: FakeRoom) -> None:
        self.matched, self.send, self.done = room.matched, room.send, room.landed_at_all
        self.on_end, self.close = room.on_end, room.fail
        self._room = room

    @property
    def ended(self) -> bool:
        return self._room.ended


class FakeRoom:
    """One room. This object is decode's half; `prefill_half` is the other.

    Writes land while `gate` is open.
    """

    def __init__(
        self,
        source: Side,
        target: Side,
        prompt_tokens: int,
        prefix_tokens: int = 0,
        *,
        late: bool = False,
    ) -> None:
        """With `late`, decode's half arrives when the test calls `meet`."""
        self._source, self._target = source, target
        self._owner: Hashable = ("room", id(self))
        self._met: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if not late:
            self._met.set_result(prefix_tokens)
        counts = pages_wanted(target.pool.layout, prompt_tokens, prefix_tokens)
        self.pages: PageIndices = target.places.take_room(counts, self._owner)
        self.gate = asyncio.Event()
        self.gate.set()
        self.sends: list[tuple[int, bool]] = []
        self.cause: Cause | None = None
        self.closed = self._kept = self.decode_reads = False
        self._sent = 0
        self._writes: set[asyncio.Task[None]] = set()
        self._landed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._callbacks: list[Callable[[], None]] = []
        self.on_landed: Callable[[], None] = lambda: None
        self.prefill_half = PrefillHalf(self)

    def meet(self, prefix_tokens: int = 0) -> None:
        if not self._met.done():
            self._met.set_result(prefix_tokens)

    def known(self, pages: int) -> None:
        """Give back the first pages, which decode has already."""
        self.pages, known = self.pages[pages:], self.pages[:pages]
        self._target.places.give_back(known, self._owner)

    async def matched(self) -> int:
        self._raise_if_ended()
        return await asyncio.shield(self._met)

    async def sent(self) -> None:
        await until(lambda: bool(self.sends) and self.sends[-1][1])

    def send(self, pages: PageIndices, *, last: bool = False, handoff: bytes = b"") -> None:
        self._raise_if_ended()
        targets = self.pages[self._sent : self._sent + pages.size]
        assert targets.size == pages.size
        self._sent += pages.size
        self.sends.append((pages.size, last))
        self._source.places.hold(pages)
        task = asyncio.ensure_future(self._write(pages, targets, handoff if last else None))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def _write(self, pages: PageIndices, targets: PageIndices, handoff: bytes | None) -> None:
        await self.gate.wait()
        source, target = self._source.pool, self._target.pool
        both = source.layout.split(pages), target.layout.split(targets)
        for c in target.layout.components:
            s, t = (torch.from_numpy(places[c.space].astype(np.int64)) for places in both)
            target.tensor(c.name, replica=c.replica)[t] = source.tensor(c.name)[s]
        self._source.places.unhold(pages)
        if handoff is not None and not self._landed.done():
            assert self._sent == self.pages.size
            self.on_landed()
            self._landed.set_result(handoff)
            self._end()

    async def landed_at_all(self) -> None:
        await asyncio.shield(self._landed)

    async def landed(self) -> bytes:
        self.decode_reads = True
        return await asyncio.shield(self._landed)

    @property
    def handoff(self) -> HandOff:
        return HandOff.decode(self._landed.result())

    def hand_over(self, handoff: bytes) -> None:
        self._landed.set_result(handoff)

    def keep(self, owner: Hashable) -> PageIndices:
        self._target.places.move(self.pages, self._owner, owner)
        self._kept = True
        return self.pages

    @property
    def ended(self) -> bool:
        return self._landed.done()

    def on_end(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def fail(self, cause: Cause | None = None) -> None:
        if not self._landed.done():
            self.cause = cause or Cause(Code.CLIENT_GONE)
            self._landed.set_exception(room_error(self.cause))
            self._landed.exception()
            self._end()

    def close(self, cause: Cause | None = None) -> None:
        self.fail(cause)
        if not self.closed:
            self.closed = True
            if not self._kept:
                self._target.places.give_back(self.pages, self._owner)

    def _end(self) -> None:
        if not self._met.done():
            self._met.set_exception(room_error(self.cause or Cause(Code.CLIENT_GONE)))
            self._met.exception()
        for callback in self._callbacks:
            callback()

    def _raise_if_ended(self) -> None:
        if self._landed.done() and (error := self._landed.exception()):
            raise error


class EnginePair:
    """Two engines, and requests through both. In the end every page, row and state is free."""

    def __init__(self, model: LoadedModel, **options: Any) -> None:
        page_size, num_pages = options.pop("page_size", 16), options.pop("num_pages", 256)
        orders: tuple[Order, Order] = options.pop("orders", ("page_first", "layer_first"))
        decode = {"max_batch": options.pop("max_batch", 256)}
        decode.update(
            (name, options.pop(name))
            for name in ("new_token_ratio", "recompute", "local_prefill_chunk")
            if name in options
        )
        host_pages, rows = options.pop("host_pages", 0), options.pop("num_rows", 32)
        source_rows = options.pop("source_rows", rows)
        self.source = Side(
            model, options.pop("source_pages", num_pages), page_size, orders[0], source_rows
        )
        self.target = Side(model, num_pages, page_size, orders[1], rows, options.pop("copies", 1))
        decode_model = options.pop("decode_model", model)
        self.source.scatter()
        self.target.scatter()
        self.caches: list[PrefixCache] = []
        self.host_tiers: list[HostTier] = []
        if policy := options.pop("cache", ""):
            host_pages_of_cache, more = (
                options.pop("cache_host_pages", 0),
                options.pop("cache_options", {}),
            )
            limit = options.pop("cache_states", 32) * self.source.pool.layout.row_bytes
            states = StateStore(self.source.pool, limit) if limit else None
            for side in (self.source, self.target):
                limit = host_pages_of_cache * side.pool.layout.page_bytes
                host = HostTier(side.pool, limit) if limit else None
                self.host_tiers += [host] if host else []
                kept = states if side is self.source else None
                self.caches.append(
                    PrefixCache(side.pages, page_size, policy, host=host, states=kept, **more)
                )
            options["cache"], decode["cache"] = self.caches
            decode["prefetch"] = options.get("prefetch", "wait_complete")
            options["prefetch"] = decode["prefetch"]
        self._threads = Threads("model"), Threads("model")
        self.prefill = PrefillEngine(
            model, self.source.pool, self.source.pages, self._threads[0], **options
        )
        self.snapshots = self.target.snapshots(host_pages) if host_pages else None
        self.decode = DecodeEngine(
            decode_model,
            self.target.pool,
            self.target.pages,
            self._threads[1],
            snapshots=self.snapshots,
            **decode,
        )
        self.rooms: list[FakeRoom] = []
        self.has_to_rest = True
        self.on_room: Callable[[FakeRoom], None] = lambda room: None
        self._numbers = itertools.count()

    async def __aenter__(self) -> Self:
        await self.prefill.start()
        await self.decode.start()
        return self

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None and self.has_to_rest:
            await self.rest()
        await self.prefill.close()
        await self.decode.close()
        if self.snapshots is not None:
            await self.snapshots.close()
        for cache in self.caches:
            await cache.close()
        for thread in self._threads:
            thread.close()

    async def rest(self) -> None:
        """Close the rooms whose decode is the test itself; check that nothing is left or locked."""
        for room in self.rooms:
            if not room.decode_reads:
                room.close()
        # A burst of decode holds its pages until its thread returns.
        if self.decode.steps or self.decode.failed_steps:
            await until(lambda: self.home)
        assert self.home
        await until(lambda: not any(cache.busy for cache in self.caches))
        for cache, side in zip(self.caches, (self.source, self.target), strict=False):
            found = cache.stats()
            assert found.pages == found.evictable_pages, "a lock was left"
            assert side.pages.owned() == ({OWNER: found.pages} if found.pages else {})
            cache.flush()
            assert side.pages.free_pages == side.pages.capacity
            assert cache.states is None or not cache.states.slots.owned()
        assert all(tier.pages.at_rest() and not tier.pages.owned() for tier in self.host_tiers)

    async def evict_all(self) -> None:
        """Evict all cached pages of both pools, and poison every byte again."""
        for cache, side in zip(self.caches, (self.source, self.target), strict=True):
            await until(lambda side=side: not side.pages.held_pages)  # type: ignore[misc]
            cache.evict(side.pages.capacity)
            assert side.pages.free_pages == side.pages.capacity and not cache.stats().pages
            poison(side.pool)

    def room(self, prompt: list[int], prefix_tokens: int = 0, *, late: bool = False) -> FakeRoom:
        room = FakeRoom(self.source, self.target, len(prompt), prefix_tokens, late=late)
        self.rooms.append(room)
        self.on_room(room)
        return room

    def send(
        self, room: FakeRoom, prompt: list[int], params: SamplingParams, **more: Any
    ) -> asyncio.Task[TokenOut]:
        leg = self.prefill.prefill(room.prefill_half, prompt, params, **more)
        return asyncio.create_task(leg)

    async def stream(
        self, prompt: list[int], params: SamplingParams
    ) -> AsyncGenerator[TokenOut, None]:
        admission = await self.decode.admit(prompt, params)
        prefix = await self.decode.cached(prompt, admission=admission)
        room = self.room(prompt, 0 if prefix is None else prefix.tokens)
        leg = self.send(room, prompt, params)
        try:
            generating = self.decode.generate(room, prompt, params, admission, prefix)
            async with aclosing(generating) as tokens:
                async for out in tokens:
                    yield out
        finally:
            await asyncio.wait([leg])
        if (error := leg.exception()) and not isinstance(error, KvflowError):
            raise error

    async def not_admitted(
        self, prompt: list[int], params: SamplingParams, prefix: Prefix | None = None
    ) -> AsyncGenerator[TokenOut, None]:
        room = self.room(prompt, 0 if prefix is None else prefix.tokens)
        leg = self.send(room, prompt, params)
        async for out in self.decode.generate(room, prompt, params, prefix=prefix):
            yield out
        await leg

    async def begun(
        self, prompt: list[int], params: SamplingParams
    ) -> tuple[AsyncGenerator[TokenOut, None], TokenOut]:
        """Return a request whose first token was read, and that token."""
        stream = self.stream(prompt, params)
        first = await anext(stream)
        assert first.finish_reason is None
        return stream, first

    async def outputs(self, prompt: list[int], params: SamplingParams) -> list[TokenOut]:
        return [out async for out in self.stream(prompt, params)]

    async def tokens(self, prompt: list[int], params: SamplingParams) -> list[int]:
        return await tokens_of(self.stream(prompt, params))

    async def tokens_of_all(
        self, prompts: list[list[int]], params: SamplingParams
    ) -> list[list[int]]:
        return await asyncio.gather(*(self.tokens(prompt, params) for prompt in prompts))

    async def together(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        begin: Callable[[], object] = lambda: None,
    ) -> list[list[TokenOut]]:
        """Run all in one batch; call `begin` before its first step."""
        return await one_batch(self.decode, [self.outputs(p, params) for p in prompts], begin)

    async def spoiled(
        self, prompt: list[int], count: int, lost: Callable[[Component], bool]
    ) -> list[int]:
        """Return the tokens of a request one of whose places is zeroed when it lands.

        That is its row, or its last page, in every component for which `lost` is true.
        """
        pool = self.target.pool

        def zero(room: FakeRoom) -> None:
            places = pool.layout.split(room.pages)
            for component in filter(lost, pool.layout.components):
                place = places[component.space][-1]
                pool.tensor(component.name)[int(place)] = 0

        def spoil(room: FakeRoom) -> None:
            room.on_landed = lambda: zero(room)

        self.on_room = spoil
        return await self.tokens(prompt, greedy(count))

    @property
    def home(self) -> bool:
        away = 0 if self.snapshots is None else self.snapshots.used_bytes
        states = [cache.states.slots for cache in self.caches if cache.states is not None]
        used = sum(slots.num_pages - slots.free_pages for slots in states) - sum(
            c.stats().states for c in self.caches
        )
        return (
            self.source.places.at_rest() and self.target.places.at_rest() and not away and not used
        )


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * i * 31 + i * 7 + salt * 101) % 509 + 2 for i in range(length)]


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=count, **more)


async def tokens_of(stream: AsyncGenerator[TokenOut, None]) -> list[int]:
    return [out.token_id async for out in stream]


async def one_batch(
    decode: DecodeEngine,
    requests: list[Coroutine[Any, Any, list[TokenOut]]],
    begin: Callable[[], object] = lambda: None,
) -> list[list[TokenOut]]:
    """Decode all requests in one batch; call `begin` before its first step."""
    decode.pause()
    running = [asyncio.ensure_future(request) for request in requests]
    await until(lambda: decode.load().running == len(running))
    begin()
    decode.resume()
    return list(await asyncio.gather(*running))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)
