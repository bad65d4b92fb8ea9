"""Tasks that read or copy pages in threads, and that can be awaited and cancelled.

A task that takes too long fails. Its thread may hang in a read. Until the thread returns, the pages
stay held and the memory stays mapped.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from kvflow.aio import Job, Threads, run_to_end

THREADS = min(4, os.cpu_count() or 1)
# Time limit of a task, including the wait for a thread. 4 threads sum some TiB within this time.
WITHIN_S = 120.0
# `close` waits this long for threads that hang.
CLOSE_S = 10.0
log = logging.getLogger("kvflow.memory")

Work = Callable[[Callable[[], bool]], bytes]
"""Work for a thread. It calls its argument between two slices. If this call returns True, the task
was cancelled, and the work returns an empty result.
"""


class PageTasks:
    """Tasks of one kind on the pages of pools. The pools must stay open until `close` returns."""

    def __init__(self, what: str, within_s: float = WITHIN_S) -> None:
        """`what` names a task in messages ("checksum"). A task fails after `within_s` seconds."""
        self._what, self._within_s = what, within_s
        self._running: set[PageTask] = set()
        self._threads = Threads(what, THREADS)

    def __repr__(self) -> str:
        hung = sum(task.done.done() for task in self._running)
        return f"<{type(self).__name__}: {len(self._running) - hung} under way, {hung} hung>"

    def start(self, work: Work, num_pages: int, mapped_by: tuple[object, ...]) -> PageTask:
        """Start a task. It refers to `mapped_by`, which keeps the memory mapped for its thread."""
        task = PageTask(self._what, work, num_pages, mapped_by, self._within_s)
        self._running.add(task)
        task.released.add_done_callback(lambda _: self._running.discard(task))
        task.begin(self._threads)
        return task

    async def close(self) -> None:
        """Cancel every task, and wait up to `CLOSE_S` seconds for their threads."""
        for task in list(self._running):
            task.cancel()
        try:
            await run_to_end(asyncio.gather(*(task.released for task in self._running)), CLOSE_S)
        except TimeoutError:
            count = len(self._running)
            log.warning(
                "%d %ss have not ended within %g s, and are left alone", count, self._what, CLOSE_S
            )
        finally:
            self._threads.close()


class PageTask:
    """One task in a thread, with a time limit. Implements `protocols.ports.ChecksumTask`."""

    def __init__(
        self, what: str, work: Work, num_pages: int, mapped_by: tuple[object, ...], within_s: float
    ) -> None:
        self._what, self._work, self._mapped_by, self._num_pages = what, work, mapped_by, num_pages
        self._job: Job[bytes] | None = None
        loop = asyncio.get_running_loop()
        self._within_s, self._timer = within_s, loop.call_later(within_s, self._expire)
        self.done: asyncio.Future[bytes] = loop.create_future()
        self.released: asyncio.Future[None] = loop.create_future()
        self.error = ""

    def begin(self, threads: Threads) -> None:
        try:
            self._job = threads.start(self._work)
        except RuntimeError:
            log.exception("a %s could not start", self._what)
            self._end(b"", "there is no thread for it")
        else:
            self._job.ended.add_done_callback(self._returned)

    def cancel(self) -> None:
        if self._job is not None and self._job.cancel():
            self._end(b"")

    def _expire(self) -> None:
        log.warning(
            "a %s of %d pages took longer than %g s", self._what, self._num_pages, self._within_s
        )
        # The task fails now. If a thread has begun the work, `cancel` only requests that it stop.
        self._answer(b"", f"the {self._what} took longer than {self._within_s:g} s")
        self.cancel()

    def _returned(self, ended: asyncio.Future[bytes]) -> None:
        if ended.cancelled():
            return
        if error := ended.exception():
            log.error("a %s failed", self._what, exc_info=error)
            self._end(b"", f"the {self._what} failed: {type(error).__name__}")
        else:
            self._end(ended.result())

    def _end(self, found: bytes, error: str = "") -> None:
        self._timer.cancel()
        self._answer(found, error)
        self.released.set_result(None)

    def _answer(self, found: bytes, error: str) -> None:
        if not self.done.done():
            self.error = error
            self.done.set_result(found)
