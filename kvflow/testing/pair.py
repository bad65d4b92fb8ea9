"""Prefill ranks and a decode in one process, on an in-memory network. Fake data planes copy real
bytes between their pools.

    async with pair() as p:
        source, target = await p.open(7, prompt=range(40))
        await source.matched()
        p.send_all(source)
        assert await target.landed() == b"handoff"
        p.decode.pages.give_back(target.keep("me"), "me")
        await p.rest()  # raises unless every page is free and every table empty
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from time import monotonic

import numpy as np

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.memory.pool import PagedPool
from kvflow.memory.staging import Staging
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.arguments import TokenIds
from kvflow.protocols.limits import Timing
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices, PoolLayout, build_layout
from kvflow.protocols.ports import DataPlane
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.testing.shards import shard_layout
from kvflow.transports.control.memory import Network
from kvflow.transports.data.fake import FakeNetwork, FakePlane

PAGE_SIZE = 4
QUICK = Timing(
    heartbeat_s=0.02, lost_after_s=60, repeat_after_s=0.02, rendezvous_s=60, register_s=60
)
"""Repeats messages quickly. The long time-outs expire only when the test advances a `Clock`."""


class Clock:
    """A monotonic clock, in seconds, that a test can advance."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        self._watching: list[Callable[[], None]] = []

    def now(self) -> float:
        return monotonic() + self._ahead_s

    def advance(self, seconds: float) -> None:
        """Advance the clock, and call every watcher."""
        self._ahead_s += seconds
        for wake in self._watching:
            wake()

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` at each `advance`, because the loop's timers do not follow this clock."""
        self._watching.append(wake)


def small_layout(num_pages: int = 64, *, page_size: int = PAGE_SIZE) -> PoolLayout:
    """Return a page-first layout with two streams and some 100 bytes per page."""
    streams: list[tuple[str, str, tuple[int, ...]]] = [
        ("0.k", "uint8", (8,)),
        ("0.v", "uint8", (16,)),
    ]
    return build_layout(streams, page_size=page_size, num_pages=num_pages)


class Pair:
    """The nodes of a test, and helpers to drive them.

    At first, every byte of page p at prefill is p % 255 + 1, and every byte at decode is 0. In a
    pool with several spaces, p is the index in a list of all spaces (see `protocols.pages.spaces`).
    """

    def __init__(
        self,
        timing: Timing,
        layouts: tuple[PoolLayout, PoolLayout],
        ranks: int,
        open_plane: Callable[[PagedPool], DataPlane] | None = None,
    ) -> None:
        """`open_plane` creates the data plane of each node; by default planes are fake."""
        self.network, self.planes = Network(), FakeNetwork()
        self._open_plane = open_plane
        self._shared = open_plane is not None  # a real data plane may need shared memory
        self.timing, self._layouts, self._world_size = timing, layouts, ranks
        self.prefills: list[PrefillNode] = []
        self.decodes: list[DecodeNode] = []
        self.clocks: dict[int, Clock] = {}  # by incarnation
        self.patience_s = 20.0  # time limit of `rest`
        self._pools: list[PagedPool] = []

    @property
    def prefill(self) -> PrefillNode:
        return self.prefills[0]

    @property
    def decode(self) -> DecodeNode:
        return self.decodes[0]

    @property
    def nodes(self) -> list[PrefillNode | DecodeNode]:
        return [*self.decodes, *self.prefills]

    @property
    def ranks(self) -> list[RankInfo]:
        return [node.info for node in self.prefills]

    def plane(self, node: PrefillNode | DecodeNode) -> FakePlane:
        assert isinstance(node.plane, FakePlane)
        return node.plane

    def clock(self, node: PrefillNode | DecodeNode) -> Clock:
        return self.clocks[node.incarnation]

    async def add_prefill(
        self, port: int = 0, *, alone: bool = False, staging_bytes: int | None = None
    ) -> PrefillNode:
        """Add a rank, or restart one that was removed.

        To restart a rank, pass its old `port`. With `alone`, the new node is a separate prefill of
        one rank. With `staging_bytes`, the node sends through staging of that size.
        """
        taken = set() if alone else {node.info.rank for node in self.prefills}
        rank = min(set(range(self._world_size + 1)) - taken)
        shards = 1 if alone else self._world_size
        pool, clock = self._pool(shard_layout(self._layouts[0], rank, shards)), Clock()
        staging = self._staging(pool, staging_bytes)
        plane = self._new_plane(pool if staging is None else staging.host)
        node = PrefillNode(
            pool,
            plane,
            port=port,
            rank=rank,
            world_size=shards,
            timing=self.timing,
            staging=staging,
            bind=self.network.bind,
            now=clock.now,
        )
        self.clocks[node.incarnation] = clock
        await node.start()
        clock.watch(node.shell.wake)
        # A test recognises a source page at decode by its byte value.
        for place in range(pool.layout.num_places):
            fill(pool, [place], place % 255 + 1)
        self.prefills.insert(len(self.prefills) if alone else rank, node)
        return node

    async def add_decode(
        self,
        layout: PoolLayout | None = None,
        *,
        staging_bytes: int | None = None,
        over: Staging | None = None,
    ) -> DecodeNode:
        """Add a decode.

        With `staging_bytes`, the node lends staging of that size (0: the size of the pool). To run
        over the pool and the staging of an earlier node, pass the staging as `over`.
        """
        if over is None:
            pool = self._pool(layout or self._layouts[1])
            staging = self._staging(pool, staging_bytes)
        else:
            pool, staging = over.pool, over
        plane, clock = self._new_plane(pool if staging is None else staging.host), Clock()
        node = DecodeNode(
            pool,
            plane,
            resolve=self._resolve,
            timing=self.timing,
            staging=staging,
            connect=self.network.connect,
            now=clock.now,
        )
        self.clocks[node.incarnation] = clock
        await node.start()
        clock.watch(node.shell.wake)
        self.decodes.append(node)
        return node

    async def open(self, room: int, prompt: TokenIds) -> tuple[PrefillRoom, DecodeRoom]:
        """Open prefill's half of a room at rank 0, then decode's half."""
        source = self.prefill.room(room, prompt)
        return source, await self.decode.room(room, "sim", prompt)

    def send_all(
        self,
        source: PrefillRoom,
        *,
        chunks: int = 1,
        node: PrefillNode | None = None,
        handoff: bytes = b"handoff",
    ) -> PageIndices:
        """Take places at prefill for the whole room, and send them in `chunks` chunks, rows with
        the last one.

        Returns the places. They are given back when the room ends.
        """
        node = node or self.prefill
        layout, owner = node.pool.layout, ("engine", source.room)
        pages = node.pages.take_room(source.record.wanted, owner)
        source.on_end(lambda: node.pages.give_back(pages, owner))
        parts = [
            [NO_PLACES] * (chunks - 1) + [own] if space.in_rows else np.array_split(own, chunks)
            for space, own in zip(layout.spaces, layout.split(pages), strict=True)
        ]
        for i, part in enumerate(zip(*parts, strict=True)):
            last = i == chunks - 1
            source.send(layout.numbered(part), last=last, handoff=handoff if last else b"")
        return pages

    async def crash(self, node: PrefillNode | DecodeNode) -> None:
        """End a node as if its process died: no goodbye, no further write, and fences resolve."""
        # The test's rules are suspended while the node closes, so that none lets a goodbye through.
        rules = self.network.rules
        self.network.rules = []
        self.network.cut()
        self.plane(node).die()
        closing = asyncio.create_task(node.close())
        await asyncio.sleep(0)
        # A closing decode waits for proofs from its peers. Advancing its clock ends the wait.
        self.clock(node).advance(1e9)
        await closing
        self.network.rules = rules
        if isinstance(node, PrefillNode):
            self.prefills.remove(node)
        else:
            self.decodes.remove(node)

    def left(self) -> list[str]:
        """Return a description of each part that is not at rest (I1, I5); empty if all are."""
        found: list[str] = []
        for prefill in self.prefills:
            name, endpoint = f"prefill {prefill.info.rank}", prefill.shell.endpoint
            open_grants = sum(len(peer.grants.rooms) for peer in endpoint.peers)
            remembered = sum(peer.grants.remembered for peer in endpoint.peers)
            found += _counted(
                name, rooms=len(endpoint.rooms), grants=open_grants, closed=remembered
            )
            found += _counted(
                name, handles=len(prefill.shell.rooms), handler_errors=prefill.counts.handler_errors
            )
            if not prefill.pool.places.at_rest():
                found.append(f"{name}: pages of {prefill.pool.places.owned()}")
        for decode in self.decodes:
            core = decode.shell.endpoint.core
            quarantined = core.ledger.quarantined_pages
            found += _counted(
                "decode", rooms=len(core.rooms), loans=len(core.ledger), quarantined=quarantined
            )
            found += _counted(
                "decode",
                handles=len(decode.shell.rooms),
                handler_errors=decode.counts.handler_errors,
            )
            if not decode.pool.places.at_rest():
                found.append(f"decode: pages of {decode.pool.places.owned()}")
            if not decode.staging_at_rest:
                found.append(f"decode: staging of {decode.reached.places.owned()}")
        return found

    async def rest(self) -> None:
        """Wait until all nodes are at rest. Raises: TimeoutError naming what is not at rest."""
        try:
            await until(lambda: not self.left(), self.patience_s)
        except TimeoutError:
            raise TimeoutError(f"not at rest: {'; '.join(self.left())}") from None

    async def close(self) -> None:
        for node in self.nodes:
            # `close` waits for the node's writes, and a test may have held them.
            if isinstance(node.plane, FakePlane):
                node.plane.release()
            await node.close()
        for pool in self._pools:
            pool.close()

    async def _resolve(self, _: str) -> Sequence[RankInfo]:
        return self.ranks

    def _new_plane(self, pool: PagedPool) -> DataPlane:
        return FakePlane(self.planes) if self._open_plane is None else self._open_plane(pool)

    def _pool(self, layout: PoolLayout) -> PagedPool:
        pool = PagedPool.allocate(layout, shared=self._shared)
        self._pools.append(pool)
        return pool

    def _staging(self, pool: PagedPool, size_bytes: int | None) -> Staging | None:
        return None if size_bytes is None else Staging(pool, size_bytes, shared=self._shared)


@asynccontextmanager
async def pair(
    *,
    timing: Timing = QUICK,
    source_layout: PoolLayout | None = None,
    target_layout: PoolLayout | None = None,
    ranks: int = 1,
    staging_bytes: int | None = None,
    source_staging_bytes: int | None = None,
    open_plane: Callable[[PagedPool], DataPlane] | None = None,
) -> AsyncIterator[Pair]:
    """Start `ranks` prefill nodes and one decode node, and yield them as a `Pair`.

    At the end, every held write is released and every node is closed. `open_plane` creates a node's
    data plane over the node's pool, or over its staging if it has one. For the other arguments see
    `Pair.add_prefill` and `Pair.add_decode`.
    """
    made = Pair(
        timing,
        (source_layout or small_layout(), target_layout or small_layout()),
        ranks,
        open_plane,
    )
    try:
        for _ in range(ranks):
            await made.add_prefill(staging_bytes=source_staging_bytes)
        await made.add_decode(staging_bytes=staging_bytes)
        yield made
    finally:
        await made.close()


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait until `condition()` is true. Raises: TimeoutError after `timeout_s`."""
    deadline = monotonic() + timeout_s
    while not condition():
        if monotonic() > deadline:
            raise TimeoutError(f"{condition} was not true within {timeout_s:g} s")
        await asyncio.sleep(0.001)


def fill(pool: PagedPool, pages: Sequence[int] | PageIndices, value: int) -> None:
    """Set every byte of `pages`, which may be places of any space, to `value`. The pool must be
    page-first.
    """
    layout = pool.layout
    places = layout.split(np.asarray(pages, dtype=np.int32))
    for b in layout.buffers:
        for place in places[b.space].tolist():
            ctypes.memset(b.address + place * b.page_bytes, value, b.page_bytes)


def _counted(name: str, **counts: int) -> list[str]:
    return [f"{name}: {count} {what}" for what, count in counts.items() if count]
