"""The bounded log of a room: its events, their times, and the phases they led to.

It is for people; no decision depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

STORY_LINES = 64


class Line(NamedTuple):
    """One line of a story.

    `at_s` is by the node's clock. `text` holds details beyond the name of the event, if any.
    """

    at_s: float
    what: str
    phase: str
    text: str


class Story:
    """The first and the latest lines of a room; lines dropped in between are counted."""

    __slots__ = ("_dropped", "_lines", "follower")

    def __init__(self) -> None:
        self._lines: list[tuple[float, IntEnum | str, IntEnum, object]] = []
        self._dropped = 0
        self.follower: Callable[[Line], None] | None = None  # called with every new line

    def tell(self, at_s: float, what: IntEnum | str, phase: IntEnum, detail: object = None) -> None:
        """Add a line. `detail` becomes text only when the line is read."""
        if len(self._lines) >= STORY_LINES:
            del self._lines[STORY_LINES // 2]
            self._dropped += 1
        self._lines.append((at_s, what, phase, detail))
        if self.follower is not None:
            self.follower(_readable(at_s, what, phase, detail))

    def lines(self) -> Sequence[Line]:
        """Return the kept lines, with one that counts those left out in the middle."""
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
