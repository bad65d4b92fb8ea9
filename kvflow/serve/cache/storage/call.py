"""One batch under way in a thread, slice by slice (I12): what is cancelled or given up is begun no
further, and its buffers are held until the thread has returned."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvflow.serve.cache.storage.port import Result

log = logging.getLogger("kvflow.storage")

Work = Callable[[Sequence[bytes], Sequence[memoryview]], list[Result]]


class Slice(NamedTuple):
    """What has become of the keys from `start` on."""

    start: int
    results: list[Result]
    took_s: float


class Call:
    """Implements `port.StorageCall`. Made, and told of what its thread does, on the event loop."""

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
        """What is known by now."""
        self.is_stalled = False
        """It was given up: its thread may never return."""
        self._work, self._keys, self._buffers, self._per_slice = work, keys, buffers, per_slice
        self._on_slice, self._on_stall, self._stall_s = on_slice, on_stall, stall_s
        self._begun = threading.Lock()  # taken once, by who is first: the thread, or the end
        self._stop = False
        self._slice_began_s: float | None = None  # written in the thread
        self._watch: asyncio.TimerHandle | None = None
        self.done.add_done_callback(self._answered)

    def run(self) -> None:
        """In a thread."""
        if not self._begun.acquire(blocking=False):
            return
        self._slice_began_s = time.monotonic()
        self._tell(self._look)
        for start in range(0, len(self._keys), self._per_slice):
            if self._stop:
                break
            part = slice(start, start + self._per_slice)
            began_s = self._slice_began_s = time.monotonic()
            results = self._attempt(self._keys[part], self._buffers[part])
            self._tell(self._on_slice, self, Slice(start, results, time.monotonic() - began_s))
            if Result.FAILED in results:
                break  # a store that has just failed is not asked on
        self._slice_began_s = None

    def returned(self) -> None:
        """On the loop: the thread has ended with it, or never began."""
        if self._watch is not None:
            self._watch.cancel()
        self.end()
        self._buffers = ()
        if not self.released.done():
            self.released.set_result(None)

    def cancel(self) -> None:
        self._stop = True
        if self._begun.acquire(blocking=False):
            self.returned()
        else:
            self.end()

    def end(self) -> None:
        """`done`, with what is known by now."""
        if not self.done.done():
            self.done.set_result([result is Result.DONE for result in self.results])

    def _answered(self, done: asyncio.Future[list[bool]]) -> None:
        if done.cancelled():  # by who awaited it without a shield
            self.cancel()

    def _attempt(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
        try:
            return self._work(keys, buffers)
        except Exception as error:  # noqa: BLE001 - whatever a store does is no error of a request
            log.warning("storage: %s: %s", type(error).__name__, error)
            return [Result.FAILED] * len(keys)

    def _look(self) -> None:
        """Whether the slice that is under way ends in time; after a cancel, too, since its thread
        is taken.
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
        with suppress(RuntimeError):  # the loop is closed, and with it all that waited
            self._loop.call_soon_threadsafe(told, *about)
