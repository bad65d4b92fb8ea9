"""One thread per data plane, which moves the blocks of many writes, round robin and slice by slice.

The thread is fair between rooms, since a write moves one slice per turn, and a write stops quickly,
since `cancel` takes effect between slices. Work arrives through a queue on which the idle thread
blocks. The thread reports ended writes to the event loop in batches: one wake-up serves all writes
that ended since the loop last ran.

Passing a write to the thread may cost more than a tiny write itself. A back end may do such a write
on the event loop instead, up to a limit per turn of the loop. It does so only while no other write
is under way, so that writes keep their order.

The rate limit is in bytes/s over the whole plane. A slice may start once all bytes before it would
have been sent at that rate, so at most one slice more than rate x time has been submitted at any
moment. Idle time earns no credit. At a low rate, a slice shrinks to what may be sent in 5 ms, but
not below 4 KiB, so that a test can stop a transfer in the middle.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Protocol

from kvflow.aio import run_to_end
from kvflow.protocols.errors import MisuseError, TransferError
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import WriteOutcome

SLICE_BYTES = 8 << 20  # 1 to 3 ms of memmove; a cancel, or another room, waits that long
AT_ONCE_BYTES = 64 << 10  # largest write done on the event loop: some 10 us of memmove
_TURN_BYTES = 4 * AT_ONCE_BYTES  # limit on the bytes written on the event loop per turn
_BLOCK_COST_BYTES = 4 << 10  # a smaller block counts as this many bytes against that limit
_LIMITED_SLICE_S = 0.005
_TOLD_AT_ONCE = 8
_SMALLEST_SLICE = 4 << 10
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.00005, 0.01
# A sleep of 50 us takes 150 us on a virtual machine, and a small write some 50 us. So the thread
# looks again and again for up to `_SPIN_S` after the first move of a write, if it was idle for
# `_IDLE_S` before. With more to do, the event loop needs the interpreter more: spinning after every
# write cost a fifth of the rooms per second.
_SPIN_S, _IDLE_S = 0.0002, 0.0004


class WriteJob(Protocol):
    """A back end's job for one write.

    Only the plane's thread advances it; the event loop may read `landed_bytes`.
    """

    def advance(self, max_bytes: int, cancelled: bool) -> int:
        """Check the blocks under way, then submit at most `max_bytes`, or a single block if it is
        larger than that. Submit nothing if `max_bytes` is 0.

        Return how many bytes were submitted; -1 if nothing changed.
        """

    @property
    def outcome(self) -> WriteOutcome | None:
        """The outcome, or None until the job ends.

        The job ends when no block is under way, and either none is left to submit, or the write
        was cancelled or failed.
        """

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next `advance`; 0 while more can be submitted."""

    @property
    def landed_bytes(self) -> int: ...

    @property
    def error(self) -> str: ...


class Assignment(Protocol):
    """The write, or part of a write, that a job carries out."""

    @property
    def source_pages(self) -> PageIndices: ...

    @property
    def target_pages(self) -> PageIndices: ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def cancelled(self) -> bool: ...


class Work(Protocol):
    """Makes jobs for writes. The thread calls it, because planning takes too long for the loop."""

    def begin(self, write: ThreadWrite) -> WriteJob: ...


class ThreadWrite:
    """Implements `protocols.ports.Write`."""

    __slots__ = (
        "_cancelled",
        "_landed_bytes",
        "_thread",
        "done",
        "error",
        "job",
        "outcome",
        "source_pages",
        "target_pages",
        "total_bytes",
        "work",
    )

    def __init__(
        self,
        thread: WriteThread,
        work: Work,
        source_pages: PageIndices,
        target_pages: PageIndices,
        total_bytes: int,
    ) -> None:
        self.done: asyncio.Future[WriteOutcome] = thread.loop.create_future()
        self.source_pages, self.target_pages = source_pages, target_pages
        self.work, self.total_bytes = work, total_bytes
        self._landed_bytes, self.error = 0, ""
        self.outcome = WriteOutcome.UNPROVEN
        self.job: WriteJob | None = None
        self._thread, self._cancelled = thread, False

    def __repr__(self) -> str:
        if self.done.done():
            state = self.outcome.value
        elif self._cancelled:
            state = "cancelled, draining"
        else:
            state = "under way"
        return (
            f"<ThreadWrite of {len(self.source_pages)} pages: {self.landed_bytes} of "
            f"{self.total_bytes} bytes, {state}>"
        )

    @property
    def landed_bytes(self) -> int:
        job = self.job
        return self._landed_bytes if job is None else job.landed_bytes

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def end(self) -> None:
        """Drop the job, and keep its byte count."""
        if self.job is not None:
            self._landed_bytes, self.job = self.job.landed_bytes, None

    def land(self) -> None:
        """End a write whose bytes have all been copied on the event loop."""
        self._landed_bytes, self.outcome = self.total_bytes, WriteOutcome.LANDED
        self.done.set_result(WriteOutcome.LANDED)

    def cancel(self) -> None:
        if not self._cancelled and not self.done.done():
            self._cancelled = True
            self._thread.wake()


