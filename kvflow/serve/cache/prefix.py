"""The prefix cache of one engine: prompts with the same beginning share pages.

The cache owns these pages (I1). A request that reads them holds a `Prefix`, a lock that eviction
respects. Pages are evicted only when a request finds too few free ones, so an idle pool may be full
of cached pages. With a host tier, the write policy selects pages that are also copied to the host,
and pages that only the host has are copied back for a prompt that begins with them. With a storage
tier behind it, pages that arrive on the host are stored, and pages that only storage has are read.

If the model keeps a state per request in addition to its pages, a prefill's cache saves copies of
states (`states`), and a request can reuse only a prefix that ends in a saved state. A decode's
cache saves no states: prefill always sends the whole row, however many pages decode already has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.aio import wait_or_cancel
from kvflow.memory.allocator import PageAllocator
from kvflow.protocols.cache.choices import WritePolicy
from kvflow.protocols.cache.events import Event, Tier
from kvflow.protocols.cache.hashes import ANY, TOKEN_BYTES, Namespace
from kvflow.protocols.cache.index import Match, PrefixIndex
from kvflow.protocols.cache.nodes import Node
from kvflow.protocols.cache.residents import Freed
from kvflow.protocols.pages.layout import PageIndices
from kvflow.serve.cache.host import HostTier
from kvflow.serve.cache.publisher import EventPublisher
from kvflow.serve.cache.states import StateStore
from kvflow.serve.cache.storage.port import StorageState
from kvflow.serve.cache.stored import StorageTier
from kvflow.serve.cache.tiers import OWNER, TierCounts, Tiers

# Number of times that `_load` waits for copies to free pages before it settles for fewer.
_ROUNDS = 8
_log = logging.getLogger("kvflow.serve.cache")
Tokens = NDArray[np.integer[Any]]


class CacheStats(TierCounts, kw_only=True):
    """Numbers of cached pages now, and counters since the start."""

    pages: int
    evictable_pages: int  # the part of `pages` that no request reads
    asked_tokens: int  # prompt tokens of requests that began
    hit_tokens: int  # the part of `asked_tokens` that was cached
    evicted_pages: int
    host_pages: int = 0
    host_limit_pages: int = 0
    storage: StorageState | None = None
    states: int = 0
    limit_states: int = 0
    evicted_states: int = 0


class Prefix:
    """The cached pages with which a prompt begins, locked until `release`."""

    __slots__ = ("_cache", "_epoch", "branch_pages", "end", "namespace", "pages", "state")

    def __init__(self, cache: PrefixCache, found: Match, namespace: Namespace) -> None:
        self._cache, self.end, self._epoch = cache, found.device_end, cache.epoch
        self.pages = found.device_pages  # int32 [n], the first n pages of the prompt
        self.namespace = namespace
        # A state saved after this many pages would let later prompts match more (see `Match`).
        self.branch_pages = found.branch_pages
        # Slot of the `StateStore` with the state at the prefix's end. None after `release_state`.
        self.state = found.state if cache.states is not None else None

    @property
    def tokens(self) -> int:
        return self.pages.size * self._cache.page_size

    @property
    def is_current(self) -> bool:
        """True until the cache is flushed. The pages stay readable even then."""
        return self._epoch == self._cache.epoch

    @property
    def held(self) -> bool:
        """True while this locks at least one page."""
        return self.end is not None

    def again(self, tokens: Tokens) -> Prefix:
        """Match `tokens` in the same namespace, and return a new lock."""
        return self._cache.match(tokens, namespace=self.namespace)

    def release(self) -> None:
        """Unlock the pages and the state. Idempotent."""
        self.release_state()
        end, self.end = self.end, None
        if end is not None:
            self._cache.unlock(end)

    def release_state(self) -> None:
        """Unlock the state. Call this once the request's row has a copy of it. Idempotent."""
        state, self.state = self.state, None
        if state is not None and self.end is not None:
            self._cache.unlock_state(self.end)


