"""Rooms that wait for pages which all of them share: which is next when some come back.

A room that fits may pass those before it: one large room would keep all small ones waiting. It may
do so for a while only: then the oldest has what comes back to itself until it fits, or small rooms
would keep it waiting. A room that needs more than can come back without a proof, because the rest
is in quarantine, has nothing to itself: when that ends is not known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

import msgspec

K = TypeVar("K", bound=Hashable)
PASSED_FOR_S = 1.0  # others may pass a room for so long


class _Wait(NamedTuple):
    turn: int
    since_s: float


class Waits(msgspec.Struct, frozen=True):
    """Rooms that wait for pages: how many, what they want together, and for how long the oldest has
    waited. Those that are `stuck` want more than there is without what is in quarantine."""

    rooms: int
    pages: int
    stuck_rooms: int
    oldest_s: float


class Waiting(Generic[K]):
    """Keys in the order in which they came, by how many pages each wants.

    Each call costs O(distinct sizes).
    """

    def __init__(self) -> None:
        self._sizes: dict[K, int] = {}
        self._by_size: dict[int, OrderedDict[K, _Wait]] = {}
        self._turn = 0
        self.pages = 0  # that all of them want

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: K) -> bool:
        return key in self._sizes

    def add(self, key: K, wanted: int, now: float) -> None:
        """No effect on one that waits already: it keeps its turn."""
        if key not in self._sizes:
            self._turn += 1
            self._sizes[key] = wanted
            self._by_size.setdefault(wanted, OrderedDict())[key] = _Wait(self._turn, now)
            self.pages += wanted

    def discard(self, key: K) -> bool:
        """Take out a key. Returns False for one that does not wait."""
        wanted = self._sizes.pop(key, None)
        if wanted is None:
            return False
        keys = self._by_size[wanted]
        del keys[key]
        if not keys:
            del self._by_size[wanted]
        self.pages -= wanted
        return True

    def next(self, free: int, can_come_back: int, now: float) -> K | None:
        """The key that may have its pages now, out of `free` ones; `can_come_back` counts all that
        no quarantine keeps. None where every key has to wait."""
        oldest = self._oldest(can_come_back)
        if oldest is None:
            return None
        key, wait = oldest
        if now - wait.since_s >= PASSED_FOR_S:
            return key if self._sizes[key] <= free else None
        fits = self._oldest(min(free, can_come_back))
        return None if fits is None else fits[0]

    def report(self, can_come_back: int, now: float) -> Waits:
        since_s = min(
            (next(iter(keys.values())).since_s for keys in self._by_size.values()), default=now
        )
        stuck = sum(len(keys) for wanted, keys in self._by_size.items() if wanted > can_come_back)
        return Waits(len(self._sizes), self.pages, stuck, max(0.0, now - since_s))

    def clear(self) -> None:
        self._sizes.clear()
        self._by_size.clear()
        self.pages = 0

    def _oldest(self, most: int) -> tuple[K, _Wait] | None:
        """The oldest of the keys that want at most `most` pages."""
        firsts = [
            next(iter(keys.items())) for wanted, keys in self._by_size.items() if wanted <= most
        ]
        return min(firsts, key=lambda found: found[1].turn, default=None)
