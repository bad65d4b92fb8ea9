"""Deadlines by key, in buckets of time on a heap, so that the next one is found without a scan."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
GRAIN_S = 0.01


class _Bucket(Generic[K]):
    """The deadlines within one grain of time."""

    __slots__ = ("keys", "order")

    def __init__(self) -> None:
        self.keys: dict[K, float] = {}
        # Entries of `keys`, latest first, or None until they are needed: most keys are cancelled
        # before their bucket comes first, so sorting early would be wasted. An entry that `keys`
        # does not confirm is stale.
        self.order: list[tuple[float, K]] | None = None

    def first(self) -> tuple[float, K]:
        """Return the earliest deadline and its key; call only while there is a key."""
        if self.order is None:
            self.order = sorted(((at_s, key) for key, at_s in self.keys.items()), key=_at_s)[::-1]
        while self.keys.get(self.order[-1][1]) != self.order[-1][0]:
            self.order.pop()
        return self.order[-1]


def _at_s(entry: tuple[float, object]) -> float:
    return entry[0]


class Deadlines(Generic[K]):
    """A set of deadlines, at most one per key.

    Setting and cancelling a deadline cost O(1); taking one that is due costs O(log n) in the size
    of its bucket. A cancelled key is removed at once, and its bucket when it comes first.
    """

    def __init__(self) -> None:
        self._where: dict[K, int] = {}
        self._buckets: dict[int, _Bucket[K]] = {}
        # Numbers of buckets. An empty bucket stays until it comes first, because a heap cannot drop
        # an inner entry cheaply.
        self._heap: list[int] = []
        # Lower bound of every deadline: cheaper than `next_at_s`, and exact after each `pop_due`.
        self.not_before_s = float("inf")

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[K]:
        """Iterate over the keys that have a deadline, in no order of time."""
        return iter(self._where)

    def __contains__(self, key: K) -> bool:
        return key in self._where

    def set(self, key: K, at_s: float) -> None:
        """Make `key` due at `at_s`, and drop its former deadline; infinity cancels it."""
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
        """Make `key` due at `at_s` if it has a later deadline."""
        number = self._where.get(key)
        if number is not None and self._buckets[number].keys[key] > at_s:
            self.set(key, at_s)

    def cancel(self, key: K) -> None:
        """Drop the deadline of `key`, if it has one."""
        number = self._where.pop(key, None)
        if number is not None:
            del self._buckets[number].keys[key]

    def next_at_s(self) -> float:
        """Return the time of the next deadline; infinity if there is none."""
        bucket = self._first()
        return float("inf") if bucket is None else bucket.first()[0]

    def pop_due(self, now: float) -> K | None:
        """Remove and return the earliest key that is due at `now`, or None."""
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
        """Return the earliest bucket that has a key, and drop the empty ones before it."""
        while self._heap:
            bucket = self._buckets[self._heap[0]]
            if bucket.keys:
                return bucket
            del self._buckets[heapq.heappop(self._heap)]
        return None