class WriteThread:
    """The thread of one plane. It reports to the event loop on which `start` was first called."""

    def __init__(
        self, name: str, rate_limit_bytes_per_s: float | None = None, slice_bytes: int = SLICE_BYTES
    ) -> None:
        """Create the thread without starting it.

        The rate limit applies to all writes together; None means no limit.

        Raises: MisuseError for a rate that is not positive.
        """
        rate = rate_limit_bytes_per_s
        if rate is not None and not rate > 0:
            raise MisuseError(f"rate limit {rate} bytes/s is not above 0")
        self.rate = rate
        if rate is None:
            self.slice_bytes = slice_bytes
        else:
            self.slice_bytes = int(max(_SMALLEST_SLICE, min(slice_bytes, rate * _LIMITED_SLICE_S)))
        self.loop: asyncio.AbstractEventLoop
        self._name = name
        self._thread: threading.Thread | None = None
        self._over: asyncio.Future[None]  # resolves when the thread ends
        self._inbox: queue.SimpleQueue[ThreadWrite | None] = queue.SimpleQueue()
        self._ended: deque[ThreadWrite] = deque()
        self._told = False  # True while the loop is about to run `_deliver`
        self._open: set[ThreadWrite] = set()  # used by the event loop only
        self._closing = False
        self._turned_at = 0.0  # when a write last had its turn, or work reached an idle thread
        self._next_slice_at = 0.0
        self._abandon_at = float("inf")
        self._turn_bytes = 0  # bytes written on the event loop in its current turn
        # Number of exceptions from the back end. Each one ended its write UNPROVEN.
        self.surprises = 0

    def start(self) -> None:
        """Start the thread; call it on the event loop. Idempotent.

        Raises: MisuseError on a second loop, or after `close`; RuntimeError when the system has
        no thread left.
        """
        loop = asyncio.get_running_loop()
        if self._thread is None and not self._closing:
            self.loop, self._over = loop, loop.create_future()
            thread = threading.Thread(target=self._main, name=f"kvflow-{self._name}", daemon=True)
            thread.start()
            # Set only after a successful start, so that a failed one can be repeated.
            self._thread = thread
        elif self._closing or loop is not self.loop:
            raise MisuseError(f"the {self._name} plane is closed, or belongs to another event loop")

    @property
    def stalled_s(self) -> float:
        """Seconds since the thread last made progress, if it has work. See `ports.DataPlane`."""
        if self._thread is None or len(self._open) == len(self._ended):
            return 0.0
        return time.monotonic() - self._turned_at if self._thread.is_alive() else float("inf")

    @property
    def is_closing(self) -> bool:
        return self._closing

    @property
    def open_writes(self) -> int:
        return len(self._open)

    def admit(self, size_bytes: int, blocks: int) -> bool:
        """Return True if a write may be done on the event loop now, instead of by the thread.

        The write then counts against the limits at once.
        """
        if self._open or self._closing or size_bytes > self.slice_bytes:
            return False
        cost = max(size_bytes, blocks * _BLOCK_COST_BYTES)
        if self._turn_bytes + cost > _TURN_BYTES:
            return False
        if self.rate:
            # `_next_slice_at` belongs to the thread, which has no work now.
            now = time.monotonic()
            if now < self._next_slice_at:
                return False
            self._next_slice_at = now + size_bytes / self.rate
        if not self._turn_bytes:
            self.loop.call_soon(self._begin_turn)
        self._turn_bytes += cost
        return True

    def _begin_turn(self) -> None:
        self._turn_bytes = 0

    def submit(self, write: ThreadWrite) -> None:
        """Hand over a write to the thread. Raises: TransferError after `close`."""
        if self._closing:
            raise TransferError(f"the {self._name} plane is closed")
        if len(self._open) == len(self._ended):
            self._turned_at = time.monotonic()
        self._open.add(write)
        self._inbox.put(write)

    def wake(self) -> None:
        """Wake the thread, so that it notices cancelled writes and finished copies."""
        self._inbox.put(None)

    async def close(self, grace_s: float = float("inf")) -> None:
        """Cancel every write, wait until all end, and end the thread.

        Cancelling the caller does not skip the wait (I12). Writes that are still under way after
        `grace_s`, for example because a peer is frozen, end UNPROVEN.
        """
        self._abandon_at = min(self._abandon_at, time.monotonic() + grace_s)
        self._closing = True
        for write in list(self._open):
            write.cancel()
        thread = self._thread
        if thread is None:
            return
        self.wake()
        try:
            if not self.loop.is_closed():
                await run_to_end(self._over)
        finally:
            thread.join()
            while self._ended:
                self._deliver()
            for write in self._open:
                # The thread died: the fate of these writes is unknown.
                write.error = "the thread of the data plane died"
                write.done.set_result(write.outcome)
            self._open.clear()

    def _main(self) -> None:
        try:
            self._run()
        finally:
            with suppress(RuntimeError):
                # The loop is closed, and its waiters are gone.
                self.loop.call_soon_threadsafe(self._over.set_result, None)

    def _run(self) -> None:
        active: deque[ThreadWrite] = deque()
        wait_s = spin_s = spins_until_s = 0.0
        # `close` sets the flag before it wakes this thread, so the thread sees it.
        while active or not (self._closing and self._inbox.empty()):
            was_idle, waited_since_s = not active, time.monotonic()
            if self._collect(active, wait_s):
                # A cancelled write may have little left to wait for: begin with the shortest pause.
                wait_s = 0.0
                was_idle = was_idle and time.monotonic() - waited_since_s >= _IDLE_S
                spin_s = _SPIN_S if was_idle and len(active) == 1 else 0.0
            moved, pause_s = False, _LONGEST_WAIT_S
            now = time.monotonic()
            for _ in range(len(active)):
                write = active.popleft()
                moved |= self._turn(write)
                self._turned_at = time.monotonic()
                if write.job is None:
                    self._tell(write)
                else:
                    pause_s = min(pause_s, write.job.pause_s)
                    active.append(write)
                now = time.monotonic() if self.rate else now
            if moved:
                spins_until_s, spin_s = self._turned_at + spin_s, 0.0
            if not active or (moved and not pause_s):
                wait_s = 0.0
            elif (
                pause_s < _SHORTEST_WAIT_S
                and max(self._turned_at, self._next_slice_at) < spins_until_s
            ):
                # The back end's own threads may need this core.
                os.sched_yield()
                wait_s = 0.0
            elif moved or not wait_s:
                wait_s = max(pause_s, _SHORTEST_WAIT_S)
            else:
                wait_s = min(wait_s * 1.5, _LONGEST_WAIT_S)
            if wait_s and self._next_slice_at > now:
                wait_s = max(wait_s, min(self._next_slice_at - now, _LONGEST_WAIT_S))

    def _collect(self, active: deque[ThreadWrite], wait_s: float) -> bool:
        """Take the writes that arrived; return False if the queue was empty.

        The call blocks while there is no work, and up to `wait_s` while every write waits for a
        back end or a copy.
        """
        inbox, found = self._inbox, False
        try:
            if not active:
                item = inbox.get()
            elif wait_s:
                item = inbox.get(timeout=wait_s)
            else:
                item = inbox.get_nowait()
            while True:
                found = True
                if item is not None:
                    active.append(item)
                item = inbox.get_nowait()
        except queue.Empty:
            return found

    def _turn(self, write: ThreadWrite) -> bool:
        """Advance a write by one slice, and drop its job if the write ends.

        Returns True if anything changed.
        """
        try:
            job = write.job
            if job is None:
                if write.cancelled:
                    write.outcome = WriteOutcome.CANCELLED
                    return True
                job = write.job = write.work.begin(write)
            if time.monotonic() > self._abandon_at:
                write.error = "the plane was closed while blocks were under way"
                write.end()
                # `outcome` is UNPROVEN until a write ends, so it is right already.
                return True
            submitted = job.advance(self._allowance(), write.cancelled)
            if submitted > 0 and self.rate:
                self._next_slice_at = (
                    max(time.monotonic(), self._next_slice_at) + submitted / self.rate
                )
            if (outcome := job.outcome) is None:
                return submitted >= 0
            write.outcome, write.error = outcome, job.error
        except Exception as error:  # noqa: BLE001
            # The thread serves other rooms too, so only this write fails.
            self.surprises += 1
            write.outcome, write.error = WriteOutcome.UNPROVEN, f"{type(error).__name__}: {error}"
        write.end()
        return True

    def _allowance(self) -> int:
        return 0 if self.rate and time.monotonic() < self._next_slice_at else self.slice_bytes

    def _tell(self, write: ThreadWrite) -> None:
        self._ended.append(write)
        if not self._told:
            self._told = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                # The loop is closed, and the waiters of these writes are gone.
                self._ended.clear()

    def _deliver(self) -> None:
        """Resolve some of the ended writes now, and the rest in the next turns of the loop.

        Each one wakes a room, so resolving all of them now would delay other callbacks (I11).
        """
        for _ in range(min(_TOLD_AT_ONCE, len(self._ended))):
            write = self._ended.popleft()
            self._open.discard(write)
            if not write.done.done():
                write.done.set_result(write.outcome)
        self._told = False
        # The thread may have seen `_told` and not woken the loop for a write that just ended.
        if self._ended:
            self._told = True
            self.loop.call_soon(self._deliver)
