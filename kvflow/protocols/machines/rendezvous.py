"""Rooms that decodes announced, and causes of halves that ended before the other half arrived."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from kvflow.protocols.errors import Cause
from kvflow.protocols.wire.messages import GrantId, RoomId

S = TypeVar("S")


class Side(Enum):
    ENGINE = "engine"
    DECODE = "decode"


class Outcome(NamedTuple):
    """The cause with which one side of a room ended. The other side receives it on arrival, until
    `forget_at_s`.
    """

    side: Side
    cause: Cause
    forget_at_s: float


class Announcement(NamedTuple, Generic[S]):
    """A decode's announcement of a room. It expires at `until_s`."""

    peer: S
    grant: GrantId
    until_s: float


class Rendezvous(Generic[S]):
    """Announcements and outcomes by room.

    All announcements are kept for the same time. Outcomes are bounded in number and in time, and
    `take` returns each at most once.
    """

    def __init__(self, limit: int) -> None:
        self.announced: dict[RoomId, Announcement[S]] = {}
        self._limit = limit
        self._outcomes: OrderedDict[RoomId, Outcome] = OrderedDict()

    def __len__(self) -> int:
        return len(self._outcomes)

    def forget_announcement(self, room: RoomId, peer: S, grant: GrantId) -> None:
        """Forget the announcement of a room if `peer` made it under `grant`."""
        if self.find(room, peer, grant) is not None:
            del self.announced[room]

    def find(self, room: RoomId, peer: S, grant: GrantId) -> Announcement[S] | None:
        """Return the announcement of a room if `peer` made it under `grant`, or None."""
        found = self.announced.get(room)
        return found if found is not None and found.peer is peer and found.grant == grant else None

    def oldest_announced(self) -> tuple[RoomId, Announcement[S]] | None:
        """Return the announcement that expires first, or None."""
        # All are kept for the same time, so the one that was added first expires first.
        return next(iter(self.announced.items()), None)

    def record_outcome(self, room: RoomId, side: Side, cause: Cause, forget_at_s: float) -> None:
        """Keep the cause with which `side` ended, for the other side to take when it arrives."""
        # If the other side ended earlier, neither side needs the other's cause.
        if self.take(room, side) is None:
            self._outcomes[room] = Outcome(side, cause, forget_at_s)
            if len(self._outcomes) > self._limit:
                self._outcomes.popitem(last=False)

    def has_ended(self, room: RoomId, side: Side) -> bool:
        """Return True if `side` ended and the other side has not arrived yet."""
        outcome = self._outcomes.get(room)
        return outcome is not None and outcome.side is side

    def take(self, room: RoomId, side: Side) -> Cause | None:
        """Return and forget the cause with which the other side ended, now that `side` arrives.
        Returns None if the other side has not ended.
        """
        # If `side` itself ended before, this is a new room with the same id, and the outcome of the
        # old one is dropped.
        outcome = self._outcomes.pop(room, None)
        return None if outcome is None or outcome.side is side else outcome.cause

    def next_expiry_s(self) -> float:
        return next(iter(self._outcomes.values())).forget_at_s if self._outcomes else float("inf")

    def expire(self, now: float) -> None:
        while self.next_expiry_s() <= now:
            self._outcomes.popitem(last=False)
