"""The conformance suite's sides and peers, by the name of a plane that ships."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvflow.protocols.pages.layout import Order
from kvflow.protocols.ports import Write, WriteOutcome
from kvflow.testing.conformance import peer, station
from kvflow.testing.conformance.peer import spawned
from kvflow.testing.conformance.station import NUM_PAGES, PAGE_SIZE, STREAMS, pages
from kvflow.transports.data.select import open_plane

__all__ = ["NUM_PAGES", "PAGE_SIZE", "STREAMS", "pages", "spawned"]  # of the suite, as they are

Peer = peer.ProcessPeer


class Side(station.Side):
    """A pool and a plane in this process, exported."""

    def __init__(
        self, backend: str, order: Order, rate: float | None, host: str = "127.0.0.1"
    ) -> None:
        super().__init__(
            lambda pool, rate: open_plane(backend, pool.segment, rate, host), order, rate
        )


async def until(condition: Callable[[], bool], *, within_s: float = 20.0) -> None:
    """Wait for `condition`; a test that never gets there fails."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.001)


async def end_of(write: Write, within_s: float = 20.0) -> WriteOutcome:
    """Wait for it; a write that does not end in time goes on. Raises: TimeoutError."""
    return await asyncio.wait_for(asyncio.shield(write.done), within_s)
