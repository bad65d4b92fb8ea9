"""The leader of a group of prefill ranks: its members, and its decisions on each request.

Like `GroupMember`, the leader decides and does not act. It runs in the process of rank 0, which is
a member like the others. The decisions of one leader form one sequence, and every member applies
them in that order. The loss of a rank ends every open request, because none can complete without
that rank. No request is opened until the rank is back. If the leader does not open a request, it
decides in the same sequence to refuse the room on every rank, because decode may have announced the
room to all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from kvflow.protocols.arguments import room_id
from kvflow.protocols.errors import (
    CapacityError,
    Cause,
    Code,
    LostError,
    MisuseError,
    RoomInUseError,
)
from kvflow.protocols.group.member import RefuseRoom
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machinery import TICK_WORK, Endpoint, parsed
from kvflow.protocols.machines.group import (
    LEADER,
    LEADER_TERMINAL,
    LeaderCommand,
    LeaderKind,
    LeaderPhase,
)
from kvflow.protocols.machines.ordered import Ordered
from kvflow.protocols.machines.tables import ERROR
from kvflow.protocols.ports import ProcessIdentity
from kvflow.protocols.wire import group as wire
from kvflow.protocols.wire.codec import encode, routing_id
from kvflow.protocols.wire.group import Ruling, Ticket, Vote
from kvflow.protocols.wire.messages import MAX_RANKS, Incarnation, Rank, RoomId

_MESSAGES = msgspec.msgpack.Decoder(wire.ToLeader)
# No request has more decisions than this. The leader drops a member that leaves more than
# `_DECISIONS * Bounds.rooms` decisions unconfirmed.
_DECISIONS = 4
_FIRST_RANK = Rank(0)  # the rank in the leader's process


class SendToMember(msgspec.Struct, frozen=True, gc=False):
    routing_id: bytes
    frame: bytes


class RequestDecided(msgspec.Struct, frozen=True, gc=False):
    """Report the outcome of a request, once for the group. `cause` is None for a success."""

    ticket: Ticket
    room: RoomId
    cause: Cause | None


class WatchMember(msgspec.Struct, frozen=True, gc=False):
    """Call `member_died` when `process` ends, if this machine can observe its end."""

    member: Incarnation
    process: ProcessIdentity


class UnwatchMember(msgspec.Struct, frozen=True, gc=False):
    member: Incarnation


# RefuseRoom is for the rank in the leader's own process, while that rank is not a member.
LeaderOutput = SendToMember | RequestDecided | RefuseRoom | WatchMember | UnwatchMember


class RequestRecord:
    """One undecided request. `missing` has a bit for each rank whose vote is awaited."""

    __slots__ = ("cause", "losses", "missing", "phase", "room", "ticket")

    def __init__(self, ticket: Ticket, room: RoomId, world_size: int, losses: int) -> None:
        self.ticket, self.room, self.losses = ticket, room, losses
        self.phase = LeaderPhase.GATHERING
        self.missing = (1 << world_size) - 1
        self.cause: Cause | None = None


class Membership:
    """One session of one rank."""

    __slots__ = ("heard_at_s", "incarnation", "is_watched", "link", "rank", "session")

    def __init__(
        self, session: int, incarnation: Incarnation, rank: Rank, now: float, *, is_watched: bool
    ) -> None:
        self.session, self.incarnation, self.rank, self.heard_at_s = session, incarnation, rank, now
        self.is_watched = is_watched
        self.link: Ordered[wire.Decision] = Ordered()


class GroupLeader(Endpoint[LeaderOutput]):
    """One incarnation of a leader."""

    def __init__(
        self,
        incarnation: Incarnation,
        world_size: int,
        *,
        now: float,
        timing: Timing | None = None,
        bounds: Bounds | None = None,
        process: ProcessIdentity | None = None,
        first: Incarnation | None = None,
    ) -> None:
        """Create a leader without members.

        `process` identifies this process, for members that can watch it. `first` is the member in
        this process. Only that member may be rank 0, because an earlier process of rank 0 may still
        run. Raises: MisuseError.
        """
        if not 1 <= world_size <= MAX_RANKS:
            raise MisuseError(f"world_size {world_size} is outside 1..{MAX_RANKS}")
        self.incarnation, self.world_size = incarnation, world_size
        self._process, self._first = process, first
        self.timing, self._limit = timing or Timing(), (bounds or Bounds()).rooms
        self.members: dict[Rank, Membership] = {}
        self.decisions = 0
        self.dropped = 0  # number of frames without effect
        self._by_incarnation: dict[Incarnation, Membership] = {}
        self._requests: dict[Ticket, RequestRecord] = {}
        self._rooms: set[RoomId] = set()  # the rooms of `_requests`
        self._next_ticket, self._next_session = Ticket(1), 1
        # Number of ranks lost so far. A loss fails every request that was opened before it, a few
        # per tick. A request that has yet to fail has a lower number in its `losses`.
        self._losses = 0
        self._lost: deque[tuple[Ticket, Cause]] = deque()
        self.outbox: list[LeaderOutput] = []
        self._due_at_s = now + self.timing.heartbeat_s

    def __repr__(self) -> str:
        here = f"{len(self.members)} of {self.world_size} ranks"
        return f"<GroupLeader {self.incarnation:016x}: {here}, {len(self._requests)} requests>"

    @property
    def requests(self) -> Mapping[Ticket, RequestRecord]:
        """Undecided requests by ticket."""
        return self._requests

    @property
    def unavailable_reason(self) -> str:
        """Text that says why no request can be opened now. Empty if every rank is a member."""
        missing = [str(rank) for rank in range(self.world_size) if Rank(rank) not in self.members]
        if not missing:
            return ""
        return f"rank {', '.join(missing)} of the group's {self.world_size} is missing"

    # --- requests

    def open(self, room: int, request: bytes) -> Ticket:
        """Open a room at every rank. `request` is passed on to the engines of all ranks.

        If a rank cannot open the room because an earlier room with the same id still drains there,
        the request fails on every rank.

        Raises: MisuseError if `room` is not a room id; RoomInUseError while another request for
        that room is undecided; CapacityError if `request` is too large or too many requests are
        open; LostError while a rank is missing. After any of the last three errors, the room is
        refused on every rank: see `refuse`.
        """
        number = room_id(room)
        if (error := self._obstacle(number, request)) is not None:
            self.refuse(number, error.cause())
            raise error
        ticket = self._take_ticket()
        self._requests[ticket] = RequestRecord(ticket, number, self.world_size, self._losses)
        self._rooms.add(number)
        self._decide(ticket, Ruling.OPEN, room=number, request=request)
        return ticket

    def refuse(self, room: int, cause: Cause) -> None:
        """Refuse decode's half of a room on every rank, with `cause`. If that half has not arrived
        yet, it is refused when it arrives.

        An open room with that id continues. A missing rank in another process does not receive the
        refusal, but decode ends the room at that rank once any other rank reports the refusal.
        Raises: MisuseError if `room` is not a room id.
        """
        number = room_id(room)
        if _FIRST_RANK not in self.members:
            self.outbox.append(RefuseRoom(number, cause))
        self._decide(self._take_ticket(), Ruling.REFUSE, cause, room=number)

    def _obstacle(self, room: RoomId, request: bytes) -> MisuseError | LostError | None:
        if len(request) > wire.MAX_REQUEST_BYTES:
            return CapacityError(
                "bytes of a request to a group", len(request), wire.MAX_REQUEST_BYTES
            )
        if room in self._rooms:
            return RoomInUseError(f"room {room} is in use")
        if len(self._requests) >= self._limit:
            return CapacityError("requests of a group", len(self._requests) + 1, self._limit)
        if reason := self.unavailable_reason:
            return LostError(reason)
        return None

    def _take_ticket(self) -> Ticket:
        ticket, self._next_ticket = self._next_ticket, Ticket(self._next_ticket + 1)
        return ticket

    def close(self, ticket: Ticket, cause: Cause) -> None:
        """End a request with `cause`, unless it is decided already."""
        self._feed(ticket, LeaderKind.CLOSED, cause)

    # --- members

    def receive(self, peer_id: bytes, frame: bytes, now: float) -> None:
        """Handle a frame from the member `peer_id`. A bad frame is counted and dropped (I7)."""
        message = parsed(_MESSAGES, frame)
        if message is None or peer_id != routing_id(message.member):
            self.dropped += 1
            return
        if isinstance(message, wire.Join):
            self._on_join(message, now)
            return
        member = self._by_incarnation.get(message.member)
        if member is None or (message.leader, message.session) != (
            self.incarnation,
            member.session,
        ):
            self.dropped += 1
            self._refuse(
                message.member, "this session of the group is over", message.leader, message.session
            )
            return
        member.heard_at_s = now
        if isinstance(message, wire.RankVote):
            self._on_vote(member, message)
        else:
            self._on_beat(member, message)

    def member_died(self, incarnation: Incarnation) -> None:
        """Remove a member whose process ended, and fail the open requests."""
        member = self._by_incarnation.get(incarnation)
        if member is not None:
            self._lose(member, f"rank {member.rank} of the group has died")

    def _on_join(self, message: wire.Join, now: float) -> None:
        if refusal := self._mismatch(message):
            self._refuse(message.member, refusal)
            return
        known = self._by_incarnation.get(message.member)
        # A Join that names the current session means that the member left that session. A Join that
        # names an older session is a repetition, and receives the same answer again.
        if (
            known is not None
            and message.last_leader == self.incarnation
            and known.session <= message.last_session
        ):
            self._lose(known, f"rank {known.rank} has left the group")
            known = None
        if known is None:
            session, self._next_session = self._next_session, self._next_session + 1
            watched = message.process
            known = Membership(
                session, message.member, message.rank, now, is_watched=watched is not None
            )
            self.members[message.rank] = self._by_incarnation[message.member] = known
            if watched is not None:
                self.outbox.append(WatchMember(message.member, watched))
        answer = wire.Joined(
            leader=self.incarnation,
            member=message.member,
            session=known.session,
            process=self._process,
        )
        self._send(message.member, answer)

    def _mismatch(self, message: wire.Join) -> str:
        """Return why this rank cannot join, or an empty string if it can."""
        if message.wire_version != wire.GROUP_WIRE_VERSION:
            return (
                f"group wire version {message.wire_version}, this leader speaks "
                f"{wire.GROUP_WIRE_VERSION}"
            )
        if message.world_size != self.world_size:
            return (
                f"rank {message.rank} is of a group of {message.world_size}, this one has "
                f"{self.world_size}"
            )
        if message.rank >= self.world_size:
            return f"rank {message.rank} is outside 0..{self.world_size - 1}"
        if message.rank == 0 and self._first not in (None, message.member):
            return "rank 0 is in the leader's own process"
        holder = self.members.get(message.rank)
        if holder is not None and holder.incarnation != message.member:
            return (
                f"rank {message.rank} is taken by another process, until that has been silent for "
                f"{self.timing.lost_after_s:g} s"
            )
        known = self._by_incarnation.get(message.member)
        if known is not None and known.rank != message.rank:
            return (
                f"this process is rank {known.rank} already, and cannot be rank {message.rank} too"
            )
        return ""

    def _refuse(
        self, member: Incarnation, refusal: str, leader: Incarnation | None = None, session: int = 0
    ) -> None:
        """End a member's session, or refuse to begin one."""
        about = leader or self.incarnation
        self._send(
            member, wire.Joined(leader=about, member=member, session=session, refusal=refusal)
        )

    def _send(self, member: Incarnation, message: wire.ToMember) -> None:
        self.outbox.append(SendToMember(routing_id(member), encode(message)))

    def _on_vote(self, member: Membership, message: wire.RankVote) -> None:
        link = member.link
        if not link.take(message.seq):
            if link.misses(message.seq):
                self._beat(member)
            return
        record = self._requests.get(message.ticket)
        if record is None:
            if message.ticket >= self._next_ticket:
                self._lose(
                    member,
                    f"rank {member.rank} voted for request {message.ticket}, which there is not",
                )
            # Otherwise the request is decided, and the vote is late.
            return
        if message.vote is Vote.FAILED:
            text = f"rank {member.rank} of the group failed"
            self._feed(
                message.ticket,
                LeaderKind.RANK_FAILED,
                message.cause or Cause(Code.ENGINE_ERROR, text),
            )
            return
        # A rank was lost after the request was opened, so `tick` will fail the request. Until
        # then, votes must not complete it, because a rank that rejoined never opened it.
        if record.losses != self._losses:
            return
        kind = _COUNTED[message.vote, not record.missing & ~(1 << member.rank)]
        if not record.missing >> member.rank & 1 or LEADER.cell(record.phase, kind) is ERROR:
            self._lose(
                member,
                f"rank {member.rank} voted {message.vote.name} for request {message.ticket} out of "
                "turn",
            )
            return
        record.missing &= ~(1 << member.rank)
        self._feed(message.ticket, kind)

    def _on_beat(self, member: Membership, message: wire.Beat) -> None:
        link = member.link
        if not link.confirm(message.received_below):
            self.dropped += 1
            return
        if message.gap:
            for decision in link.unconfirmed:
                self._send(member.incarnation, decision)
        if link.misses(message.sent_below):
            self._beat(member)

    def _lose(self, member: Membership, text: str) -> None:
        """Remove a member, and queue the open requests to fail. Each tick fails a few of them."""
        del self.members[member.rank], self._by_incarnation[member.incarnation]
        # The member may be alive. This message makes it leave the session.
        self._refuse(member.incarnation, text, session=member.session)
        if member.is_watched:
            self.outbox.append(UnwatchMember(member.incarnation))
        self._losses += 1
        cause = Cause(Code.PEER_LOST, text)
        self._lost.extend((ticket, cause) for ticket in self._requests)

    # --- time

    def next_tick(self) -> float:
        """Return the earliest time at which `tick` may have work."""
        return float("-inf") if self._lost else self._due_at_s

    def tick(self, now: float) -> None:
        """Send heartbeats, act on silence, and fail some of the requests that the loss of a rank
        ends.
        """
        for _ in range(min(TICK_WORK, len(self._lost))):
            ticket, cause = self._lost.popleft()
            self._feed(ticket, LeaderKind.RANK_LOST, cause)
        if now < self._due_at_s:
            return
        self._due_at_s = now + self.timing.heartbeat_s
        for member in list(self.members.values()):
            if now - member.heard_at_s >= self.timing.lost_after_s:
                text = (
                    f"rank {member.rank} of the group was silent for {self.timing.lost_after_s:g} s"
                )
                self._lose(member, text)
            elif (count := len(member.link.unconfirmed)) > _DECISIONS * self._limit:
                self._lose(
                    member,
                    f"rank {member.rank} of the group has left {count} decisions unconfirmed",
                )
            else:
                self._beat(member)

    def credit_stall(self, late_s: float, now: float) -> None:
        """Extend every member's silence limit by the time during which the shell stalled."""
        for member in self.members.values():
            member.heard_at_s = min(member.heard_at_s + late_s, now)

    def _beat(self, member: Membership) -> None:
        link = member.link
        beat = wire.Beat(
            leader=self.incarnation,
            member=member.incarnation,
            session=member.session,
            sent_below=link.sent_below,
            received_below=link.received_below,
            gap=link.asks,
        )
        self._send(member.incarnation, beat)

    # --- decisions

    def _feed(self, ticket: Ticket, kind: LeaderKind, cause: Cause | None = None) -> None:
        """Feed one event to a request, unless it is decided. No other code changes its phase."""
        record = self._requests.get(ticket)
        if record is None:
            return
        move = LEADER.moves[record.phase, kind]
        if move is None:
            return
        record.phase, record.cause = move.phase, cause
        # The second round of votes begins: now every rank has to report that it is done.
        if kind is LeaderKind.ALL_READY:
            record.missing = (1 << self.world_size) - 1
        if record.phase in LEADER_TERMINAL:
            del self._requests[ticket]
            self._rooms.discard(record.room)
        for command in move.commands:
            if command is LeaderCommand.TELL_OUTCOME:
                self.outbox.append(RequestDecided(ticket, record.room, cause))
            else:
                self._decide(ticket, _RULINGS[command], cause)

    def _decide(
        self,
        ticket: Ticket,
        ruling: Ruling,
        cause: Cause | None = None,
        *,
        room: RoomId | None = None,
        request: bytes = b"",
    ) -> None:
        number, self.decisions = self.decisions, self.decisions + 1
        for member in self.members.values():
            message = wire.Decision(
                leader=self.incarnation,
                member=member.incarnation,
                session=member.session,
                seq=member.link.sent_below,
                number=number,
                ticket=ticket,
                ruling=ruling,
                cause=cause,
                room=room,
                request=request,
            )
            member.link.add(message)
            self._send(member.incarnation, message)


_COUNTED = {
    (Vote.READY, False): LeaderKind.READY,
    (Vote.READY, True): LeaderKind.ALL_READY,
    (Vote.DONE, False): LeaderKind.DONE,
    (Vote.DONE, True): LeaderKind.ALL_DONE,
}
_RULINGS = {
    LeaderCommand.DECIDE_START: Ruling.START,
    LeaderCommand.DECIDE_SUCCEED: Ruling.SUCCEED,
    LeaderCommand.DECIDE_FAIL: Ruling.FAIL,
}
