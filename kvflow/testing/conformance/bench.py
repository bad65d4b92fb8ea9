"""Tools for checks: the sides and peers of the plane under test, and the error for a failure."""

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
from kvflow.protocols.ports import Write, WriteOutcome
from kvflow.testing.conformance.adapter import NotRunError, load_adapter
from kvflow.testing.conformance.peer import ObjectPeer, Peer, spawned
from kvflow.testing.conformance.station import NUM_PAGES, Side

# Time limit for anything that must end.
WITHIN_S = 20.0
# Late bytes, if there are any, arrive within this time.
SETTLE_S = 0.3
# In bytes/s. At this rate a write of all pages takes 2.6 s, so a check can act in the middle.
RATE = 4_000_000
EVERYTHING: PageIndices = np.arange(NUM_PAGES, dtype=np.int32)


class NotConformingError(AssertionError):
    """Raised when a plane breaks a promise. The text describes what the plane did."""


def require(holds: object, text: str) -> None:
    if not holds:
        raise NotConformingError(text)


class Bench:
    """The plane under test. `plane` is a name for `load_adapter`."""

    def __init__(self, plane: str, seed: int = 0, rooms: int = 200) -> None:
        self.plane, self.adapter, self.seed, self.rooms = plane, load_adapter(plane), seed, rooms

    @asynccontextmanager
    async def side(
        self, order: Order = "page_first", rate: float | None = None
    ) -> AsyncIterator[Side]:
        """Yield a pool and a plane in this process, and close them at the end."""
        side = Side(self.adapter.open, order, rate)
        try:
            yield side
        finally:
            await asyncio.wait_for(side.close(), WITHIN_S)

    @asynccontextmanager
    async def peer(
        self, order: Order = "page_first", rate: float | None = None
    ) -> AsyncIterator[Peer]:
        """Yield the other side: a process if the plane reaches other processes, else an object."""
        if not self.adapter.between_processes:
            async with self.side(order, rate) as side:
                yield ObjectPeer(self.adapter, side)
        else:
            async with spawned(self.plane, order, rate) as peer:
                yield peer

    def only_between_processes(self) -> None:
        """Skip the check (raise NotRunError) if the planes cannot reach other processes."""
        if not self.adapter.between_processes:
            raise NotRunError("its planes live within one process")


async def bytes_of(peer: Peer, which: PageIndices) -> bytes:
    return base64.b64decode(await peer.ask("read", which.tolist()))


async def let_write(peer: Peer, side: Side) -> None:
    """Connect the peer to our pool, so that it can write there."""
    await peer.ask("connect", msgspec.to_builtins((side.address, side.layout)))


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition()` is true. Raises: NotConformingError after `WITHIN_S`."""
    try:
        async with asyncio.timeout(WITHIN_S):
            while not condition():  # noqa: ASYNC110 - what is observed may be another process
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise NotConformingError(f"{what} did not happen within {WITHIN_S:g} s") from None


async def end_of(write: Write, within_s: float = WITHIN_S) -> WriteOutcome:
    """Return the outcome of a write. Raises: TimeoutError if the write has not ended in time."""
    return await asyncio.wait_for(asyncio.shield(write.done), within_s)


# A thread pool starts another thread if work arrives before an idle thread is back in the pool. So
# the number of its threads depends on chance, up to the pool's limit. All pools of a node together
# have at most this many threads, so only a larger increase is a leak.
POOLED_THREADS = 32


class Resources(NamedTuple):
    """The open descriptors, the threads and the resident memory of this process."""

    descriptors: int
    threads: int
    resident_bytes: int

    @classmethod
    def now(cls) -> Resources:
        with open("/proc/self/statm", encoding="ascii") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        return cls(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident)

    async def returned(self, more_threads: int = 0) -> Resources:
        """Wait until the process has no more descriptors and threads than `self`; return `now()`.

        `more_threads` further threads are allowed. Raises: NotConformingError after `WITHIN_S`.
        """
        threads = self.threads + more_threads

        def are_there() -> bool:
            now = Resources.now()
            return now.descriptors <= self.descriptors and now.threads <= threads

        await until(
            are_there, f"the return to {self.descriptors} descriptors and {threads} threads"
        )
        return Resources.now()


class Check(NamedTuple):
    """A check of one promise. `run` returns a text on what it observed, or raises on a failure."""

    name: str
    run: Callable[[Bench], Awaitable[str]]
