"""What a check works with: sides and peers of the plane under test, and the words for what does not
hold.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec
import numpy as np

from kvflow.protocols.pages.layout import Order, PageIndices
from kvflow.testing.conformance.adapter import NotRunError, load_adapter
from kvflow.testing.conformance.peer import ObjectPeer, Peer, spawned
from kvflow.testing.conformance.station import NUM_PAGES, Side

WITHIN_S = 20.0  # what ends at all has ended by then
SETTLE_S = 0.3  # what could still arrive would arrive within it
RATE = 4_000_000  # bytes/s: all pages take 2.6 s, so there is a middle
EVERYTHING: PageIndices = np.arange(NUM_PAGES, dtype=np.int32)


class NotConformingError(AssertionError):
    """What the plane did, and what it should have done."""


def require(holds: object, text: str) -> None:
    """Raises: NotConformingError."""
    if not holds:
        raise NotConformingError(text)


class Bench:
    """`plane` is as `load_adapter` takes it."""

    def __init__(self, plane: str, seed: int = 0, rooms: int = 200) -> None:
        self.plane, self.adapter, self.seed, self.rooms = plane, load_adapter(plane), seed, rooms

    @asynccontextmanager
    async def side(
        self, order: Order = "page_first", rate: float | None = None
    ) -> AsyncIterator[Side]:
        """A pool and a plane in this process, closed at the end."""
        side = Side(self.adapter.open, order, rate)
        try:
            yield side
        finally:
            await asyncio.wait_for(side.close(), WITHIN_S)

    @asynccontextmanager
    async def peer(
        self, order: Order = "page_first", rate: float | None = None
    ) -> AsyncIterator[Peer]:
        """The other side: a process, for planes that reach one."""
        if not self.adapter.between_processes:
            async with self.side(order, rate) as side:
                yield ObjectPeer(self.adapter, side)
        else:
            async with spawned(self.plane, order, rate) as peer:
                yield peer

    def only_between_processes(self) -> None:
        """Raises: NotRunError."""
        if not self.adapter.between_processes:
            raise NotRunError("its planes live within one process")


async def bytes_of(peer: Peer, which: PageIndices) -> bytes:
    return base64.b64decode(await peer.ask("read", which.tolist()))


async def let_write(peer: Peer, side: Side) -> None:
    """Let the peer write into our pool."""
    await peer.ask("connect", msgspec.to_builtins((side.address, side.layout)))


async def until(condition: Callable[[], bool], what: str) -> None:
    """Raises: NotConformingError when it has not come true in time."""
    try:
        async with asyncio.timeout(WITHIN_S):
            while not condition():  # noqa: ASYNC110 - what is observed may be another process
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise NotConformingError(f"{what} did not happen within {WITHIN_S:g} s") from None


class Resources(NamedTuple):
    """What this process holds."""

    descriptors: int
    threads: int
    resident_bytes: int

    @classmethod
    def now(cls) -> Resources:
        with open("/proc/self/statm", encoding="ascii") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        return cls(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident)

    async def returned(self) -> Resources:
        """Wait until this process has no more descriptors and no more threads than these; what it
        has then.

        Raises: NotConformingError.
        """

        def are_there() -> bool:
            now = Resources.now()
            return now.descriptors <= self.descriptors and now.threads <= self.threads

        await until(
            are_there, f"the return to {self.descriptors} descriptors and {self.threads} threads"
        )
        return Resources.now()


class Check(NamedTuple):
    """One thing to show.

    `run` returns what it saw, in words; it raises NotConformingError, or NotRunError.
    """

    name: str
    run: Callable[[Bench], Awaitable[str]]
