"""The residency table, cell by cell, against rules written down apart from it (I1, I2)."""

from __future__ import annotations

from kvflow.protocols.machines.residency import (
    TABLE,
    ResidencyCommand,
    ResidencyKind,
    ResidencyPhase,
)
from kvflow.protocols.machines.tables import ERROR, IGNORE, Move
from tests.protocols.cells import cells, check_cell

P, K, C = ResidencyPhase, ResidencyKind, ResidencyCommand
OWNS_PAGES = {P.RESIDENT, P.LEAVING, P.RETURNING}
MAY_OWN_SNAPSHOT = {P.AWAY, P.RETURNING}
COPIES = {P.LEAVING, P.RETURNING}


def expected(phase: ResidencyPhase, kind: ResidencyKind) -> object:
    if phase is P.ENDED:  # a copy that `close` came too late to stop may have made a snapshot
        late = Move(P.ENDED, (C.FREE_SNAPSHOT,))
        return {K.COPIED_OUT: late, K.COPIED_IN: IGNORE, K.COPY_ENDED: IGNORE, K.CLOSE: IGNORE}.get(
            kind, ERROR
        )
    if kind is K.CLOSE:
        owned = {C.STOP_COPY: COPIES, C.GIVE_BACK: OWNS_PAGES, C.FREE_SNAPSHOT: MAY_OWN_SNAPSHOT}
        return Move(P.ENDED, tuple(command for command, phases in owned.items() if phase in phases))
    return {
        (P.RESIDENT, K.RETRACT): Move(P.LEAVING),
        (P.RESIDENT, K.DROP): Move(P.AWAY, (C.GIVE_BACK,)),
        (P.LEAVING, K.COPIED_OUT): Move(P.AWAY, (C.GIVE_BACK,)),
        (P.LEAVING, K.COPY_ENDED): Move(P.RESIDENT),
        (P.AWAY, K.RESUME): Move(P.RETURNING),
        (P.RETURNING, K.COPIED_IN): Move(P.RESIDENT, (C.FREE_SNAPSHOT,)),
        (P.RETURNING, K.COPY_ENDED): Move(P.AWAY, (C.GIVE_BACK,)),
    }.get((phase, kind), ERROR)


@cells(TABLE)
def test_cell(phase: ResidencyPhase, kind: ResidencyKind) -> None:
    check_cell(TABLE, phase, kind, expected(phase, kind))


@cells(TABLE)
def test_what_is_owned_is_freed_once(phase: ResidencyPhase, kind: ResidencyKind) -> None:
    cell = TABLE.cell(phase, kind)
    if not isinstance(cell, Move):
        return
    gives_back = phase in OWNS_PAGES and cell.phase not in OWNS_PAGES
    # Pages go with the phase that owns them (I1).
    assert (C.GIVE_BACK in cell.commands) == gives_back
    if phase in MAY_OWN_SNAPSHOT and cell.phase not in MAY_OWN_SNAPSHOT:
        assert C.FREE_SNAPSHOT in cell.commands
    # Only a whole copy leaves.
    assert not (phase is P.LEAVING and cell.phase is P.AWAY and kind is not K.COPIED_OUT)
