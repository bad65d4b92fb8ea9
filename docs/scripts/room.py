"""Draw the life of one room as an SVG: python -m docs.scripts.room

The drawing plays two stories on the tables of the loan and of both halves of the room. The phases
in it are the tables' answers, so an event that a table does not allow raises an error here. A test
compares the files with what this script draws.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from kvflow.protocols.machines import decode_room, loan, prefill_room
from kvflow.protocols.machines.decode_room import DecodeKind, DecodePhase
from kvflow.protocols.machines.loan import LoanKind, LoanPhase
from kvflow.protocols.machines.prefill_room import PrefillKind, PrefillPhase
from kvflow.protocols.machines.tables import Table
from kvflow.protocols.wire.messages import Abort, AbortAck, Announce, Bootstrap, ChunkDone

FOLDER = Path(__file__).parents[1] / "assets"
TITLES = ("A room that succeeds", "A room that decode aborts")

# Pixels.
BAR, LOAN_BAR, GAP, SPACE = 124, 86, 140, 6
PANEL = LOAN_BAR + SPACE + BAR + GAP + BAR
BETWEEN, MARGIN, TOP = 36, 10, 64
ROW, SLANT, ENDED = 46, 14, 28
LEFT = {"loan": 0, "decode": LOAN_BAR + SPACE, "prefill": LOAN_BAR + SPACE + BAR + GAP}
WIDTH = {"loan": LOAN_BAR, "decode": BAR, "prefill": BAR}


class Palette(NamedTuple):
    """Colours of one drawing. Fills are by what a phase means."""

    text: str
    line: str
    write: str
    active: str
    waiting: str
    ending: str
    good: str
    ended: str


LIGHT = Palette(
    text="#1f2328",
    line="#59636e",
    write="#0969da",
    active="#b6d8ff",
    waiting="#e6eaef",
    ending="#ffdf9e",
    good="#b4ecc0",
    ended="#d5dae0",
)
DARK = Palette(
    text="#f0f6fc",
    line="#9198a1",
    write="#58a6ff",
    active="#1f4a80",
    waiting="#2d333b",
    ending="#7a5200",
    good="#1f6b34",
    ended="#454c55",
)
PALETTES = {"light": LIGHT, "dark": DARK}
# Phases of different tables that have the same number are equal: a set would keep one of them.
FILLS: dict[str, tuple[IntEnum, ...]] = {
    "active": (DecodePhase.TRANSFERRING, PrefillPhase.TRANSFERRING, LoanPhase.LENT),
    "ending": (DecodePhase.DRAINING, PrefillPhase.DRAINING, LoanPhase.RECALLED),
    "good": (DecodePhase.SUCCESS, PrefillPhase.SUCCESS),
    "ended": (DecodePhase.ABORTED, PrefillPhase.ABORTED, LoanPhase.RETURNED),
}


class Segment(NamedTuple):
    column: str
    phase: IntEnum
    start: int
    end: int


class Arrow(NamedTuple):
    """A message, or a write of the data plane, from one column to the other."""

    source: str
    text: str
    y: int
    is_write: bool = False


class Story:
    """One room, played row by row on the tables."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.arrows: list[Arrow] = []
        self.y = TOP
        self._tables: dict[str, Table[Any, Any, Any]] = {
            "loan": loan.TABLE,
            "decode": decode_room.TABLE,
            "prefill": prefill_room.TABLE,
        }
        self._phases: dict[str, IntEnum] = {
            "loan": LoanPhase.ANNOUNCED,
            "decode": DecodePhase.BOOTSTRAPPING,
            "prefill": PrefillPhase.EXPECTED,
        }
        self._since = dict.fromkeys(self._phases, self.y)
        self.next_row()

    def next_row(self, rows: float = 1) -> None:
        self.y += round(ROW * rows)

    def happens(self, column: str, kind: IntEnum, *, later: int = 0) -> None:
        """Feed an event to the column's table. Raises: TransitionError, ValueError (no move)."""
        move = self._tables[column].moves[self._phases[column], kind]
        if move is None:
            raise ValueError(f"{column}: {kind.name} moves nothing in {self._phases[column].name}")
        self._close(column, self.y + later)
        self._phases[column] = move.phase

    def sends(self, source: str, message: type, more: str = "") -> None:
        self.arrows.append(Arrow(source, f"{message.__name__}{more}", self.y))

    def writes(self, text: str) -> None:
        self.arrows.append(Arrow("prefill", text, self.y, is_write=True))

    def end(self) -> None:
        for column in self._phases:
            self._close(column, self._since[column] + ENDED)

    def _close(self, column: str, y: int) -> None:
        if y > self._since[column]:
            segment = Segment(column, self._phases[column], self._since[column], y)
            last = next((one for one in reversed(self.segments) if one.column == column), None)
            if last is not None and last.phase is segment.phase:
                self.segments.remove(last)
                segment = segment._replace(start=last.start)
            self.segments.append(segment)
        self._since[column] = y


