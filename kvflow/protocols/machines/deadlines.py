"""Deadlines by key, in buckets of time on a heap: what is due next is known without a look at all
that waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
GRAIN_S = 0.01


class _Bucket(Generic[K]):
    """What is due within one grain of time.

    It is put in order when it is the first: most keys are cancelled before.
    """

    __slots__ = ("keys", "order")

    def __init__(self) -> None:
        self.keys: dict[K, float] = {}
        # The latest first; what `keys` does not confirm is stale.
        self.order: list[tuple[float, K]] | None = None

    def first(self) -> tuple[float, K]:
        """The earliest; call only when there is a key."""
        if self.order is None:
            self.order = sorted(((at_s, key) for key, at_s in self.keys.items()), key=_at_s)[::-1]
        while self.keys.get(self.order[-1][1]) != self.order[-1][0]:
            self.order.pop()
        return self.order[-1]


def _at_s(entry: tuple[float, object]) -> float:
    return entry[0]


class Deadlines(Generic[K]):
    """At most one deadline per key.

    Setting and cancelling cost O(1), taking what is due O(log n) of a bucket's size.

    Rooms that end long before their deadline leave nothing behind once their bucket is empty, and
    nothing has to be cleaned up at once.
    """

    def __init__(self) -> None:
        self._where: dict[K, int] = {}
        self._buckets: dict[int, _Bucket[K]] = {}
        # Of bucket numbers; those that have become empty go when they come first.
        self._heap: list[int] = []
        # Nothing is due before; cheaper than `next_at_s`, exact after each `pop_due`.
        self.not_before_s = float("inf")

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[K]:
        """Every key that has a deadline, in no order of time."""
        return iter(self._where)

    def __contains__(self, key: K) -> bool:
        return key in self._where

    def set(self, key: K, at_s: float) -> None:
        """Make `key` due at `at_s`, instead of any earlier setting; infinity cancels it."""
        if key in self._where:
            self.cancel(key)
        if at_s == float("inf"):
            return
        if at_s < self.not_before_s:
            self.not_before_s = at_s
        number = int(at_s / GRAIN_S)
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = _Bucket()
            heapq.heappush(self._heap, number)
        bucket.keys[key] = at_s
        bucket.order = None
        self._where[key] = number

    def advance(self, key: K, at_s: float) -> None:
        """Make `key` due at `at_s`, if it is due later."""
        number = self._where.get(key)
        if number is not None and self._buckets[number].keys[key] > at_s:
            self.set(key, at_s)

    def cancel(self, key: K) -> None:
        """Forget a deadline; no error when there is none."""
        number = self._where.pop(key, None)
        if number is not None:
            del self._buckets[number].keys[key]

    def next_at_s(self) -> float:
        """When the next deadline is due; infinity when there is none."""
        bucket = self._first()
        return float("inf") if bucket is None else bucket.first()[0]

    def pop_due(self, now: float) -> K | None:
        """Take the earliest key that is due at `now`; None when none is."""
        bucket = self._first()
        if bucket is None:
            self.not_before_s = float("inf")
            return None
        self.not_before_s, key = bucket.first()
        if self.not_before_s > now:
            return None
        self.cancel(key)
        return key

    def _first(self) -> _Bucket[K] | None:
        """The earliest bucket that is not empty."""
        while self._heap:
            bucket = self._buckets[self._heap[0]]
            if bucket.keys:
                return bucket
            del self._buckets[heapq.heappop(self._heap)]
        return None
