"""The index and the oracle side by side: each call does the same to both, and compares them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from kvflow.protocols.cache.events import Tier
from kvflow.protocols.cache.hashes import Namespace, chain_root, token_bytes
from kvflow.protocols.cache.index import Match, PrefixIndex
from kvflow.protocols.cache.nodes import Node
from kvflow.protocols.cache.residents import Freed
from kvflow.protocols.machines.cached_run import RunPhase
from tests.protocols.cache.oracle import DEVICE, HOST, Gone, Key, Oracle
from tests.protocols.cache.subscriber import Subscriber, block_hash, digest_chain

PAGE_SIZE, POOL, STATES = 2, 24, 8


def tokens(prompt: tuple[int, ...]) -> bytes:
    return token_bytes([token for page in prompt for token in (7, page)])


def array(pages: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(pages, np.int32)


def last_page(node: Node) -> int:
    """Return the number of the node's last page on the device."""
    pages = node.pages[DEVICE]
    assert pages is not None
    return int(pages[-1])


@cache
def name(key: Key) -> int:
    """What events call the page, computed from all tokens before it."""
    ids = [token for page in key[2:] for token in (7, page)]
    return block_hash(digest_chain(ids, PAGE_SIZE, chain_root(key[1]))[-1])


class Driver:
    def __init__(self, policy: str, *, needs_state: bool = False) -> None:
        self.index = PrefixIndex(PAGE_SIZE, policy, needs_state=needs_state, events=True)
        self.oracle = Oracle(policy, needs_state=needs_state)
        self.states = set(range(STATES))  # that are free
        self.subscriber = Subscriber()
        self.free = [set(range(POOL)), set(range(POOL))]
        self.now = 0.0
        self.locked: list[tuple[Node, Key, bool]] = []  # and whether its state is locked, too
        self.ended: list[int] = []

    def take(self, tier: int, count: int) -> list[int]:
        taken = sorted(self.free[tier])[:count]
        self.free[tier] -= set(taken)
        return taken

    def give_back(self, tier: int, pages: list[int]) -> None:
        assert len(set(pages)) == len(pages) and not self.free[tier] & set(pages), (
            "a page came back twice"
        )
        self.free[tier] |= set(pages)

    def give_states_back(self, states: tuple[int, ...]) -> None:
        assert len(set(states)) == len(states) and not self.states & set(states), (
            "a state came back twice"
        )
        self.states |= set(states)

    def give_all_back(self, freed: Freed, expected: Gone) -> None:
        assert set(freed.states) == expected[2]
        self.give_states_back(freed.states)
        for tier, pages in ((DEVICE, freed.device), (HOST, freed.host)):
            assert set(pages.tolist()) == expected[tier]
            self.give_back(tier, pages.tolist())

    def find(self, namespace: Namespace, prompt: tuple[int, ...]) -> tuple[Match, int]:
        self.now += 1
        found = self.index.match(tokens(prompt), self.now, namespace)
        count, device, state, cached = self.oracle.match(namespace, prompt, self.now)
        assert (found.num_pages, found.device_pages.tolist()) == (count, device)
        assert (found.state, found.branch_pages) == (state, cached)
        return found, len(device)

    def insert(
        self, namespace: Namespace, prompt: tuple[int, ...], priority: int, share: bool
    ) -> None:
        shared = self.find(namespace, prompt)[1] if share else 0
        if len(self.free[DEVICE]) < len(prompt):
            return
        given = self.take(DEVICE, len(prompt) - shared)
        self.now += 1
        inserted = self.index.insert(
            tokens(prompt), array(given), self.now, namespace, shared=shared, priority=priority
        )
        duplicates = self.oracle.insert(namespace, prompt, given, shared, self.now, priority)
        assert inserted.duplicates.tolist() == duplicates
        assert inserted.end is not None and inserted.end.depth == len(prompt)
        self.give_back(DEVICE, duplicates)

    def put_state(self, namespace: Namespace, prompt: tuple[int, ...]) -> None:
        if not self.states:
            return
        state = min(self.states)
        taken = self.index.put_state(tokens(prompt), state, namespace)
        assert taken == self.oracle.put_state(self.oracle.prefixes(namespace, prompt)[-1], state)
        if taken:
            self.states.remove(state)

    def evict_states(self, count: int) -> None:
        freed = self.index.evict_states(count)
        assert not freed.device.size and not freed.host.size
        able = [
            page
            for key, page in self.oracle.pages.items()
            if self.oracle.state_evictable(key, page)
        ]
        assert len(freed.states) == min(count, len(able))
        self.oracle.evict_states(set(freed.states), exact=count == 1)
        self.give_states_back(freed.states)

    def lock(self, namespace: Namespace, prompt: tuple[int, ...]) -> None:
        found, count = self.find(namespace, prompt)
        if found.device_end is not None:
            self.index.lock(found.device_end)
            key = self.oracle.prefixes(namespace, prompt)[count - 1]
            self.oracle.pages[key].locks += 1
            has_state = self.oracle.pages[key].state is not None
            if has_state:
                self.index.lock_state(found.device_end)
                self.oracle.pages[key].state_locks += 1
            self.locked.append((found.device_end, key, has_state))

    def unlock(self, which: int) -> None:
        node, key, has_state = self.locked.pop(which)
        if has_state:
            self.index.unlock_state(node)
            self.oracle.pages[key].state_locks -= 1
        self.oracle.pages[key].locks -= 1
        self.give_all_back(self.index.unlock(node), self.oracle.reap((set(), set(), set())))

    def unlock_state(self, which: int) -> None:
        node, key, has_state = self.locked[which]
        if has_state:
            self.index.unlock_state(node)
            self.oracle.pages[key].state_locks -= 1
            self.locked[which] = (node, key, False)

    def begin_write(
        self, namespace: Namespace, prompt: tuple[int, ...], route: tuple[int, int], cut: int
    ) -> None:
        found, _ = self.find(namespace, prompt)
        if found.end is None:
            return
        source, target = Tier(route[0]), Tier(route[1])
        keys = self.oracle.missing(
            self.oracle.prefixes(namespace, prompt)[: found.num_pages], source, target
        )
        assert self.index.missing(found.end, source, target) == len(keys)
        keys = keys[: max(1, len(keys) - cut)]
        if not keys or (target is not Tier.STORAGE and len(self.free[target]) < len(keys)):
            return
        given = [] if target is Tier.STORAGE else self.take(target, len(keys))
        write = self.index.begin_write(found.end, source, target, array(given), count=len(keys))
        assert write.source_pages.tolist() == [
            self.oracle.pages[key].number[source] for key in keys
        ]
        assert [page for offsets in write.offsets for page in offsets] == [
            len(key) - 3 for key in keys
        ]
        self.oracle.begin(write.number, keys, source, target, given)

    def end(self, number: int, landed: bool) -> None:
        freed = self.index.ack(number) if landed else self.index.fail(number)
        self.give_all_back(freed, self.oracle.end(number, landed))
        self.ended.append(number)

    def evict(self, tier: Tier, count: int) -> None:
        freed = self.index.evict(tier, count)
        pages = (freed.device, freed.host)[tier].tolist()
        assert not len((freed.host, freed.device)[tier])
        assert set(freed.states) == self.oracle.evict(tier, pages, exact=count == 1)
        self.give_states_back(freed.states)
        assert len(pages) == count or not self.oracle.candidates(tier), (
            "something could have been evicted"
        )
        assert len(pages) <= count
        self.give_back(tier, pages)

    def evict_copied(self, count: int, wanted: int) -> None:
        """As write_back does: what the host has goes, and copies of `wanted` others begin."""
        pages = self.oracle.pages
        freed, ends = self.index.evict_copied(count)
        assert not freed.host.size
        copied = {
            page.number[DEVICE] for page in pages.values() if page.phase[HOST] is RunPhase.PRESENT
        }
        assert set(freed.device.tolist()) <= copied, "a page went that nobody else has"
        self.oracle.evict(DEVICE, freed.device.tolist(), exact=False)
        self.give_back(DEVICE, freed.device.tolist())
        lonely = [
            key
            for key in self.oracle.candidates(DEVICE)
            if pages[key].phase[HOST] is not RunPhase.PRESENT
        ]
        kept = {last_page(end) for end in ends}
        assert len(kept) == len(ends) and kept <= {pages[key].number[DEVICE] for key in lonely}
        assert freed.device.size + sum(end.num_pages for end in ends) >= count or len(kept) == len(
            lonely
        )
        for end in ends:
            (key,) = [key for key in lonely if pages[key].number[DEVICE] == last_page(end)]
            prefix = [key[:length] for length in range(3, len(key) + 1)]
            keys = self.oracle.missing(prefix, Tier.DEVICE, Tier.HOST)[:wanted]
            if len(self.free[HOST]) < len(keys):
                return
            given = self.take(HOST, len(keys))
            write = self.index.begin_write(end, Tier.DEVICE, Tier.HOST, array(given))
            self.oracle.begin(write.number, keys, Tier.DEVICE, Tier.HOST, given)

    def lose(self, namespace: Namespace, prompt: tuple[int, ...], first: int) -> None:
        found, _ = self.find(namespace, prompt)
        if found.end is not None:
            prefix = self.oracle.prefixes(namespace, prompt)[: found.num_pages]
            phases = [self.oracle.pages[key].phase[Tier.STORAGE] for key in prefix]
            stored = [number for number, phase in enumerate(phases) if phase is RunPhase.PRESENT]
            assert self.index.stored_pages(found.end) == stored
            lost = self.oracle.lose(prefix, first)
            assert self.index.lost(found.end, first) == lost

    def flush(self) -> None:
        self.give_all_back(self.index.flush(), self.oracle.flush())
        assert self.index.epoch == self.oracle.epoch

    def every_page_is_free_or_held(self) -> None:
        for tier in (DEVICE, HOST):
            held = self.oracle.held(tier)
            assert not held & self.free[tier] and len(held) + len(self.free[tier]) == POOL
            assert self.index.stats().num_pages[tier] == len(held)
        states = {page.state for page in self.oracle.pages.values()} - {None}
        assert not states & self.states and len(states) + len(self.states) == STATES
        assert self.index.stats().num_states == len(states)
        assert self.index.evictable_pages == len(self.oracle.held(DEVICE)) - self.oracle.pinned()

    def subscribers_know_what_can_be_read(self) -> None:
        """Subscribers and late joiners know what is connected in each tier."""
        self.subscriber.replay(self.index.take_events())
        expected = [{name(key) for key in self.oracle.connected(tier)} for tier in Tier]
        assert self.subscriber.content() == expected
        late = Subscriber()
        late.replay(self.index.snapshot_events())
        assert late.content() == expected

    def finish(self) -> None:
        for number in sorted(self.oracle.writes):
            self.end(number, False)
        while self.locked:
            self.unlock(-1)
        # Neither tier can be emptied first where pages of one lie below those of the other.
        for _ in range(2 * POOL):
            pages = [self.index.evict(tier, POOL) for tier in (Tier.DEVICE, Tier.HOST)]
            for freed in pages:
                self.give_states_back(freed.states)
            self.give_back(DEVICE, pages[0].device.tolist())
            self.give_back(HOST, pages[1].host.tolist())
            if not pages[0].device.size and not pages[1].host.size:
                break
        assert [len(pages) for pages in self.free] == [POOL, POOL] and len(self.states) == STATES
        self.subscriber.replay(self.index.take_events())
        assert self.subscriber.content() == [set(), set(), set()]
        stats = self.index.stats()
        assert stats.num_pages == (0, 0, 0)
        assert stats.num_nodes == stats.num_namespaces == stats.writes_open == 0
