"""No store hands out what a writer of an earlier node may still write into (I2)."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from kvflow.memory.allocator import PageAllocator
from kvflow.memory.external import ExternalPages
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import OwnershipError
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.protocols.pages.layout import PageIndices, build_layout
from kvflow.protocols.ports import PlaneAddress, ProcessIdentity, Quarantine, UnprovenLoan

FIRST, SECOND = (
    PlaneAddress("local", f"fd:{n}", ProcessIdentity("boot", "ns", n, 1)) for n in (1, 2)
)


def pages(*indices: int) -> PageIndices:
    return np.array(indices, dtype=np.int32)


def loan(lent: PageIndices, grant: int = 1, writer: PlaneAddress = FIRST) -> UnprovenLoan:
    number = writer.process.pid
    return UnprovenLoan(
        writer=writer,
        incarnation=number,
        control="tcp://there:1",
        rank=0,
        room=7,
        lease=(5, grant),
        pages=lent,
    )


def small(num_rows: int = 0) -> PagedPool:
    kinds = [StateKind("k", "uint8", (2,))] + (
        [StateKind("s", "uint8", (4,), ROW)] if num_rows else []
    )
    return PagedPool.allocate(
        build_layout(kinds, page_size=4, num_pages=8, num_rows=num_rows), shared=False
    )


class Heir:
    def __init__(self) -> None:
        self.inherited: list[UnprovenLoan] = []
        self.ended: list[tuple[int, PlaneAddress | None]] = []

    def inherit(self, quarantine: Quarantine, loans: Sequence[UnprovenLoan]) -> None:
        self.inherited += loans

    def writer_ended(self, incarnation: int, writer: PlaneAddress | None) -> None:
        self.ended.append((incarnation, writer))


def closed(pool: PagedPool, *grants: int) -> ExternalPages:
    """A node over an engine's own pages closes with one loan for each grant, of that page."""
    store = ExternalPages(8)
    for grant in grants:
        store.hold(pages(grant))
    pool.quarantine.add([loan(pages(grant), grant) for grant in grants], store)
    for grant in grants:
        store.unhold(pages(grant))
    return store


def test_the_lender_gives_up_what_it_lent_and_the_store_keeps_it() -> None:
    pool = small()
    lent = pool.pages.take(3, "room")
    pool.quarantine.add([loan(lent)], pool.pages)
    pool.pages.give_back(lent, "room")
    assert pool.pages.free_pages == 5 and [found.room for found in pool.unproven] == [7]
    mine = pool.pages.take(5, "engine")
    assert not set(mine.tolist()) & set(lent.tolist())
    pool.pages.give_back(mine, "engine")
    pool.quarantine.free((5, 1))
    pool.quarantine.free((5, 1))  # a second node has seen the same proof
    assert pool.pages.at_rest() and not pool.unproven


def test_every_later_store_withholds_them_until_they_are_free() -> None:
    pool = small()
    first = closed(pool, 2, 5)
    assert pool.pages.free_pages == 6, "the pool's own allocator, made only now"
    second, third = ExternalPages(8), PageAllocator(8)
    for store in (second, third, second):
        pool.quarantine.keep_out_of(store)
    stores = (first, second)
    assert all(store.busy(range(8)).tolist() == [2, 5] for store in stores)
    assert third.take(6, "engine").tolist() == [0, 1, 3, 4, 6, 7]
    third.give_back(pages(0, 1, 3, 4, 6, 7), "engine")
    pool.quarantine.free((5, 2))
    assert all(store.busy(range(8)).tolist() == [5] for store in stores)
    assert pool.pages.free_pages == 7
    pool.quarantine.free((5, 5))
    assert all(store.at_rest() for store in (*stores, third, pool.pages))


def test_a_store_that_an_owner_has_pages_in_keeps_them_when_they_come_back() -> None:
    pool, store = small(), PageAllocator(8)
    mine = store.take(8, "engine")
    closed(pool, 2)
    pool.quarantine.keep_out_of(store)
    store.give_back(mine, "engine")
    assert store.free_pages == 7
    pool.quarantine.free((5, 2))
    assert store.at_rest()


