"""The ledger frees pages once, when room and loans are over, whatever the order (I1, I2)."""

from __future__ import annotations

import itertools

import pytest

from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machines.ledger import Change, Lease, Ledger
from kvflow.protocols.machines.loan import LoanCommand, LoanKind, LoanPhase
from kvflow.protocols.wire.messages import GrantId, RoomId

WHY = Cause(Code.CLIENT_GONE)
FIRST = GrantId(1)


class Desk:
    """A ledger with one lease of four pages, lent to `ranks` sources."""

    def __init__(self, ranks: int) -> None:
        self.ledger: Ledger[int] = Ledger(quarantine_limit=(4,))
        self.freed = 0
        self.aborts = [0] * ranks
        self.lease: Lease[int] = Lease(FIRST, RoomId(99))
        self.lease.counts = (4,)
        for rank in range(ranks):
            self.ledger.open(self.lease, rank)
            self.feed(rank, LoanKind.LEND)

    def feed(self, rank: int, kind: LoanKind) -> None:
        self.note(self.ledger.feed(self.lease, rank, kind))

    def in_doubt(self) -> bool:
        return self.lease.doubtful

    def end_room(self) -> None:
        for change in self.ledger.recall(self.lease, WHY, 0.0):
            self.note(change)
        self.freed += self.ledger.room_ended(self.lease)

    def note(self, change: Change[int]) -> None:
        self.freed += change.freed
        self.aborts[change.source] += change.commands.count(LoanCommand.SEND_ABORT)


PROOFS = [LoanKind.LANDED, LoanKind.DRAINED, LoanKind.FENCED]


# A fence is the answer to a lost source, and losing it has ended the room before.
LIVES = [
    (proofs, end)
    for proofs in itertools.product(PROOFS, repeat=2)
    for end in (0, 1, 2)
    if LoanKind.FENCED not in proofs[:end]
]


@pytest.mark.parametrize(("proofs", "room_ends_at"), LIVES, ids=str)
def test_pages_are_freed_once_everything_is_over(
    proofs: tuple[LoanKind, ...], room_ends_at: int
) -> None:
    desk = Desk(2)
    for step in range(3):
        if step == room_ends_at:
            desk.end_room()
        if step < 2:
            assert not desk.freed
            if proofs[step] is LoanKind.FENCED:
                desk.feed(step, LoanKind.SOURCE_LOST)
            desk.feed(step, proofs[step])
    assert desk.freed == 1 and not len(desk.ledger) and desk.ledger.quarantined_pages == 0
    assert desk.ledger.find(0, FIRST) is None, "a late message about an ended loan finds nothing"


def test_a_source_settles_what_it_has_answered_and_nothing_above_an_open_loan() -> None:
    desk = Desk(2)
    second: Lease[int] = Lease(GrantId(2), RoomId(100))
    for rank in (0, 1):
        desk.ledger.open(second, rank)
    assert [desk.ledger.settled_below(rank) for rank in (0, 1)] == [1, 1]
    desk.feed(0, LoanKind.LANDED)
    assert [desk.ledger.settled_below(rank) for rank in (0, 1)] == [2, 1]
    for change in desk.ledger.recall(second, WHY, 0.0):
        desk.note(change)
    desk.ledger.feed(second, 1, LoanKind.DRAINED)
    assert [desk.ledger.settled_below(rank) for rank in (0, 1)] == [2, 1], "its first grant is open"
    desk.feed(1, LoanKind.LANDED)
    assert [desk.ledger.settled_below(rank) for rank in (0, 1)] == [2, 3]


def test_a_drained_loan_whose_room_is_open_settles_nothing() -> None:
    desk = Desk(1)
    desk.feed(0, LoanKind.DRAINED)
    assert desk.lease.loans == {0: LoanPhase.PROVEN} and desk.ledger.settled_below(0) == FIRST
    desk.end_room()
    assert desk.freed == 1 and desk.ledger.settled_below(0) == 2 and desk.aborts == [0]


def test_loans_of_a_lost_source_are_in_doubt_and_no_other() -> None:
    desk = Desk(2)
    desk.end_room()
    desk.feed(0, LoanKind.SOURCE_LOST)
    assert not desk.in_doubt()
    desk.feed(1, LoanKind.SOURCE_LOST)
    assert desk.in_doubt()
    desk.feed(0, LoanKind.SOURCE_BACK)
    assert not desk.in_doubt() and desk.aborts == [2, 1]
