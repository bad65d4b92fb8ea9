"""Columns of numbers that represent many states of a world at once."""

from __future__ import annotations

from enum import IntFlag
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.proof.walk.rows import Numbers

States = NDArray[np.uint64]


class Flag(IntFlag):
    """Properties of a row, apart from the state that it leads to."""

    POP = 1  # takes the first word of the queue
    FAIR = 2
    TIMER = 4  # left out while the same word is queued
    CLEAR_PREFILL = 8  # loses the words on their way to prefill
    CLEAR_DECODE = 16  # loses the words on their way to decode
    SUCCESS = 32
    BROKEN = 64


class Parts(NamedTuple):
    """States taken apart into numbers. The lists have one column for each rank."""

    decode: Numbers
    prefills: list[Numbers]
    to_prefill: list[Numbers]
    to_decode: list[Numbers]

    def at(self, which: Numbers) -> Parts:
        return Parts(
            self.decode[which], *([column[which] for column in columns] for columns in self[1:])
        )


class Moves(NamedTuple):
    """Steps from many states: for each, the index of its state and the number of its text."""

    source: Numbers
    state: States
    price: Numbers
    fair: NDArray[np.bool_]
    broken: NDArray[np.bool_]
    text: Numbers
