"""The ledger of loans. It is separate from rooms, because a loan may outlive its room (I2)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from kvflow.protocols.errors import Cause, QuarantineError
from kvflow.protocols.machines.loan import TABLE, LoanCommand, LoanKind, LoanPhase
from kvflow.protocols.machines.ranges import Range
from kvflow.protocols.pages.spaces import Counts, counts_less, counts_sum
from kvflow.protocols.wire.messages import GrantId, RoomId

S = TypeVar("S", bound=Hashable)


@dataclass(slots=True, eq=False, repr=False)
class Lease(Generic[S]):
    """The places of one room, lent to every rank under one grant."""

    grant: GrantId
    room: RoomId
    counts: Counts = ()  # places of each space; empty until they are lent
    loans: dict[S, LoanPhase] = field(default_factory=dict)  # phases of open loans, by source
    # True once the room ends without success after it lent pages. The end of the last loan
    # then frees them.
    room_ended: bool = False
    cause: Cause | None = None  # set when the loans are recalled
    recalled_at_s: float = 0.0
    # True once a recalled loan is in doubt, or its Abort has been unanswered for too long.
    overdue: bool = False

    @property
    def num_pages(self) -> int:
        """Places of all spaces together."""
        return sum(self.counts)

    @property
    def doubtful(self) -> bool:
        """True when every open loan is in doubt."""
        return all(phase is LoanPhase.DOUBTFUL for phase in self.loans.values())


class Change(msgspec.Struct, Generic[S], frozen=True, gc=False):
    """The result of one event for one loan: the commands that the caller must run."""

    lease: Lease[S]
    source: S
    commands: tuple[LoanCommand, ...]
    freed: bool  # True if the event ended the last claim on the lease's pages


class Ledger(Generic[S]):
    """The loans of one node, by source. A source is a link to a prefill rank, or a writer to which
    an earlier node lent pages. The ledger makes no callbacks: it returns changes.
    """

    def __init__(self, quarantine_limit: Counts, page_sizes: Sequence[int] = ()) -> None:
        """Create an empty ledger. `check_quarantine` allows `quarantine_limit` overdue places of
        each space. `page_sizes` has the tokens of a place of each, for its error; 0 for rows.
        """
        self._by_source: dict[S, OrderedDict[GrantId, Lease[S]]] = {}
        # For each source, the highest grant that its answers confirmed.
        self._acknowledged: dict[S, GrantId] = {}
        self._told_from: dict[S, int] = {}  # where `settled_above` continues, by source
        self._count = 0
        self.quarantine_limit = quarantine_limit
        self._page_sizes = page_sizes or (0,) * len(quarantine_limit)
        # Places in quarantine, by space.
        self.quarantined: Counts = (0,) * len(quarantine_limit)
        # Places in quarantine that count against admission. Places do not count while a rank is
        # expected to answer their Abort soon, so that ordinary aborts do not block new rooms.
        self.overdue: Counts = self.quarantined

    def __len__(self) -> int:
        return self._count

    @property
    def quarantined_pages(self) -> int:
        """Places of all spaces in quarantine."""
        return sum(self.quarantined)

    @property
    def overdue_pages(self) -> int:
        """Places of all spaces that count against admission."""
        return sum(self.overdue)

    def check_quarantine(self) -> None:
        """Raise QuarantineError if more places of a space are overdue than its limit allows."""
        if not any(self.overdue):
            return
        spaces = zip(self.overdue, self.quarantine_limit, self._page_sizes, strict=True)
        for overdue, limit, page_size in spaces:
            if overdue > limit:
                raise QuarantineError(overdue, limit, page_size)

    @property
    def excess(self) -> str:
        """The reason why no room can be opened, or an empty string if rooms can be opened."""
        try:
            self.check_quarantine()
        except QuarantineError as error:
            return str(error)
        return ""

    def open(self, lease: Lease[S], source: S) -> None:
        """Add an announced loan. Callers must add the grants of a source in ascending order."""
        lease.loans[source] = LoanPhase.ANNOUNCED
        loans = self._by_source.get(source)
        if loans is None:
            loans = self._by_source[source] = OrderedDict()
        loans[lease.grant] = lease
        self._count += 1

    def inherit(self, lease: Lease[S], sources: Iterable[S], cause: Cause) -> None:
        """Add the loans of an earlier node's room. They are in doubt, and their pages are in
        quarantine.
        """
        for source in sources:
            self.open(lease, source)
            lease.loans[source] = LoanPhase.DOUBTFUL
        lease.cause, lease.room_ended = cause, True
        if lease.counts:
            self.quarantined = counts_sum(self.quarantined, lease.counts)
        self.note_overdue(lease)

    def note_overdue(self, lease: Lease[S]) -> None:
        """Count a recalled lease's pages as overdue. The lease must have open loans. Idempotent."""
        if not lease.overdue:
            lease.overdue = True
            if lease.counts:
                self.overdue = counts_sum(self.overdue, lease.counts)

    def find(self, source: S, grant: GrantId) -> Lease[S] | None:
        return self._by_source.get(source, _NONE).get(grant)

    def grants_of(self, source: S) -> list[GrantId]:
        """Return the grants of a source's open loans, ascending."""
        return list(self._by_source.get(source, _NONE))

    def owes(self, source: S) -> bool:
        return bool(self._by_source.get(source))

    def awaits(self, source: S) -> bool:
        """Return True if the source may still answer: it has an open loan that is not in doubt."""
        leases = self._by_source.get(source, _NONE).values()
        return any(lease.loans[source] is not LoanPhase.DOUBTFUL for lease in leases)

    def owed_by(self, source: S) -> tuple[int, int]:
        """Return how many open loans a source has, and how many pages they keep in quarantine."""
        leases = self._by_source.get(source, _NONE).values()
        return len(leases), sum(lease.num_pages for lease in leases if lease.cause is not None)

    def settled_below(self, source: S) -> GrantId:
        """Return the bound below which every grant is settled at the source. A grant is settled if
        the source has confirmed it or a later one, and it has no open loan there. Decode needs no
        further message about settled grants, so prefill may forget them.
        """
        confirmed = GrantId(self._acknowledged.get(source, 0) + 1)
        loans = self._by_source.get(source)
        return min(confirmed, next(iter(loans))) if loans else confirmed

    def settled_above(self, source: S, most: int) -> tuple[Range, ...]:
        """Return the ranges of settled grants above the first open loan. If there are more than
        `most` ranges, each call returns the next `most` of them.
        """
        confirmed = self._acknowledged.get(source, 0) + 1
        loans = self._by_source.get(source)
        if not loans:
            return ()
        open_ = np.fromiter(loans, np.int64, len(loans))
        starts, ends = open_ + 1, np.append(open_[1:], confirmed)
        np.minimum(ends, confirmed, out=ends)
        filled = starts < ends
        starts, ends = starts[filled], ends[filled]
        # A heartbeat holds a limited number of ranges. Each heartbeat continues where the previous
        # one stopped, so that every range is reported eventually.
        if len(starts) > most:
            turn = np.arange(most) + np.searchsorted(starts, self._told_from.get(source, 0))
            starts, ends = starts.take(turn, mode="wrap"), ends.take(turn, mode="wrap")
            self._told_from[source] = int(ends[-1])
        return tuple(
            (GrantId(start), GrantId(end))
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        )

    def note_known(self, source: S, below: GrantId) -> None:
        """Record that the source confirmed every grant below `below`: see `Register.fresh_from`."""
        self._acknowledged[source] = max(
            self._acknowledged.get(source, GrantId(0)), GrantId(below - 1)
        )

    def forget_source(self, source: S) -> None:
        """Drop the records of a source that is gone and has no open loan."""
        self._by_source.pop(source, None)
        self._acknowledged.pop(source, None)
        self._told_from.pop(source, None)

    def feed(self, lease: Lease[S], source: S, kind: LoanKind) -> Change[S]:
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
                if lease.counts and lease.cause is not None:
                    self.quarantined = counts_less(self.quarantined, lease.counts)
                    if lease.overdue:
                        self.overdue = counts_less(self.overdue, lease.counts)
                freed = lease.room_ended
        elif lease.cause is not None and lease.loans[source] is LoanPhase.DOUBTFUL:
            self.note_overdue(lease)
        return Change(lease, source, commands, freed)

    def recall(self, lease: Lease[S], cause: Cause, now: float) -> list[Change[S]]:
        """Recall the loans that are still open when their room ends. The pages are in quarantine
        until all of these loans end.
        """
        if lease.loans and lease.cause is None:
            if lease.counts:
                self.quarantined = counts_sum(self.quarantined, lease.counts)
            lease.recalled_at_s = now
        lease.cause = cause
        return [self.feed(lease, source, LoanKind.RECALL) for source in list(lease.loans)]

    def room_ended(self, lease: Lease[S]) -> bool:
        """Record the end of the lease's room. Returns True if no loan holds its pages."""
        lease.room_ended = True
        return not lease.loans


_NONE: OrderedDict[GrantId, Lease[Any]] = OrderedDict()
_CONFIRMED = (LoanKind.LANDED, LoanKind.DRAINED, LoanKind.UNPROVEN)
