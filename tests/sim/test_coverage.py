"""Cells are counted as the machines look them up, and the report names what is missing."""

from __future__ import annotations

from collections import Counter

import pytest

from kvflow.proof.sim.coverage import Cell, covered, report
from kvflow.protocols.machines import loan as loans
from kvflow.protocols.machines.loan import LoanKind, LoanPhase
from kvflow.protocols.machines.tables import TransitionError


def test_visits_are_counted_while_it_is_asked_for() -> None:
    visits: Counter[Cell] = Counter()
    with covered(visits):
        move = loans.TABLE.moves[LoanPhase.LENT, LoanKind.LANDED]
        assert move is not None and move.phase is LoanPhase.RETURNED
    assert loans.TABLE.moves[LoanPhase.LENT, LoanKind.LANDED] is move
    assert visits == {("loan", LoanPhase.LENT, LoanKind.LANDED): 1}
    said = report(visits)
    assert said["visited"] == 1 and not said["error"]
    assert "loan LENT x LANDED" not in said["missing"] and "loan LENT x RECALL" in said["missing"]


def test_an_impossible_cell_is_named() -> None:
    from kvflow.protocols.machines import prefill_room
    from kvflow.protocols.machines.prefill_room import (
        PrefillEvent,
        PrefillKind,
        PrefillPhase,
        PrefillRoomState,
    )

    visits: Counter[Cell] = Counter()
    with covered(visits), pytest.raises(TransitionError):
        prefill_room.step(
            PrefillRoomState(PrefillPhase.EXPECTED), PrefillEvent(PrefillKind.DRAINED)
        )
    assert report(visits)["error"] == ["prefill EXPECTED x DRAINED"]
