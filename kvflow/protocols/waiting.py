"""The queue of rooms that wait for pages of one pool.

A room that fits may pass the rooms before it, since one large room would otherwise keep all small
ones waiting. Once the oldest room has waited for `PASSED_FOR_S`, no room may pass it, since small
rooms would otherwise keep it waiting forever. A room that wants more pages of some space than are
outside quarantine may always be passed, since a quarantine may never end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

import msgspec

from kvflow.protocols.pages.spaces import Counts, counts_fit

K = TypeVar("K", bound=Hashable)
PASSED_FOR_S = 1.0  # others may pass a waiting room for this long


class _Wait(NamedTuple):
    turn: int
    since_s: float


class Waits(msgspec.Struct, frozen=True):
    """Statistics of the rooms that wait for pages: their number, the places that they want in all,
    and how long the oldest has waited. A `stuck` room wants more pages than are outside quarantine.
    """

    rooms: int
    pages: int
    stuck_rooms: int
    oldest_s: float


class Waiting(Generic[K]):
    """Waiting keys in order of arrival, each with the number of places that it wants of each space.
    `next` and `report` cost O(distinct sizes).
    """

    def __init__(self) -> None:
        self._sizes: dict[K, Counts] = {}
        # The oldest key of a size fits whenever any key of that size does, so a search looks only
        # at the first of each size.
        self._by_size: dict[Counts, OrderedDict[K, _Wait]] = {}
        self._turn = 0
        self.pages = 0  # number of places that all keys want in total

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: K) -> bool:
        return key in self._sizes

    def add(self, key: K, wanted: Counts, now: float) -> None:
        """Add a key that wants `wanted` places. A key that waits already keeps its turn."""
        if key not in self._sizes:
            self._turn += 1
            self._sizes[key] = wanted
            self._by_size.setdefault(wanted, OrderedDict())[key] = _Wait(self._turn, now)
            self.pages += sum(wanted)

    def discard(self, key: K) -> bool:
        """Remove a key. Returns False for a key that does not wait."""
        wanted = self._sizes.pop(key, None)
        if wanted is None:
            return False
        keys = self._by_size[wanted]
        del keys[key]
        if not keys:
            del self._by_size[wanted]
        self.pages -= sum(wanted)
        return True

    def next(self, free: Counts, can_come_back: Counts, now: float) -> K | None:
        """Return the key that may take its places now, or None when every key has to wait. `free`
        counts the free places, and `can_come_back` all places outside quarantine.
        """
        oldest = self._oldest(can_come_back)
        if oldest is None:
            return None
        key, wait = oldest
        if now - wait.since_s >= PASSED_FOR_S:
            return key if counts_fit(self._sizes[key], free) else None
        fits = self._oldest(tuple(map(min, free, can_come_back)))
        return None if fits is None else fits[0]

    def report(self, can_come_back: Counts, now: float) -> Waits:
        since_s = min(
            (next(iter(keys.values())).since_s for keys in self._by_size.values()), default=now
        )
        stuck = sum(
            len(keys)
            for wanted, keys in self._by_size.items()
            if not counts_fit(wanted, can_come_back)
        )
        return Waits(len(self._sizes), self.pages, stuck, max(0.0, now - since_s))

    def clear(self) -> None:
        self._sizes.clear()
        self._by_size.clear()
        self.pages = 0

    def _oldest(self, most: Counts) -> tuple[K, _Wait] | None:
        firsts = [
            next(iter(keys.items()))
            for wanted, keys in self._by_size.items()
            if counts_fit(wanted, most)
        ]
        return min(firsts, key=lambda found: found[1].turn, default=None)
