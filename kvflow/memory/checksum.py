"""Checksums of pages (XXH3, 64 bits) in threads of their own, equal for equal content however a pool is laid out.

A checksum that does not come back in time is none. Its thread may hang in a read: it is left alone, and until it
returns its pages are held and the memory stays mapped.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, NamedTuple

from xxhash import xxh3_64

from kvflow.aio import run_to_end
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.layout import PageIndices, Places, PoolLayout

_THREADS = min(4, os.cpu_count() or 1)
_BREATH_BYTES = 1 << 20  # small blocks are summed with the GIL held: let others have it after so many bytes
_SUM_S = 120.0  # the wait for a thread included; 4 threads sum some TiB in it
_CLOSE_S = 10.0
log = logging.getLogger("kvflow.memory")


class _Stretch(NamedTuple):
    """Bytes that lie together in every page, or row: `size_bytes` at `offset` of it, pages `page_bytes` apart."""

    memory: memoryview
    page_bytes: int
    offset: int
    size_bytes: int


class _Stores(NamedTuple):
    """What to sum of each page, and of each row."""

    pages: list[_Stretch]
    rows: list[_Stretch]


class PageChecksums:
    """Implements `protocols.ports.Checksums`; the pool must stay open until `close` has returned."""

    def __init__(self, pool: PagedPool, *, within_s: float = _SUM_S) -> None:
        """A checksum takes `within_s` at most. Raises: LayoutError for a pool that is not in host memory."""
        if not pool.on_host:
            raise LayoutError("checksums are for pools in host memory")
        self._layout, self._stores = pool.layout, _stores(pool.layout)
        self._mapped_by, self._within_s = pool.mapped_by, within_s
        self._running: set[_ChecksumTask] = set()
        self._threads = _DaemonThreads(_THREADS)

    def __repr__(self) -> str:
        hung = sum(task.done.done() for task in self._running)
        return f"<PageChecksums: {len(self._running) - hung} under way, {hung} hung>"

    def begin(self, pages: PageIndices) -> _ChecksumTask:
        task = _ChecksumTask(self._stores, self._mapped_by, self._layout.split(pages), self._within_s)
        self._running.add(task)
        task.released.add_done_callback(lambda _: self._running.discard(task))
        task.begin(self._threads)
        return task

    async def close(self) -> None:
        for task in list(self._running):
            task.cancel()
        try:
            await run_to_end(asyncio.gather(*(task.released for task in self._running)), _CLOSE_S)
        except TimeoutError:
            log.warning("%d checksums have not ended within %g s, and are left alone", len(self._running), _CLOSE_S)
        finally:
            self._threads.shutdown(wait=False)
            self._stores, self._mapped_by = _Stores([], []), ()


class _DaemonThreads(Executor):
    """A ThreadPoolExecutor for whose threads the end of the process does not wait. (`aio.Threads` starts one a call: to
    the event loop that costs more than most chunks take.)"""

    def __init__(self, limit: int) -> None:
        self._limit, self._threads, self._closed = limit, 0, False
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, work: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        """Raises: RuntimeError when no thread is to be had, or after `shutdown`."""
        if self._closed:
            raise RuntimeError("no work is taken after shutdown")
        if self._threads < self._limit:
            try:
                name = f"kvflow-checksum-{self._threads}"
                threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True).start()
                self._threads += 1
            except RuntimeError:
                if not self._threads:
                    raise
        future: Future[Any] = Future()
        self._queue.put((future, functools.partial(work, *args, **more)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Threads end when they have done what has been submitted; nothing waits for them."""
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
        del item, future, work  # and what they keep mapped


class _ChecksumTask:
    """Implements `protocols.ports.ChecksumTask`."""

    def __init__(
        self,
        stores: _Stores,
        mapped_by: tuple[object, ...],
        places: Places,
        within_s: float,
    ) -> None:
        self._parts = [(stores.pages, places.pages.tolist()), (stores.rows, places.rows.tolist())]
        self._mapped_by, self._num_pages = mapped_by, len(places.pages)
        self._begun = threading.Lock()  # taken once, by who is first: the thread that reads, or the end
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
            log.exception("a checksum could not start")
            self.fail("there is no thread for it")
        else:
            running.add_done_callback(self._returned)

    def cancel(self) -> None:
        self._cancelled = True
        if self._begun.acquire(blocking=False):
            self._end(b"")

    def fail(self, error: str) -> None:
        """It is given up: a thread that has begun is left alone."""
        if not self.done.done():
            self.error = error
            self.done.set_result(b"")
        self.cancel()

    def _expire(self) -> None:
        log.warning("a checksum of %d pages took longer than %g s", self._num_pages, self._within_s)
        self.fail(f"the checksum took longer than {self._within_s:g} s")

    def _returned(self, running: asyncio.Future[bytes | None]) -> None:
        if error := running.exception():
            log.error("a checksum failed", exc_info=error)
            self._end(b"", f"the checksum failed: {type(error).__name__}")
        elif (found := running.result()) is not None:
            self._end(found)

    def _end(self, found: bytes, error: str = "") -> None:
        self._timer.cancel()
        if not self.done.done():
            self.error = error
            self.done.set_result(found)
        self.released.set_result(None)

    def _run(self) -> bytes | None:
        """In a thread. None: it came too late to begin."""
        return self._sum() if self._begun.acquire(blocking=False) else None

    def _sum(self) -> bytes:
        found = xxh3_64()
        summed_bytes = 0
        for stretches, indices in self._parts:
            for page in indices:
                for s in stretches:
                    start = page * s.page_bytes + s.offset
                    found.update(s.memory[start : start + s.size_bytes])
                    summed_bytes += s.size_bytes
                if self._cancelled:
                    return b""
                if summed_bytes >= _BREATH_BYTES:
                    summed_bytes = 0
                    time.sleep(0)
        return found.digest()


def _stores(layout: PoolLayout) -> _Stores:
    memories = [memoryview((ctypes.c_uint8 * b.size_bytes).from_address(b.address)) for b in layout.buffers]
    return _Stores(_stretches(layout, memories, in_rows=False), _stretches(layout, memories, in_rows=True))


def _stretches(layout: PoolLayout, memories: list[memoryview], *, in_rows: bool) -> list[_Stretch]:
    """Components in an order that depends on their names only (in an opaque pool, that of the bytes of its page);
    neighbours in memory are summed as one."""
    found: list[_Stretch] = []
    by_name = sorted(layout.components, key=lambda c: (len(c.name), c.name))  # "9.v" stands before "10.k", as in memory
    for c in layout.components if layout.tag else by_name:
        if c.in_rows != in_rows:
            continue
        new = _Stretch(memories[c.buffer], layout.buffers[c.buffer].page_bytes, c.offset, c.size_bytes)
        last = found[-1] if found else None
        if last is not None and last.memory is new.memory and last.offset + last.size_bytes == new.offset:
            found[-1] = last._replace(size_bytes=last.size_bytes + new.size_bytes)
        else:
            found.append(new)
    return found
