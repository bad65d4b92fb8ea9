"""Rooms of which one half ended before the other came: the other half is told why, instead of waiting for nobody."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

from kvflow.protocols.errors import Cause


class Half(Enum):
    ENGINE = "engine"
    DECODE = "decode"


class _Ending(NamedTuple):
    half: Half
    cause: Cause
    forget_at_s: float


class EndedHalves:
    """Bounded in number and in time; each ending is told once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._endings: OrderedDict[int, _Ending] = OrderedDict()

    def __len__(self) -> int:
        return len(self._endings)

    def remember(self, room: int, half: Half, cause: Cause, forget_at_s: float) -> None:
        self._endings.pop(room, None)
        self._endings[room] = _Ending(half, cause, forget_at_s)
        if len(self._endings) > self._limit:
            self._endings.popitem(last=False)

    def never_comes(self, room: int, half: Half, cause: Cause, forget_at_s: float) -> None:
        """`half` of `room` has ended before it came: kept for the other one, unless that has ended already."""
        if self.take(room, half) is None:
            self.remember(room, half, cause, forget_at_s)

    def take(self, room: int, half: Half) -> Cause | None:
        """Why the other half of `room` ended, for `half` that comes now; the same half coming again begins afresh."""
        ending = self._endings.pop(room, None)
        return None if ending is None or ending.half is half else ending.cause

    def expire(self, now: float) -> None:
        while self._endings and next(iter(self._endings.values())).forget_at_s < now:
            self._endings.popitem(last=False)
