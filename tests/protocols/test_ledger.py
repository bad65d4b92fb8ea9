"""The ledger of loans: counts, quarantine, and what a source has said it knows (I1, I2)."""

from __future__ import annotations

import pytest

from kvflow.protocols.errors import Cause, Code, QuarantineError
from kvflow.protocols.machines.ledger import Lease, Ledger
from kvflow.protocols.machines.loan import LoanCommand, LoanKind, LoanPhase
from kvflow.protocols.wire.messages import GrantId, RoomId

K = LoanKind
GONE, LATER = Cause(Code.CLIENT_GONE, "gone"), Cause(Code.DEADLINE, "later")


def lent(ledger: Ledger[str], grant: int, *sources: str, pages: int = 3) -> Lease[str]:
    lease: Lease[str] = Lease(GrantId(grant), RoomId(70 + grant))
    assert lease.num_pages == 0
    for source in sources:
        ledger.open(lease, source)
    lease.counts = (pages,)
    for source in sources:
        ledger.feed(lease, source, K.LEND)
    return lease


def test_a_lease_is_free_when_its_room_and_all_of_its_loans_have_ended() -> None:
    ledger: Ledger[str] = Ledger((3,))
    lease = lent(ledger, 1, "a", "b")
    changes = ledger.recall(lease, GONE, 0.0)
    assert [(c.lease, c.source, c.commands, c.freed) for c in changes] == [
        (lease, source, (LoanCommand.SEND_ABORT,), False) for source in ("a", "b")
    ]
    assert (len(ledger), ledger.quarantined_pages, ledger.owed_by("a")) == (2, 3, (1, 3))
    assert not ledger.room_ended(lease)
    first = ledger.feed(lease, "a", K.DRAINED)
    assert first.commands == (LoanCommand.RETURN,) and not first.freed
    assert (len(ledger), ledger.quarantined_pages, ledger.owed_by("a")) == (1, 3, (0, 0))
    assert ledger.owes("b")
    assert ledger.feed(lease, "b", K.DRAINED).freed
    assert (len(ledger), ledger.quarantined_pages, ledger.owes("b")) == (0, 0, False)
    assert ledger.overdue_pages == 0


def test_places_in_quarantine_are_counted_by_space() -> None:
    """A room that is recalled before it has lent anything keeps no row."""
    ledger: Ledger[str] = Ledger((9, 9, 9))
    leases = [lent(ledger, 1, "a", "b"), lent(ledger, 2, "a"), lent(ledger, 3, "a")]
    leases[0].counts, leases[1].counts, leases[2].counts = (3, 2, 1), (), (1, 4, 1)
    for lease in leases:
        ledger.recall(lease, GONE, 0.0)
        ledger.note_overdue(lease)
    assert ledger.quarantined == ledger.overdue == (4, 6, 2) and ledger.quarantined_pages == 12
    assert ledger.owed_by("a") == (3, 12) and ledger.owed_by("b") == (1, 6)
    ledger.feed(leases[1], "a", K.DRAINED)
    ledger.feed(leases[0], "a", K.DRAINED)
    assert ledger.quarantined == ledger.overdue == (4, 6, 2)
    ledger.feed(leases[0], "b", K.DRAINED)
    assert ledger.quarantined == ledger.overdue == (1, 4, 1) and ledger.overdue_pages == 6
    ledger.feed(leases[2], "a", K.DRAINED)
    assert ledger.quarantined == ledger.overdue == (0, 0, 0)


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ((4, 6, 2), ""),
        ((3, 6, 2), "4 pages are in quarantine, more than 3 (64 and 48 tokens): no new room"),
        ((99, 5, 99), "6 pages are in quarantine, more than 5 (48 and 40 tokens): no new room"),
        ((99, 99, 1), "2 pages are in quarantine, more than 1: no new room"),
    ],
)
def test_one_space_over_its_limit_is_enough(limit: tuple[int, ...], text: str) -> None:
    ledger: Ledger[str] = Ledger(limit, (16, 8, 0))
    for grant, counts in ((1, (3, 2, 1)), (2, (1, 4, 1))):
        lease = lent(ledger, grant, "a")
        lease.counts = counts
        ledger.recall(lease, GONE, 0.0)
        ledger.feed(lease, "a", K.UNPROVEN)
    assert ledger.excess.startswith(text) and bool(ledger.excess) == bool(text)


def test_loans_that_end_before_their_room_free_nothing() -> None:
    ledger: Ledger[str] = Ledger((3,))
    lease = lent(ledger, 1, "a")
    assert not ledger.feed(lease, "a", K.LANDED).freed and ledger.quarantined_pages == 0
    # Nothing is lent any more.
    assert ledger.recall(lease, GONE, 0.0) == [] and ledger.quarantined_pages == 0
    assert ledger.room_ended(lease)


def test_pages_are_in_quarantine_once_however_often_they_are_recalled() -> None:
    ledger: Ledger[str] = Ledger((5,))
    first, second = lent(ledger, 1, "a"), lent(ledger, 2, "a")
    ledger.recall(first, GONE, 0.0)
    ledger.feed(first, "a", K.UNPROVEN)
    ledger.recall(first, LATER, 0.0)
    assert ledger.quarantined_pages == 3 and ledger.owed_by("a") == (2, 3) and first.doubtful
    ledger.recall(second, GONE, 0.0)
    assert ledger.quarantined_pages == 6
    assert second.loans == {"a": LoanPhase.RECALLED} and not second.doubtful


