"""Prompts that begin alike share pages: the device tier of the cache, in the pool of an engine.

Its pages are owned by the cache (I1), and whoever reads them holds a `Prefix`, a lock that eviction respects. They are
evicted only when a request finds too few free pages, so at rest the pool may be full of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.memory.allocator import PageAllocator
from kvflow.protocols.cache.hashes import ANY, TOKEN_BYTES, Namespace
from kvflow.protocols.cache.index import PrefixIndex
from kvflow.protocols.cache.nodes import Node, Tier
from kvflow.protocols.cache.residents import Freed
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices

OWNER = ("cache", "prefix")
Tokens = NDArray[np.integer[Any]]


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """What is cached now, and what has happened since the start."""

    pages: int
    evictable_pages: int  # of them, those that nobody reads
    asked_tokens: int  # of prompts that were looked up
    hit_tokens: int  # of them, those that were cached
    evicted_pages: int


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

    def release(self) -> None:
        """They are not read any more. Idempotent."""
        end, self._end = self._end, None
        if end is not None:
            self._cache.unlock(end)


class PrefixCache:
    """Cached pages of one pool. Used on the event loop only; a lookup or a hand-over costs some 10 to 50 us."""

    def __init__(
        self, pages: PageAllocator, page_size: int, policy: str = "lru", *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`pages` are told to ask here for more when they run short. Raises: MisuseError."""
        self.page_size, self.epoch = page_size, 0
        self._pages, self._now = pages, now
        self._index = PrefixIndex(page_size, policy)
        self._asked = self._hits = 0
        pages.lender = self

    def match(self, tokens: Tokens, most_tokens: int | None = None, namespace: Namespace = ANY) -> Prefix:
        """The longest cached prefix of `tokens` in whole pages, of at most `most_tokens`; locked, even if empty."""
        self._asked += len(tokens)
        whole = (len(tokens) if most_tokens is None else max(0, min(len(tokens), most_tokens))) // self.page_size
        found = self._index.match(_bytes_of(tokens, whole * self.page_size), self._now(), namespace)
        if found.device_end is None:
            return Prefix(self, None, NO_PLACES, namespace)
        self._index.lock(found.device_end)
        self._hits += found.device_pages.size * self.page_size
        return Prefix(self, found.device_end, found.device_pages, namespace)

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
        return whole

    def close(self) -> None:
        """Give everything back, when nothing reads it any more."""
        self.flush()
        self._pages.lender = None

    def flush(self) -> None:
        """Forget everything; what is locked becomes free when it is released."""
        self.epoch += 1
        self._free(self._index.flush())

    @property
    def evictable_pages(self) -> int:
        return self._index.evictable_pages

    def evict(self, count: int) -> None:
        """Give `count` pages back, or all that nobody reads; the allocator calls this."""
        self._free(self._index.evict(Tier.DEVICE, count))

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
        )

    def _free(self, freed: Freed) -> None:
        self._pages.give_back(freed.device, OWNER)


def _bytes_of(tokens: Tokens, count: int) -> bytes:
    """The first `count` tokens, as `hashes.token_bytes`; they are known to be those of a vocabulary."""
    found = tokens[:count].astype("<u4").tobytes()
    assert len(found) == count * TOKEN_BYTES
    return found
