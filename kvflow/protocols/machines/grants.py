"""Prefill's memory of one decode's grants: which are open, and how the others ended (I6).

Until decode reports that an ended grant is settled, prefill keeps its last messages about the
grant, to send them again. The number of these grants is bounded for each decode, and the size of
their handoffs is bounded over all decodes. Evicting a grant raises the low-water mark, and no grant
below the mark begins. Settled grants above the mark are kept as ranges, so that one grant that
stays open does not keep the others in memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Generic, TypeVar

from kvflow.protocols.machines.ranges import GrantRanges, Range
from kvflow.protocols.machines.tables import ERROR, IGNORE, Cell, Move, Table, rest
from kvflow.protocols.wire.messages import AbortAck, ChunkDone, GrantId, Message, RoomId


class GrantPhase(IntEnum):
    UNKNOWN = 0
    ANNOUNCED = 1  # decode will offer pages; the engine's half has not arrived yet
    OPEN = 2  # a room at this prefill answers for it
    CLOSED = 3  # ended, and its writes are drained
    DOUBTFUL = 4  # ended, and some write under it may still land
    BELOW = 5  # settled, or below the low-water mark: it ended, or must not begin
    BELOW_DOUBTFUL = 6  # evicted while in doubt


class GrantKind(IntEnum):
    ANNOUNCE = 0
    BOOTSTRAP = 1
    ABORT = 2
    ASK = 3  # decode sent Resync
    JOIN = 4  # the engine's half of an announced room arrived
    END = 5  # the room ended or was refused, and its writes are drained
    END_IN_DOUBT = 6
    SETTLE = 7  # decode needs no message about it any more
    EVICT = 8


class GrantCommand(IntEnum):
    EXPECT = 0  # keep the announcement until the engine's half arrives
    ADMIT = 1  # check the offer, then open a room or refuse it
    TELL_ROOM = 2  # pass the message to the room that answers for the grant
    RESEND = 3
    REFUSE_STALE = 4
    END_OTHER_HALF = 5
    ACKNOWLEDGE = 6
    REPORT_UNKNOWN = 7


P, K, C = GrantPhase, GrantKind, GrantCommand
_ENDED = Move(P.CLOSED, (C.END_OTHER_HALF, C.ACKNOWLEDGE))


def _over(
    phase: GrantPhase, answer: GrantCommand, asked: GrantCommand
) -> dict[GrantKind, Cell[GrantPhase, GrantCommand]]:
    again = Move(phase, (answer,))
    return rest(K, ERROR) | {
        K.ANNOUNCE: again,
        K.BOOTSTRAP: again,
        K.ABORT: Move(phase, (C.ACKNOWLEDGE,)),
        K.ASK: Move(phase, (asked,)),
    }


TABLE: Table[GrantPhase, GrantKind, GrantCommand] = Table(
    P,
    K,
    {
        P.UNKNOWN: rest(K, ERROR)
        | {
            K.ANNOUNCE: Move(P.ANNOUNCED, (C.EXPECT,)),
            K.BOOTSTRAP: Move(P.OPEN, (C.ADMIT,)),
            K.ABORT: _ENDED,
            K.ASK: Move(P.UNKNOWN, (C.REPORT_UNKNOWN,)),
        },
        P.ANNOUNCED: rest(K, ERROR)
        | {
            K.ANNOUNCE: IGNORE,
            K.BOOTSTRAP: Move(P.OPEN, (C.ADMIT,)),
            K.ABORT: _ENDED,
            K.ASK: Move(P.ANNOUNCED, (C.REPORT_UNKNOWN,)),
            K.JOIN: Move(P.OPEN),
            K.END: Move(P.CLOSED),
            K.SETTLE: Move(P.BELOW),
        },
        P.OPEN: rest(K, ERROR)
        | {
            # A repetition: decode may have missed the room's Begun.
            K.ANNOUNCE: Move(P.OPEN, (C.TELL_ROOM,)),
            # Either this offers the pages of an announced room, or it is a repetition.
            K.BOOTSTRAP: Move(P.OPEN, (C.TELL_ROOM,)),
            K.ABORT: Move(P.OPEN, (C.TELL_ROOM,)),
            K.ASK: Move(P.OPEN, (C.RESEND,)),
            K.END: Move(P.CLOSED),
            K.END_IN_DOUBT: Move(P.DOUBTFUL),
        },
        P.CLOSED: _over(P.CLOSED, C.RESEND, C.RESEND)
        | {K.SETTLE: Move(P.BELOW), K.EVICT: Move(P.BELOW)},
        P.DOUBTFUL: _over(P.DOUBTFUL, C.RESEND, C.RESEND)
        | {K.SETTLE: Move(P.BELOW), K.EVICT: Move(P.BELOW_DOUBTFUL)},
        P.BELOW: _over(P.BELOW, C.REFUSE_STALE, C.REPORT_UNKNOWN),
        P.BELOW_DOUBTFUL: _over(P.BELOW_DOUBTFUL, C.REFUSE_STALE, C.REPORT_UNKNOWN)
        | {K.SETTLE: Move(P.BELOW)},
    },
)

_UNSETTLED = frozenset({P.ANNOUNCED, P.OPEN, P.DOUBTFUL, P.BELOW_DOUBTFUL})
R = TypeVar("R")


class Announcements:
    """Announced grants whose pages decode has not offered yet, with their rooms, kept sorted."""

    def __init__(self) -> None:
        self.rooms: dict[GrantId, RoomId] = {}
        self._order: list[GrantId] = []

    def add(self, grant: GrantId, room: RoomId) -> None:
        self.rooms[grant] = room
        # Grants nearly always arrive in order, so this usually appends.
        insort(self._order, grant)

    def discard(self, grant: GrantId) -> None:
        if self.rooms.pop(grant, None) is not None:
            del self._order[bisect_left(self._order, grant)]

    def pop(self, start: GrantId, end: GrantId) -> list[tuple[GrantId, RoomId]]:
        """Remove and return the grants in [start, end), with their rooms."""
        first, last = bisect_left(self._order, start), bisect_left(self._order, end)
        taken = self._order[first:last]
        del self._order[first:last]
        return [(grant, self.rooms.pop(grant)) for grant in taken]


class KeptBytes:
    """The size in bytes of all kept handoffs, summed over the tables that share this counter."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0