class PrefixCache:
    """The cache of one pool, for one event loop. A lookup or `keep` takes some 10 to 50 us."""

    def __init__(
        self,
        pages: PageAllocator,
        page_size: int,
        policy: str = "lru",
        *,
        now: Callable[[], float] = time.monotonic,
        host: HostTier | None = None,
        write_policy: WritePolicy = "write_through",
        events: bool = False,
        storage: StorageTier | None = None,
        states: StateStore | None = None,
    ) -> None:
        """Register the cache with the allocator `pages`, which calls `evict` when it runs short.

        `close` also closes `host`, the `storage` behind it, and `states`. `write_policy` selects
        the pages that are copied to the host: all kept pages (write_through), those that a later
        prompt finds (write_through_selective), or those about to be evicted (write_back). With
        `events`, changes are recorded, and a publisher can use the cache as its `EventSource`. With
        `states`, only prefixes that end in a saved state are matched.

        Raises: MisuseError.
        """
        self.page_size = page_size
        self._pages, self._now = pages, now
        self._index = PrefixIndex(page_size, policy, needs_state=states is not None, events=events)
        self.states = states
        self.publisher: EventPublisher | None = None  # notified after every change
        self._asked = self._hits = 0
        self._write_policy = write_policy
        self._tiers: Tiers | None = None
        if host is not None:
            self._tiers = Tiers(
                self._index,
                host,
                storage,
                device_pages=pages.capacity,
                now=now,
                free=self._free,
                # Requests that wait for pages must try again when a copy ends, even if it failed.
                on_copied=pages.wake_waiters,
            )
        pages.reclaimables.append(self)

    def match(
        self, tokens: Tokens, most_tokens: int | None = None, namespace: Namespace = ANY
    ) -> Prefix:
        """Lock and return the longest prefix on the device, in whole pages. It may be empty."""
        return self._lock(self._look(self._key(tokens, most_tokens), namespace), namespace)

    def _lock(self, found: Match, namespace: Namespace) -> Prefix:
        prefix = Prefix(self, found, namespace)
        if found.device_end is not None:
            self._index.lock(found.device_end)
            if prefix.state is not None:
                self._index.lock_state(found.device_end)
        return prefix

    def count(self, prompt_tokens: int, prefix: Prefix) -> None:
        """Count a request that begins with `prefix`. Call this only once for each request."""
        self._asked += prompt_tokens
        self._hits += prefix.tokens
        if prefix.end is not None:
            self._index.hit(prefix.end)
            if self._tiers is not None and self._write_policy == "write_through_selective":
                self._tiers.save(prefix.end)

    @property
    def has_host(self) -> bool:
        return self._tiers is not None

    @property
    def busy(self) -> bool:
        return self._tiers is not None and self._tiers.busy

    @property
    def leaving_pages(self) -> int:
        """Number of device pages that write_back is copying to the host before it evicts them."""
        return 0 if self._tiers is None else self._tiers.leaving_pages

    async def fetch(
        self, tokens: Tokens, most_tokens: int | None = None, namespace: Namespace = ANY
    ) -> None:
        """Read into host memory those pages of `tokens[:most_tokens]` that only storage has.

        A cancellation takes effect at once, and pages that were read by then are kept. Errors are
        logged.
        """
        if self._tiers is None:
            return
        try:
            await self._fetch(
                self._tiers, self._key(tokens, most_tokens), namespace, self._pages.capacity
            )
        # A request works without the cache, so an error here must not end it.
        except Exception:  # noqa: BLE001
            _log.exception("reading a cached prefix from storage failed")

    async def load(
        self,
        tokens: Tokens,
        most_tokens: int | None = None,
        namespace: Namespace = ANY,
        *,
        most_pages: int = 1 << 30,
        taking: Callable[[int], None] = lambda count: None,
        from_storage: bool = True,
        locked: Callable[[Prefix], None] = lambda prefix: None,
    ) -> Prefix:
        """Load from the host the pages that the device lacks, then `match`.

        With `from_storage`, pages that only storage has are read first. The copy takes at most
        `most_pages` device pages, free or evictable. The result is locked in the same turn of the
        loop in which the copy ends, so nothing is evicted in between.

        When a copy begins, `taking` is called with the number of pages that it takes. Until the
        copy ends, these pages are neither free nor cached. In the turn in which the copy ends,
        `taking` is called with the same number, negated, and `locked` with the result. A
        cancellation stops the copy and drops its pages. Errors are logged, and the result is then
        what the device has.
        """
        key = self._key(tokens, most_tokens)
        if self._tiers is not None:
            try:
                if from_storage:
                    await self._fetch(
                        self._tiers, key, namespace, min(most_pages, self._pages.available_pages)
                    )
                if (
                    loaded := await self._load(
                        self._tiers, key, namespace, most_pages, taking, locked
                    )
                ) is not None:
                    return loaded
            # A request works without the cache, so an error here must not end it.
            except Exception:  # noqa: BLE001
                _log.exception("loading a cached prefix failed")
        return self._lock(self._look(key, namespace), namespace)

    def lacks(
        self, tokens: Tokens, most_tokens: int | None = None, namespace: Namespace = ANY
    ) -> bool:
        """Return True if `load` would copy pages to the device, or wait for another such copy."""
        if self._tiers is None:
            return False
        found = self._look(self._key(tokens, most_tokens), namespace)
        return found.num_pages > found.device_pages.size

    async def _fetch(self, tiers: Tiers, key: bytes, namespace: Namespace, most_pages: int) -> None:
        # Storage has no states, so a model that needs states cannot use the pages in it.
        if tiers.storage is None or self.states is not None:
            return
        found = self._look(key, namespace)
        if found.num_pages < len(key) // (self.page_size * TOKEN_BYTES):
            await tiers.fetch(key, found, namespace, most_pages)

    async def _load(
        self,
        tiers: Tiers,
        key: bytes,
        namespace: Namespace,
        most_pages: int,
        taking: Callable[[int], None],
        locked: Callable[[Prefix], None],
    ) -> Prefix | None:
        """Return the locked result, or None if no copy was necessary or possible."""
        found = self._look(key, namespace)
        # Another prompt is loading these pages. A second copy would waste pages and bandwidth.
        while found.end is not None and self._index.arrives(found.end):
            await tiers.wait_for_load()
            found = self._look(key, namespace)
        if found.end is None or found.num_pages == found.device_pages.size:
            return None
        # Without this lock, making room could evict the prefix that the copied pages are to extend.
        held = self._lock(found, namespace)
        try:
            wanted = min(most_pages, self._index.missing(found.end, Tier.HOST, Tier.DEVICE))
            wanted = min(wanted, self._pages.available_pages)
            free = self._pages.reclaim(wanted)
            # With write_back, another request may take the freed pages, so the waits are bounded.
            for _ in range(_ROUNDS):
                if free >= wanted or not tiers.leaving_pages:
                    break
                await tiers.wait_for_copy()
                free = self._pages.reclaim(wanted)
            # The eviction of device pages also evicts host pages that follow them in a prompt.
            if found.end.removed:
                return None
            wanted = min(wanted, free, self._index.missing(found.end, Tier.HOST, Tier.DEVICE))
            if wanted <= 0:
                return None
            write = self._index.begin_write(
                found.end, Tier.HOST, Tier.DEVICE, self._pages.take(wanted, OWNER)
            )
            taking(wanted)
            loaded: list[Prefix] = []

            def ended() -> None:
                taking(-wanted)
                # The pages could be evicted before this coroutine runs again.
                loaded.append(self._lock(self._look(key, namespace), namespace))
                locked(loaded[0])

            try:
                await wait_or_cancel(tiers.begin(write, ended=ended))
            except BaseException:
                for prefix in loaded:
                    prefix.release()
                raise
            return loaded[0]
        finally:
            held.release()

    def _key(self, tokens: Tokens, most_tokens: int | None = None) -> bytes:
        count = len(tokens) if most_tokens is None else max(0, min(len(tokens), most_tokens))
        whole = count // self.page_size * self.page_size
        # `hashes.token_bytes` also checks every token. Ids from the vocabulary need no check.
        return tokens[:whole].astype(f"<u{TOKEN_BYTES}").tobytes()

    def _look(self, key: bytes, namespace: Namespace) -> Match:
        return self._index.match(key, self._now(), namespace, hit=False)

    def keep(
        self, tokens: Tokens, pages: PageIndices, owner: Hashable, prefix: Prefix, priority: int = 0
    ) -> int:
        """Take over from `owner` the `pages` that `tokens` fill. All `tokens` must be computed.

        `pages` begins with the pages of `prefix`. If another request added the same tokens in
        the meantime, this request's duplicates become free. Return the number of leading `pages`
        that `owner` does not own now, those of the prefix included. The request must no longer
        write to them.

        Raises: OwnershipError if `owner` does not own the pages; then no page is taken.
        """
        whole, shared = len(tokens) // self.page_size, int(prefix.pages.size)
        if not prefix.is_current:
            return shared
        if whole <= shared:
            # The host may lack pages of the prefix, because an earlier copy failed or was evicted.
            self._save(prefix.end)
            return shared
        own = pages[shared:whole].copy()
        self._pages.move(own, owner, OWNER)
        inserted = self._index.insert(
            self._key(tokens), own, self._now(), prefix.namespace, shared=shared, priority=priority
        )
        self._pages.give_back(inserted.duplicates, OWNER)
        self._save(inserted.end)
        self._tell()
        return whole

    def _save(self, end: Node | None) -> None:
        if self._tiers is not None and self._write_policy == "write_through" and end is not None:
            self._tiers.save(end)

    def take_state(self, owner: Hashable) -> int | None:
        """Take a slot, and evict a state if no slot is free. Return None if all are in use."""
        assert self.states is not None
        slots = self.states.slots
        if not slots.free_pages:
            self._free(self._index.evict_states(1))
        return int(slots.take(1, owner)[0]) if slots.free_pages else None

    def keep_states(
        self, tokens: Tokens, states: Mapping[int, int], owner: Hashable, prefix: Prefix
    ) -> None:
        """Take over saved states from `owner`. `states` maps token counts to slots.

        A count is the number of tokens before the state. Call `keep` with these tokens first. A
        slot becomes free if the cache already has this state, lacks the pages, or was flushed.
        """
        assert self.states is not None
        for count, state in states.items():
            slot = np.array([state], np.int32)
            self.states.slots.move(slot, owner, OWNER)
            key = self._key(tokens, count)
            if not (prefix.is_current and self._index.put_state(key, state, prefix.namespace)):
                self.states.free((state,), OWNER)

    def take_events(self) -> list[Event]:
        return self._index.take_events()

    def snapshot_events(self) -> list[Event]:
        return self._index.snapshot_events()

    def _tell(self) -> None:
        self._pages.tell_evictable()
        if self.publisher is not None:
            self.publisher.notify()

    async def close(self) -> None:
        """Stop every copy, and free all pages and memory. No request may read them. Idempotent."""
        try:
            if self._tiers is not None:
                await self._tiers.end()
        finally:
            self.flush()
            if self in self._pages.reclaimables:
                self._pages.reclaimables.remove(self)
            if self._tiers is not None:
                self._tiers.host.close()
            if self.states is not None:
                self.states.close()

    def flush(self) -> None:
        """Drop every cached page. Locked pages become free when they are released."""
        self._free(self._index.flush())

    @property
    def epoch(self) -> int:
        """Number of flushes so far."""
        return self._index.epoch

    @property
    def evictable_pages(self) -> int:
        return self._index.evictable_pages

    def evict(self, count: int) -> None:
        """Free `count` pages, or all evictable pages if there are fewer.

        With write_back, pages that the host lacks are copied first (`leaving_pages`). They are
        freed when the allocator calls again after the copy.
        """
        if (
            self._tiers is not None
            and self._write_policy == "write_back"
            and self._tiers.make_way(count)
        ):
            return
        least = self.evictable_pages - count
        self._free(self._index.evict(Tier.DEVICE, count))
        while self._tiers is not None and (left := self.evictable_pages - max(least, 0)) > 0:
            # If the copy of a page failed, the index keeps the page as long as host pages follow it
            # in a prompt.
            freed = self._index.evict(Tier.HOST, left)
            if not freed.host.size:
                break
            self._free(freed)
            self._free(self._index.evict(Tier.DEVICE, left))

    def unlock(self, end: Node) -> None:
        self._free(self._index.unlock(end))

    def unlock_state(self, end: Node) -> None:
        self._index.unlock_state(end)

    def stats(self) -> CacheStats:
        found = self._index.stats()
        moved = TierCounts() if self._tiers is None else self._tiers.counts
        return CacheStats(
            pages=found.num_pages[Tier.DEVICE],
            evictable_pages=self.evictable_pages,
            asked_tokens=self._asked,
            hit_tokens=self._hits,
            evicted_pages=found.num_evicted[Tier.DEVICE],
            host_pages=found.num_pages[Tier.HOST],
            host_limit_pages=0 if self._tiers is None else self._tiers.host.pages.capacity,
            storage=None
            if self._tiers is None or self._tiers.storage is None
            else self._tiers.storage.state(),
            states=found.num_states,
            limit_states=0 if self.states is None else self.states.slots.capacity,
            evicted_states=found.num_states_evicted,
            **msgspec.structs.asdict(moved),
        )

    def _free(self, freed: Freed) -> None:
        self._pages.give_back(freed.device, OWNER)
        if self._tiers is not None:
            self._tiers.host.pages.give_back(freed.host, OWNER)
        if self.states is not None:
            self.states.free(freed.states, OWNER)
        self._tell()
