"""A prefill and a decode engine in one process, each with a pool of its own; rooms between them
without a network.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable
from typing import Any, Self

import numpy as np
import torch

from kvflow.aio import Threads
from kvflow.memory.allocator import PageAllocator
from kvflow.memory.pool import PagedPool
from kvflow.memory.snapshot import SnapshotStore
from kvflow.protocols.arguments import pages_wanted
from kvflow.protocols.errors import Cause, Code, KvflowError, room_error
from kvflow.protocols.pages.layout import Order, PageIndices, build_layout
from kvflow.serve.cache.host import HostTier
from kvflow.serve.cache.prefix import PrefixCache
from kvflow.serve.cache.states import StateStore
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.scheduler.decode import DecodeEngine
from kvflow.serve.engine.scheduler.params import SamplingParams, TokenOut
from kvflow.serve.engine.scheduler.prefill import PrefillEngine


class Side:
    """One pool with its owners.

    Every byte is poison at first: whoever reads what nobody wrote gets NaN.
    """

    def __init__(
        self,
        model: LoadedModel,
        num_pages: int,
        page_size: int,
        order: Order,
        num_rows: int = 32,
        copies: int = 1,
    ) -> None:
        """`num_rows`: of a model that keeps rows. `copies`: of every stream, for as many shards."""
        rows = num_rows if model.has_rows else 0
        streams = [
            kind._replace(replica=n, replicas=copies)
            for n in range(copies)
            for kind in model.streams
        ]
        layout = build_layout(
            streams, page_size=page_size, num_pages=num_pages, num_rows=rows, order=order
        )
        self.pool = PagedPool.allocate(layout, shared=copies > 1)
        self.pages = PageAllocator(num_pages)
        self.places = self.pool.places_over(self.pages)
        for component in layout.components:
            self.pool.tensor(component.name, replica=component.replica).fill_(float("nan"))

    def snapshots(self, host_pages: int) -> SnapshotStore:
        layout = self.pool.layout
        limit = host_pages * layout.page_bytes + layout.num_rows * layout.row_bytes
        return SnapshotStore(self.pool, limit, num_rows=layout.num_rows, pages=self.pages)

    def scatter(self) -> None:
        """Hand pages and rows out in no order from now on."""
        for store in (self.pages, self.pool.rows) if self.pool.layout.num_rows else (self.pages,):
            count = store.free_pages
            store._stack[:count] = np.random.default_rng(3).permutation(store._stack[:count])


class PrefillHalf:
    """What prefill sees of a FakeRoom."""

    def __init__(self, room: FakeRoom) -> None:
        self.matched, self.send, self.done, self.on_end, self.close = (
            room.matched,
            room.send,
            room.landed_at_all,
            room.on_end,
            room.fail,
        )
        self._room = room

    @property
    def ended(self) -> bool:
        return self._room.ended


class FakeRoom:
    """One room; itself decode's half, `prefill_half` is the other.

    Writes land while `gate` is open.
    """

    def __init__(
        self, source: Side, target: Side, prompt_tokens: int, prefix_tokens: int = 0
    ) -> None:
        self._source, self._target = source, target
        self._owner: Hashable = ("room", id(self))
        self._prefix_tokens = prefix_tokens
        places = pages_wanted(target.pool.layout, prompt_tokens, prefix_tokens)
        self.pages: PageIndices = (target.places.take_room if places else target.places.take)(
            places, self._owner
        )
        self.gate = asyncio.Event()
        self.gate.set()
        self.sends: list[tuple[int, bool]] = []
        self.cause: Cause | None = None
        self.closed = self._kept = False
        self._sent = 0
        self._writes: set[asyncio.Task[None]] = set()
        self._landed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._callbacks: list[Callable[[], None]] = []
        self.on_landed: Callable[[], None] = lambda: None
        self.prefill_half = PrefillHalf(self)

    async def matched(self) -> int:
        self._raise_if_ended()
        return self._prefix_tokens

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
            s, t = (
                torch.from_numpy((p.rows if c.in_rows else p.pages).astype(np.int64)) for p in both
            )
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
        return await asyncio.shield(self._landed)

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
        """Prefill's close."""
        if not self._landed.done():
            self.cause = cause or Cause(Code.CLIENT_GONE)
            self._landed.set_exception(room_error(self.cause))
            self._landed.exception()
            self._end()

    def close(self, cause: Cause | None = None) -> None:
        """Decode's close."""
        self.fail(cause)
        if not self.closed:
            self.closed = True
            if not self._kept:
                self._target.places.give_back(self.pages, self._owner)

    def _end(self) -> None:
        for callback in self._callbacks:
            callback()

    def _raise_if_ended(self) -> None:
        if self._landed.done() and (error := self._landed.exception()):
            raise error


class EnginePair:
    """Two engines on one model thread, and requests through both."""

    def __init__(self, model: LoadedModel, **options: Any) -> None:
        page_size, num_pages = options.pop("page_size", 16), options.pop("num_pages", 256)
        orders: tuple[Order, Order] = options.pop("orders", ("page_first", "layer_first"))
        decode = {"max_batch": options.pop("max_batch", 256)}
        decode.update(
            (name, options.pop(name))
            for name in ("new_token_ratio", "recompute")
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
        # One for each role, as in two processes.
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
        self.on_room: Callable[[FakeRoom], None] = lambda room: None
        self._numbers = itertools.count()

    async def __aenter__(self) -> Self:
        await self.prefill.start()
        await self.decode.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.prefill.close()
        await self.decode.close()
        if self.snapshots is not None:
            await self.snapshots.close()
        for cache in self.caches:
            await cache.close()
        for thread in self._threads:
            thread.close()

    def room(self, prompt: list[int], prefix_tokens: int = 0) -> FakeRoom:
        room = FakeRoom(self.source, self.target, len(prompt), prefix_tokens)
        self.rooms.append(room)
        self.on_room(room)
        return room

    async def outputs(self, prompt: list[int], params: SamplingParams) -> list[TokenOut]:
        """One request through both engines. Raises what decode raises."""
        admission = await self.decode.admit(prompt, params)
        prefix = await self.decode.cached(prompt, admission=admission)
        room = self.room(prompt, 0 if prefix is None else prefix.tokens)
        leg = asyncio.ensure_future(self.prefill.prefill(room.prefill_half, prompt, params))
        found: list[TokenOut] = []
        try:
            async for out in self.decode.generate(room, prompt, params, admission, prefix):
                found.append(out)
        finally:
            await asyncio.wait([leg])
            if (
                not leg.cancelled()
                and (error := leg.exception())
                and not isinstance(error, KvflowError)
            ):
                raise error
        return found

    async def tokens(self, prompt: list[int], params: SamplingParams) -> list[int]:
        return [out.token_id for out in await self.outputs(prompt, params)]

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
    """Ids that repeat themselves nowhere near."""
    return [(i * i * 31 + i * 7 + salt * 101) % 509 + 2 for i in range(length)]


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=count, **more)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that nobody announces; a test that waits in vain fails."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)