class GrantTable(Generic[R]):
    """The grants of one decode incarnation. `R` is the type of room that answers for a grant."""

    def __init__(self, limit: int, low_water: GrantId, kept: KeptBytes) -> None:
        """Create a table that remembers up to `limit` ended grants and as many settled ranges. No
        grant below `low_water` begins. `kept` counts the handoff bytes of all tables that share it.
        """
        self.low_water = low_water
        self.kept_bytes, self._kept = 0, kept
        self.rooms: dict[GrantId, R] = {}
        self.announcements = Announcements()
        self._limit = limit
        # A grant without an entry is unknown, settled, or below the low-water mark.
        self._phases: dict[GrantId, GrantPhase] = {}
        self._settled = GrantRanges()  # ranges above the low-water mark, in which no grant begins
        self._unsettled: set[GrantId] = set()
        self._evicted_in_doubt: set[GrantId] = set()
        # The last messages about ended grants. The grant that ended first comes first, because it
        # is evicted first. `_remembered` has the same grants in ascending order, for settling.
        self._sent: OrderedDict[GrantId, tuple[Message, ...]] = OrderedDict()
        self._remembered: list[GrantId] = []
        self._seen_below: int = low_water  # a number above every grant seen so far

    def phase(self, grant: GrantId) -> GrantPhase:
        found = self._phases.get(grant)
        return self._phase_of_others(grant) if found is None else found

    def _phase_of_others(self, grant: GrantId) -> GrantPhase:
        return P.BELOW if grant < self.low_water or grant in self._settled else P.UNKNOWN

    @property
    def remembered(self) -> int:
        return len(self._sent)

    @property
    def all_ended(self) -> bool:
        """True while no grant is open or announced. Ended grants may be in doubt."""
        return not self.rooms and not self.announcements.rooms

    def unproven(self) -> tuple[GrantId, ...]:
        """Return the grants under which bytes may still arrive, ascending."""
        return tuple(
            sorted(grant for grant in self._unsettled if self._phases[grant] is not P.ANNOUNCED)
        )

    def remember_doubts(self, grants: Iterable[GrantId]) -> None:
        """Restore grants in doubt that prefill recorded when it last forgot this decode (I2)."""
        for grant in grants:
            self.begin_from(GrantId(grant + 1))
            self._enter(grant, P.BELOW_DOUBTFUL)

    def feed(self, grant: GrantId, kind: GrantKind) -> tuple[GrantCommand, ...]:
        """Feed one event to a grant, and return the commands to run."""
        before = self._phases.get(grant)
        # Most grants arrive in ascending order. A grant above all those seen is unknown, so the
        # settled ranges need not be searched.
        if before is None:
            before = P.UNKNOWN if grant >= self._seen_below else self._phase_of_others(grant)
        move = TABLE.moves[before, kind]
        if grant >= self._seen_below:
            self._seen_below = grant + 1
        if move is None:
            return ()
        after = move.phase
        if after is not before:
            self._enter(grant, after)
        return move.commands

    def _enter(self, grant: GrantId, phase: GrantPhase) -> None:
        if phase is P.BELOW:
            self._phases.pop(grant, None)
        else:
            self._phases[grant] = phase
        if phase in _UNSETTLED:
            self._unsettled.add(grant)
        else:
            self._unsettled.discard(grant)
        if phase is P.BELOW_DOUBTFUL:
            self._evicted_in_doubt.add(grant)
        elif self._evicted_in_doubt:
            self._evicted_in_doubt.discard(grant)

    def end(self, grant: GrantId, sent: tuple[Message, ...]) -> None:
        """End a grant, and keep the last messages about it. Above the limit, the grant that ended
        first is evicted.

        `sent` may be empty only for a grant that an Abort just closed.
        """
        if self._phases.get(grant) is not P.CLOSED:
            # An AbortAck, if there is one, is always the last message about a grant.
            last = sent[-1]
            doubtful = type(last) is AbortAck and not last.drained
            self.feed(grant, K.END_IN_DOUBT if doubtful else K.END)
        self.rooms.pop(grant, None)
        self.announcements.discard(grant)
        self._sent[grant] = sent
        insort(self._remembered, grant)
        self._count(sent, 1)
        while len(self._sent) > self._limit:
            self.evict()

    def evict(self) -> None:
        """Drop the messages of the grant that ended first. The low-water mark rises above it."""
        evicted, sent = next(iter(self._sent.items()))
        self.feed(evicted, K.EVICT)
        del self._sent[evicted], self._remembered[bisect_left(self._remembered, evicted)]
        self._count(sent, -1)
        self._raise_low_water(GrantId(evicted + 1))

    def forget(self) -> None:
        """Subtract this table's bytes from the shared count, before the table is dropped."""
        self._kept.total -= self.kept_bytes
        self.kept_bytes = 0

    def _count(self, sent: tuple[Message, ...], sign: int) -> None:
        for message in sent:
            if type(message) is ChunkDone and message.handoff:
                self.kept_bytes += sign * len(message.handoff)
                self._kept.total += sign * len(message.handoff)

    def _raise_low_water(self, grant: GrantId) -> None:
        if grant > self.low_water:
            self.low_water = self._settled.pop_through(grant)

    def last_messages(self, grant: GrantId) -> tuple[Message, ...]:
        """Return the messages kept about a grant: none if the grant is open or forgotten."""
        return self._sent.get(grant, ())

    def is_drained(self, grant: GrantId) -> bool:
        """Return True if no write under a grant can land any more. The grant must not be open."""
        return self.phase(grant) not in (P.DOUBTFUL, P.BELOW_DOUBTFUL)

    @property
    def seen_below(self) -> GrantId:
        """A number above every grant seen so far."""
        return GrantId(self._seen_below)

    def begin_from(self, grant: GrantId) -> list[tuple[GrantId, RoomId]]:
        """Let no grant below `grant` begin. Returns the announced grants below it whose pages were
        never offered, with their rooms.
        """
        self._seen_below = max(self._seen_below, grant)
        self._raise_low_water(grant)
        return self._withdraw(GrantId(0), grant)

    def _withdraw(self, start: GrantId, end: GrantId) -> list[tuple[GrantId, RoomId]]:
        withdrawn = self.announcements.pop(start, end)
        for announced, _ in withdrawn:
            if self._phases.get(announced) is P.ANNOUNCED:
                self.feed(announced, K.SETTLE)
        return withdrawn

    def settle(
        self, below: GrantId, ranges: Sequence[Range] = ()
    ) -> list[tuple[GrantId, RoomId]] | None:
        """Forget the grants below `below` and in `ranges`, which decode reports as settled, and let
        none of them begin.

        Returns the announced grants among them whose pages were never offered, with their rooms.
        Returns None and changes nothing if decode names an empty range or a grant above all those
        seen.
        """
        if below > self._seen_below or any(
            not start < end <= self._seen_below for start, end in ranges
        ):
            return None
        self._settle(GrantId(0), below)
        withdrawn = self.begin_from(below)
        for start, end in ranges:
            if end > self.low_water:
                self._settled.add(max(start, self.low_water), end)
            self._settle(start, end)
            withdrawn += self._withdraw(start, end)
        self.low_water = self._settled.pop_through(self.low_water)
        # Dropping the lowest range raises the low-water mark to its end. A grant below the mark
        # that is still in transit is then refused. That is safe, but unbounded memory is not.
        while len(self._settled) > self._limit:
            self.low_water = self._settled.pop_first()
        return withdrawn

    def _settle(self, start: GrantId, end: GrantId) -> None:
        first, last = bisect_left(self._remembered, start), bisect_left(self._remembered, end)
        for grant in self._remembered[first:last]:
            self.feed(grant, K.SETTLE)
            self._count(self._sent.pop(grant), -1)
        del self._remembered[first:last]
        for grant in [grant for grant in self._evicted_in_doubt if start <= grant < end]:
            self.feed(grant, K.SETTLE)
