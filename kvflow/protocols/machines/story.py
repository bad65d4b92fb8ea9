"""The bounded story of a room: what happened, when, and where it left the room.

For people, never for decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

STORY_LINES = 64


class Line(NamedTuple):
    """`at_s` is the node's clock; `text` is empty unless there is more to say than the event's
    name.
    """

    at_s: float
    what: str
    phase: str
    text: str


class Story:
    """The first lines of a room and then the latest ones; what falls out in between is counted."""

    __slots__ = ("_dropped", "_lines", "follower")

    def __init__(self) -> None:
        self._lines: list[tuple[float, IntEnum | str, IntEnum, object]] = []
        self._dropped = 0
        self.follower: Callable[[Line], None] | None = None  # is told every line as it comes

    def tell(self, at_s: float, what: IntEnum | str, phase: IntEnum, detail: object = None) -> None:
        """`detail` becomes text when somebody reads it."""
        if len(self._lines) >= STORY_LINES:
            del self._lines[STORY_LINES // 2]
            self._dropped += 1
        self._lines.append((at_s, what, phase, detail))
        if self.follower is not None:
            self.follower(_readable(at_s, what, phase, detail))

    def lines(self) -> Sequence[Line]:
        told = [_readable(*line) for line in self._lines]
        if self._dropped:
            middle = told[STORY_LINES // 2]
            told.insert(
                STORY_LINES // 2,
                Line(middle.at_s, f"{self._dropped} lines left out", middle.phase, ""),
            )
        return told


def _readable(at_s: float, what: IntEnum | str, phase: IntEnum, detail: object) -> Line:
    name = what if isinstance(what, str) else what.name.lower()
    return Line(at_s, name, phase.name, "" if detail is None else str(detail))
