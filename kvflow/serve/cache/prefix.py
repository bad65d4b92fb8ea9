"""Prompts that begin alike share pages: the cache of one engine's pool, and of host memory behind
it.

Its pages are owned by the cache (I1), and whoever reads them holds a `Prefix`, a lock that eviction
respects. They are evicted only when a request finds too few free pages, so at rest the pool may be
full of them. With a host tier, what is kept is copied there too (write-through), and what a prompt
finds there alone is copied back before it begins. With a storage tier behind it, what has come to
the host is stored, and what neither has is read from there.

Where requests keep a state beside their pages, a prefill's cache keeps copies of it (`states`), and
a prompt begins with what ends in one. A decode's keeps none: a row comes whole from prefill,
whatever pages are here already.
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

_ROUNDS = 8  # of waiting for pages that leave, see `_load`
_log = logging.getLogger("kvflow.serve.cache")
Tokens = NDArray[np.integer[Any]]


class CacheStats(TierCounts, kw_only=True):
    """What is cached now, and what has happened since the start."""

    pages: int
    evictable_pages: int  # of them, those that nobody reads
    asked_tokens: int  # of prompts that were looked up
    hit_tokens: int  # of them, those that were cached
    evicted_pages: int
    host_pages: int = 0
    host_limit_pages: int = 0
    storage: StorageState | None = None
    states: int = 0
    limit_states: int = 0
    evicted_states: int = 0


class Prefix:
    """The cached pages that a prompt begins with; they stay where they are until `release`."""

    __slots__ = ("_cache", "_epoch", "branch_pages", "end", "namespace", "pages", "state")

    def __init__(self, cache: PrefixCache, found: Match, namespace: Namespace) -> None:
        self._cache, self.end, self._epoch = cache, found.device_end, cache.epoch
        self.pages = found.device_pages  # int32 [n], the first n of the prompt
        self.namespace = namespace
        self.branch_pages = found.branch_pages  # where a state would be of use, see `Match`
        self.state = found.state if cache.states is not None else None
        """The slot of the store with the state at its end, until `release_state`."""

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
        return self.end is not None

    def again(self, tokens: Tokens) -> Prefix:
        """What the cache has of `tokens` now, locked."""
        return self._cache.match(tokens, namespace=self.namespace)

    def release(self) -> None:
        """They are not read any more. Idempotent."""
        self.release_state()
        end, self.end = self.end, None
        if end is not None:
            self._cache.unlock(end)

    def release_state(self) -> None:
        """It has been copied to the request's own row. Idempotent."""
        state, self.state = self.state, None
        if state is not None and self.end is not None:
            self._cache.unlock_state(self.end)


