"""The conformance suite's sides and peers, by the name of a plane that ships."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvflow.memory.pool import PagedPool
from kvflow.protocols.pages.layout import Order, PoolLayout
from kvflow.testing import pair
from kvflow.testing.conformance import peer, station
from kvflow.testing.conformance.bench import EVERYTHING, SETTLE_S, end_of, let_write
from kvflow.testing.conformance.peer import spawned
from kvflow.testing.conformance.station import NUM_PAGES, PAGE_SIZE, STREAMS, pages
from kvflow.transports.data.local import LocalPlane
from kvflow.transports.data.select import open_plane
from kvflow.transports.data.threaded import EnginePlane

# The suite's own, as they are.
__all__ = ["EVERYTHING", "NUM_PAGES", "PAGE_SIZE", "STREAMS", "end_of", "pages", "spawned"]

Peer = peer.ProcessPeer
until = functools.partial(pair.until, timeout_s=20.0)


class Side(station.Side):
    """A pool and a plane in this process, exported."""

    def __init__(
        self, backend: str, order: Order, rate: float | None, host: str = "127.0.0.1"
    ) -> None:
        super().__init__(
            lambda pool, rate: open_plane(backend, pool.segment, rate, host), order, rate
        )


@asynccontextmanager
async def local_planes(
    layout: PoolLayout, rate: float | None = None, copy_threads: int = 1
) -> AsyncIterator[tuple[LocalPlane, LocalPlane, PagedPool, PagedPool]]:
    """A source and a target in this process, and their pools. Only the source exports its pool."""
    source, target = (PagedPool.allocate(layout) for _ in range(2))
    planes = LocalPlane(source.segment, rate, copy_threads), LocalPlane(target.segment)
    planes[0].export(source.layout)
    try:
        yield *planes, source, target
    finally:
        for plane in planes:
            await plane.close()
        for pool in (source, target):
            pool.close()


async def write_and_fork(peer: Peer, side: Side, writes: int) -> None:
    """The peer writes, and then has a child, which inherits its connections to us."""
    await peer.ask("fill", 8)
    await let_write(peer, side)
    for _ in range(writes):
        await peer.ask("write", EVERYTHING.tolist(), EVERYTHING.tolist())
        assert (await peer.ask("done"))[0] == "landed"
    await peer.ask("fork")


async def kill_a_writer(peer: Peer, side: Side) -> None:
    """It is killed in the middle of a write, and none of its bytes comes after the fence."""
    assert isinstance(side.plane, EnginePlane)
    writers = side.plane._inbound._writers
    process = peer.address.process
    fence = asyncio.ensure_future(side.plane.fence(peer.address))
    await until(lambda: process in writers and writers[process].last_look > 0)
    await peer.ask("write", EVERYTHING.tolist(), EVERYTHING.tolist())
    peer.process.kill()
    await asyncio.wait_for(fence, 20)
    await check_no_late_byte(side)


async def check_no_late_byte(side: Side) -> None:
    side.wipe()  # somebody else's pages now
    await asyncio.sleep(SETTLE_S)
    assert side.landed_bytes() == 0
