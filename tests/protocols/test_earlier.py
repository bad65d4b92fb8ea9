"""Loans of earlier nodes over a pool: one watch a writer, and an end by proof alone (I2)."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from kvflow.protocols.commands import FreePages, StopEarlierWatch, WatchEarlierWriter
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.decode.links import DecodeIdentity
from kvflow.protocols.earlier import EarlierLoans
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.machinery import TICK_WORK
from kvflow.protocols.machines.ledger import Ledger
from kvflow.protocols.machines.loan import LoanPhase
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.ports import PlaneAddress, ProcessIdentity, UnprovenLoan
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.prefill.peers import PrefillIdentity
from kvflow.protocols.wire.messages import GrantId, Incarnation, Rank
from kvflow.telemetry.counters import Counts

LENDER = 77
FIRST, SECOND = (
    PlaneAddress("local", f"fd:{n}", ProcessIdentity("boot", "ns", n, 1)) for n in (1, 2)
)
LAYOUT = build_layout([("k", "uint8", (2,))], page_size=4, num_pages=64)


def loan(
    grant: int, writer: PlaneAddress | None = FIRST, incarnation: int = 11, pages: int = 2
) -> UnprovenLoan:
    lent = np.arange(pages, dtype=np.int32) + 2 * grant
    return UnprovenLoan(
        writer=writer,
        incarnation=incarnation,
        control="tcp://there:1",
        rank=0,
        room=70 + grant,
        lease=(LENDER, grant),
        pages=lent,
    )


class Desk:
    """The earlier loans of one endpoint, whose grants begin at 5."""

    def __init__(self, *loans: UnprovenLoan) -> None:
        self.ledger: Ledger[Any] = Ledger((100,))
        self.outbox: list[Any] = []
        grants = itertools.count(5)
        self.earlier = EarlierLoans(self.ledger, self.outbox, lambda: GrantId(next(grants)), LAYOUT)
        self.granted = self.earlier.inherit(loans)

    def asked(self, work: float = float("inf")) -> list[Any]:
        self.earlier.work(work)
        found = self.outbox[:]
        self.outbox.clear()
        return found


def test_a_writer_is_watched_once_whatever_it_owes() -> None:
    desk = Desk(loan(1), loan(2), loan(3, SECOND, 12), loan(4))
    assert desk.asked() == [WatchEarlierWriter(1, FIRST), WatchEarlierWriter(2, SECOND)]
    assert desk.granted == {5: (LENDER, 1), 6: (LENDER, 2), 7: (LENDER, 3), 8: (LENDER, 4)}
    assert (len(desk.ledger), desk.ledger.quarantined_pages) == (4, 8)
    assert desk.ledger.quarantined == desk.ledger.overdue == (8,)
    owed = [desk.earlier.owed_by(writer) for writer in desk.earlier.writers.values()]
    assert owed == [(3, 6), (1, 2)]
    writer = desk.earlier.writers[1]
    assert (writer.incarnation, writer.control, writer.rank) == (11, "tcp://there:1", 0)
    assert desk.earlier.find(11, FIRST) is writer and desk.earlier.find(11, SECOND) is None
    assert "EarlierWriter 000000000000000b at tcp://there:1" in repr(writer)


def test_they_are_in_doubt_and_only_their_own_writer_ends_them() -> None:
    desk = Desk(loan(1), loan(2, SECOND, 12))
    lease = desk.ledger.find(desk.earlier.writers[1], GrantId(5))
    assert lease is not None
    assert lease.doubtful
    assert set(lease.loans.values()) == {LoanPhase.DOUBTFUL}
    assert lease.room == 71
    desk.asked()
    desk.earlier.writer_died(1)
    assert desk.asked() == [FreePages(GrantId(5)), StopEarlierWatch(1, Incarnation(11), FIRST)]
    assert list(desk.earlier.writers) == [2]
    assert desk.ledger.quarantined_pages == 2
    assert len(desk.ledger) == 1
    desk.earlier.writer_died(1)  # a second word for it
    assert desk.asked() == []
    desk.earlier.writer_died(2)
    desk.earlier.writer_died(2)
    assert desk.asked() == [FreePages(GrantId(6)), StopEarlierWatch(2, Incarnation(12), SECOND)]
    assert desk.ledger.quarantined_pages == 0 and not desk.earlier.writers


def test_pages_of_several_ranks_are_counted_once_and_wait_for_every_one() -> None:
    desk = Desk(loan(1), loan(1, SECOND, 12))
    assert desk.granted == {5: (LENDER, 1)}
    assert (len(desk.ledger), desk.ledger.quarantined_pages) == (2, 2)
    desk.asked()
    desk.earlier.writer_died(2)
    assert desk.asked() == [StopEarlierWatch(2, Incarnation(12), SECOND)]
    assert desk.ledger.quarantined_pages == 2
    desk.earlier.writer_died(1)
    assert desk.asked() == [FreePages(GrantId(5)), StopEarlierWatch(1, Incarnation(11), FIRST)]


def test_two_writers_of_one_incarnation_are_two() -> None:
    """A prefill may name another address to another decode."""
    desk = Desk(loan(1), loan(2, SECOND))
    assert [type(command) for command in desk.asked()] == [WatchEarlierWriter, WatchEarlierWriter]
    desk.earlier.writer_died(2)
    assert desk.asked() == [FreePages(GrantId(6)), StopEarlierWatch(2, Incarnation(11), SECOND)]
    assert desk.earlier.declare_dead(11) == (1, 2)
    assert desk.asked()[0] == FreePages(GrantId(5))


def test_one_that_named_no_address_ends_by_a_word_alone() -> None:
    desk = Desk(loan(1, None))
    assert desk.asked() == []
    assert desk.earlier.declare_dead(11) == (1, 2) and desk.earlier.declare_dead(12) == (0, 0)
    assert desk.asked() == [FreePages(GrantId(5)), StopEarlierWatch(1, Incarnation(11), None)]


def test_the_end_of_many_is_cut_up() -> None:
    desk = Desk(*(loan(n) for n in range(10)))
    desk.asked()
    desk.earlier.writer_died(1)
    assert [len(desk.asked(work)) for work in (0, 4, 4)] == [0, 4, 4] and desk.earlier.tasks
    assert [type(command) for command in desk.asked(4)] == [FreePages, FreePages, StopEarlierWatch]
    assert not desk.earlier.tasks


def test_what_comes_while_others_end_ends_as_well() -> None:
    """Another node over the pool closes when the writer's death is known already."""
    desk = Desk(loan(1), loan(2))
    desk.asked()
    desk.earlier.writer_died(1)
    assert desk.asked(1) == [FreePages(GrantId(5))]
    assert desk.earlier.inherit([loan(3)]) == {7: (LENDER, 3)}
    stop = StopEarlierWatch(1, Incarnation(11), FIRST)
    assert desk.asked() == [FreePages(GrantId(6)), FreePages(GrantId(7)), stop]
    assert desk.earlier.inherit([loan(4)]) and desk.asked() == [WatchEarlierWriter(2, FIRST)]


