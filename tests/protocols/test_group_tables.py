"""The tables of a group, one rank's and the leader's, against rules written apart from them."""

from __future__ import annotations

import itertools

from kvflow.protocols.machines.group import (
    LEADER,
    LEADER_TERMINAL,
    MEMBER,
    LeaderCommand,
    LeaderKind,
    LeaderPhase,
    MemberCommand,
    MemberKind,
    MemberPhase,
)
from kvflow.protocols.machines.tables import ERROR, IGNORE, Move
from tests.protocols.cells import cells, check_cell

M, MK, MC = MemberPhase, MemberKind, MemberCommand
L, LK, LC = LeaderPhase, LeaderKind, LeaderCommand
LIVES = (M.OPEN, M.READY, M.STARTED)  # nothing of it has failed, and some of it is to come
VOTES = {MC.VOTE_READY, MC.VOTE_DONE, MC.VOTE_FAILED}
OVER = (MK.GROUP_FAILED, MK.LEADER_LOST)


def at_a_member(phase: MemberPhase, kind: MemberKind) -> object:
    if kind in OVER and phase is not M.ENDED:
        if phase in LIVES:  # the room is closed, and drains
            return Move(M.CLOSING, (MC.CLOSE_ROOM, MC.TELL_FAILED))
        if phase is M.FAILING:  # it drains already
            return Move(M.CLOSING, (MC.TELL_FAILED,))
        return IGNORE if phase is M.CLOSING else Move(M.ENDED, (MC.TELL_FAILED, MC.END))
    if kind is MK.FAILED and phase in LIVES:
        return Move(M.FAILING, (MC.VOTE_FAILED,))
    if kind is MK.FAILED and phase in (M.FAILING, M.DRAINED, M.CLOSING):
        return IGNORE
    if kind is MK.STARTED and phase in (M.FAILING, M.DRAINED, M.CLOSING):
        return IGNORE  # decided before the failure was known
    return {
        (M.OPEN, MK.MATCHED): Move(M.READY, (MC.VOTE_READY,)),
        (M.READY, MK.STARTED): Move(M.STARTED, (MC.START,)),
        (M.STARTED, MK.LANDED): Move(M.DONE, (MC.VOTE_DONE,)),
        (M.DONE, MK.SUCCEEDED): Move(M.ENDED, (MC.TELL_SUCCESS, MC.END)),
        (M.FAILING, MK.RELEASED): Move(M.DRAINED),
        (M.CLOSING, MK.RELEASED): Move(M.ENDED, (MC.END,)),
        (M.CLOSING, MK.LANDED): Move(M.ENDED, (MC.END,)),
        (M.CLOSING, MK.MATCHED): IGNORE,
        (M.CLOSING, MK.SUCCEEDED): IGNORE,
    }.get((phase, kind), ERROR)


@cells(MEMBER)
def test_cell_of_a_member(phase: MemberPhase, kind: MemberKind) -> None:
    check_cell(MEMBER, phase, kind, at_a_member(phase, kind))


@cells(MEMBER)
def test_rules_of_a_member(phase: MemberPhase, kind: MemberKind) -> None:
    cell = MEMBER.cell(phase, kind)
    if not isinstance(cell, Move):
        return
    commands = set(cell.commands)
    assert len(commands & VOTES) <= 1
    # Its own failures are told, at once, and no others.
    assert (MC.VOTE_FAILED in commands) is (kind is MK.FAILED)
    # It starts when the group does, and never by itself.
    assert (MC.START in commands) is (kind is MK.STARTED)
    assert (MC.END in commands) is (cell.phase is M.ENDED)
    settled = commands & {MC.TELL_SUCCESS, MC.TELL_FAILED}
    # What became of it is the group's word, once.
    assert bool(settled) is (kind in (MK.SUCCEEDED, *OVER))
    assert (MC.CLOSE_ROOM in commands) is (kind in OVER and phase in LIVES)


def at_the_leader(phase: LeaderPhase, kind: LeaderKind) -> object:
    if phase in LEADER_TERMINAL:
        return ERROR  # in no table any more
    if kind in (LK.RANK_FAILED, LK.RANK_LOST, LK.CLOSED):
        return Move(L.FAILED, (LC.DECIDE_FAIL, LC.TELL_OUTCOME))
    return {
        (L.GATHERING, LK.READY): IGNORE,
        (L.GATHERING, LK.ALL_READY): Move(L.RUNNING, (LC.DECIDE_START,)),
        (L.RUNNING, LK.DONE): IGNORE,
        (L.RUNNING, LK.ALL_DONE): Move(L.SUCCEEDED, (LC.DECIDE_SUCCEED, LC.TELL_OUTCOME)),
    }.get((phase, kind), ERROR)


@cells(LEADER)
def test_cell_of_the_leader(phase: LeaderPhase, kind: LeaderKind) -> None:
    check_cell(LEADER, phase, kind, at_the_leader(phase, kind))


def test_what_is_decided_is_told_once() -> None:
    assert {L.SUCCEEDED, L.FAILED} == LEADER_TERMINAL
    for phase, kind in itertools.product(L, LK):
        cell = LEADER.cell(phase, kind)
        if isinstance(cell, Move):
            assert (LC.TELL_OUTCOME in cell.commands) is (cell.phase in LEADER_TERMINAL)
            assert len(cell.commands) == 1 + (cell.phase in LEADER_TERMINAL), "one decision"
