"""Small tables that grow as they are looked up: values as numbers, and rows of numbers by key."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

V = TypeVar("V", bound=Hashable)
Numbers = NDArray[np.int64]


class Interned(Generic[V]):
    """Values as small numbers, and what is asked about them as arrays."""

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
        """The answer (a number) for every value; `question` must be the same object each time."""
        known = self._columns.get(question, np.empty(0, np.int64))
        while len(known) < len(self.values):  # an answer may be a new value
            new = [int(question(value)) for value in self.values[len(known) :]]
            known = self._columns[question] = np.append(known, np.array(new, np.int64))
        return known


class Rows:
    """Rows of numbers by key, made when a key is first looked up."""

    def __init__(self, make: Callable[[int], Sequence[tuple[int, ...]]], keys: int, width: int) -> None:
        self._make = make
        self._start, self._count = np.full(keys, -1, np.int64), np.zeros(keys, np.int64)
        self._rows: Numbers = np.empty((0, width), np.int64)

    def of(self, keys: Numbers) -> tuple[Numbers, Numbers]:
        """(which key, row) for every row of every key."""
        missing = np.unique(keys[self._start[keys] < 0])
        if len(missing):
            made = [self._make(int(key)) for key in missing]
            self._count[missing] = counts = np.array([len(rows) for rows in made])
            self._start[missing] = len(self._rows) + np.cumsum(counts) - counts
            flat = [row for rows in made for row in rows]
            if flat:
                self._rows = np.concatenate([self._rows, np.array(flat, np.int64)])
        counts = self._count[keys]
        which = np.repeat(np.arange(len(keys)), counts)
        first = np.repeat(self._start[keys] - (np.cumsum(counts) - counts), counts)
        return which, self._rows[first + np.arange(len(which))]
