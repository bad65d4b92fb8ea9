"""The ledger of loans: pages in the hands of prefill ranks.

Apart from rooms, which end in time; loans end on proof.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from kvflow.protocols.errors import Cause, QuarantineError
from kvflow.protocols.machines.loan import TABLE, LoanCommand, LoanKind, LoanPhase
from kvflow.protocols.machines.ranges import Range
from kvflow.protocols.wire.messages import GrantId, RoomId

S = TypeVar("S", bound=Hashable)


class Lease(Generic[S]):
    """What one room holds: pages lent to every rank under one grant; they are free when the room
    and all loans end.
    """

    __slots__ = (
        "cause",
        "grant",
        "loans",
        "num_pages",
        "overdue",
        "recalled_at_s",
        "room",
        "room_ended",
    )

    def __init__(self, grant: GrantId, room: RoomId) -> None:
        self.grant, self.room = grant, room
        self.num_pages = 0
        self.loans: dict[S, LoanPhase] = {}  # those that have not ended, by source
        self.room_ended = False
        self.cause: Cause | None = None  # set when the loans are recalled
        self.recalled_at_s = 0.0
        # Recalled, and some rank is in doubt or has left its Abort unanswered for too long.
        self.overdue = False

    @property
    def doubtful(self) -> bool:
        """Every loan that has not ended is in doubt."""
        return all(phase is LoanPhase.DOUBTFUL for phase in self.loans.values())


class Change(msgspec.Struct, Generic[S], frozen=True, gc=False):
    """One loan has moved on, and this is to be done about it."""

    lease: Lease[S]
    source: S
    commands: tuple[LoanCommand, ...]
    freed: bool  # with this loan the last claim on the lease's pages has ended


class Ledger(Generic[S]):
    """Runs the loan machine.

    A source is the link to one prefill rank; nothing here calls anything back.
    """

    def __init__(self, quarantine_limit: int) -> None:
        """`quarantine_limit`: pages in quarantine that are overdue; with more no room is opened."""
        self._by_source: dict[S, OrderedDict[GrantId, Lease[S]]] = {}
        # The highest grant that each source has said it knows of.
        self._acknowledged: dict[S, GrantId] = {}
        self._told_from: dict[S, int] = {}  # where the next of many settled ranges begin
        self._count = 0
        self.quarantined_pages, self.quarantine_limit = 0, quarantine_limit
        self.quarantined_leases = 0  # with pages; in a pool with rows one of those is a row
        # Part of the quarantine. An Abort that a healthy rank is about to answer does not keep
        # others' rooms out.
        self.overdue_pages = 0

    def __len__(self) -> int:
        """Loans that have not ended."""
        return self._count

    def check_quarantine(self) -> None:
        """Raises: QuarantineError while more than its share of the pool is overdue."""
        if self.overdue_pages > self.quarantine_limit:
            raise QuarantineError(self.overdue_pages, self.quarantine_limit)

    @property
    def excess(self) -> str:
        """Why no room is opened, in words; empty while the quarantine is within its share of the
        pool.
        """
        try:
            self.check_quarantine()
        except QuarantineError as error:
            return str(error)
        return ""

    def open(self, lease: Lease[S], source: S) -> None:
        """A loan that is announced; its pages follow with LEND.

        Grants are opened in ascending order.
        """
        lease.loans[source] = LoanPhase.ANNOUNCED
        loans = self._by_source.get(source)
        if loans is None:
            loans = self._by_source[source] = OrderedDict()
        loans[lease.grant] = lease
        self._count += 1

    def inherit(self, lease: Lease[S], sources: Iterable[S], cause: Cause) -> None:
        """The loans of a room of an earlier node over the pool: every one is in doubt from the
        beginning, and the pages are in quarantine."""
        for source in sources:
            self.open(lease, source)
            lease.loans[source] = LoanPhase.DOUBTFUL
        lease.cause, lease.room_ended = cause, True
        self.quarantined_pages += lease.num_pages
        self.quarantined_leases += bool(lease.num_pages)
        self.note_overdue(lease)

    def note_overdue(self, lease: Lease[S]) -> None:
        """Count the pages of a recalled lease, on which loans are left, as overdue. Idempotent."""
        if not lease.overdue:
            lease.overdue = True
            self.overdue_pages += lease.num_pages

    def find(self, source: S, grant: GrantId) -> Lease[S] | None:
        """The lease of a loan that has not ended."""
        return self._by_source.get(source, _NONE).get(grant)

    def grants_of(self, source: S) -> list[GrantId]:
        """Every grant under which a loan of one source has not ended, ascending."""
        return list(self._by_source.get(source, _NONE))

    def owes(self, source: S) -> bool:
        """Some loan of this source has not ended."""
        return bool(self._by_source.get(source))

    def awaits(self, source: S) -> bool:
        """Some loan of this source is neither ended nor in doubt: it has not answered for it."""
        leases = self._by_source.get(source, _NONE).values()
        return any(lease.loans[source] is not LoanPhase.DOUBTFUL for lease in leases)

    def owed_by(self, source: S) -> tuple[int, int]:
        """Loans of this source that have not ended, and pages it keeps in quarantine."""
        leases = self._by_source.get(source, _NONE).values()
        return len(leases), sum(lease.num_pages for lease in leases if lease.cause is not None)

    def settled_below(self, source: S) -> GrantId:
        """Nothing of this source's loans below this grant is needed any more, and the source knows
        all of them.
        """
        confirmed = GrantId(self._acknowledged.get(source, 0) + 1)
        loans = self._by_source.get(source)
        return min(confirmed, next(iter(loans))) if loans else confirmed

    def settled_above(self, source: S, most: int) -> tuple[Range, ...]:
        """The same for ranges above the first loan that has not ended: `most` of them, and the next
        time others.
        """
        confirmed = self._acknowledged.get(source, 0) + 1
        loans = self._by_source.get(source)
        if not loans or next(iter(loans)) + 1 >= confirmed:
            return ()
        open_ = np.fromiter(loans, np.int64, len(loans))
        starts, ends = open_ + 1, np.append(open_[1:], confirmed)
        np.minimum(ends, confirmed, out=ends)
        filled = starts < ends
        starts, ends = starts[filled], ends[filled]
        if len(starts) > most:
            turn = np.arange(most) + np.searchsorted(starts, self._told_from.get(source, 0))
            starts, ends = starts.take(turn, mode="wrap"), ends.take(turn, mode="wrap")
            self._told_from[source] = int(ends[-1])
        return tuple(
            (GrantId(start), GrantId(end))
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        )

    def note_known(self, source: S, below: GrantId) -> None:
        """The source has confirmed that it knows of every grant below this one; see
        `Register.fresh_from`.
        """
        self._acknowledged[source] = max(
            self._acknowledged.get(source, GrantId(0)), GrantId(below - 1)
        )

    def forget_source(self, source: S) -> None:
        """The link is gone for good, and owes nothing."""
        self._by_source.pop(source, None)
        self._acknowledged.pop(source, None)
        self._told_from.pop(source, None)

    def feed(self, lease: Lease[S], source: S, kind: LoanKind) -> Change[S]:
        """One event for one loan that has not ended."""
        move = TABLE.moves[lease.loans[source], kind]
        commands: tuple[LoanCommand, ...] = ()
        if move is not None:
            lease.loans[source], commands = move
        freed = False
        if kind in _CONFIRMED and lease.grant > self._acknowledged.get(source, 0):
            self._acknowledged[source] = lease.grant
        if LoanCommand.RETURN in commands:
            del lease.loans[source]
            del self._by_source[source][lease.grant]
            self._count -= 1
            if not lease.loans:
                if lease.cause is not None:
                    self.quarantined_pages -= lease.num_pages
                    self.quarantined_leases -= bool(lease.num_pages)
                if lease.overdue:
                    self.overdue_pages -= lease.num_pages
                freed = lease.room_ended
        elif lease.cause is not None and lease.loans[source] is LoanPhase.DOUBTFUL:
            self.note_overdue(lease)
        return Change(lease, source, commands, freed)

    def recall(self, lease: Lease[S], cause: Cause, now: float) -> list[Change[S]]:
        """The room has ended, or is about to, without every rank's proof: its pages are in
        quarantine from here on.
        """
        if lease.loans and lease.cause is None:
            self.quarantined_pages += lease.num_pages
            self.quarantined_leases += bool(lease.num_pages)
            lease.recalled_at_s = now
        lease.cause = cause
        return [self.feed(lease, source, LoanKind.RECALL) for source in list(lease.loans)]

    def room_ended(self, lease: Lease[S]) -> bool:
        """True when no loan keeps the pages: they are free now."""
        lease.room_ended = True
        return not lease.loans


_NONE: OrderedDict[GrantId, Lease[Any]] = OrderedDict()
_CONFIRMED = (LoanKind.LANDED, LoanKind.DRAINED, LoanKind.UNPROVEN)
