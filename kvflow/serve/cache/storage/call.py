"""One batch call to a store. A thread carries it out in slices (I12).

A cancelled or abandoned call begins no further slice, and keeps its buffers until the thread
returns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvflow.aio import Job, Threads
from kvflow.serve.cache.storage.port import Result

log = logging.getLogger("kvflow.storage")

Work = Callable[[Sequence[bytes], Sequence[memoryview]], list[Result]]


class Slice(NamedTuple):
    """The results of one slice, for the keys from `start` on."""

    start: int
    results: list[Result]
    took_s: float


class Call:
    """A `port.StorageCall`. Its event loop receives the results from the thread."""

    def __init__(
        self,
        work: Work,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        per_slice: int,
        on_slice: Callable[[Call, Slice], None],
        on_stall: Callable[[Call], None],
        stall_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[list[bool]] = self._loop.create_future()
        self.released: asyncio.Future[None] = self._loop.create_future()
        self.results = [Result.FAILED] * len(keys)
        self.is_stalled = False  # True once the call is abandoned; its thread may never return
        self._work, self._keys, self._buffers, self._per_slice = work, keys, buffers, per_slice
        self._on_slice, self._on_stall, self._stall_s = on_slice, on_stall, stall_s
        self._job: Job[None] | None = None
        self._slice_began_s: float | None = None  # set by the thread
        self._watch: asyncio.TimerHandle | None = None
        self.done.add_done_callback(self._answered)

    def begin(self, threads: Threads) -> None:
        """Queue the call for a thread. Raises: RuntimeError if no thread can be started."""
        self._job = threads.start(self._run)
        self._job.ended.add_done_callback(lambda _: self._returned())

    def _run(self, is_cancelled: Callable[[], bool]) -> None:
        self._slice_began_s = time.monotonic()
        self._tell(self._look)
        for start in range(0, len(self._keys), self._per_slice):
            if is_cancelled():
                break
            part = slice(start, start + self._per_slice)
            began_s = self._slice_began_s = time.monotonic()
            results = self._attempt(self._keys[part], self._buffers[part])
            self._tell(self._on_slice, self, Slice(start, results, time.monotonic() - began_s))
            # A store that just failed would probably fail again, after another long wait.
            if Result.FAILED in results:
                break
        self._slice_began_s = None

    def _returned(self) -> None:
        """Release the buffers: the thread returned, or never began. Called on the event loop."""
        if self._watch is not None:
            self._watch.cancel()
        self._end()
        self._buffers = ()
        if not self.released.done():
            self.released.set_result(None)

    def cancel(self) -> None:
        # If the call still waits for a thread, it never begins, and its buffers are free now.
        if self._job is None or self._job.cancel():
            self._returned()
        else:
            self._end()

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result([result is Result.DONE for result in self.results])

    def _answered(self, done: asyncio.Future[list[bool]]) -> None:
        # A caller that is cancelled while it awaits `done` without a shield cancels the call.
        if done.cancelled():
            self.cancel()

    def _attempt(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
        try:
            return self._work(keys, buffers)
        except Exception as error:  # noqa: BLE001 - whatever a store does is no error of a request
            log.warning("storage: %s: %s", type(error).__name__, error)
            return [Result.FAILED] * len(keys)

    def _look(self) -> None:
        """Abandon the call if its current slice takes too long. Otherwise check again later.

        The checks continue after a cancellation, since the slice still occupies its thread.
        """
        began_s = self._slice_began_s
        if began_s is None or self.released.done():
            return
        left_s = self._stall_s - (time.monotonic() - began_s)
        if left_s > 0:
            self._watch = self._loop.call_later(left_s, self._look)
        else:
            self.is_stalled = True
            self._on_stall(self)

    def _tell(self, told: Callable[..., None], *about: object) -> None:
        # If the loop is closed already, no task waits for this call.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(told, *about)
