"""Checksums of pages (XXH3, 64 bits) in threads of their own, equal for equal content however a pool is laid out."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import NamedTuple

from xxhash import xxh3_64

from kvflow.aio import run_to_end
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.layout import PageIndices, PoolLayout

_THREADS = min(4, os.cpu_count() or 1)
_BREATH_BYTES = 1 << 20  # small blocks are summed with the GIL held: let others have it after so many bytes
log = logging.getLogger("kvflow.memory")


class _Stretch(NamedTuple):
    """Bytes that lie together in every page: `size_bytes` at `offset` of the page, pages `page_bytes` apart."""

    memory: memoryview
    page_bytes: int
    offset: int
    size_bytes: int


class PageChecksums:
    """Implements `protocols.ports.Checksums`; the pool must stay open until `close` has returned."""

    def __init__(self, pool: PagedPool) -> None:
        """Raises: LayoutError for a pool that is not in host memory."""
        if not pool.on_host:
            raise LayoutError("checksums are for pools in host memory")
        self._stretches, self._page_bytes = _stretches(pool.layout), pool.layout.page_bytes
        self._running: set[_ChecksumTask] = set()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvflow-checksum")

    def begin(self, pages: PageIndices) -> _ChecksumTask:
        made = _ChecksumTask(self._threads, self._stretches, self._page_bytes, pages)
        self._running.add(made)
        made.done.add_done_callback(lambda _: self._running.discard(made))
        return made

    async def close(self) -> None:
        for made in self._running:
            made.cancel()
        try:
            await run_to_end(asyncio.gather(*(made.done for made in self._running)))
        finally:
            self._threads.shutdown(wait=False)  # none runs any more


class _ChecksumTask:
    """Implements `protocols.ports.ChecksumTask`."""

    def __init__(
        self, threads: ThreadPoolExecutor, stretches: list[_Stretch], page_bytes: int, pages: PageIndices
    ) -> None:
        self._stretches, self._pages = stretches, pages.tolist()
        self._breath_pages = max(1, _BREATH_BYTES // page_bytes)
        self._cancelled = False
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[bytes]
        try:
            self.done = loop.run_in_executor(threads, self._run)
        except RuntimeError:  # no thread is to be had: what was queued must not read on, and nothing was summed
            log.exception("a checksum could not start")
            self._cancelled = True
            self.done = loop.create_future()
            self.done.set_result(b"")

    def cancel(self) -> None:
        self._cancelled = True

    def _run(self) -> bytes:
        try:
            return self._sum()
        except Exception:
            log.exception("a checksum failed")
            return b""

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
