"""Many states of a world at once, as columns of numbers."""

from __future__ import annotations

from enum import IntFlag
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.proof.walk.rows import Numbers

States = NDArray[np.uint64]


class Flag(IntFlag):
    """What a row says beside where it leads."""

    POP = 1  # the first word of the queue was heard
    FAIR = 2
    TIMER = 4  # not while the same word is on its way
    CLEAR_PREFILL = 8  # what was on its way to prefill is lost
    CLEAR_DECODE = 16
    SUCCESS = 32  # decode's room has just succeeded
    BROKEN = 64


class Parts(NamedTuple):
    """States taken apart: numbers of decode, and per rank of prefill, the queue to it and the queue
    to decode.
    """

    decode: Numbers
    prefills: list[Numbers]
    to_prefill: list[Numbers]
    to_decode: list[Numbers]

    def at(self, which: Numbers) -> Parts:
        return Parts(
            self.decode[which], *([column[which] for column in columns] for columns in self[1:])
        )


class Moves(NamedTuple):
    """Steps of many states: from `source` (an index) to `state`, at a price; `text` numbers what
    happened.
    """

    source: Numbers
    state: States
    price: Numbers
    fair: NDArray[np.bool_]
    broken: NDArray[np.bool_]
    text: Numbers
