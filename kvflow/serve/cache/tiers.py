"""Copies of cached pages between device, host and storage, from their start to their end.

A copy names a run of pages (`protocols.cache.writes`), so splits, evictions and flushes of the
index do not disturb it. Its pages are freed only when the copy no longer reads or writes them,
which may take a long time if a store hangs.

Pages that wait for a copy cannot be evicted. So at most three quarters of a tier may wait. Further
pages are counted and not copied. When they are used again, they get another chance.

**write_back.** Pages leave the device only when a request needs room. `make_way` first frees pages
that the host already has, in the order of the policy. It then begins to copy other pages, each with
all pages before it in its prompt, so that a parent is copied before its child. The request has to
ask again. Pages that cannot be copied (the copy failed, or the host is full of pages in use) are
evicted without a copy.

**A store loses pages**: it evicts them, or the process that held them dies. So before more pages of
a prompt are stored, the tiers check that the store still has those that the index lists as stored.
From the first missing page on, all of them are stored again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from kvflow.aio import run_to_end
from kvflow.protocols.cache.events import Tier
from kvflow.protocols.cache.hashes import TOKEN_BYTES, Namespace, chain_root, page_hashes
from kvflow.protocols.cache.index import Match, PrefixIndex
from kvflow.protocols.cache.nodes import Node
from kvflow.protocols.cache.residents import NOTHING, Freed
from kvflow.protocols.cache.writes import Write
from kvflow.protocols.errors import TransferError
from kvflow.protocols.pages.layout import NO_PLACES
from kvflow.serve.cache.host import HostTier
from kvflow.serve.cache.storage.port import Storage
from kvflow.serve.cache.stored import StorageTier

OWNER = ("cache", "prefix")
_log = logging.getLogger("kvflow.serve.cache")


class TierCounts(msgspec.Struct, kw_only=True):
    """Counters of copies between the tiers since the start, in pages unless noted."""

    saved_pages: int = 0  # copied to the host
    loaded_pages: int = 0  # copied back to the device
    stored_pages: int = 0  # put into storage
    fetched_pages: int = 0  # read from storage
    # Pages not copied to the host, because it was full, because too many pages waited for a copy,
    # or because their copy failed under write_back. They are on the device alone, or were evicted.
    unsaved_pages: int = 0
    unstored_pages: int = 0  # not put into storage, because too many pages waited
    lost_pages: int = 0  # missing in storage, or after a missing page in a prompt
    failed_copies: int = 0  # copies that failed or were stopped


class Tiers:
    """The copies between the tiers of one index. Use it on one event loop."""

    def __init__(
        self,
        index: PrefixIndex,
        host: HostTier,
        storage: StorageTier | None,
        *,
        device_pages: int,
        now: Callable[[], float],
        free: Callable[[Freed], None],
        on_copied: Callable[[], None],
    ) -> None:
        """Make the tiers of `index`, with no copy under way.

        `device_pages` is the size of the device's pool. `free` is called with the pages that a
        change of the index freed. It is called even if there are none, since it also publishes
        events. `on_copied` is called at the end of each copy that `leaving_pages` counts.
        """
        self.host, self.storage, self.counts = host, storage, TierCounts()
        self._index, self._now, self._free, self._on_copied = index, now, free, on_copied
        self._copies: set[asyncio.Task[None]] = set()
        self._loads: set[asyncio.Task[None]] = set()  # the copies to the device
        self._waiting = [0, 0, 0]  # pages in copies under way, by target tier
        # Copies to the device need no limit: `load` takes their pages before they begin.
        self._most_waiting = (
            1 << 62,
            *(max(1, pages * 3 // 4) for pages in (device_pages, host.pages.capacity)),
        )
        # By write number: device pages that can be evicted when the write lands.
        self._leaving: dict[int, int] = {}
        self._given_up = 0  # pages of `_leaving` whose write failed since the last `make_way`
        self._asking = False  # True while `_ask` runs

    @property
    def leaving_pages(self) -> int:
        """Number of device pages that can be evicted when the copies under way land."""
        return sum(self._leaving.values())

    @property
    def busy(self) -> bool:
        return bool(self._copies)

    def save(self, end: Node) -> None:
        """Begin to copy the pages up to `end` that the host lacks. If it lacks none, store them."""
        wanted = self._index.missing(end, Tier.DEVICE, Tier.HOST)
        if not wanted:
            self._store(end)
            return
        write = self._save(end, min(wanted, self._may_wait(Tier.HOST)))
        self.counts.unsaved_pages += wanted - (0 if write is None else len(write.source_pages))

    def make_way(self, count: int) -> bool:
        """Free at most `count` device pages under write_back.

        Pages that the host has too are freed now. Copies of other pages begin, and a later call
        frees these. Return False if no page was freed and no page is being copied.
        """
        freed, uncopied = self._index.evict_copied(count)
        self._free(freed)
        left = count - freed.device.size
        # Pages whose copy failed are evicted without a copy, so that a failing host does not keep
        # the device full.
        lost, self._given_up = min(left, self._given_up), 0
        for end in uncopied:
            wanted = self._index.missing(end, Tier.DEVICE, Tier.HOST)
            waits = self._waiting[Tier.HOST] and wanted > self._may_wait(Tier.HOST)
            if self.leaving_pages + lost >= left or waits:
                break
            write = self._save(end, wanted)
            if write is not None and end.readers[Tier.DEVICE]:
                self._leaving[write.number] = end.num_pages
            # The host has no room for these pages. The last resort is to evict them without a copy.
            elif end.evictable(Tier.DEVICE):
                lost += end.num_pages
        if lost:
            gone = self._index.evict(Tier.DEVICE, min(lost, left))
            self.counts.unsaved_pages += gone.device.size
            self._free(gone)
            freed = freed if freed.device.size else gone
        return bool(freed.device.size or self._leaving)

    def _save(self, end: Node, wanted: int) -> Write | None:
        if wanted <= 0 or not (room := self._room(wanted)):
            return None
        write = self._index.begin_write(
            end, Tier.DEVICE, Tier.HOST, self.host.pages.take(room, OWNER)
        )
        self.begin(write)
        return write

    def _may_wait(self, target: Tier) -> int:
        return max(0, self._most_waiting[target] - self._waiting[target])

    def begin(
        self,
        write: Write,
        keys: list[bytes] | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> asyncio.Task[None]:
        """Start the task of `write`. If it is for storage, `keys` are the digests of the pages.

        `ended` is called in the same turn of the loop in which the index records the end.
        """
        self._waiting[write.target] += len(write.source_pages)
        copying = self._spawn(self._copy(write, keys, ended), f"kvflow-cache-copy-{write.number}")
        if write.target is Tier.DEVICE:
            self._loads.add(copying)
            copying.add_done_callback(self._loads.discard)
        return copying

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)
        return task

    async def wait_for_load(self) -> None:
        if self._loads:
            await asyncio.wait(self._loads, return_when=asyncio.FIRST_COMPLETED)

    async def wait_for_copy(self) -> None:
        if self._copies:
            await asyncio.wait(self._copies, return_when=asyncio.FIRST_COMPLETED)

    async def fetch(
        self, tokens: bytes, found: Match, namespace: Namespace, most_pages: int
    ) -> None:
        """Read at most `most_pages` pages after `found` from storage, fewer if the host lacks room.

        A cancellation takes effect at once, and pages that were read by then are kept.
        """
        assert self.storage is not None
        store, host, epoch = self.storage.store, self.host.pages, self._index.epoch
        if not store.readable:
            return
        start, size = found.num_pages, self._index.page_size * TOKEN_BYTES
        above = (
            chain_root(namespace) if found.end is None else self._index.page_hashes(found.end)[-1]
        )
        most_pages = min(most_pages, host.capacity)
        keys = page_hashes(
            tokens[start * size : (start + most_pages) * size], self._index.page_size, above
        )
        count = await store.exists_prefix(keys) if keys else 0
        pages = host.take(self._room(count), OWNER) if count else NO_PLACES
        if not pages.size:
            return
        call = self.storage.get(keys[: pages.size], pages)
        try:
            await asyncio.shield(call.done)
        finally:
            # After a cancellation, this completes `done` with the results so far.
            call.cancel()
            # If the cache was flushed meanwhile, these pages must not enter the index.
            read = call.done.result() if epoch == self._index.epoch else [False]
            good = read.index(False) if False in read else len(read)
            left, taken = pages[good:], pages[:good].copy()
            # A call that hangs may still write to these pages, so they become free when it returns.
            call.released.add_done_callback(lambda _: host.give_back(left, OWNER))
            whole = tokens[: (start + good) * size]
            self._free(
                Freed(
                    host=self._index.insert_stored(
                        whole, taken, self._now(), namespace, start=start
                    )
                )
            )
            self.counts.fetched_pages += good

    async def end(self) -> None:
        """Stop every copy, and close the store. When this returns, or raises because the caller was
        cancelled, no copy runs (I12). Calls that hang in the store are abandoned, and keep their
        memory.
        """
        await run_to_end(asyncio.ensure_future(self._end()))

    async def _end(self) -> None:
        # A task that is cancelled before its first step never runs its `finally`, which ends its
        # write in the index. So every task takes its first step here.
        await asyncio.sleep(0)
        if self.storage is not None:
            await self.storage.store.close()
        for copying in self._copies:
            copying.cancel()
        await run_to_end(asyncio.gather(*self._copies, return_exceptions=True))

    def _room(self, wanted: int) -> int:
        pages = self.host.pages
        if pages.free_pages < wanted:
            self._free(self._index.evict(Tier.HOST, wanted - pages.free_pages))
        return min(wanted, pages.free_pages)

    def _store(self, end: Node) -> None:
        if self.storage is None or not self.storage.store.writable or end.removed or end.detached:
            return
        if (
            self.storage.store.readable
            and not self._asking
            and (stored := self._index.stored_pages(end))
        ):
            self._asking = True
            # The node may be removed before the task takes its first step.
            digests = self._index.page_hashes(end)
            asking = self._ask(self.storage.store, end, stored, [digests[page] for page in stored])
            self._spawn(asking, "kvflow-cache-ask")
        else:
            self._put(end)

    async def _ask(self, store: Storage, end: Node, stored: list[int], keys: list[bytes]) -> None:
        try:
            if not store.readable:
                return
            before = _troubles(store)
            count = await store.exists_prefix(keys)
        finally:
            self._asking = False
        if end.removed or end.detached:
            return
        # A failed lookup counts as absent, even though the store may have the pages.
        if count < len(stored) and _troubles(store) == before:
            self.counts.lost_pages += self._index.lost(end, stored[count])
            self._free(NOTHING)
        if store.writable:
            self._put(end)

    def _put(self, end: Node) -> None:
        missing = self._index.missing(end, Tier.HOST, Tier.STORAGE)
        count = min(missing, self._may_wait(Tier.STORAGE))
        self.counts.unstored_pages += missing - count
        if count:
            digests = self._index.page_hashes(end)
            write = self._index.begin_write(end, Tier.HOST, Tier.STORAGE, count=count)
            self.begin(write, [digests[page] for offsets in write.offsets for page in offsets])

    async def _copy(
        self, write: Write, keys: list[bytes] | None, ended: Callable[[], None]
    ) -> None:
        whole = False
        try:
            if keys is not None and self.storage is not None:
                whole = await self.storage.put(keys, write.source_pages)
            else:
                whole = await self.host.copy(write.source_pages, write.target_pages, write.target)
        except TransferError:
            _log.exception("a copy of %d cached pages failed", len(write.source_pages))
        # `put` and `host.copy` end only once the copy stops, so the pages can be freed here.
        finally:
            self._waiting[write.target] -= len(write.source_pages)
            left = self._leaving.pop(write.number, 0)
            self._given_up += 0 if whole else left
            self._free(self._index.ack(write.number) if whole else self._index.fail(write.number))
            ended()
            if left:
                self._on_copied()
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


def _troubles(store: Storage) -> tuple[int, ...]:
    """Return the counters that show that the store could not answer a call."""
    counts = store.counts
    return counts.errors, counts.stalls, counts.refused, counts.trips