def test_pages_count_against_the_limit_once_they_are_overdue() -> None:
    """In doubt, or said to be: recalled alone they are about to come back."""
    ledger: Ledger[str] = Ledger((5,))
    first, second = lent(ledger, 1, "a", "b"), lent(ledger, 2, "a")
    ledger.recall(first, GONE, 0.0)
    ledger.recall(second, GONE, 0.0)
    assert (ledger.quarantined_pages, ledger.overdue_pages) == (6, 0)
    ledger.feed(first, "a", K.UNPROVEN)
    ledger.feed(first, "b", K.UNPROVEN)
    assert ledger.overdue_pages == 3, "once, however many ranks are in doubt"
    ledger.check_quarantine()
    ledger.note_overdue(second)
    ledger.note_overdue(second)
    with pytest.raises(QuarantineError, match="6 pages are in quarantine, more than 5"):
        ledger.check_quarantine()
    ledger.feed(second, "a", K.DRAINED)
    assert ledger.overdue_pages == 3, "the answer came late, and ends it"
    ledger.feed(first, "a", K.FENCED)
    assert ledger.overdue_pages == 3, "the other may still write"
    ledger.feed(first, "b", K.FENCED)
    assert ledger.overdue_pages == 0 == ledger.quarantined_pages


def test_what_was_in_doubt_before_its_room_ended_is_overdue_at_once() -> None:
    ledger: Ledger[str] = Ledger((2,))
    lease = lent(ledger, 1, "a")
    ledger.feed(lease, "a", K.UNPROVEN)
    assert ledger.overdue_pages == 0, "the room has the pages"
    ledger.recall(lease, GONE, 0.0)
    assert ledger.overdue_pages == 3


def test_what_is_settled_is_what_the_source_knows_and_nothing_needs() -> None:
    ledger: Ledger[str] = Ledger((9,))
    assert ledger.settled_below("a") == 1
    leases = {grant: lent(ledger, grant, "a") for grant in (1, 2, 3)}
    assert ledger.grants_of("a") == [1, 2, 3] and ledger.find("a", GrantId(2)) is leases[2]
    ledger.feed(leases[2], "a", K.LANDED)
    assert ledger.settled_below("a") == 1, "the first is needed"
    ledger.recall(leases[1], GONE, 0.0)
    ledger.feed(leases[1], "a", K.SOURCE_LOST)
    ledger.feed(leases[1], "a", K.FENCED)
    assert ledger.settled_below("a") == 3 and ledger.find("a", GrantId(1)) is None
    ledger.feed(leases[3], "a", K.UNPROVEN)
    ledger.recall(leases[3], GONE, 0.0)
    ledger.feed(leases[3], "a", K.FENCED)
    assert ledger.settled_below("a") == 4, "it has said that it cannot vouch for it: so it knew it"
    last = lent(ledger, 4, "a")
    ledger.recall(last, GONE, 0.0)
    ledger.feed(last, "a", K.SOURCE_LOST)
    ledger.feed(last, "a", K.FENCED)
    assert ledger.settled_below("a") == 4, "no word of it has come"
    ledger.note_known("a", GrantId(3))
    assert ledger.settled_below("a") == 4, "an older word"
    ledger.note_known("a", GrantId(5))
    assert ledger.settled_below("a") == 5
    ledger.forget_source("a")
    assert ledger.settled_below("a") == 1 and not ledger._by_source


def test_ranges_that_are_settled_above_an_open_loan() -> None:
    ledger: Ledger[str] = Ledger((99,))
    leases = {grant: lent(ledger, grant, "a", *("b" * (grant % 2))) for grant in range(1, 10)}
    assert ledger.settled_above("a", 9) == (), "it has confirmed nothing"
    for grant in (2, 3, 5, 8):
        ledger.feed(leases[grant], "a", K.LANDED)
    assert ledger.settled_below("a") == 1
    assert ledger.settled_above("a", 9) == ((2, 4), (5, 6), (8, 9)), "the ninth is not known to it"
    assert [ledger.settled_above("a", 2) for _ in range(3)] == [
        ((2, 4), (5, 6)),
        ((8, 9), (2, 4)),
        ((5, 6), (8, 9)),
    ]
    assert [ledger.settled_above("a", 1) for _ in range(4)] == [
        ((2, 4),),
        ((5, 6),),
        ((8, 9),),
        ((2, 4),),
    ]
    assert ledger.settled_above("a", 3) == ((2, 4), (5, 6), (8, 9)), "all of them, in order"
    assert ledger.settled_above("b", 9) == ledger.settled_above("c", 9) == ()
    for grant in (1, 4, 6, 7, 9):
        ledger.feed(leases[grant], "a", K.LANDED)
    assert ledger.settled_below("a") == 10 and ledger.settled_above("a", 9) == ()
    ledger.forget_source("a")
    assert not ledger._told_from


def test_a_settled_range_ends_where_the_source_knows_no_more() -> None:
    ledger: Ledger[str] = Ledger((99,))
    leases = {grant: lent(ledger, grant, "a") for grant in (1, 2, 9)}
    ledger.feed(leases[2], "a", K.LANDED)
    assert ledger.settled_above("a", 9) == ((2, 3),), "the grants up to 9 are of other sources"


def test_what_is_asked_of_a_source_may_end_its_loans_on_the_way() -> None:
    ledger: Ledger[str] = Ledger((9,))
    leases = {grant: lent(ledger, grant, "a") for grant in (1, 2)}
    for grant in ledger.grants_of("a"):
        ledger.feed(leases[grant], "a", K.LANDED)
    assert len(ledger) == 0 and ledger.grants_of("b") == []
