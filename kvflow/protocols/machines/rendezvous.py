"""Where the two halves of a room meet: who has announced which room, and halves that ended before
the other came.
"""

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
    """`side` of a room has ended, and the other side is to be told why when it comes."""

    side: Side
    cause: Cause
    forget_at_s: float


class Announcement(NamedTuple, Generic[S]):
    peer: S
    grant: GrantId
    until_s: float


class Rendezvous(Generic[S]):
    """Announcements last as long as the peer that made them, and all for the same time at most;
    outcomes are bounded in number and in time, and each is told once."""

    def __init__(self, limit: int) -> None:
        """At most `limit` outcomes are remembered."""
        self.announced: dict[RoomId, Announcement[S]] = {}
        self._limit = limit
        self._outcomes: OrderedDict[RoomId, Outcome] = OrderedDict()

    def __len__(self) -> int:
        """Outcomes that are remembered."""
        return len(self._outcomes)

    def forget_announcement(self, room: RoomId, peer: S, grant: GrantId) -> None:
        """Only the one that was made under this grant."""
        if self.find(room, peer, grant) is not None:
            del self.announced[room]

    def find(self, room: RoomId, peer: S, grant: GrantId) -> Announcement[S] | None:
        """The announcement of a room, if it was made under this grant."""
        found = self.announced.get(room)
        return found if found is not None and found.peer is peer and found.grant == grant else None

    def oldest_announced(self) -> tuple[RoomId, Announcement[S]] | None:
        """The one that ends first."""
        return next(iter(self.announced.items()), None)

    def record_outcome(self, room: RoomId, side: Side, cause: Cause, forget_at_s: float) -> None:
        """`side` has ended: kept for the other one, unless that has ended already."""
        if self.take(room, side) is None:
            self._outcomes[room] = Outcome(side, cause, forget_at_s)
            if len(self._outcomes) > self._limit:
                self._outcomes.popitem(last=False)

    def has_ended(self, room: RoomId, side: Side) -> bool:
        """The other one has not been told yet."""
        outcome = self._outcomes.get(room)
        return outcome is not None and outcome.side is side

    def take(self, room: RoomId, side: Side) -> Cause | None:
        """Why the other half of `room` ended, for `side` that comes now; the same side coming again
        begins afresh.
        """
        outcome = self._outcomes.pop(room, None)
        return None if outcome is None or outcome.side is side else outcome.cause

    def next_expiry_s(self) -> float:
        """When the oldest outcome is to be forgotten; infinity when there is none."""
        return next(iter(self._outcomes.values())).forget_at_s if self._outcomes else float("inf")

    def expire(self, now: float) -> None:
        while self._outcomes and self.next_expiry_s() <= now:
            self._outcomes.popitem(last=False)
