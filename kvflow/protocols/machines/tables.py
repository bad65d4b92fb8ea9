"""Total transition tables: for each phase and each kind of event a next phase, an explicit IGNORE,
or an ERROR.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final, Generic, NamedTuple, NoReturn, TypeVar

P = TypeVar("P", bound=IntEnum)
K = TypeVar("K", bound=IntEnum)
C = TypeVar("C", bound=IntEnum)


class Move(NamedTuple, Generic[P, C]):
    """Go to `phase`, then run `commands` in order."""

    phase: P
    commands: tuple[C, ...] = ()


class _Ignore:
    def __repr__(self) -> str:
        return "IGNORE"


class _Error:
    def __repr__(self) -> str:
        return "ERROR"


IGNORE: Final = _Ignore()  # legal and without effect: late, duplicate, or already acted on
ERROR: Final = _Error()  # cannot happen unless our own code is wrong

Cell = Move[P, C] | _Ignore | _Error


class TransitionError(AssertionError):
    """Our own code fed a machine an event its phase excludes."""


class Moves(dict[tuple[P, K], Move[P, C] | None]):
    """`moves[phase, kind]`: the move for this event, None where the table says IGNORE.

    A lookup, not a call: it is the commonest thing an endpoint does.

    Raises: TransitionError on an ERROR cell.
    """

    def __missing__(self, key: tuple[P, K]) -> NoReturn:
        phase, kind = key
        raise TransitionError(f"{kind!r} cannot happen in {phase!r}")


class Table(Generic[P, K, C]):
    """A machine's whole behaviour, looked up by phase and kind (both IntEnums counting from 0)."""

    def __init__(
        self, phases: type[P], kinds: type[K], rows: Mapping[P, Mapping[K, Cell[P, C]]]
    ) -> None:
        """Raises: ValueError when a cell is missing or a row is."""
        self.phases, self.kinds = phases, kinds
        for phase in phases:
            missing = [k.name for k in kinds if k not in rows.get(phase, {})]
            if missing:
                raise ValueError(
                    f"{phases.__name__}.{phase.name} says nothing about {', '.join(missing)}"
                )
        self.moves: Moves[P, K, C] = Moves()
        for phase in phases:
            for kind in kinds:
                self.put(phase, kind, rows[phase][kind])

    def cell(self, phase: P, kind: K) -> Cell[P, C]:
        move = self.moves.get((phase, kind), ERROR)
        return IGNORE if move is None else move

    def put(self, phase: P, kind: K, cell: Cell[P, C]) -> None:
        """Make this cell another one."""
        if isinstance(cell, _Error):
            self.moves.pop((phase, kind), None)
        else:
            self.moves[phase, kind] = None if isinstance(cell, _Ignore) else cell

    def mermaid(self) -> str:
        """The table as a Mermaid state diagram; ignored and impossible events are left out."""
        lines = ["stateDiagram-v2"]
        for phase in self.phases:
            joined: dict[str, list[str]] = {}
            for kind in self.kinds:
                cell = self.cell(phase, kind)
                if isinstance(cell, Move):
                    joined.setdefault(cell.phase.name, []).append(kind.name.lower())
            lines.extend(
                f"    {phase.name} --> {target}: {', '.join(kinds)}"
                for target, kinds in joined.items()
            )
        return "\n".join(lines)


def rest(kinds: type[K], cell: Cell[P, C]) -> dict[K, Cell[P, C]]:
    """A row in which every kind has the same cell; a row is written as
    `rest(...) | {what differs}`.
    """
    return dict.fromkeys(kinds, cell)
