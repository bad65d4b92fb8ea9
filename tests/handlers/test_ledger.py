"""The ledger gives pages back once, when room and loans are over, whatever the order (I1, I2)."""

from __future__ import annotations

import itertools

import pytest

from kvflow.memory.allocator import PageAllocator
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machines.decode_room import DecodePhase
from kvflow.protocols.machines.ledger import Grant, Ledger, Quarantined
from kvflow.protocols.machines.loan import LoanKey, LoanKind
from kvflow.protocols.machines.story import STORY_LINES, Story

WHY = Cause(Code.CLIENT_GONE)


class FakeLink:
    """Implements `ledger.Lender` and remembers what it was asked to do."""

    def __init__(self, source: int, rank: int) -> None:
        self.source, self.rank = source, rank
        self.aborts: list[tuple[int, int]] = []
        self.fences = 0

    def send_abort(self, room: int, grant: int, cause: Cause) -> None:
        assert cause == WHY
        self.aborts.append((room, grant))

    def await_fence(self) -> None:
        self.fences += 1


class Desk:
    """A ledger with one grant of four pages, lent to `ranks` links."""

    def __init__(self, ranks: int) -> None:
        self.at_s = 100.0
        self.pages = PageAllocator(16)
        self.ledger = Ledger(self.pages, lambda: self.at_s, quarantine_limit=4)
        self.links = [FakeLink(7, rank) for rank in range(ranks)]
        self.grant = Grant(1, 99, self.pages.take(4, "room"), "room")
        for link in self.links:
            self.ledger.lend(self.grant, link)

    def feed(self, rank: int, kind: LoanKind) -> bool:
        return self.ledger.feed(LoanKey(7, rank, 1), kind)


PROOFS = [LoanKind.LANDED, LoanKind.DRAINED, LoanKind.FENCED]


# A fence is the answer to a lost source, and losing it has ended the room before.
LIVES = [
    (proofs, end)
    for proofs in itertools.product(PROOFS, repeat=2)
    for end in (0, 1, 2)
    if LoanKind.FENCED not in proofs[:end]
]


@pytest.mark.parametrize(("proofs", "room_ends_at"), LIVES, ids=str)
def test_pages_come_home_once_everything_is_over(proofs: tuple[LoanKind, ...], room_ends_at: int) -> None:
    desk = Desk(2)
    for step in range(3):
        if step == room_ends_at:
            desk.ledger.recall(desk.grant, WHY)
            desk.ledger.room_ended(desk.grant)
        if step < 2:
            assert not desk.pages.at_rest()
            if proofs[step] is LoanKind.FENCED:
                desk.feed(step, LoanKind.SOURCE_LOST)
            desk.feed(step, proofs[step])
    assert desk.pages.at_rest() and not len(desk.ledger) and desk.ledger.quarantined_pages == 0
    assert not desk.feed(0, LoanKind.DRAINED), "late words about ended loans are nobody's"


def test_quarantine_is_counted_and_owned_apart_from_the_room() -> None:
    desk = Desk(1)
    desk.ledger.recall(desk.grant, WHY)
    desk.feed(0, LoanKind.UNPROVEN)
    desk.ledger.room_ended(desk.grant)
    (owner,) = desk.pages.owned()
    assert isinstance(owner, Quarantined) and repr(owner) == "quarantine(1)"
    assert desk.ledger.quarantined_pages == desk.pages.count_by(Quarantined) == 4
    assert desk.links[0].fences == 1 and desk.ledger.owes(desk.links[0])
    assert desk.ledger.lowest_open_grant(50) == 1
    desk.feed(0, LoanKind.FENCED)
    assert desk.pages.at_rest() and desk.ledger.lowest_open_grant(50) == 50


def test_aborts_are_repeated_until_answered_and_not_too_often() -> None:
    desk = Desk(2)
    desk.ledger.recall(desk.grant, WHY)
    assert [link.aborts for link in desk.links] == [[(99, 1)]] * 2
    desk.feed(0, LoanKind.DRAINED)
    desk.ledger.repeat(older_than_s=desk.at_s)
    assert [len(link.aborts) for link in desk.links] == [1, 1]
    desk.at_s += 1
    desk.ledger.repeat(older_than_s=desk.at_s)
    desk.ledger.repeat(older_than_s=desk.at_s)
    assert [len(link.aborts) for link in desk.links] == [1, 2]


def test_one_event_for_all_loans_of_a_link_and_no_other() -> None:
    desk = Desk(2)
    changes: list[bool] = []
    desk.ledger.recall(desk.grant, WHY)
    desk.grant.on_change = lambda: changes.append(desk.grant.doubtful)
    desk.ledger.feed_link(desk.links[0], LoanKind.SOURCE_LOST)
    assert changes == [False]
    desk.ledger.feed_link(desk.links[1], LoanKind.SOURCE_LOST)
    assert changes == [False, True]
    desk.ledger.feed_link(desk.links[0], LoanKind.SOURCE_BACK)
    assert [len(link.aborts) for link in desk.links] == [2, 1]


def test_a_story_is_bounded_and_keeps_its_beginning_and_its_end() -> None:
    story = Story()
    for at in range(1_000):
        story.tell(float(at), f"step {at}", DecodePhase.TRANSFERRING)
    lines = story.lines()
    assert len(lines) == STORY_LINES + 1
    assert lines[0].what == "step 0" and lines[-1].what == "step 999"
    assert lines[STORY_LINES // 2].what == f"{1_000 - STORY_LINES} lines left out"
    assert [line.at_s for line in lines] == sorted(line.at_s for line in lines)
