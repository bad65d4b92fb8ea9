"""The data plane for tests, within one process: real bytes, no thread, no clock, faults on demand.

What status means landed?       LANDED: every byte was copied before `landed_bytes` counted it.
Can a write outlive its error?  Only when the script asks for it (`Fault.LATE`): the rest then lands
                                when `land_late` is called.
What fences a peer?             `die`: the peer's plane then copies no more bytes.

Planes that share a `FakeNetwork` reach each other. Without a script, a write lands in the next turn
of the event loop. After `plane.hold()`, writes wait until `plane.step(pages)` or `plane.release()`
moves them, the oldest first:

    network = FakeNetwork()
    prefill, decode = FakePlane(network), FakePlane(network)
    prefill.hold()                          # or prefill.script(Fault.LATE) for the next write
    ...
    prefill.step(3); write.cancel()         # exactly 3 pages are in decode's pool

A subclass that overrides `began`, `copied` and `ended` decides when pages move, and observes them
(`proof.sim.plane`).
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
from collections import deque
from enum import Enum

from kvflow.protocols.errors import LayoutError, TransferError
from kvflow.protocols.pages.fine import in_common_pages
from kvflow.protocols.pages.layout import PageIndices, PoolLayout
from kvflow.protocols.ports import PlaneAddress, WriteOutcome
from kvflow.transports.data.route import BlockQueue, Planner
from kvflow.transports.host.identity import own_identity

_ALL = 1 << 62


class Fault(Enum):
    """The fault of one scripted write."""

    # Half of the pages land, and the rest never do. The write ends UNPROVEN, or CANCELLED if no
    # page landed.
    ERROR = "error"
    # Half of the pages land, and the write ends UNPROVEN. The rest land when `land_late` is called,
    # with what the source then holds.
    LATE = "late"
    # The write neither lands nor ends, cancelled or not, until `release` or `die`.
    STUCK = "stuck"


class FakeNetwork:
    def __init__(self) -> None:
        self.planes: dict[str, FakePlane] = {}
        self._numbers = itertools.count(1)

    def join(self, plane: FakePlane) -> str:
        address = f"fake-{next(self._numbers)}"
        self.planes[address] = plane
        return address


class FakePlane:
    """Implements `protocols.ports.DataPlane`."""

    name = "fake"
    stalled_s = 0.0
    drains_at_once = True  # no copy runs in the background, so a cancelled write ends at once

    def __init__(self, network: FakeNetwork) -> None:
        self.address = network.join(self)
        self.writes: list[FakeWrite] = []  # under way, oldest first
        self.started: list[FakeWrite] = []  # every write ever started
        self._network = network
        self._layout: PoolLayout | None = None
        self._script: deque[Fault] = deque()
        self._late: list[FakeWrite] = []
        self._held = False
        self._dead: asyncio.Event = asyncio.Event()

    def script(self, *faults: Fault) -> None:
        """Apply these faults to the next writes, one each."""
        self._script.extend(faults)

    def hold(self) -> None:
        """Make all writes wait for `step` or `release`."""
        self._held = True

    def release(self) -> None:
        """Stop holding writes. Move each one under way, even a stuck one, to its end."""
        self._held = False
        for write in list(self.writes):
            write.fault = None if write.fault is Fault.STUCK else write.fault
            write.move(_ALL)

    def step(self, pages: int = 1) -> int:
        """Copy up to `pages` pages of the oldest write that is not stuck; return the byte count."""
        write = next((w for w in self.writes if w.fault is not Fault.STUCK), None)
        if write is None:
            return 0
        before = write.landed_bytes
        write.move(pages * write.page_bytes)
        return write.landed_bytes - before

    def land_late(self) -> int:
        """Copy the rest of every `Fault.LATE` write, if any is left; return the byte count."""
        late, self._late = self._late, []
        return sum(write.copy(_ALL) for write in late)

    def die(self) -> None:
        """Stop like a process that dies: no more bytes are copied, and the fence resolves."""
        self._dead.set()
        self._late.clear()
        for write in list(self.writes):
            write.end(WriteOutcome.UNPROVEN, "the process is gone")

    def export(self, layout: PoolLayout) -> tuple[PlaneAddress, PoolLayout]:
        layout.check()
        self._layout = layout
        return PlaneAddress(self.name, self.address, own_identity()), layout

    async def connect(self, address: PlaneAddress, layout: PoolLayout) -> FakeRoute:
        peer = self._network.planes.get(address.locator)
        if self._layout is None:
            raise LayoutError("export our own pool before connecting to a peer's")
        if address.backend != self.name or peer is None or peer._dead.is_set():
            raise TransferError(f"no fake plane answers at {address.locator!r}")
        layout.check()
        ours, _ = in_common_pages(self._layout, layout)
        block_bytes = next(filter(None, ours.place_bytes), 1)
        return FakeRoute(self, peer, Planner(self._layout, layout, max_block_bytes=block_bytes))

    async def fence(self, writer: PlaneAddress) -> None:
        peer = self._network.planes.get(writer.locator)
        if peer is None:
            raise TransferError(f"no fake plane was ever at {writer.locator!r}")
        await peer._dead.wait()

    def sees_alive(self, writer: PlaneAddress) -> bool:
        """Return False, as for a writer on another host: tests may then declare any writer dead."""
        return False

    async def close(self) -> None:
        """Cancel every write, and then `die`. Stuck writes end UNPROVEN."""
        for write in list(self.writes):
            write.cancel()
        self.die()

    def begin(self, write: FakeWrite) -> None:
        if self._dead.is_set():
            raise TransferError("the fake plane is closed")
        write.fault = self._script.popleft() if self._script else None
        self.writes.append(write)
        self.started.append(write)
        self.began(write)

    def began(self, write: FakeWrite) -> None:
        """Schedule a write that begins: it moves in the next turn of the event loop."""
        asyncio.get_running_loop().call_soon(self._turn, write)

    def copied(self, write: FakeWrite, size_bytes: int) -> None:
        """Called when `size_bytes` more bytes of a write are in the peer's memory.

        `landed_bytes` does not count those that `land_late` copies.
        """

    def ended(self, write: FakeWrite, outcome: WriteOutcome) -> None:
        """Called when a write stops, before its `done` resolves."""

    def keep_late(self, write: FakeWrite) -> None:
        self._late.append(write)

    def _turn(self, write: FakeWrite) -> None:
        if not self._held:
            write.move(_ALL)


class FakeRoute:
    """Implements `protocols.ports.Route`."""

    def __init__(self, plane: FakePlane, peer: FakePlane, planner: Planner) -> None:
        self.closed = False
        self._plane, self._peer, self._planner = plane, peer, planner

    def write(self, source_pages: PageIndices, target_pages: PageIndices) -> FakeWrite:
        if self.closed:
            raise TransferError("the route is closed")
        self._planner.check(source_pages, target_pages)
        write = FakeWrite(self._plane, self._peer, self._planner, source_pages, target_pages)
        self._plane.begin(write)
        return write

    def close(self) -> None:
        self.closed = True


class FakeWrite:
    """Implements `protocols.ports.Write`."""

    def __init__(
        self,
        plane: FakePlane,
        peer: FakePlane,
        planner: Planner,
        source_pages: PageIndices,
        target_pages: PageIndices,
    ) -> None:
        self.done: asyncio.Future[WriteOutcome] = asyncio.get_running_loop().create_future()
        self.peer, self.source_pages, self.target_pages = peer, source_pages, target_pages
        self._plane, self._blocks = plane, BlockQueue(planner, source_pages, target_pages)
        self.page_bytes, self.place_bytes = planner.page_bytes or 1, planner.place_bytes
        self.total_bytes = self._blocks.left_bytes
        self.landed_bytes, self.error = 0, ""
        self.fault: Fault | None = None
        self.cancelled = False

    def cancel(self) -> None:
        if self.done.done() or self.cancelled:
            return
        self.cancelled = True
        if self.fault is not Fault.STUCK and self._plane.drains_at_once:
            self.end(WriteOutcome.CANCELLED)

    def move(self, max_bytes: int) -> None:
        """Copy up to `max_bytes`. End the write after its last byte, or where its fault occurs."""
        if self.done.done() or self.fault is Fault.STUCK:
            return
        if self.cancelled:
            self.end(WriteOutcome.CANCELLED)
            return
        if self.fault:
            stop_at = self.total_bytes // self.page_bytes // 2 * self.page_bytes
        else:
            stop_at = self.total_bytes
        self.landed_bytes += self.copy(min(max_bytes, stop_at - self.landed_bytes))
        if self._blocks.left_bytes == 0:
            self.end(WriteOutcome.LANDED)
        elif self.fault and self.landed_bytes >= stop_at:
            if self.fault is Fault.LATE:
                self._plane.keep_late(self)
            # A write that failed before its first byte is drained: no byte is in doubt.
            stopped = self.fault is Fault.ERROR and not stop_at
            outcome = WriteOutcome.CANCELLED if stopped else WriteOutcome.UNPROVEN
            self.end(outcome, f"scripted {self.fault.value}")

    def copy(self, max_bytes: int) -> int:
        """Copy whole blocks until at least `max_bytes` are copied, or no block is left.

        Returns the number of bytes copied.
        """
        copied = 0
        while max_bytes > copied and self._blocks.left_bytes:
            sources, targets, sizes = self._blocks.take(max_bytes - copied, 1)
            ctypes.memmove(targets[0], sources[0], sizes[0])
            copied += sizes[0]
            self._plane.copied(self, sizes[0])
        return copied

    def end(self, outcome: WriteOutcome, error: str = "") -> None:
        if not self.done.done():
            self.error = error
            self._plane.writes.remove(self)
            self._plane.ended(self, outcome)
            self.done.set_result(outcome)
