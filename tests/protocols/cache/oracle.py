"""What the index must do, told page by page: a map from whole prefixes to records."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from kvflow.protocols.machines.cached_run import RunPhase

ABSENT, ARRIVING, PRESENT = RunPhase.ABSENT, RunPhase.ARRIVING, RunPhase.PRESENT
DEVICE, HOST, STORAGE = range(3)
Gone = tuple[set[int], set[int], set[int]]  # pages of device and host, states
# (epoch, namespace, page, page, ...): all tokens up to the end of the last page.
Key = tuple[Any, ...]


@dataclass
class Page:
    phase: list[RunPhase] = field(default_factory=lambda: [ABSENT, ABSENT, ABSENT])
    number: list[int] = field(default_factory=lambda: [-1, -1])
    readers: list[int] = field(default_factory=lambda: [0, 0])
    used: float = 0.0
    hits: int = 0
    priority: int = 0
    locks: int = 0
    state: int | None = None  # at the end of the page
    state_locks: int = 0


KEYS = {
    "lru": lambda key, page: page.used,
    "lfu": lambda key, page: (page.hits, page.used),
    "slru": lambda key, page: (page.hits >= 2, page.used),
    "priority": lambda key, page: (page.priority, page.used),
    "depth": lambda key, page: (-len(key), page.used),
}


class Oracle:
    def __init__(self, policy: str, *, needs_state: bool = False) -> None:
        self.needs_state = needs_state
        self.pages: dict[Key, Page] = {}
        self.epoch = 0
        self.policy = policy
        self.writes: dict[int, tuple[list[Key], int, int]] = {}

    def prefixes(self, namespace: object, prompt: tuple[int, ...]) -> list[Key]:
        return [(self.epoch, namespace, *prompt[: n + 1]) for n in range(len(prompt))]

    def match(
        self, namespace: object, prompt: tuple[int, ...], now: float
    ) -> tuple[int, list[int], int | None, int]:
        """Pages found, those on the device, the state behind these, and how many are cached."""
        found: list[Page] = []
        for key in self.prefixes(namespace, prompt):
            if key not in self.pages:
                break
            found.append(self.pages[key])
        cached = len(found)
        self.cut(found)
        for page in found:
            page.used, page.hits = now, page.hits + 1
        device = list(takewhile(lambda page: page.phase[DEVICE] is PRESENT, found))
        self.cut(device)
        state = device[-1].state if device else None
        return len(found), [page.number[DEVICE] for page in device], state, cached

    def cut(self, found: list[Page]) -> None:
        while self.needs_state and found and found[-1].state is None:
            found.pop()

    def put_state(self, key: Key, state: int) -> bool:
        page = self.pages.get(key)
        if page is None or page.state is not None:
            return False
        page.state = state
        return True

    def evict_states(self, gone: set[int], *, exact: bool) -> None:
        """Apply it, and check that each was allowed to go, and a single one was the first."""
        able = [key for key, page in self.pages.items() if self.state_evictable(key, page)]
        keys = [key for key in able if self.pages[key].state in gone]
        assert len(keys) == len(gone), "a state was locked, or not there"
        if exact and keys:
            assert self.rank(keys[0]) == min(self.rank(key) for key in able)
        for key in keys:
            self.pages[key].state = None

    def state_evictable(self, key: Key, page: Page) -> bool:
        return key[0] == self.epoch and page.state is not None and not page.state_locks

    def insert(
        self,
        namespace: object,
        prompt: tuple[int, ...],
        given: list[int],
        shared: int,
        now: float,
        priority: int,
    ) -> list[int]:
        duplicates = []
        for index, key in enumerate(self.prefixes(namespace, prompt)):
            page = self.pages.setdefault(key, Page())
            page.used, page.priority = now, max(priority, page.priority)
            if index < shared:
                continue
            if page.phase[DEVICE] is ABSENT:
                page.phase[DEVICE], page.number[DEVICE] = PRESENT, given[index - shared]
            else:
                duplicates.append(given[index - shared])
        return duplicates

    def missing(self, prefix: list[Key], source: int, target: int) -> list[Key]:
        pages = self.pages
        return [
            k
            for k in prefix
            if pages[k].phase[target] is ABSENT and pages[k].phase[source] is PRESENT
        ]

    def begin(
        self, number: int, keys: list[Key], source: int, target: int, given: list[int]
    ) -> None:
        for index, key in enumerate(keys):
            page = self.pages[key]
            page.phase[target] = ARRIVING
            page.readers[source] += 1
            if target != STORAGE:
                page.number[target] = given[index]
        self.writes[number] = (keys, source, target)

    def end(self, number: int, landed: bool) -> Gone:
        freed: Gone = (set(), set(), set())
        keys, source, target = self.writes.pop(number, ([], 0, 0))
        for key in keys:
            page = self.pages[key]
            page.readers[source] -= 1
            page.phase[target] = PRESENT if landed else ABSENT
            if not landed and target != STORAGE:
                freed[target].add(page.number[target])
        return self.reap(freed)

    def lose(self, prefix: list[Key], first: int) -> int:
        """How many pages have counted as stored."""
        if first >= len(prefix):
            return 0
        after = [k for k in self.pages if k[: len(prefix[first])] == prefix[first]]
        stored = [key for key in after if self.pages[key].phase[STORAGE] is PRESENT]
        for key in stored:
            self.pages[key].phase[STORAGE] = ABSENT
        return len(stored)

    def children(self, key: Key) -> list[Page]:
        return [page for other, page in self.pages.items() if other[:-1] == key]

    def evictable(self, key: Key, tier: int) -> bool:
        page, below = self.pages[key], self.children(key)
        return (
            key[0] == self.epoch
            and page.phase[tier] is PRESENT
            and not page.readers[tier]
            and not (tier == DEVICE and page.locks)
            and all(child.phase[tier] is ABSENT for child in below)
            and (not below or page.phase[1 - tier] is PRESENT)
        )

    def candidates(self, tier: int) -> list[Key]:
        return [key for key in self.pages if self.evictable(key, tier)]

    def rank(self, key: Key) -> Any:
        return KEYS[self.policy](key, self.pages[key])  # type: ignore[no-untyped-call]

    def evict(self, tier: int, freed: list[int], *, exact: bool) -> set[int]:
        """Apply what was freed, and check that each page could go, and was the first. Returns the
        states that went.
        """
        left = set(freed)
        states: set[int] = set()
        assert len(left) == len(freed)
        while left:
            able = self.candidates(tier)
            gone = [key for key in able if self.pages[key].number[tier] in left]
            assert gone, f"pages {sorted(left)} were in use, or not leaves"
            if exact:
                assert self.rank(gone[0]) == min(self.rank(key) for key in able)
            for key in gone:
                page = self.pages[key]
                left.remove(page.number[tier])
                page.phase[tier] = ABSENT
                if page.phase[DEVICE] is ABSENT and page.phase[HOST] is ABSENT:
                    if page.state is not None:
                        states.add(page.state)
                    del self.pages[key]
        return states

    def flush(self) -> Gone:
        self.epoch += 1
        return self.reap((set(), set(), set()))

    def reap(self, freed: Gone) -> Gone:
        """Free the flushed pages that nothing at or below them uses any more."""
        held = [
            key
            for key, page in self.pages.items()
            if page.locks or any(page.readers) or ARRIVING in page.phase
        ]
        for key in [key for key in self.pages if key[0] < self.epoch]:
            if not any(other[: len(key)] == key for other in held):
                page = self.pages.pop(key)
                if page.state is not None:
                    freed[2].add(page.state)
                for tier in (DEVICE, HOST):
                    if page.phase[tier] is PRESENT:
                        freed[tier].add(page.number[tier])
        return freed

    def connected(self, tier: int) -> list[Key]:
        """Those that can be read in `tier`, as can all pages of the prompt before them."""
        found = {
            key
            for key, page in self.pages.items()
            if key[0] == self.epoch and page.phase[tier] is PRESENT
        }
        return [key for key in found if all(key[:length] in found for length in range(3, len(key)))]

    def pinned(self) -> int:
        """Pages on the device, or under way to it, at or above one in use there."""
        used = [
            k
            for k, p in self.pages.items()
            if p.locks or p.readers[DEVICE] or p.phase[DEVICE] is ARRIVING
        ]
        above = {key[:count] for key in used for count in range(3, len(key) + 1)}
        return sum(
            key in above and page.phase[DEVICE] is not ABSENT for key, page in self.pages.items()
        )

    def held(self, tier: int) -> set[int]:
        """Page numbers that the index has."""
        return {page.number[tier] for page in self.pages.values() if page.phase[tier] is not ABSENT}
