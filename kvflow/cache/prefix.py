"""Prompts that begin alike share pages: the cache of one engine's pool, and of host memory behind it.

Its pages are owned by the cache (I1), and whoever reads them holds a `Prefix`, a lock that eviction respects. They are
evicted only when a request finds too few free pages, so at rest the pool may be full of them. With a host tier, what is
kept is copied there too (write-through), and what a prompt finds there alone is copied back before it begins.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.aio import run_to_end, wait_or_cancel
from kvflow.cache.host import HostTier
from kvflow.cache.publisher import EventPublisher
from kvflow.memory.allocator import PageAllocator
from kvflow.protocols.cache.events import Event
from kvflow.protocols.cache.hashes import ANY, TOKEN_BYTES, Namespace
from kvflow.protocols.cache.index import Match, PrefixIndex
from kvflow.protocols.cache.nodes import Node, Tier
from kvflow.protocols.cache.residents import Freed
from kvflow.protocols.cache.writes import Write
from kvflow.protocols.errors import TransferError
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices

OWNER = ("cache", "prefix")
WritePolicy = Literal["write_through", "write_through_selective"]
_log = logging.getLogger("kvflow.cache")
Tokens = NDArray[np.integer[Any]]


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """What is cached now, and what has happened since the start."""

    pages: int
    evictable_pages: int  # of them, those that nobody reads
    asked_tokens: int  # of prompts that were looked up
    hit_tokens: int  # of them, those that were cached
    evicted_pages: int
    host_pages: int = 0
    host_limit_pages: int = 0
    saved_pages: int = 0  # copied to the host
    loaded_pages: int = 0  # copied back
    failed_copies: int = 0
    unsaved_pages: int = 0  # kept on the device alone: the host tier was full of what is read or copied


class Prefix:
    """The cached pages that a prompt begins with; they stay where they are until `release`."""

    __slots__ = ("_cache", "_end", "_epoch", "namespace", "pages")

    def __init__(self, cache: PrefixCache, end: Node | None, pages: PageIndices, namespace: Namespace) -> None:
        self._cache, self._end, self._epoch = cache, end, cache.epoch
        self.pages = pages  # int32 [n], the first n of the prompt
        self.namespace = namespace

    @property
    def tokens(self) -> int:
        return self.pages.size * self._cache.page_size

    @property
    def is_current(self) -> bool:
        """The cache has not been flushed since; the pages are good either way."""
        return self._epoch == self._cache.epoch

    @property
    def held(self) -> bool:
        """It has pages, and is not released."""
        return self._end is not None

    def again(self, tokens: Tokens) -> Prefix:
        """What the cache has of `tokens` now, locked."""
        return self._cache.match(tokens, namespace=self.namespace)

    def release(self) -> None:
        """They are not read any more. Idempotent."""
        end, self._end = self._end, None
        if end is not None:
            self._cache.unlock(end)


class PrefixCache:
    """Cached pages of one pool. Used on the event loop only; a lookup or a hand-over costs some 10 to 50 us."""

    def __init__(
        self, pages: PageAllocator, page_size: int, policy: str = "lru", *, now: Callable[[], float] = time.monotonic,
        host: HostTier | None = None, write_policy: WritePolicy = "write_through",
        events: bool = False,
    ) -> None:  # fmt: skip
        """`pages` are told to ask here for more when they run short. `host`: closed with the cache; `write_policy` says
        what is copied there: all that is kept, or what a prompt has found since (write_through_selective). `events`: it
        is the `EventSource` of a publisher.

        Raises: MisuseError."""
        self.page_size, self.epoch = page_size, 0
        self._pages, self._now = pages, now
        self._index = PrefixIndex(page_size, policy, events=events)
        self.publisher: EventPublisher | None = None  # of its events, told of every change
        self._asked = self._hits = 0
        self._host, self._needed_hits = host, 1 if write_policy == "write_through_selective" else 0
        self._copies: set[asyncio.Task[None]] = set()
        self._saved = self._loaded = self._failed = self._unsaved = 0
        pages.lender = self

    def match(self, tokens: Tokens, most_tokens: int | None = None, namespace: Namespace = ANY) -> Prefix:
        """The longest cached prefix of `tokens` in whole pages, of at most `most_tokens`; locked, even if empty."""
        whole = (len(tokens) if most_tokens is None else max(0, min(len(tokens), most_tokens))) // self.page_size
        found = self._index.match(_bytes_of(tokens, whole * self.page_size), self._now(), namespace)
        prefix = self._lock(found, namespace)
        if self._needed_hits and prefix.pages.size:
            self._save(found.device_end)
        return prefix

    def _lock(self, found: Match, namespace: Namespace) -> Prefix:
        """What of it is on the device."""
        if found.device_end is None:
            return Prefix(self, None, NO_PLACES, namespace)
        self._index.lock(found.device_end)
        return Prefix(self, found.device_end, found.device_pages, namespace)

    def count(self, prompt_tokens: int, prefix: Prefix) -> None:
        """A request begins with what was found: it may have looked more than once."""
        self._asked += prompt_tokens
        self._hits += prefix.tokens

    @property
    def has_host(self) -> bool:
        return self._host is not None

    async def load(
        self, tokens: Tokens, most_tokens: int | None = None, namespace: Namespace = ANY, *, most_pages: int = 1 << 30,
        taking: Callable[[int], None] = lambda count: None,
    ) -> None:  # fmt: skip
        """Copy to the device what the host alone has of the first `most_tokens` tokens, into at most `most_pages` pages
        that are free or can be evicted. It is not locked afterwards: `match` follows.

        `taking` is called with how many pages are neither free nor cached from here on, and with that number below 0
        when they are. A cancellation stops the copy, and what it has copied is forgotten."""
        if self._host is None:
            return
        whole = (len(tokens) if most_tokens is None else max(0, min(len(tokens), most_tokens))) // self.page_size
        found = self._index.match(_bytes_of(tokens, whole * self.page_size), self._now(), namespace)
        if found.end is None or found.num_pages == found.device_pages.size:
            return
        held = self._lock(found, namespace)  # making room must not evict what it is made for
        try:
            wanted = min(most_pages, self._index.missing(found.end, Tier.HOST, Tier.DEVICE))
            wanted = min(wanted, self._pages.available_pages)
            wanted = min(wanted, self._pages.reclaim(wanted))
            if wanted <= 0:
                return
            pages = self._pages.take(wanted, OWNER)
            taking(wanted)
            copying = self._begin(self._index.begin_write(found.end, Tier.HOST, Tier.DEVICE, pages))
            try:
                await wait_or_cancel(copying)
            finally:
                taking(-wanted)
        finally:
            held.release()

    def _save(self, end: Node | None) -> None:
        """Begin to copy to the host what it lacks up to here, as far as it has room."""
        if self._host is None or end is None or not (wanted := self._index.missing(end, Tier.DEVICE, Tier.HOST)):
            return
        pages = self._host.pages
        if pages.free_pages < wanted:
            self._free(self._index.evict(Tier.HOST, wanted - pages.free_pages))
        room = min(wanted, pages.free_pages)
        self._unsaved += wanted - room
        if room:
            self._begin(self._index.begin_write(end, Tier.DEVICE, Tier.HOST, pages.take(room, OWNER)))

    def _begin(self, write: Write) -> asyncio.Task[None]:
        copying = asyncio.get_running_loop().create_task(self._copy(write), name=f"kvflow-cache-copy-{write.number}")
        self._copies.add(copying)
        copying.add_done_callback(self._copies.discard)
        return copying

    async def _copy(self, write: Write) -> None:
        assert self._host is not None
        whole = False
        try:
            whole = await self._host.copy(write.source_pages, write.target_pages, write.target)
        except TransferError:
            _log.exception("a copy of %d cached pages failed", len(write.source_pages))
        finally:  # nothing of it runs on, cancelled or not
            self._free(self._index.ack(write.number) if whole else self._index.fail(write.number))
            self._failed += not whole
            if whole and write.target is Tier.HOST:
                self._saved += len(write.source_pages)
            elif whole:
                self._loaded += len(write.source_pages)

    def keep(self, tokens: Tokens, pages: PageIndices, owner: Hashable, prefix: Prefix, priority: int = 0) -> int:
        """Take the whole pages of `tokens`, which are all computed, over from `owner`; `pages` begins with those of
        `prefix`. Those that others have brought meanwhile become free. Returns how many of `pages` are the owner's no
        more, those of the prefix included; nothing may write to them from here on.

        Raises: OwnershipError when they are not `owner`'s (nothing is taken).
        """
        whole, shared = len(tokens) // self.page_size, int(prefix.pages.size)
        if whole <= shared or not prefix.is_current:
            return shared
        own = pages[shared:whole].copy()
        self._pages.move(own, owner, OWNER)
        inserted = self._index.insert(
            _bytes_of(tokens, whole * self.page_size), own, self._now(), prefix.namespace,
            shared=shared, priority=priority,
        )  # fmt: skip
        self._pages.give_back(inserted.duplicates, OWNER)
        if not self._needed_hits:
            self._save(inserted.end)
        self._tell()
        return whole

    def take_events(self) -> list[Event]:
        return self._index.take_events()

    def snapshot_events(self) -> list[Event]:
        return self._index.snapshot_events()

    def _tell(self) -> None:
        if self.publisher is not None:
            self.publisher.notify()

    async def close(self) -> None:
        """End every copy, and give everything back, when no request reads it any more."""
        await asyncio.sleep(0)  # a copy that has not begun would not end its write
        for copying in self._copies:
            copying.cancel()
        await run_to_end(asyncio.gather(*self._copies, return_exceptions=True))
        self.flush()
        self._pages.lender = None
        if self._host is not None:
            self._host.close()

    def flush(self) -> None:
        """Forget everything; what is locked becomes free when it is released."""
        self.epoch += 1
        self._free(self._index.flush())

    @property
    def evictable_pages(self) -> int:
        return self._index.evictable_pages

    def evict(self, count: int) -> None:
        """Give `count` pages back, or all that nobody reads; the allocator calls this."""
        least = self.evictable_pages - count
        self._free(self._index.evict(Tier.DEVICE, count))
        while self._host is not None and (left := self.evictable_pages - max(least, 0)) > 0:
            # What is on the device alone, as its copy has failed, stays while host pages follow it.
            freed = self._index.evict(Tier.HOST, left)
            if not freed.host.size:
                break
            self._free(freed)
            self._free(self._index.evict(Tier.DEVICE, left))

    def unlock(self, end: Node) -> None:
        """Of a `Prefix`."""
        self._free(self._index.unlock(end))

    def stats(self) -> CacheStats:
        found = self._index.stats()
        return CacheStats(
            pages=found.num_pages[Tier.DEVICE],
            evictable_pages=self.evictable_pages,
            asked_tokens=self._asked,
            hit_tokens=self._hits,
            evicted_pages=found.num_evicted[Tier.DEVICE],
            host_pages=found.num_pages[Tier.HOST],
            host_limit_pages=0 if self._host is None else self._host.pages.capacity,
            saved_pages=self._saved,
            loaded_pages=self._loaded,
            failed_copies=self._failed,
            unsaved_pages=self._unsaved,
        )

    def _free(self, freed: Freed) -> None:
        self._pages.give_back(freed.device, OWNER)
        if self._host is not None:
            self._host.pages.give_back(freed.host, OWNER)
        self._tell()


def _bytes_of(tokens: Tokens, count: int) -> bytes:
    """The first `count` tokens, as `hashes.token_bytes`; they are known to be those of a vocabulary."""
    found = tokens[:count].astype("<u4").tobytes()
    assert len(found) == count * TOKEN_BYTES
    return found
