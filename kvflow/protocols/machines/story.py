"""The bounded story of a room: what happened, when, and where it left the room. For people, never for decisions."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

STORY_LINES = 64


class Line(NamedTuple):
    """`at_s` is the node's clock; `text` is empty unless there is more to say than the event's name."""

    at_s: float
    what: str
    phase: str
    text: str


class Story:
    """The first lines of a room and then the latest ones; what falls out in between is counted."""

    __slots__ = ("_dropped", "_lines")

    def __init__(self) -> None:
        self._lines: list[tuple[float, IntEnum | str, IntEnum, object]] = []
        self._dropped = 0

    def tell(self, at_s: float, what: IntEnum | str, phase: IntEnum, detail: object = None) -> None:
        """`detail` becomes text when somebody reads it."""
        if len(self._lines) >= STORY_LINES:
            del self._lines[STORY_LINES // 2]
            self._dropped += 1
        self._lines.append((at_s, what, phase, detail))

    def lines(self) -> Sequence[Line]:
        told = [
            Line(at, w if isinstance(w, str) else w.name.lower(), p.name, "" if detail is None else str(detail))
            for at, w, p, detail in self._lines
        ]
        if self._dropped:
            middle = told[STORY_LINES // 2]
            told.insert(STORY_LINES // 2, Line(middle.at_s, f"{self._dropped} lines left out", middle.phase, ""))
        return told