def begun() -> Story:
    """Play what both stories share: the meeting, the first chunk, and the start of the second."""
    story = Story()
    story.sends("decode", Announce)
    story.happens("prefill", PrefillKind.ANNOUNCED, later=SLANT)
    story.next_row()
    story.happens("decode", DecodeKind.LENT)
    story.happens("loan", LoanKind.LEND)
    story.sends("decode", Bootstrap, ": pages")
    story.happens("prefill", PrefillKind.MATCHED, later=SLANT)
    story.next_row()
    story.happens("prefill", PrefillKind.CHUNK_QUEUED)
    story.writes("pages of chunk 0")
    story.next_row()
    story.happens("prefill", PrefillKind.IDLE)
    story.sends("prefill", ChunkDone, " 0")
    story.happens("decode", DecodeKind.CHUNK_LANDED, later=SLANT)
    story.next_row()
    story.happens("prefill", PrefillKind.CHUNK_QUEUED)
    story.writes("pages of chunk 1")
    return story


def succeeds() -> Story:
    story = begun()
    story.next_row()
    story.happens("prefill", PrefillKind.ALL_LANDED)
    story.sends("prefill", ChunkDone, " 1, last")
    story.happens("decode", DecodeKind.ALL_LANDED, later=SLANT)
    story.happens("loan", LoanKind.LANDED, later=SLANT)
    story.end()
    return story


def aborted() -> Story:
    story = begun()
    story.next_row()
    story.happens("decode", DecodeKind.ENDED_LOCALLY)
    story.happens("loan", LoanKind.RECALL)
    story.sends("decode", Abort, ": client left")
    story.happens("prefill", PrefillKind.ABORT_RECEIVED, later=SLANT)
    story.next_row(1.5)
    story.happens("prefill", PrefillKind.DRAINED)
    story.sends("prefill", AbortAck, ": drained")
    story.happens("loan", LoanKind.DRAINED, later=SLANT)
    story.happens("decode", DecodeKind.LOANS_ENDED, later=SLANT)
    story.end()
    return story


def draw(palette: Palette) -> str:
    stories = (succeeds(), aborted())
    height = max(segment.end for story in stories for segment in story.segments) + MARGIN
    width = 2 * MARGIN + 2 * PANEL + BETWEEN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{palette.text}">',
        "<title>One room that succeeds, and one that decode aborts</title>",
        "<defs>",
        *_marker("message", palette.line, 7),
        *_marker("write", palette.write, 2.6),
        "</defs>",
    ]
    for number, (story, title) in enumerate(zip(stories, TITLES, strict=True)):
        lines += [f'<g transform="translate({MARGIN + number * (PANEL + BETWEEN)} 0)">']
        lines += [_text(PANEL / 2, 20, title, size=15, weight=600)]
        lines += [_text(LEFT[name] + WIDTH[name] / 2, TOP - 8, name, weight=600) for name in LEFT]
        lines += [line for segment in story.segments for line in _segment(segment, palette)]
        lines += [line for arrow in story.arrows for line in _arrow(arrow, palette)]
        lines += ["</g>"]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _marker(name: str, colour: str, size: float) -> list[str]:
    return [
        f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="{size}" '
        f'markerHeight="{size}" orient="auto"><path d="M0 0 10 5 0 10z" fill="{colour}"/></marker>'
    ]


def _segment(segment: Segment, palette: Palette) -> list[str]:
    names = (name for name, phases in FILLS.items() if any(segment.phase is one for one in phases))
    fill = getattr(palette, next(names, "waiting"))
    left, width = LEFT[segment.column], WIDTH[segment.column]
    words = segment.phase.name.lower().replace("_", " ")
    height = segment.end - segment.start - 2
    place = f'x="{left}" y="{segment.start}" width="{width}" height="{height}"'
    return [
        f'<rect {place} rx="4" fill="{fill}"/>',
        _text(left + width / 2, (segment.start + segment.end) / 2 + 3.5, words),
    ]


def _arrow(arrow: Arrow, palette: Palette) -> list[str]:
    decode, prefill = LEFT["decode"] + BAR + 3, LEFT["prefill"] - 3
    start, end = (decode, prefill) if arrow.source == "decode" else (prefill, decode)
    colour = palette.write if arrow.is_write else palette.line
    stroke, name, drop = (6, "write", 0) if arrow.is_write else (1.5, "message", SLANT)
    y = arrow.y + SLANT if arrow.is_write else arrow.y
    return [
        f'<path d="M{start} {y} {end} {y + drop}" stroke="{colour}" stroke-width="{stroke}" '
        f'fill="none" marker-end="url(#{name})"/>',
        _text((decode + prefill) / 2, y - (9 if arrow.is_write else 4), arrow.text),
    ]


def _text(x: float, y: float, text: str, *, size: int = 0, weight: int = 0) -> str:
    more = (f' font-size="{size}"' if size else "") + (f' font-weight="{weight}"' if weight else "")
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle"{more}>{text}</text>'


def drawings() -> dict[Path, str]:
    return {FOLDER / f"room-{name}.svg": draw(palette) for name, palette in PALETTES.items()}


if __name__ == "__main__":
    for path, drawing in drawings().items():
        path.write_text(drawing, encoding="utf-8")
