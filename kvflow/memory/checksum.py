"""Checksums of pages (XXH3, 64 bits) in threads of their own, equal for equal content however a pool is laid out.

A checksum that does not come back in time is none. Its thread may hang in a read: it is left alone, and until it
returns its pages are held and the memory stays mapped.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import threading
import time
from itertools import count
from queue import SimpleQueue
from typing import NamedTuple

from xxhash import xxh3_64

from kvflow.aio import call_in_loop, run_to_end
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.layout import PageIndices, PoolLayout

_THREADS = min(4, os.cpu_count() or 1)
_BREATH_BYTES = 1 << 20  # small blocks are summed with the GIL held: let others have it after so many bytes
_SUM_S = 120.0  # the wait for a thread included; 4 threads sum some TiB in it
_CLOSE_S = 10.0
log = logging.getLogger("kvflow.memory")


class _Stretch(NamedTuple):
    """Bytes that lie together in every page: `size_bytes` at `offset` of the page, pages `page_bytes` apart."""

    memory: memoryview
    page_bytes: int
    offset: int
    size_bytes: int


class PageChecksums:
    """Implements `protocols.ports.Checksums`; the pool must stay open until `close` has returned.

    Not an executor, whose threads the end of the process waits for, nor `aio.Threads`: to start a thread for each
    chunk costs the event loop more than most chunks take.
    """

    def __init__(self, pool: PagedPool, *, within_s: float = _SUM_S) -> None:
        """A checksum takes `within_s` at most. Raises: LayoutError for a pool that is not in host memory."""
        if not pool.on_host:
            raise LayoutError("checksums are for pools in host memory")
        self._stretches, self._page_bytes = _stretches(pool.layout), pool.layout.page_bytes
        self._mapped_by, self._within_s = pool.mapped_by, within_s
        self._running: set[_ChecksumTask] = set()
        self._queue: SimpleQueue[_ChecksumTask | None] = SimpleQueue()
        self._num_threads = 0
        self._closed = False

    def __repr__(self) -> str:
        hung = sum(task.done.done() for task in self._running)
        return f"<PageChecksums: {self._num_threads} threads, {len(self._running) - hung} under way, {hung} hung>"

    def begin(self, pages: PageIndices) -> _ChecksumTask:
        task = _ChecksumTask(self._stretches, self._page_bytes, self._mapped_by, pages, self._within_s)
        self._running.add(task)
        task.released.add_done_callback(lambda _: self._running.discard(task))
        if not self._closed and self._num_threads < min(_THREADS, len(self._running)):
            self._start_thread()
        if self._closed or not self._num_threads:
            task.fail("there is no thread for it")
        else:
            self._queue.put(task)
        return task

    def _start_thread(self) -> None:
        name = f"kvflow-checksum-{self._num_threads}"
        try:
            threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True).start()
        except RuntimeError:
            log.exception("a thread for checksums could not start")
        else:
            self._num_threads += 1

    async def close(self) -> None:
        self._closed = True
        for task in list(self._running):
            task.cancel()
        try:
            await run_to_end(asyncio.gather(*(task.released for task in self._running)), _CLOSE_S)
        except TimeoutError:
            log.warning("%d checksums have not ended within %g s, and are left alone", len(self._running), _CLOSE_S)
        finally:
            for _ in range(self._num_threads):
                self._queue.put(None)
            self._stretches, self._mapped_by = [], ()


def _work(queue: SimpleQueue[_ChecksumTask | None]) -> None:
    while (task := queue.get()) is not None:
        task.run()
        del task  # and what it keeps mapped


class _ChecksumTask:
    """Implements `protocols.ports.ChecksumTask`."""

    def __init__(
        self,
        stretches: list[_Stretch],
        page_bytes: int,
        mapped_by: tuple[object, ...],
        pages: PageIndices,
        within_s: float,
    ) -> None:
        self._stretches, self._mapped_by, self._pages = stretches, mapped_by, pages.tolist()
        self._breath_pages = max(1, _BREATH_BYTES // page_bytes)
        self._begun = threading.Lock()  # taken once, by who is first: the thread that reads, or the end
        self._cancelled = False
        self._loop = asyncio.get_running_loop()
        self._within_s, self._timer = within_s, self._loop.call_later(within_s, self._expire)
        self.done: asyncio.Future[bytes] = self._loop.create_future()
        self.released: asyncio.Future[None] = self._loop.create_future()
        self.error = ""

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
        log.warning("a checksum of %d pages took longer than %g s", len(self._pages), self._within_s)
        self.fail(f"the checksum took longer than {self._within_s:g} s")

    def _end(self, found: bytes, error: str = "") -> None:
        self._timer.cancel()
        if not self.done.done():
            self.error = error
            self.done.set_result(found)
        self.released.set_result(None)

    def run(self) -> None:
        """In a thread."""
        if not self._begun.acquire(blocking=False):
            return
        found, error = b"", ""
        try:
            found = self._sum()
        except Exception as failure:
            log.exception("a checksum failed")
            error = f"the checksum failed: {type(failure).__name__}"
        call_in_loop(self._loop, self._end, found, error)

    def _sum(self) -> bytes:
        found = xxh3_64()
        for done, page in zip(count(1), self._pages):
            for s in self._stretches:
                start = page * s.page_bytes + s.offset
                found.update(s.memory[start : start + s.size_bytes])
            if self._cancelled:
                return b""
            if done % self._breath_pages == 0:
                time.sleep(0)
        return found.digest()


def _stretches(layout: PoolLayout) -> list[_Stretch]:
    """Components in an order that depends on their names only (in an opaque pool, that of the bytes of its page);
    neighbours in memory are summed as one."""
    memories = [memoryview((ctypes.c_uint8 * b.size_bytes).from_address(b.address)) for b in layout.buffers]
    found: list[_Stretch] = []
    by_name = sorted(layout.components, key=lambda c: (len(c.name), c.name))  # "9.v" stands before "10.k", as in memory
    for c in layout.components if layout.tag else by_name:
        new = _Stretch(memories[c.buffer], layout.buffers[c.buffer].page_bytes, c.offset, c.size_bytes)
        last = found[-1] if found else None
        if last is not None and last.memory is new.memory and last.offset + last.size_bytes == new.offset:
            found[-1] = last._replace(size_bytes=last.size_bytes + new.size_bytes)
        else:
            found.append(new)
    return found
