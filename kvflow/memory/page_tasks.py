"""Work on pages in threads; each task has an end that can be awaited, and can be cancelled or given
up.

A task that takes too long is given up. Its thread may hang in a read: until it returns, the pages
stay held and the memory stays mapped.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any

from kvflow.aio import run_to_end

THREADS = min(4, os.cpu_count() or 1)
WITHIN_S = 120.0  # the wait for a thread included; 4 threads sum some TiB in it
CLOSE_S = 10.0
log = logging.getLogger("kvflow.memory")

Work = Callable[[Callable[[], bool]], bytes]
"""Work in a thread. It calls its argument between two slices, and returns an empty result when it
was cancelled.
"""


class PageTasks:
    """Tasks of one kind over the pages of pools, which must stay open until `close` returned."""

    def __init__(self, what: str, within_s: float = WITHIN_S) -> None:
        """`what` names one task in messages ("checksum"). A task takes `within_s` at most."""
        self._what, self._within_s = what, within_s
        self._running: set[PageTask] = set()
        self._threads = DaemonThreads(THREADS, what)

    def __repr__(self) -> str:
        hung = sum(task.done.done() for task in self._running)
        return f"<{type(self).__name__}: {len(self._running) - hung} under way, {hung} hung>"

    def start(self, work: Work, num_pages: int, mapped_by: tuple[object, ...]) -> PageTask:
        """Start a task; `mapped_by` keeps the memory mapped as long as the thread may read it."""
        task = PageTask(self._what, work, num_pages, mapped_by, self._within_s)
        self._running.add(task)
        task.released.add_done_callback(lambda _: self._running.discard(task))
        task.begin(self._threads)
        return task

    async def close(self) -> None:
        """Cancel and drain every task; tasks that hang are left alone after `CLOSE_S`."""
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
            self._threads.shutdown(wait=False)


class PageTask:
    """One task. Implements `protocols.ports.ChecksumTask`."""

    def __init__(
        self, what: str, work: Work, num_pages: int, mapped_by: tuple[object, ...], within_s: float
    ) -> None:
        self._what, self._work, self._mapped_by, self._num_pages = what, work, mapped_by, num_pages
        # Taken once, by the first to come: the thread that begins the work, or the end of the task.
        self._begun = threading.Lock()
        self._cancelled = False
        loop = asyncio.get_running_loop()
        self._within_s, self._timer = within_s, loop.call_later(within_s, self._expire)
        self.done: asyncio.Future[bytes] = loop.create_future()
        self.released: asyncio.Future[None] = loop.create_future()
        self.error = ""

    def begin(self, threads: Executor) -> None:
        try:
            running = asyncio.get_running_loop().run_in_executor(threads, self._run)
        except RuntimeError:
            log.exception("a %s could not start", self._what)
            self.fail("there is no thread for it")
        else:
            running.add_done_callback(self._returned)

    def cancel(self) -> None:
        self._cancelled = True
        if self._begun.acquire(blocking=False):
            self._end(b"")

    def fail(self, error: str) -> None:
        """Give the task up: a thread that began is left alone."""
        if not self.done.done():
            self.error = error
            self.done.set_result(b"")
        self.cancel()

    def _expire(self) -> None:
        log.warning(
            "a %s of %d pages took longer than %g s", self._what, self._num_pages, self._within_s
        )
        self.fail(f"the {self._what} took longer than {self._within_s:g} s")

    def _returned(self, running: asyncio.Future[bytes | None]) -> None:
        if error := running.exception():
            log.error("a %s failed", self._what, exc_info=error)
            self._end(b"", f"the {self._what} failed: {type(error).__name__}")
        elif (found := running.result()) is not None:
            self._end(found)

    def _end(self, found: bytes, error: str = "") -> None:
        self._timer.cancel()
        if not self.done.done():
            self.error = error
            self.done.set_result(found)
        self.released.set_result(None)

    def _run(self) -> bytes | None:
        """Run the work in a thread; None if the task ended before."""
        return self._work(lambda: self._cancelled) if self._begun.acquire(blocking=False) else None


class DaemonThreads(Executor):
    """An executor of daemon threads, for which the end of the process does not wait.

    `aio.Threads` starts one thread per call: that costs the event loop more than most chunks take.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name, self._threads, self._closed = limit, name, 0, False
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, work: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        """Queue `work` for the threads.

        Raises: RuntimeError when no thread can be started, or after `shutdown`.
        """
        if self._closed:
            raise RuntimeError("no work is taken after shutdown")
        if self._threads < self._limit:
            try:
                name = f"kvflow-{self._name}-{self._threads}"
                threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True).start()
                self._threads += 1
            except RuntimeError:
                # One thread is enough to do the work, if the machine has no more.
                if not self._threads:
                    raise
        future: Future[Any] = Future()
        self._queue.put((future, functools.partial(work, *args, **more)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end after the work that was submitted; never wait for them."""
        self._closed = True
        for _ in range(self._threads):
            self._queue.put(None)


def _serve(queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (item := queue.get()) is not None:
        future, work = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - whoever awaits it gets it
                future.set_exception(error)
        # The thread may wait long for its next item: it must not keep the memory of this one
        # mapped.
        del item, future, work
