"""Deadlines by key on a heap: what is due next is known without looking at everything that waits."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
_COMPACT_ABOVE = 64


class Deadlines(Generic[K]):
    """At most one deadline per key. Replaced and cancelled entries stay on the heap until due, or until most are such.

    Setting, cancelling and taking cost O(log n) amortised.
    """

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0  # breaks ties: keys need not be comparable

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: K) -> bool:
        return key in self._at

    def set(self, key: K, at_s: float) -> None:
        """Make `key` due at `at_s`, instead of any earlier setting; infinity cancels it."""
        if at_s == float("inf"):
            self.cancel(key)
            return
        self._at[key] = at_s
        self._count += 1
        heapq.heappush(self._heap, (at_s, self._count, key))
        if len(self._heap) > _COMPACT_ABOVE + 2 * len(self._at):
            self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def cancel(self, key: K) -> None:
        """Forget a deadline; no error when there is none."""
        self._at.pop(key, None)

    def next_at_s(self) -> float:
        """When the next deadline is due; infinity when there is none."""
        heap = self._heap
        while heap and self._at.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else float("inf")

    def pop_due(self, now: float) -> K | None:
        """Take the earliest key that is due at `now`; None when none is."""
        if self.next_at_s() > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._at[key]
        return key
