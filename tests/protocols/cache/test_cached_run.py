"""The table of cached runs, cell by cell, against rules written down apart from it."""

from __future__ import annotations

from kvflow.protocols.machines.cached_run import TABLE, RunCommand, RunKind, RunPhase
from kvflow.protocols.machines.tables import ERROR, Move
from tests.protocols.cells import cells, check_cell

P, K, C = RunPhase, RunKind, RunCommand


def expected(phase: RunPhase, kind: RunKind) -> object:
    if kind is K.GIVEN:  # pages are taken where there are none, and come back everywhere else
        return Move(P.PRESENT) if phase is P.ABSENT else Move(phase, (C.RETURN_DUPLICATE,))
    return {
        (P.ABSENT, K.BEGIN): Move(P.ARRIVING),
        (P.ARRIVING, K.ACK): Move(P.PRESENT),
        (P.ARRIVING, K.FAIL): Move(P.ABSENT, (C.FREE,)),
        (P.PRESENT, K.EVICT): Move(P.ABSENT, (C.FREE,)),
    }.get((phase, kind), ERROR)


@cells(TABLE)
def test_cell(phase: RunPhase, kind: RunKind) -> None:
    check_cell(TABLE, phase, kind, expected(phase, kind))


@cells(TABLE)
def test_pages_are_freed_when_a_run_leaves_and_only_then(phase: RunPhase, kind: RunKind) -> None:
    cell = TABLE.cell(phase, kind)
    if isinstance(cell, Move):
        assert (C.FREE in cell.commands) == (phase is not P.ABSENT and cell.phase is P.ABSENT)