def test_rows_are_withheld_as_pages_are() -> None:
    pool, store = small(num_rows=2), ExternalPages(10)
    lent = pages(1, 8)  # a page, and row 0
    store.hold(lent)
    pool.quarantine.add([loan(lent)], store)
    assert (
        pool.places.take_room((2, 1), "room").tolist() == [0, 2, 9] and pool.pages.free_pages == 5
    )
    with pytest.raises(OwnershipError, match="row 0 is in quarantine"):
        pool.quarantine.check(pages(8))
    pool.quarantine.free((5, 1))
    assert pool.pages.free_pages == 6 and pool.rows.free_pages == 1


def test_a_row_out_of_quarantine_may_be_used_while_another_is_kept() -> None:
    pool, store = small(num_rows=2), ExternalPages(10)
    pool.quarantine.add([loan(pages(1, 8), 1), loan(pages(2, 9), 2)], store)
    pool.quarantine.free((5, 1))
    pool.quarantine.check(pages(1, 8))
    for place, named in ((2, "page 2"), (9, "row 1")):
        with pytest.raises(OwnershipError, match=f"{named} is in quarantine"):
            pool.quarantine.check(pages(place))


def test_the_error_names_page_writer_and_what_to_do() -> None:
    pool = small()
    pool.quarantine.check(pages(0, 1, 2))
    closed(pool, 2)
    pool.quarantine.check(pages(0, 1))
    pool.quarantine.check(pages())
    with pytest.raises(OwnershipError) as caught:
        pool.quarantine.check(pages(0, 2))
    text = str(caught.value)
    assert text.startswith(
        "page 2 is in quarantine: an earlier node over this pool lent it to prefill 00000000"
    )
    assert "tcp://there:1" in text and text.endswith("declare_dead(0x1, why)")
    pool.quarantine.free((5, 2))
    pool.quarantine.check(pages(0, 2))


