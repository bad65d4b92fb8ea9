"""The loan table, cell by cell, against rules written down apart from it (I2)."""

from __future__ import annotations

import itertools

import pytest

from kvflow.protocols.machines.loan import TABLE, LoanCommand, LoanKey, LoanKind, LoanPhase, step
from kvflow.protocols.machines.tables import ERROR, IGNORE, Move, TransitionError

P, K, C = LoanPhase, LoanKind, LoanCommand
PROOF = {K.LANDED, K.DRAINED, K.FENCED}
DOUBT = {K.UNPROVEN, K.SOURCE_LOST}
CELLS = list(itertools.product(P, K))


def expected(phase: LoanPhase, kind: LoanKind) -> tuple[LoanPhase, tuple[LoanCommand, ...]] | object | None:
    """None: ignored. What other machines say comes at any time; what the ledger says comes in its order."""
    if phase is P.RETURNED:  # out of the ledger
        return ERROR
    if kind is K.FENCED and phase is not P.DOUBTFUL:  # the source was lost before
        return ERROR
    if (kind is K.SOURCE_LOST and phase is P.LENT) or (kind is K.RECALL and phase is P.RECALLED):
        return ERROR  # the room is ended first, which recalls its loans once
    if kind is K.REPEAT_DUE and phase is not P.RECALLED:
        return ERROR
    if kind is K.SOURCE_BACK and phase is not P.DOUBTFUL:  # it was lost before
        return ERROR
    if kind is K.LANDED and phase is P.DOUBTFUL:  # a prefill that cannot vouch does not take that back
        return ERROR
    if kind in PROOF:
        return P.RETURNED, (C.RETURN,)
    if kind in DOUBT:
        return None if phase is P.DOUBTFUL else (P.DOUBTFUL, (C.AWAIT_FENCE,))
    if kind is K.RECALL:  # said once; a loan in doubt has nobody to be said to
        return (P.RECALLED, (C.SEND_ABORT,)) if phase is P.LENT else None
    if kind is K.REPEAT_DUE:
        return (P.RECALLED, (C.SEND_ABORT,)) if phase is P.RECALLED else None
    assert kind is K.SOURCE_BACK  # whoever owes an answer is asked again, and from then on repeatedly
    return P.RECALLED, (C.SEND_ABORT,)


@pytest.mark.parametrize(("phase", "kind"), CELLS, ids=lambda value: value.name)
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


@pytest.mark.parametrize(("phase", "kind"), CELLS, ids=lambda value: value.name)
def test_returned_only_on_proof_and_only_once(phase: LoanPhase, kind: LoanKind) -> None:
    if TABLE.cell(phase, kind) is ERROR:
        return
    after, commands = step(phase, kind)
    returns = commands.count(C.RETURN)
    assert returns == (1 if after is P.RETURNED and phase is not P.RETURNED else 0)
    assert not returns or kind in PROOF


@pytest.mark.parametrize("phase", [P.LENT, P.RECALLED, P.DOUBTFUL], ids=lambda value: value.name)
@pytest.mark.parametrize("kinds", list(itertools.product(sorted(set(K) - PROOF), repeat=3)), ids=str)
def test_no_sequence_without_proof_returns_anything(phase: LoanPhase, kinds: tuple[LoanKind, ...]) -> None:
    for kind in kinds:
        if TABLE.cell(phase, kind) is ERROR:
            return
        phase, commands = step(phase, kind)
        assert phase is not P.RETURNED and C.RETURN not in commands


def test_silence_and_return_is_asked_about_until_answered() -> None:
    phase, _ = step(P.LENT, K.RECALL)
    phase, _ = step(phase, K.SOURCE_LOST)
    phase, commands = step(phase, K.SOURCE_BACK)
    assert commands == (C.SEND_ABORT,)
    for _ in range(3):
        phase, commands = step(phase, K.REPEAT_DUE)
        assert commands == (C.SEND_ABORT,)
    assert step(phase, K.DRAINED) == (P.RETURNED, (C.RETURN,))


def test_keys_tell_source_rank_and_grant_apart() -> None:
    assert len({LoanKey(*key) for key in itertools.product((1, 2), repeat=3)}) == 8
