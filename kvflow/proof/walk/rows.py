"""Tables that grow on look-up: numbers for values, and rows of numbers by key."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

V = TypeVar("V", bound=Hashable)
Numbers = NDArray[np.int64]


class Interned(Generic[V]):
    """A numbering of values, with columns. A column is an array with one number for each value."""

    def __init__(self, bits: int) -> None:
        self.values: list[V] = []
        self._numbers: dict[V, int] = {}
        self._limit = 1 << bits
        self._columns: dict[Callable[[V], Any], Numbers] = {}

    def number(self, value: V) -> int:
        found = self._numbers.get(value)
        if found is None:
            if len(self.values) == self._limit:
                raise OverflowError(f"more than {self._limit} values: {value}")
            found = self._numbers[value] = len(self.values)
            self.values.append(value)
        return found

    def column(self, question: Callable[[V], Any]) -> Numbers:
        """Return the answers to `question` for all values. They are cached by `question`."""
        known = self._columns.get(question, np.empty(0, np.int64))
        # `question` may number a new value, which then needs an answer too.
        while len(known) < len(self.values):
            new = [int(question(value)) for value in self.values[len(known) :]]
            known = self._columns[question] = np.append(known, np.array(new, np.int64))
        return known


class Growing:
    """An array that grows at its end, in constant time per element on average."""

    def __init__(self, *width: int) -> None:
        self._kept: Numbers = np.empty((1024, *width), np.int64)
        self.count = 0

    def extend(self, more: Numbers) -> None:
        end = self.count + len(more)
        if end > len(self._kept):
            kept = np.empty((max(end, 2 * len(self._kept)), *self._kept.shape[1:]), np.int64)
            kept[: self.count] = self.all
            self._kept = kept
        self._kept[self.count : end] = more
        self.count = end

    @property
    def all(self) -> Numbers:
        return self._kept[: self.count]


class Index:
    """A hash table with open addressing, which numbers whole arrays of keys at once.

    A dict would need one look-up in Python for each of millions of keys.
    """

    def __init__(self, bits: int = 12) -> None:
        self._known = Growing()
        self._resize(bits)

    def _resize(self, bits: int) -> None:
        self._bits = bits
        self._keys = np.full(1 << bits, -1, np.int64)
        self._numbers = np.zeros(1 << bits, np.int64)
        if len(self):
            self._insert(self.keys, np.arange(len(self)))

    def __len__(self) -> int:
        return self._known.count

    @property
    def keys(self) -> Numbers:
        return self._known.all

    def _slots(self, keys: Numbers) -> Numbers:
        """Return the slot of each key, or the empty slot in which it belongs."""
        mask = (1 << self._bits) - 1
        # Fibonacci hashing: the multiplier is 2**64 / the golden ratio.
        hashed = (keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(
            64 - self._bits
        )
        slots = hashed.astype(np.int64)
        found = self._keys[slots]
        wrong = np.flatnonzero((found != keys) & (found >= 0))
        while len(wrong):
            slots[wrong] = (slots[wrong] + 1) & mask
            found = self._keys[slots[wrong]]
            wrong = wrong[(found != keys[wrong]) & (found >= 0)]
        return slots

    def _insert(self, keys: Numbers, numbers: Numbers) -> None:
        """Insert new keys, each of which occurs once in `keys`."""
        while len(keys):
            slots = self._slots(keys)
            # Two keys may belong in one slot. The first takes it, and the other probes again.
            _, first = np.unique(slots, return_index=True)
            self._keys[slots[first]], self._numbers[slots[first]] = keys[first], numbers[first]
            rest = np.ones(len(keys), np.bool_)
            rest[first] = False
            keys, numbers = keys[rest], numbers[rest]

    def find(self, keys: Numbers) -> Numbers:
        """Return the number of each key, or -1 for an unknown key. Keys must not be negative."""
        slots = self._slots(keys)
        return np.where(self._keys[slots] == keys, self._numbers[slots], -1)

    def number(self, keys: Numbers) -> Numbers:
        """Return the number of each key. New keys get the next numbers."""
        found = self.find(keys)
        missing = found < 0
        if missing.any():
            new = np.unique(keys[missing])
            numbers = np.arange(len(self), len(self) + len(new))
            self._known.extend(new)
            # At most half of the slots are in use, so that probing stays short.
            if len(self) > 1 << (self._bits - 1):
                self._resize(len(self).bit_length() + 2)
            else:
                self._insert(new, numbers)
            found = self.find(keys)
        return found


class Rows:
    """Rows of numbers by key. `make` computes the rows of a key when it is first looked up."""

    def __init__(self, make: Callable[[int], Sequence[tuple[int, ...]]], width: int) -> None:
        self._make = make
        self._index = Index()
        self._start, self._count, self._rows = Growing(), Growing(), Growing(width)

    def of(self, keys: Numbers) -> tuple[Numbers, Numbers]:
        """Return two arrays: for each row its key's index in `keys`, and the rows themselves."""
        numbers = self._index.number(keys)
        if len(self._index) > self._start.count:
            made = [self._make(key) for key in self._index.keys[self._start.count :].tolist()]
            counts = np.array([len(rows) for rows in made])
            self._start.extend(self._rows.count + np.cumsum(counts) - counts)
            self._count.extend(counts)
            flat = [row for rows in made for row in rows]
            if flat:
                self._rows.extend(np.array(flat, np.int64))
        counts = self._count.all[numbers]
        which = np.repeat(np.arange(len(keys)), counts)
        first = np.repeat(self._start.all[numbers] - (np.cumsum(counts) - counts), counts)
        return which, self._rows.all[first + np.arange(len(which))]
