"""The data plane between processes of one machine: decode's pool is a shared segment, and prefill
copies straight into it.

What status means landed?       memmove returned: the bytes are in the target's memory, where every
                                process sees them.
Can a write outlive its error?  No. A copy fails only if its process dies, and a cancelled write
                                stops between two blocks. So this plane never reports UNPROVEN for a
                                write that it ran.
What fences a peer?             The end of its process (pidfd, checked against its start time). Only
                                that process has the mapping: children do not inherit it, and the
                                process closed the memory's descriptor after mapping it.

Every value from the wire is checked before it is used. The target is the memfd of a process whose
identity is verified after the memfd is opened. The memory itself names the node that it belongs to,
and every offset is checked against the real size of the memory.

Copies hold the GIL in bursts, and release it with the last block of each burst. Between short
bursts (2 MiB) the event loop can receive an abort and stop the copy. But if another thread keeps
running Python, such as an engine between its kernels, short bursts are slow: after each release,
the copying thread waits for the GIL, for up to the switch interval of 5 ms. Measured against a
thread that never releases the GIL, a release per block gives 0.01 (4 KiB) to 0.4 GB/s (2 MiB), and
bursts of a slice give 0.4 to 2.2 GB/s (without that thread: 1 to 6.5). So after a long wait for the
GIL, bursts are as long as a slice, 1 to 3 ms, for a while. With small blocks, the release after a
burst is so short that a waiting thread may still have to wait the full 5 ms.

Several threads share the copies: each takes a part of the pages of a large write, and a smaller
write goes to the thread with the least work. A core copies some 5 to 9 GB/s, and two copy twice as
much. By default one thread copies, because decode steps and checksums need the other cores, and
small blocks, which are copied while the GIL is held, gain nothing. After a cancel, each thread
stops its part between two blocks, and the write ends when every part has ended.

A write of at most 64 KiB, in few blocks, is copied on the event loop if no other write of the plane
is under way. The copy takes some 10 us, and passing the write to the thread and back would cost
each of the two threads several times that. The bytes that one turn of the loop copies are bounded.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

import msgspec
import numpy as np

from kvflow.aio import Threads
from kvflow.memory.copies import copy_small
from kvflow.memory.shared import SharedSegment
from kvflow.protocols.errors import LayoutError, MisuseError, TransferError
from kvflow.protocols.pages.layout import PageIndices, PoolLayout
from kvflow.protocols.ports import PlaneAddress, Write, WriteOutcome
from kvflow.transports.data.route import BlockList, PlannedJob, PlannedRoute, Planner
from kvflow.transports.data.threaded import ThreadedPlane
from kvflow.transports.data.write_thread import AT_ONCE_BYTES, Assignment, ThreadWrite, WriteThread
from kvflow.transports.host.identity import check_same_host, is_alive, own_identity, wait_dead

_log = logging.getLogger(__name__)
# Pools mapped at a time, and the time limit for one. The kernel takes a minute or two to provide
# 1 TiB of pages.
_CONNECTS, _CONNECT_S = 4, 120.0
# The event loop maps pools of a known layout up to this size, with at most so many buffers. This
# takes 0.1 to 0.5 ms.
_SMALL_BYTES, _FEW_BUFFERS = 1 << 20, 256
_UNMAP_S = 10.0  # how long a closing plane waits until large pools are unmapped
_PLANNERS = 8  # number of layouts whose planners are kept
_BURST_BLOCKS = 64
_BURST_BYTES = 2 << 20  # some 350 us; a burst has at least one block
_CROWDED_BURSTS = 64  # long bursts before short ones are tried again
# A copy that takes _LONG_S longer than at _SLOWEST_BYTES_PER_S must have waited for the GIL.
_LONG_S, _SLOWEST_BYTES_PER_S = 0.001, 1e9
_MAX_BLOCK_BYTES = 4 << 20
# Large writes are divided among threads into parts of at least this size.
_PART_BYTES = 8 << 20
_WORST_FIRST = (WriteOutcome.UNPROVEN, WriteOutcome.CANCELLED, WriteOutcome.LANDED)
_ADDRESS = re.compile(r"fd:([0-9]{1,9})\Z", re.ASCII)

_copy_holding_gil = ctypes.PyDLL(None).memmove
_copy_releasing_gil = ctypes.CDLL(None).memmove
for _function in (_copy_holding_gil, _copy_releasing_gil):
    _function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    _function.restype = None


class LocalPlane(ThreadedPlane["LocalRoute"]):
    """Implements `protocols.ports.DataPlane` over shared memory."""

    name = "local"

    def __init__(
        self,
        segment: SharedSegment | None,
        rate_limit_bytes_per_s: float | None = None,
        copy_threads: int = 1,
    ) -> None:
        """`segment` holds our own pool; it is None for a pool that only sends.

        `copy_threads` threads share the copies of large writes. With a rate limit there is one.

        Raises: MisuseError for a rate that is not positive, and fewer threads than one.
        """
        super().__init__(rate_limit_bytes_per_s)
        if copy_threads < 1:
            raise MisuseError(f"{copy_threads} copy threads are fewer than 1")
        if rate_limit_bytes_per_s is None:
            self._threads += [WriteThread(f"{self.name}-{n}") for n in range(1, copy_threads)]
        self._segment = segment
        self._connecting = Threads("local-connect", _CONNECTS)
        self._unmapping = Threads("local-unmap")
        self._last_unmapped: Future[None] | None = None
        self._planners: dict[PoolLayout, Planner] = {}  # by the layout of a peer

    def __repr__(self) -> str:
        pool = "a shared pool" if self._segment is not None else "a pool that only sends"
        return f"<LocalPlane of {pool}: {len(self._routes)} routes>"

    def export(self, layout: PoolLayout) -> tuple[PlaneAddress, PoolLayout]:
        """Return our address, and the layout with offsets in the segment as buffer addresses.

        Without a segment (a user's own tensors) the locator is empty: peers can read our layout but
        cannot write to us.

        Raises: LayoutError when a buffer does not lie in the segment.
        """
        layout.check()
        self._layout = layout
        self._planners.clear()
        segment = self._segment
        if segment is None or segment.fd < 0:
            return PlaneAddress(self.name, "", own_identity()), layout
        buffers = []
        for b in layout.buffers:
            offset = b.address - segment.address
            if offset < 0 or offset + b.size_bytes > segment.size_bytes:
                raise LayoutError(f"buffer {b.name!r} is not in the pool's shared segment")
            buffers.append(msgspec.structs.replace(b, address=offset))
        placed = msgspec.structs.replace(layout, buffers=tuple(buffers))
        return PlaneAddress(self.name, f"fd:{segment.fd}", own_identity()), placed

    async def connect(self, address: PlaneAddress, layout: PoolLayout) -> LocalRoute:
        """Map the peer's pool, and return a route to it.

        Raises: LayoutError (the pools do not fit), TransferError (the pool cannot be opened).
        """
        ours = self._own_layout()
        for thread in self._threads:
            thread.start()
        planner = self._planners.pop(layout, None)
        if planner is not None:
            self._planners[layout] = planner  # as the last one
            # A thread that runs a little Python waits for the GIL again and again, so what is short
            # is done on the event loop.
            if end_of(layout) <= _SMALL_BYTES and len(layout.buffers) <= _FEW_BUFFERS:
                return self._keep(self._open(ours, address, layout, planner))
        try:
            route = await self._connecting.run(
                lambda: self._open(ours, address, layout, planner),
                LocalRoute.close,
                within_s=_CONNECT_S,
            )
        except TimeoutError:
            pid = address.process.pid
            raise TransferError(
                f"the pool of process {pid} could not be mapped within {_CONNECT_S:g} s"
            ) from None
        if ours is self._layout:
            self._planners.pop(layout, None)
            self._planners[layout] = route.planner
            if len(self._planners) > _PLANNERS:
                del self._planners[next(iter(self._planners))]
        return self._keep(route)

    def _open(
        self, ours: PoolLayout, address: PlaneAddress, theirs: PoolLayout, known: Planner | None
    ) -> LocalRoute:
        """Map the peer's pool. `known` is a planner to another peer with the same layout."""
        if known is None:
            theirs.check()
        segment = map_peer(address, theirs)
        try:
            if known is None:
                block_bytes = min(_MAX_BLOCK_BYTES, self._thread.slice_bytes)
                known = Planner(ours, theirs, max_block_bytes=block_bytes)
            segment.prefault()
        except BaseException:
            segment.close()
            raise
        planner = known.moved(segment.address)
        return LocalRoute(self._threads, planner, segment, self._routes, self._unmap)

    def _unmap(self, segment: SharedSegment) -> None:
        """Unmap a peer's pool. A thread unmaps a large one."""
        if segment.size_bytes > _SMALL_BYTES:
            with suppress(RuntimeError):  # the process ends, or no thread can be started
                self._last_unmapped = self._unmapping.executor.submit(segment.close_peer)
                return
        segment.close()

    async def _release(self) -> None:
        self._unmapping.close()
        if self._last_unmapped is not None:
            # The only thread works in order.
            last = asyncio.wrap_future(self._last_unmapped)
            if not (await asyncio.wait([last], timeout=_UNMAP_S))[0]:
                _log.warning("pools of peers are still being unmapped after %g s", _UNMAP_S)

    async def fence(self, writer: PlaneAddress) -> None:
        """Wait until the writer's process is dead.

        Raises: TransferError for a process on another host.
        """
        await wait_dead(writer.process)


def end_of(layout: PoolLayout) -> int:
    """Return the offset behind the last buffer of a layout whose addresses are offsets."""
    return max((b.address + b.size_bytes for b in layout.buffers), default=0)


def map_peer(address: PlaneAddress, layout: PoolLayout) -> SharedSegment:
    """Map the pool of exactly the process that the address names.

    Raises: TransferError; LayoutError if the process's memory is smaller than its layout says.
    """
    found = _ADDRESS.match(address.locator)
    if found is None:
        raise TransferError(
            "the peer's pool cannot be written to through shared memory (locator "
            f"{address.locator!r:.80})"
        )
    check_same_host(address.process)
    segment = SharedSegment.open_peer(
        address.process.pid, int(found[1]), address.owner, size_bytes=end_of(layout)
    )
    # Check after opening: if the pid was re-used, the memory may be another process's.
    if not is_alive(address.process):
        segment.close()
        raise TransferError(f"process {address.process.pid} has ended")
    return segment


class LocalRoute(PlannedRoute):
    """Implements `protocols.ports.Route` over a mapping of the peer's pool."""

    def __init__(
        self,
        threads: list[WriteThread],
        planner: Planner,
        segment: SharedSegment,
        siblings: set[LocalRoute],
        unmap: Callable[[SharedSegment], object],
    ) -> None:
        super().__init__(threads[0], planner, siblings)
        self._unmap = unmap
        # The threads share the copier. If two of them change its count at once, long bursts end a
        # little sooner or later.
        self._segment, self._copier, self._threads = segment, _Copier(), threads

    def write(self, source_pages: PageIndices, target_pages: PageIndices) -> Write:
        if len(self._threads) == 1:
            return super().write(source_pages, target_pages)
        self.check_write(source_pages, target_pages)
        whole = self.write_of(self.thread, source_pages, target_pages)
        if self.write_at_once(whole):
            return whole
        # A closing plane closes all threads in one turn of the loop. If one took its part and
        # another refused, a copy would run for a write that the caller does not have.
        if any(thread.is_closing for thread in self._threads):
            raise TransferError("the local plane is closed")
        parts = max(1, whole.total_bytes // _PART_BYTES)
        count = min(len(self._threads), len(source_pages), parts)
        # The threads with the least work take the parts.
        threads = sorted(self._threads, key=lambda thread: thread.open_writes)[:count]
        columns = (np.array_split(pages, count) for pages in (source_pages, target_pages))
        writes = [self.write_of(*part) for part in zip(threads, *columns, strict=True)]
        for thread, write in zip(threads, writes, strict=True):
            thread.submit(write)
        return writes[0] if count == 1 else PartedWrite(writes)

    def write_at_once(self, write: ThreadWrite) -> bool:
        if write.total_bytes > AT_ONCE_BYTES or any(t.open_writes for t in self._threads):
            return False
        blocks = self.planner.few_blocks(write.source_pages, write.target_pages)
        if blocks is None or not self.thread.admit(write.total_bytes, len(blocks.sizes)):
            return False
        for source, target, size in zip(*blocks, strict=True):
            _copy_holding_gil(target, source, size)
        write.land()
        return True

    def begin(self, write: Assignment) -> _CopyJob:
        return _CopyJob(self, write, self._copier)

    def release(self) -> None:
        self._unmap(self._segment)


class PartedWrite:
    """A write whose parts are copied by several threads. Implements `protocols.ports.Write`.

    It ends when every part has ended: then no thread copies for it any more.
    """

    def __init__(self, parts: list[ThreadWrite]) -> None:
        self._parts = parts
        self.total_bytes = sum(part.total_bytes for part in parts)
        self.done: asyncio.Future[WriteOutcome] = parts[0].done.get_loop().create_future()
        for part in parts:
            part.done.add_done_callback(self._part_ended)

    def __repr__(self) -> str:
        return f"<PartedWrite: {self._parts!r}>"

    @property
    def landed_bytes(self) -> int:
        return sum(part.landed_bytes for part in self._parts)

    @property
    def error(self) -> str:
        return next((part.error for part in self._parts if part.error), "")

    def cancel(self) -> None:
        for part in self._parts:
            part.cancel()

    def _part_ended(self, ended: asyncio.Future[WriteOutcome]) -> None:
        # The rest of a write that cannot land any more need not be copied.
        if ended.result() is not WriteOutcome.LANDED:
            self.cancel()
        if self.done.done() or not all(part.done.done() for part in self._parts):
            return
        outcomes = {part.done.result() for part in self._parts}
        self.done.set_result(next(worst for worst in _WORST_FIRST if worst in outcomes))


class _CopyJob(PlannedJob):
    """Implements `write_thread.WriteJob`. A block lands as soon as it is copied."""

    __slots__ = ("_copier",)

    def __init__(self, route: LocalRoute, write: Assignment, copier: _Copier) -> None:
        super().__init__(route, write)
        self._copier = copier

    def advance(self, max_bytes: int, cancelled: bool) -> int:
        before = self.landed_bytes
        if cancelled:
            self.outcome = WriteOutcome.CANCELLED
            return 0
        allowed = max_bytes
        while allowed > 0 and self._blocks.left_bytes and not self._write.cancelled:
            if self._blocks.are_small:
                small = self._blocks.take_small(min(allowed, _BURST_BYTES))
                copy_small(small)
                moved = small.total_bytes
            else:
                moved = self._copier.copy(self._blocks.take(allowed, _BURST_BLOCKS), self._write)
            self.landed_bytes += moved
            allowed -= moved
        # An empty queue is no proof: after a cancel, blocks taken from it may not be copied.
        if self.landed_bytes == self._write.total_bytes:
            self.outcome = WriteOutcome.LANDED
        return self.landed_bytes - before or -1


class _Copier:
    """Copies blocks on the plane's thread. The duration of a burst decides how long the next ones
    hold the GIL.
    """

    def __init__(self) -> None:
        # Number of long bursts still to come, because another thread keeps the GIL.
        self._crowded = 0

    def copy(self, blocks: BlockList, write: Assignment) -> int:
        """Copy blocks, at least one, until the write is cancelled; return the bytes copied."""
        copied = held = 0
        left = len(blocks.sizes)
        for source, target, size in zip(*blocks, strict=True):
            left -= 1
            held += size
            if left and (self._crowded or held < _BURST_BYTES):
                _copy_holding_gil(target, source, size)
            else:
                begun_at_s = time.monotonic()
                _copy_releasing_gil(target, source, size)
                took_s, held = time.monotonic() - begun_at_s, 0
                self._crowded = max(0, self._crowded - 1)
                if took_s > _LONG_S + size / _SLOWEST_BYTES_PER_S:
                    self._crowded = _CROWDED_BURSTS
            copied += size
            if not held and write.cancelled:
                break
        return copied