class PrefixCache:
    """Cached pages of one pool.

    Used on the event loop only; a lookup or a hand-over costs some 10 to 50 us.
    """

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
        """`pages` are told to ask here for more when they run short.

        `host`: closed with the cache; `write_policy` says what is copied there: all that is kept,
        what a prompt has found since (write_through_selective), or what is about to be evicted
        (write_back). `events`: it is the `EventSource` of a publisher. `storage`: behind the host
        tier, and closed with the cache. `states`: prompts begin only with what ends in one of
        these; closed with it.

        Raises: MisuseError."""
        self.page_size = page_size
        self._pages, self._now = pages, now
        self._index = PrefixIndex(page_size, policy, needs_state=states is not None, events=events)
        self.states = states
        self.publisher: EventPublisher | None = None  # of its events, told of every change
        self._asked = self._hits = 0
        self._write_policy = write_policy
        self.on_copied: Callable[[], None] = lambda: None
        """Called when pages that are evicted by write_back have been copied: who waits for them
        asks again.
        """
        self._tiers: Tiers | None = None
        if host is not None:
            self._tiers = Tiers(
                self._index,
                host,
                storage,
                device_pages=pages.capacity,
                now=now,
                free=self._free,
                on_copied=lambda: self.on_copied(),  # noqa: PLW0108  # it is set later
            )
        pages.reclaimables.append(self)

    def match(
        self, tokens: Tokens, most_tokens: int | None = None, namespace: Namespace = ANY
    ) -> Prefix:
        """The longest cached prefix of `tokens` in whole pages, of at most `most_tokens`; locked,
        even if empty.
        """
        return self._lock(self._look(self._key(tokens, most_tokens), namespace), namespace)

    def _lock(self, found: Match, namespace: Namespace) -> Prefix:
        """What of it is on the device."""
        prefix = Prefix(self, found, namespace)
        if found.device_end is not None:
            self._index.lock(found.device_end)
            if prefix.state is not None:
                self._index.lock_state(found.device_end)
        return prefix

    def count(self, prompt_tokens: int, prefix: Prefix) -> None:
        """A request begins with what was found: it may have looked more than once."""
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
        """Whether a copy between tiers is under way."""
        return self._tiers is not None and self._tiers.busy

    @property
    def leaving_pages(self) -> int:
        """Pages that are being copied to the host so that they can be evicted."""
        return 0 if self._tiers is None else self._tiers.leaving_pages

    async def fetch(
        self, tokens: Tokens, most_tokens: int | None = None, namespace: Namespace = ANY
    ) -> None:
        """Read what storage alone has of the first `most_tokens` tokens into host memory.

        A cancellation stops it, and raises at once; what has come by then is good. What goes wrong
        is logged."""
        if self._tiers is None:
            return
        try:
            await self._fetch(
                self._tiers, self._key(tokens, most_tokens), namespace, self._pages.capacity
            )
        # An error of the cache must not end a request that can do without.
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
        """`match`, once what the host alone has of the first `most_tokens` tokens has been copied
        to the device, and what storage alone has unless `from_storage` is false, into at most
        `most_pages` pages that are free or can be evicted. It is locked from the moment at which it
        can be read: nothing comes between.

        `taking` is called with how many pages are neither free nor cached from here on, and with
        that number below 0 when they are; `locked` in the same turn of the loop, with what is
        locked then. A cancellation stops the copy, and what it has copied is forgotten. What goes
        wrong is logged: a cache that cannot load has not got it."""
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
            # An error of the cache must not end a request that can do without.
            except Exception:  # noqa: BLE001
                _log.exception("loading a cached prefix failed")
        return self._lock(self._look(key, namespace), namespace)

    def lacks(
        self, tokens: Tokens, most_tokens: int | None = None, namespace: Namespace = ANY
    ) -> bool:
        """True where `load` would copy some of it from the host to the device, or waits for a
        prompt that does.
        """
        if self._tiers is None:
            return False
        found = self._look(self._key(tokens, most_tokens), namespace)
        return found.num_pages > found.device_pages.size

    async def _fetch(self, tiers: Tiers, key: bytes, namespace: Namespace, most_pages: int) -> None:
        """From storage to the host."""
        # No state is stored with pages, which are of no use then.
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
        """What is there then, where a copy was needed and has ended."""
        found = self._look(key, namespace)
        while found.end is not None and self._index.arrives(found.end):  # another prompt loads it
            await tiers.wait_for_load()
            found = self._look(key, namespace)
        if found.end is None or found.num_pages == found.device_pages.size:
            return None
        held = self._lock(found, namespace)  # making room must not evict what it is made for
        try:
            wanted = min(most_pages, self._index.missing(found.end, Tier.HOST, Tier.DEVICE))
            wanted = min(wanted, self._pages.available_pages)
            free = self._pages.reclaim(wanted)
            # Pages leave once they have been copied; others may be quicker to take them.
            for _ in range(_ROUNDS):
                if free >= wanted or not tiers.leaving_pages:
                    break
                await tiers.wait_for_copy()
                free = self._pages.reclaim(wanted)
            if found.end.removed:  # to make room host pages had to go, and these were among them
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
                """Others may evict pages in the turns of the loop before this coroutine goes on."""
                taking(-wanted)
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
        """The whole pages of the first `most_tokens` tokens, or of all, as the index has them."""
        count = len(tokens) if most_tokens is None else max(0, min(len(tokens), most_tokens))
        return _bytes_of(tokens, count // self.page_size * self.page_size)

    def _look(self, key: bytes, namespace: Namespace) -> Match:
        return self._index.match(key, self._now(), namespace, hit=False)

    def keep(
        self, tokens: Tokens, pages: PageIndices, owner: Hashable, prefix: Prefix, priority: int = 0
    ) -> int:
        """Take the whole pages of `tokens`, which are all computed, over from `owner`; `pages`
        begins with those of `prefix`. Those that others have brought meanwhile become free. Returns
        how many of `pages` are the owner's no more, those of the prefix included; nothing may write
        to them from here on.

        Raises: OwnershipError when they are not `owner`'s (nothing is taken).
        """
        whole, shared = len(tokens) // self.page_size, int(prefix.pages.size)
        if not prefix.is_current:
            return shared
        if whole <= shared:
            self._save(prefix.end)  # what a copy, or the store, lacks of it
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
        """With write_through, what has been kept."""
        if self._tiers is not None and self._write_policy == "write_through" and end is not None:
            self._tiers.save(end)

    def take_state(self, owner: Hashable) -> int | None:
        """A slot for a state that `owner` computes; one that is cached makes way.

        None where all are in use.
        """
        assert self.states is not None
        slots = self.states.slots
        if not slots.free_pages:
            self._free(self._index.evict_states(1))
        return int(slots.take(1, owner)[0]) if slots.free_pages else None

    def keep_states(
        self, tokens: Tokens, states: Mapping[int, int], owner: Hashable, prefix: Prefix
    ) -> None:
        """Take over the slots of `states` from `owner`, by the number of tokens before each: whole
        pages, which `keep` has taken. Those for which others have brought one meanwhile become
        free."""
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
        if self.publisher is not None:
            self.publisher.notify()

    async def close(self) -> None:
        """End every copy, and give everything back, when no request reads it any more.

        Idempotent.
        """
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
        """Forget everything; what is locked becomes free when it is released."""
        self._free(self._index.flush())

    @property
    def epoch(self) -> int:
        """How often it has been flushed."""
        return self._index.epoch

    @property
    def evictable_pages(self) -> int:
        return self._index.evictable_pages

    def evict(self, count: int) -> None:
        """Give `count` pages back, or all that nobody reads; the allocator calls this.

        With write_back what the host lacks follows when it is asked for again, and has been copied
        meanwhile: `leaving_pages`."""
        if (
            self._tiers is not None
            and self._write_policy == "write_back"
            and self._tiers.make_way(count)
        ):
            return
        least = self.evictable_pages - count
        self._free(self._index.evict(Tier.DEVICE, count))
        while self._tiers is not None and (left := self.evictable_pages - max(least, 0)) > 0:
            # What is on the device alone, as its copy has failed, stays while host pages follow it.
            freed = self._index.evict(Tier.HOST, left)
            if not freed.host.size:
                break
            self._free(freed)
            self._free(self._index.evict(Tier.DEVICE, left))

    def unlock(self, end: Node) -> None:
        """Of a `Prefix`."""
        self._free(self._index.unlock(end))

    def unlock_state(self, end: Node) -> None:
        """Of a `Prefix`."""
        self._index.unlock_state(end)

    def stats(self) -> CacheStats:
        found, moved = (
            self._index.stats(),
            TierCounts() if self._tiers is None else self._tiers.counts,
        )
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


def _bytes_of(tokens: Tokens, count: int) -> bytes:
    """The first `count` tokens, as `hashes.token_bytes`; they are known to be those of a
    vocabulary.
    """
    found = tokens[:count].astype("<u4").tobytes()
    assert len(found) == count * TOKEN_BYTES
    return found