def test_a_store_of_fewer_pages_is_told_what_it_cannot_know(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool, store = small(), ExternalPages(4)
    closed(pool, 6)
    pool.quarantine.keep_out_of(store)
    assert (
        "cannot withhold the pages of room 7 of an earlier node: page 6 is outside 0..3"
        in caplog.text
    )
    with pytest.raises(OwnershipError, match="page 6 is in quarantine"):
        pool.quarantine.check(pages(6))
    pool.quarantine.free((5, 6))
    assert store.at_rest()


@pytest.mark.parametrize("grants", [(6, 2, 7, 3), (6, 3)])
def test_a_store_of_fewer_pages_withholds_those_that_it_knows(grants: tuple[int, ...]) -> None:
    pool, store = small(), ExternalPages(4)
    closed(pool, *grants)
    pool.quarantine.keep_out_of(store)
    assert store.busy(range(4)).tolist() == [grant for grant in range(4) if grant in grants]
    for grant in grants:
        pool.quarantine.free((5, grant))
    assert store.at_rest()


def test_nodes_that_run_are_told_of_what_another_leaves_and_proves() -> None:
    pool, heir, late = small(), Heir(), Heir()
    store = ExternalPages(8)
    assert pool.quarantine.join(heir, store) == []
    closed(pool, 2, 3)
    assert [found.lease for found in heir.inherited] == [(5, 2), (5, 3)]
    assert store.busy([2, 3]).tolist() == [2, 3]
    assert [found.lease for found in pool.quarantine.join(late, store)] == [(5, 2), (5, 3)]
    pool.quarantine.free((5, 2))
    pool.quarantine.free((5, 3))
    pool.quarantine.forget(1, FIRST)
    assert heir.ended == late.ended == [(1, FIRST)] and not late.inherited
    for each in (heir, heir):
        pool.quarantine.leave(each)
    closed(pool, 4)
    assert len(heir.inherited) == 2 and len(late.inherited) == 1


def test_a_writer_is_forgotten_though_another_still_has_the_pages() -> None:
    pool = small()
    lent = pool.pages.take(2, "room")
    pool.quarantine.add([loan(lent), loan(lent, writer=SECOND)], pool.pages)
    pool.pages.give_back(lent, "room")
    pool.quarantine.forget(1, FIRST)
    assert [found.writer for found in pool.unproven] == [SECOND] and pool.pages.free_pages == 6
    assert "1 leases" in repr(pool.quarantine)


def test_pages_whose_last_writer_is_forgotten_are_free() -> None:
    """The word about a writer comes before a node that runs has heard of its loans."""
    pool = small()
    closed(pool, 2, 3)
    pool.quarantine.forget(1, FIRST)
    pool.quarantine.check(pages(2, 3))
    assert pool.pages.at_rest() and not pool.unproven and not pool.quarantine.leases


def test_a_loan_stands_until_its_writer_has_ended_though_its_pages_are_kept_for_another() -> None:
    pool = small()
    both = [loan(pages(2)), loan(pages(2), writer=SECOND)]
    pool.quarantine.add(both, ExternalPages(8))
    pool.quarantine.forget(1, FIRST)
    assert pool.quarantine.standing(both) == both[1:]
    pool.quarantine.free((5, 1))
    assert pool.quarantine.standing(both) == []


class FailingStore(ExternalPages):
    def withhold(self, pages: PageIndices) -> None:
        raise ValueError("no such book")

    def unhold(self, pages: PageIndices) -> None:
        super().unhold(pages)
        raise ValueError("no such book")


def test_a_store_that_fails_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pool, fails, after = small(), FailingStore(8), ExternalPages(8)
    pool.quarantine.join(Heir(), fails)
    pool.quarantine.join(Heir(), after)
    closed(pool, 6)
    assert "cannot withhold the pages of room 7 of an earlier node: no such book" in caplog.text
    assert after.busy(range(8)).tolist() == [6] and pool.pages.free_pages == 7
    pool.quarantine.free((5, 6))
    assert after.at_rest() and pool.pages.at_rest()


def test_a_store_that_fails_to_take_pages_back_costs_the_others_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class FailsLate(FailingStore):
        withhold = ExternalPages.withhold

    pool, fails, after = small(), FailsLate(8), ExternalPages(8)
    for store in (fails, after):
        pool.quarantine.join(Heir(), store)
    closed(pool, 6)
    pool.quarantine.free((5, 6))
    assert "could not take pages back from quarantine" in caplog.text
    assert after.at_rest() and pool.pages.at_rest()


def test_what_a_failing_lender_cannot_keep_is_refused_by_name() -> None:
    pool, lender = small(), FailingStore(8)
    pool.quarantine.add([loan(pages(6))], lender)
    with pytest.raises(OwnershipError, match="page 6 is in quarantine"):
        pool.quarantine.check(pages(6))
    assert pool.pages.free_pages == 7


def test_leases_that_name_one_page_are_all_waited_for() -> None:
    pool, store = small(), ExternalPages(8)
    pool.quarantine.add([loan(pages(2, 3), 1)], store)
    pool.quarantine.add([loan(pages(3, 4), 2)], store)
    assert pool.pages.free_pages == 5
    pool.quarantine.free((5, 1))
    with pytest.raises(OwnershipError, match="page 3 is in quarantine"):
        pool.quarantine.check(pages(3))
    assert pool.pages.free_pages == 6
    pool.quarantine.free((5, 2))
    assert pool.pages.at_rest() and store.at_rest()


def test_nothing_left_behind_is_nothing_done() -> None:
    pool, heir = small(), Heir()
    pool.quarantine.join(heir, pool.pages)
    pool.quarantine.add([], pool.pages)
    assert not heir.inherited and pool.pages.at_rest()


def test_another_thread_withholds_while_this_one_hands_out() -> None:
    store = PageAllocator(64)
    mine = pages(*range(0, 64, 2))
    go = threading.Barrier(2)

    def other() -> None:
        go.wait()
        for _ in range(300):
            store.withhold(mine)
            store.unhold(mine)

    thread = threading.Thread(target=other)
    thread.start()
    go.wait()
    for _ in range(300):
        taken = store.take(8, "engine")
        store.hold(taken)
        store.give_back(taken, "engine")
        store.unhold(taken)
    thread.join()
    assert store.at_rest() and sorted(store.take(64, "all").tolist()) == list(range(64))
