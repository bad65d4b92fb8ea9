"""The loan table, cell by cell, against rules written down apart from it (I2)."""

from __future__ import annotations

import itertools

import pytest

from kvflow.protocols.machines.loan import TABLE, LoanCommand, LoanKind, LoanPhase
from kvflow.protocols.machines.tables import ERROR, IGNORE, Move, TransitionError
from tests.protocols.cells import cells

P, K, C = LoanPhase, LoanKind, LoanCommand
PROOF = {K.LANDED, K.DRAINED, K.FENCED}
DOUBT = {K.UNPROVEN, K.SOURCE_LOST}
LENT = (P.LENT, P.RECALLED, P.DOUBTFUL)  # the rank may write into our pages


def step(phase: LoanPhase, kind: LoanKind) -> tuple[LoanPhase, tuple[LoanCommand, ...]]:
    """A phase is the whole state of a loan."""
    move = TABLE.moves[phase, kind]
    return (phase, ()) if move is None else move


def expected(
    phase: LoanPhase, kind: LoanKind
) -> tuple[LoanPhase, tuple[LoanCommand, ...]] | object | None:
    """None: ignored. Reports may come at any time; what the ledger asks for comes in its order."""
    if phase is P.RETURNED:  # out of the ledger
        return ERROR
    if kind is K.LEND:  # pages are offered once
        return (P.LENT, ()) if phase is P.ANNOUNCED else ERROR
    if phase is P.PROVEN:  # it only waits for the room to end
        if kind is K.RECALL:
            return P.RETURNED, (C.RETURN,)
        return None if kind is K.DRAINED else ERROR
    if phase not in LENT:
        return without_pages(phase, kind)
    if kind is K.FENCED and phase is not P.DOUBTFUL:  # the source was lost before
        return ERROR
    if (kind is K.SOURCE_LOST and phase is P.LENT) or (kind is K.RECALL and phase is P.RECALLED):
        return ERROR  # the room is ended first, which recalls its loans once
    if kind is K.REPEAT_DUE and phase is not P.RECALLED:
        return ERROR
    if kind is K.SOURCE_BACK and phase is not P.DOUBTFUL:  # it was lost before
        return ERROR
    # A prefill that cannot vouch does not take that back.
    if kind is K.LANDED and phase is P.DOUBTFUL:
        return ERROR
    # Proof, but the room has not been told why its grant ended.
    if kind is K.DRAINED and phase is P.LENT:
        return P.PROVEN, ()
    if kind in PROOF:
        return P.RETURNED, (C.RETURN,)
    if kind in DOUBT:
        return None if phase is P.DOUBTFUL else (P.DOUBTFUL, ())
    if kind is K.RECALL:  # sent once; for a loan in doubt there is no one to send it to
        return (P.RECALLED, (C.SEND_ABORT,)) if phase is P.LENT else None
    # A source that is back is asked again, as one that has not answered is.
    return P.RECALLED, (C.SEND_ABORT,)


def without_pages(
    phase: LoanPhase, kind: LoanKind
) -> tuple[LoanPhase, tuple[LoanCommand, ...]] | object | None:
    """Before any page is offered no rank can write, so nothing has to be proven."""
    if phase is P.ANNOUNCED:
        if kind is K.RECALL:
            return P.WITHDRAWN, (C.SEND_ABORT,)
        return None if kind is K.DRAINED else ERROR  # its RoomFailed ends the room
    if kind is K.REPEAT_DUE:
        return P.WITHDRAWN, (C.SEND_ABORT,)
    return (P.RETURNED, (C.RETURN,)) if kind in (K.DRAINED, K.SOURCE_LOST) else ERROR


@cells(TABLE)
def test_cell(phase: LoanPhase, kind: LoanKind) -> None:
    wanted = expected(phase, kind)
    cell = TABLE.cell(phase, kind)
    if wanted is ERROR:
        assert cell is ERROR
        with pytest.raises(TransitionError):
            step(phase, kind)
        return
    assert (cell == wanted and isinstance(cell, Move)) if wanted else cell is IGNORE
    assert step(phase, kind) == (wanted or (phase, ()))


@cells(TABLE)
def test_returned_only_on_proof_and_only_once(phase: LoanPhase, kind: LoanKind) -> None:
    if TABLE.cell(phase, kind) is ERROR:
        return
    after, commands = step(phase, kind)
    returns = commands.count(C.RETURN)
    assert returns == (1 if after is P.RETURNED and phase is not P.RETURNED else 0)
    # Only what was lent needs proof.
    assert not returns or kind in PROOF or phase in (P.WITHDRAWN, P.PROVEN)


@pytest.mark.parametrize("lent", LENT, ids=lambda value: value.name)
def test_no_sequence_without_proof_returns_anything(lent: LoanPhase) -> None:
    for kinds in itertools.product(sorted(set(K) - PROOF), repeat=3):
        phase = lent
        for kind in kinds:
            if TABLE.cell(phase, kind) is ERROR:
                break
            phase, commands = step(phase, kind)
            assert phase is not P.RETURNED and C.RETURN not in commands, kinds


def test_silence_and_return_is_asked_about_until_answered() -> None:
    phase, _ = step(P.LENT, K.RECALL)
    phase, _ = step(phase, K.SOURCE_LOST)
    phase, commands = step(phase, K.SOURCE_BACK)
    assert commands == (C.SEND_ABORT,)
    for _ in range(3):
        phase, commands = step(phase, K.REPEAT_DUE)
        assert commands == (C.SEND_ABORT,)
    assert step(phase, K.DRAINED) == (P.RETURNED, (C.RETURN,))


def test_a_rank_that_ended_the_grant_keeps_its_loan_until_the_room_ends() -> None:
    """Else the grant would be settled, and a lost reason could not be sent again."""
    phase, commands = step(P.LENT, K.DRAINED)
    assert (phase, commands) == (P.PROVEN, ())
    assert step(phase, K.DRAINED) == (P.PROVEN, ())
    assert step(phase, K.RECALL) == (P.RETURNED, (C.RETURN,))


def test_an_announcement_that_is_withdrawn_needs_an_answer_but_no_proof() -> None:
    phase, commands = step(P.ANNOUNCED, K.RECALL)
    assert (phase, commands) == (P.WITHDRAWN, (C.SEND_ABORT,))
    assert step(phase, K.REPEAT_DUE) == (P.WITHDRAWN, (C.SEND_ABORT,))
    for answer in (K.DRAINED, K.SOURCE_LOST):
        assert step(phase, answer) == (P.RETURNED, (C.RETURN,))