# --- in the endpoints


def decode() -> DecodeEndpoint:
    return DecodeEndpoint(DecodeIdentity(Incarnation(1), LAYOUT, SECOND), observer=Counts())


def prefill() -> PrefillEndpoint:
    return PrefillEndpoint(
        PrefillIdentity(Incarnation(1), Rank(0), LAYOUT, SECOND), observer=Counts()
    )


@pytest.mark.parametrize("make", [decode, prefill])
def test_either_endpoint_works_it_off_tick_by_tick(make: Any) -> None:
    endpoint, count = make(), 2 * TICK_WORK + 1
    endpoint.earlier.inherit(
        [loan(n % 32) for n in range(1)] + [loan(n, pages=0) for n in range(1, count)]
    )
    assert endpoint.core.ledger.quarantined_pages == 2 and len(endpoint.core.ledger) == count
    assert len(endpoint.commands()) == 1 and endpoint.next_tick() > 0
    endpoint.earlier.writer_died(1)
    freed = []
    while endpoint.next_tick() == float("-inf"):
        endpoint.tick(0.0)
        freed.append(len(endpoint.commands()))
    assert freed == [TICK_WORK, TICK_WORK, 2] and not len(endpoint.core.ledger)


@pytest.mark.parametrize("make", [decode, prefill])
def test_an_operator_declares_it_dead_at_either_endpoint(make: Any) -> None:
    endpoint = make()
    endpoint.earlier.inherit([loan(1), loan(2), loan(3, SECOND, 12)])
    endpoint.commands()
    word = {"why": "its machine is off", "now": 0.0} if make is decode else {}
    with pytest.raises(MisuseError, match="no prefill 000000000000000d"):
        endpoint.declare_dead(Incarnation(13), **word)
    assert endpoint.declare_dead(Incarnation(11), **word) == (2, 4)
    endpoint.tick(0.0)
    kinds = [type(command) for command in endpoint.commands()]
    assert kinds == [FreePages, FreePages, StopEarlierWatch]
    assert endpoint.core.observer.declared_dead == 1 and endpoint.core.ledger.quarantined_pages == 2
    assert endpoint.declare_dead(Incarnation(12), **word) == (1, 2)
    assert endpoint.core.observer.declared_dead == 2


def test_grants_of_earlier_loans_are_not_a_room_s() -> None:
    endpoint = decode()
    assert list(endpoint.earlier.inherit([loan(1)])) == [1] and endpoint.core.next_grant == 2


def test_a_decode_that_closes_ends_what_is_proven_first() -> None:
    endpoint = decode()
    endpoint.earlier.inherit([loan(n, pages=0) for n in range(2 * TICK_WORK)])
    endpoint.commands()
    endpoint.earlier.writer_died(1)
    endpoint.close(0.0)
    assert not endpoint.earlier.writers and len(endpoint.commands()) == 2 * TICK_WORK + 1


def test_a_loan_is_what_it_is_and_no_other() -> None:
    """Loans are told apart although arrays of pages cannot be compared."""
    one = loan(1)
    assert one != loan(1)
    assert one in [loan(1), one]
    assert msgspec.structs.replace(one, room=3).room == 3
