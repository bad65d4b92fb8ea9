"""Loans that earlier nodes over the same pool left behind: a lost writer may still reach the pages,
although the node that lent them is closed.

The next node over the pool, prefill or decode, takes these loans into its own ledger, without a
link to their writers. Like every loan in doubt, they end when the data plane's fence proves that
the writer ended, or when an operator declares the writer dead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvflow.protocols.commands import FreePages, StopEarlierWatch, WatchEarlierWriter
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machines.ledger import Lease, Ledger
from kvflow.protocols.machines.loan import LoanKind
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import LeaseId, PlaneAddress, UnprovenLoan
from kvflow.protocols.wire.messages import GrantId, Incarnation, RoomId

_CAUSE = Cause(
    Code.PEER_LOST, "an earlier node over this pool closed without proof that the writer has ended"
)


class EarlierWriter:
    """A writer to which an earlier node lent pages."""

    __slots__ = ("address", "control", "incarnation", "number", "rank")

    def __init__(self, number: int, loan: UnprovenLoan) -> None:
        self.number, self.address = number, loan.writer
        self.incarnation = Incarnation(loan.incarnation)
        self.control, self.rank = loan.control, loan.rank

    def __repr__(self) -> str:
        return f"<EarlierWriter {self.incarnation:016x} at {self.control}>"


class EarlierLoans:
    """The part of an endpoint that decides when loans of earlier nodes end."""

    def __init__(
        self,
        ledger: Ledger[Any],
        outbox: list[Any],
        take_grant: Callable[[], GrantId],
        layout: PoolLayout,
    ) -> None:
        """Share `ledger` and `outbox` with the endpoint, whose pool has the given layout. The loans
        added by this class have `EarlierWriter`s as sources, and the endpoint's own loans have
        links. Neither part reads the other's loans.
        """
        self._ledger, self._outbox, self._take_grant = ledger, outbox, take_grant
        self._layout = layout
        self._by_name: dict[tuple[int, PlaneAddress | None], EarlierWriter] = {}
        self.writers: dict[int, EarlierWriter] = {}  # writers that still have loans, by number
        self._last_number = 0
        # A dead writer may have thousands of loans. They wait in this queue, and each tick ends a
        # few, so that the event loop stays free.
        self.tasks: deque[tuple[EarlierWriter, deque[GrantId]]] = deque()

    def inherit(
        self, loans: Sequence[UnprovenLoan], layout: PoolLayout | None = None
    ) -> dict[GrantId, LeaseId]:
        """Take over `loans`, and issue one `WatchEarlierWriter` for every new writer that has an
        address. Returns the id of each lease by its new grant, which `FreePages` will name.
        `layout` is that of the pool with their pages, if it is not the one of this node.
        """
        layout = layout or self._layout
        leases: dict[LeaseId, dict[EarlierWriter, UnprovenLoan]] = {}
        for loan in loans:
            leases.setdefault(loan.lease, {})[self._writer(loan)] = loan
        granted: dict[GrantId, LeaseId] = {}
        for name, by_writer in leases.items():
            loan = next(iter(by_writer.values()))
            lease: Lease[EarlierWriter] = Lease(self._take_grant(), RoomId(loan.room))
            lease.counts = layout.counted(loan.pages)
            self._ledger.inherit(lease, by_writer, _CAUSE)
            granted[lease.grant] = name
        return granted

    def _writer(self, loan: UnprovenLoan) -> EarlierWriter:
        writer = self._by_name.get((loan.incarnation, loan.writer))
        if writer is None:
            self._last_number += 1
            writer = EarlierWriter(self._last_number, loan)
            self.writers[writer.number] = self._by_name[loan.incarnation, loan.writer] = writer
            if writer.address is not None:
                self._outbox.append(WatchEarlierWriter(writer.number, writer.address))
        return writer

    def find(self, incarnation: int, address: PlaneAddress | None) -> EarlierWriter | None:
        return self._by_name.get((incarnation, address))

    def of(self, incarnation: int) -> list[EarlierWriter]:
        return [writer for writer in self.writers.values() if writer.incarnation == incarnation]

    def owed_by(self, writer: EarlierWriter) -> tuple[int, int]:
        """Return how many loans a writer has, and how many pages they keep in quarantine."""
        return self._ledger.owed_by(writer)

    def declare_dead(self, incarnation: int) -> tuple[int, int]:
        """End all loans of an incarnation that an operator declares dead. Returns how many loans
        end, and how many pages they keep in quarantine.
        """
        loans = pages = 0
        for writer in self.of(incarnation):
            owed = self.owed_by(writer)
            loans, pages = loans + owed[0], pages + owed[1]
            self._end(writer)
        return loans, pages

    def writer_died(self, number: int) -> None:
        """Report the data plane's fence: the writer's loans end over the next ticks."""
        if (writer := self.writers.get(number)) is not None:
            self._end(writer)

    def _end(self, writer: EarlierWriter) -> None:
        """Queue the end of a writer's loans. Idempotent."""
        if all(other is not writer for other, _ in self.tasks):
            self.tasks.append((writer, deque(self._ledger.grants_of(writer))))

    def work(self, limit: float) -> None:
        """End up to `limit` loans of dead writers."""
        while self.tasks and limit > 0:
            limit -= 1
            writer, grants = self.tasks[0]
            self._end_loan(writer, grants.popleft())
            if not grants:
                self.tasks.popleft()
                self._drop_if_idle(writer)

    def _end_loan(self, writer: EarlierWriter, grant: GrantId) -> None:
        lease = self._ledger.find(writer, grant)
        assert lease is not None
        if self._ledger.feed(lease, writer, LoanKind.FENCED).freed:
            self._outbox.append(FreePages(grant))

    def _drop_if_idle(self, writer: EarlierWriter) -> None:
        """Forget a writer without loans. If another node closed meanwhile, and left more
        loans of this writer, end those first.
        """
        if self._ledger.owes(writer):
            self._end(writer)
            return
        self._ledger.forget_source(writer)
        del self.writers[writer.number], self._by_name[writer.incarnation, writer.address]
        self._outbox.append(StopEarlierWatch(writer.number, writer.incarnation, writer.address))
