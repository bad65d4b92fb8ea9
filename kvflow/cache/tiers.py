"""Cached pages on their way between device, host and storage: what begins when, and what becomes of it.

A copy names a run of pages (`protocols.cache.writes`): splits, evictions and flushes meanwhile change nothing. Its
pages come home when nothing reads or writes them any more, which may be long after a store has begun to hang.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from kvflow.aio import run_to_end
from kvflow.cache.host import HostTier
from kvflow.cache.stored import StorageTier
from kvflow.protocols.cache.hashes import TOKEN_BYTES, Namespace, chain_root, page_hashes
from kvflow.protocols.cache.index import Match, PrefixIndex
from kvflow.protocols.cache.nodes import Node, Tier
from kvflow.protocols.cache.residents import Freed
from kvflow.protocols.cache.writes import Write
from kvflow.protocols.errors import TransferError
from kvflow.protocols.pages.layout import NO_PLACES

OWNER = ("cache", "prefix")
_log = logging.getLogger("kvflow.cache")


class TierCounts(msgspec.Struct, kw_only=True):
    """What has been moved since the start."""

    saved_pages: int = 0  # copied to the host
    loaded_pages: int = 0  # copied back
    stored_pages: int = 0  # put into storage
    fetched_pages: int = 0  # read from there
    unsaved_pages: int = 0  # kept on the device alone: the host was full of what is read or copied
    failed_copies: int = 0  # that failed, or were cut off


class Tiers:
    """The copies of one index. Used on one event loop."""

    def __init__(
        self, index: PrefixIndex, host: HostTier, storage: StorageTier | None, *, now: Callable[[], float],
        free: Callable[[Freed], None],
    ) -> None:  # fmt: skip
        """`free` is called with what the index gives back, even if it is nothing, after each change of it."""
        self.host, self.storage, self.counts = host, storage, TierCounts()
        self._index, self._now, self._free = index, now, free
        self._copies: set[asyncio.Task[None]] = set()
        self._loads: set[asyncio.Task[None]] = set()  # of them, those to the device
        self._flushes = 0

    @property
    def busy(self) -> bool:
        return bool(self._copies)

    def flushed(self) -> None:
        """What is read from storage now is for prompts from before that: it is not cached."""
        self._flushes += 1

    def save(self, end: Node) -> None:
        """Begin to copy to the host what it lacks up to `end`, as far as it has room; then to storage."""
        wanted = self._index.missing(end, Tier.DEVICE, Tier.HOST)
        if not wanted:
            self._store(end)
            return
        room = self._room(wanted)
        self.counts.unsaved_pages += wanted - room
        if room:
            pages = self.host.pages.take(room, OWNER)
            self.begin(self._index.begin_write(end, Tier.DEVICE, Tier.HOST, pages))

    def begin(
        self, write: Write, keys: list[bytes] | None = None, ended: Callable[[], None] = lambda: None
    ) -> asyncio.Task[None]:
        """`keys`: the digests of what is stored. `ended` is called in the turn of the loop in which the index learns of
        the end."""
        copying = asyncio.get_running_loop().create_task(
            self._copy(write, keys, ended), name=f"kvflow-cache-copy-{write.number}"
        )
        for copies in (self._copies, self._loads) if write.target is Tier.DEVICE else (self._copies,):
            copies.add(copying)
            copying.add_done_callback(copies.discard)
        return copying

    async def a_load(self) -> None:
        """Wait until one of the copies to the device that are under way has ended."""
        if self._loads:
            await asyncio.wait(self._loads, return_when=asyncio.FIRST_COMPLETED)

    async def fetch(self, tokens: bytes, found: Match, namespace: Namespace, most_pages: int) -> None:
        """Read from storage what follows on `found`, at most `most_pages` pages, as far as the host has room.

        A cancellation ends the call to the store, and raises at once."""
        assert self.storage is not None
        store, host, flushes = self.storage.store, self.host.pages, self._flushes
        if not store.readable:
            return
        start, size = found.num_pages, self._index.page_size * TOKEN_BYTES
        above = chain_root(namespace) if found.end is None else self._index.page_hashes(found.end)[-1]
        most_pages = min(most_pages, host.capacity)
        keys = page_hashes(tokens[start * size : (start + most_pages) * size], self._index.page_size, above)
        count = await store.exists_prefix(keys) if keys else 0
        pages = host.take(self._room(count), OWNER) if count else NO_PLACES
        if not pages.size:
            return
        call = self.storage.get(keys[: pages.size], pages)
        good = 0
        try:
            read = await asyncio.shield(call.done)
            if call.released.done() and flushes == self._flushes:
                good = read.index(False) if False in read else len(read)
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            left = pages[good:]
            call.released.add_done_callback(lambda _: host.give_back(left, OWNER))
        whole = tokens[: (start + good) * size]
        taken = pages[:good].copy()
        self._free(Freed(host=self._index.insert_stored(whole, taken, self._now(), namespace, start=start)))
        self.counts.fetched_pages += good

    async def end(self) -> None:
        """End every copy, and close the store. What hangs in it is left alone: it keeps its memory."""
        await asyncio.sleep(0)  # a copy that has not begun would not end its write
        if self.storage is not None:
            await self.storage.store.close()
        for copying in self._copies:
            copying.cancel()
        await run_to_end(asyncio.gather(*self._copies, return_exceptions=True))

    def _room(self, wanted: int) -> int:
        """How many of `wanted` pages the host has free, after some have made way."""
        pages = self.host.pages
        if pages.free_pages < wanted:
            self._free(self._index.evict(Tier.HOST, wanted - pages.free_pages))
        return min(wanted, pages.free_pages)

    def _store(self, end: Node) -> None:
        """Begin to store what storage lacks up to `end`, of what the host has."""
        if self.storage is None or not self.storage.store.writable or end.removed or end.detached:
            return
        if missing := self._index.missing(end, Tier.HOST, Tier.STORAGE):
            digests = self._index.page_hashes(end)
            write = self._index.begin_write(end, Tier.HOST, Tier.STORAGE, count=missing)
            self.begin(write, [digests[page] for offsets in write.offsets for page in offsets])

    async def _copy(self, write: Write, keys: list[bytes] | None, ended: Callable[[], None]) -> None:
        whole = False
        try:
            if keys is not None and self.storage is not None:
                whole = await self.storage.put(keys, write.source_pages)
            else:
                whole = await self.host.copy(write.source_pages, write.target_pages, write.target)
        except TransferError:
            _log.exception("a copy of %d cached pages failed", len(write.source_pages))
        finally:  # nothing of it runs on, cancelled or not
            self._free(self._index.ack(write.number) if whole else self._index.fail(write.number))
            ended()
            self._count(write, whole)
            if whole and write.target is Tier.HOST:
                run, start, stop = write.pieces[-1]
                if nodes := run.between(start, stop):
                    self._store(nodes[-1])

    def _count(self, write: Write, whole: bool) -> None:
        count = len(write.source_pages)
        if not whole:
            self.counts.failed_copies += 1
        elif write.target is Tier.DEVICE:
            self.counts.loaded_pages += count
        elif write.target is Tier.HOST:
            self.counts.saved_pages += count
        else:
            self.counts.stored_pages += count
