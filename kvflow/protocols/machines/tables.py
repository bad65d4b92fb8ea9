"""Total transition tables: each pair of a phase and a kind has a next phase, IGNORE, or ERROR."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final, Generic, NamedTuple, NoReturn, TypeVar

P = TypeVar("P", bound=IntEnum)
K = TypeVar("K", bound=IntEnum)
C = TypeVar("C", bound=IntEnum)


class Move(NamedTuple, Generic[P, C]):
    """A table cell: go to `phase`, then run `commands` in order."""

    phase: P
    commands: tuple[C, ...] = ()


class _Ignore:
    def __repr__(self) -> str:
        return "IGNORE"


class _Error:
    def __repr__(self) -> str:
        return "ERROR"


IGNORE: Final = _Ignore()  # legal and without effect: late, repeated, or already acted on
ERROR: Final = _Error()  # impossible unless our own code is wrong

Cell = Move[P, C] | _Ignore | _Error


class TransitionError(AssertionError):
    """Raised when our own code feeds a machine an event that its phase excludes."""


class Moves(dict[tuple[P, K], Move[P, C] | None]):
    """Moves by phase and kind, None for IGNORE. Raises: TransitionError on an ERROR cell."""

    # This is a dict rather than a method, because endpoints look up a move for every event, and a
    # dict lookup makes no Python call.

    def __missing__(self, key: tuple[P, K]) -> NoReturn:
        phase, kind = key
        raise TransitionError(f"{kind!r} cannot happen in {phase!r}")


class Table(Generic[P, K, C]):
    """The whole behaviour of a machine, by phase and kind (both IntEnums that count from 0).

    Raises: ValueError if a row or a cell is missing.
    """

    def __init__(
        self, phases: type[P], kinds: type[K], rows: Mapping[P, Mapping[K, Cell[P, C]]]
    ) -> None:
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
        """Return the Move, IGNORE or ERROR for a phase and a kind."""
        move = self.moves.get((phase, kind), ERROR)
        return IGNORE if move is None else move

    def put(self, phase: P, kind: K, cell: Cell[P, C]) -> None:
        """Set or replace a cell. Simulators plant bugs with this method."""
        if isinstance(cell, _Error):
            self.moves.pop((phase, kind), None)
        else:
            self.moves[phase, kind] = None if isinstance(cell, _Ignore) else cell

    def mermaid(self) -> str:
        """Return the table as a Mermaid state diagram, without ignored and impossible events."""
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
    """Return a row in which every kind has the same cell. Callers then override some cells."""
    return dict.fromkeys(kinds, cell)
