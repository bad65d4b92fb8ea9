"""One rank of a group of prefill ranks: its membership, its votes, and the effect of the leader's
decisions on its rooms.

It decides and does not act: it uses no asyncio, clock, socket or thread. Methods receive the time,
and `commands()` returns the work for the shell. The rooms themselves belong to this rank's
`PrefillEndpoint`. The shell reports their events to `GroupMember`, and applies the group's
decisions to them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.limits import Timing
from kvflow.protocols.machinery import TICK_WORK, Endpoint, parsed
from kvflow.protocols.machines.group import MEMBER, MemberCommand, MemberKind, MemberPhase
from kvflow.protocols.machines.ordered import Ordered
from kvflow.protocols.ports import ProcessIdentity
from kvflow.protocols.wire import group as wire
from kvflow.protocols.wire.codec import encode
from kvflow.protocols.wire.group import Ruling, Ticket, Vote
from kvflow.protocols.wire.messages import Incarnation, Rank, RoomId

_MESSAGES = msgspec.msgpack.Decoder(wire.ToMember)
_REFUSED = Cause(Code.REFUSED, "the group does not open this room")


class TicketKey(NamedTuple):
    """The identity of a request. Ticket numbers are unique within one incarnation of a leader."""

    leader: Incarnation
    ticket: Ticket


class SendToLeader(msgspec.Struct, frozen=True, gc=False):
    frame: bytes


class OpenRoom(msgspec.Struct, frozen=True, gc=False):
    """Open this rank's half. If that fails, call `failed` and `released`, and refuse decode's half
    unless another room uses the id.
    """

    key: TicketKey
    room: RoomId
    request: bytes


class StartRoom(msgspec.Struct, frozen=True, gc=False):
    """Start the room: every rank is ready. All ranks receive these commands in the same order."""

    key: TicketKey


class CloseRoom(msgspec.Struct, frozen=True, gc=False):
    """End this rank's half of the room, then call `released` or `landed`. It is no error to call
    `failed` first.
    """

    key: TicketKey
    cause: Cause


class RefuseRoom(msgspec.Struct, frozen=True, gc=False):
    """Refuse decode's half of a room that will not be opened. Open rooms with that id continue."""

    room: RoomId
    cause: Cause


class RequestSettled(msgspec.Struct, frozen=True, gc=False):
    """Report the outcome of a request. `cause` is None for a success. Every rank reports the same
    outcome, unless it loses the leader first.
    """

    key: TicketKey
    cause: Cause | None


class TicketEnded(msgspec.Struct, frozen=True, gc=False):
    """Report that the request ended at this rank, and that none of its writes runs."""

    key: TicketKey


class WatchLeader(msgspec.Struct, frozen=True, gc=False):
    """Call `leader_gone` when `process` ends, if this machine can observe its end."""

    process: ProcessIdentity


class UnwatchLeader(msgspec.Struct, frozen=True, gc=False):
    pass


MemberOutput = (
    WatchLeader
    | UnwatchLeader
    | SendToLeader
    | OpenRoom
    | StartRoom
    | CloseRoom
    | RefuseRoom
    | RequestSettled
    | TicketEnded
)


class TicketRecord:
    """One request at this rank."""

    __slots__ = ("cause", "key", "phase")

    def __init__(self, key: TicketKey) -> None:
        self.key = key
        self.phase = MemberPhase.OPEN
        self.cause: Cause | None = None

    @property
    def first_cause(self) -> Cause:
        assert self.cause is not None
        return self.cause


class Session:
    """One membership in a leader's group, with the numbered messages between member and leader."""

    __slots__ = ("is_watched", "leader", "link", "number")

    def __init__(self, leader: Incarnation, number: int, *, is_watched: bool) -> None:
        self.leader, self.number, self.is_watched = leader, number, is_watched
        self.link: Ordered[wire.RankVote] = Ordered()


class GroupMember(Endpoint[MemberOutput]):
    """One incarnation of one rank."""

    def __init__(
        self,
        incarnation: Incarnation,
        rank: int,
        world_size: int,
        *,
        now: float,
        timing: Timing | None = None,
        process: ProcessIdentity | None = None,
    ) -> None:
        """Create a member without a session. A leader may watch `process`, if it is given."""
        self.incarnation, self._process = incarnation, process
        self.rank, self.world_size = Rank(rank), world_size
        self.timing = timing or Timing()
        self.session: Session | None = None
        # Why the leader does not accept this rank. Empty if the leader accepts it, or has not
        # answered yet.
        self.refusal = ""
        self.dropped = 0  # number of frames without effect
        self._last_session = 0
        self._leader = Incarnation(0)  # leader of the last session
        # Open requests at this rank. Other modules may read this, but must not change it.
        self.tickets: dict[TicketKey, TicketRecord] = {}
        self._ending: deque[TicketKey] = deque()  # requests of an ended session, for `tick` to end
        self._why_over = Cause(Code.PEER_LOST)
        self.outbox: list[MemberOutput] = []
        self._heard_at_s = self._due_at_s = now

    def __repr__(self) -> str:
        where = "no session" if self.session is None else f"session {self.session.number}"
        return (
            f"<GroupMember rank {self.rank} of {self.world_size}: {where}, {len(self.tickets)} "
            "requests>"
        )

    # --- what happens to this rank's half of a room

    def matched(self, key: TicketKey) -> None:
        """Report that both halves of the room arrived at this rank."""
        self._feed(key, MemberKind.MATCHED)

    def landed(self, key: TicketKey) -> None:
        """Report that the room succeeded at this rank: all its writes landed."""
        self._feed(key, MemberKind.LANDED)

    def failed(self, key: TicketKey, cause: Cause) -> None:
        """Report that the room failed at this rank, so that it ends on every rank. Call `released`
        once its writes end.
        """
        self._feed(key, MemberKind.FAILED, cause)

    def released(self, key: TicketKey) -> None:
        """Report that no write of a failed room runs any more."""
        self._feed(key, MemberKind.RELEASED)

    # --- the leader

    def receive(self, frame: bytes, now: float) -> None:
        """Handle a frame from the leader. A bad or stale frame is counted and dropped (I7)."""
        message = parsed(_MESSAGES, frame)
        if message is None or message.member != self.incarnation:
            self.dropped += 1
        elif isinstance(message, wire.Joined):
            self._on_joined(message, now)
        elif self.session is None or (message.leader, message.session) != (
            self.session.leader,
            self.session.number,
        ):
            self.dropped += 1
        else:
            self._heard_at_s = now
            if isinstance(message, wire.Decision):
                self._on_decision(self.session, message)
            else:
                self._on_beat(self.session, message)

    def leader_gone(self, now: float) -> None:
        """End the session: the leader's process died. Decisions that it had not sent are lost."""
        self._leave(
            Cause(Code.PEER_LOST, f"rank {self.rank}: the leader of the group has died"), now
        )

    def _on_joined(self, message: wire.Joined, now: float) -> None:
        if message.refusal:
            if self.session is None:
                self.refusal = message.refusal
                return
            if (message.leader, message.session) != (self.session.leader, self.session.number):
                self.dropped += 1  # the answer to an earlier Join
                return
            self._leave(
                Cause(Code.PEER_LOST, f"rank {self.rank} left the group: {message.refusal}"), now
            )
            self.refusal = message.refusal
            return
        if message.leader == self._leader and message.session <= self._last_session:
            self.dropped += 1
            return
        if self.session is not None:
            text = f"rank {self.rank} began another session with the leader of the group"
            self._leave(Cause(Code.PEER_LOST, text), now)
        watched, self.refusal = message.process, ""
        self.session = Session(message.leader, message.session, is_watched=watched is not None)
        if watched is not None:
            self.outbox.append(WatchLeader(watched))
        self._leader, self._last_session = message.leader, message.session
        self._heard_at_s, self._due_at_s = now, now + self.timing.heartbeat_s

    def _on_decision(self, session: Session, message: wire.Decision) -> None:
        link = session.link
        if not link.take(message.seq):
            if link.misses(message.seq):
                self._beat(session)
            return
        key = TicketKey(message.leader, message.ticket)
        if message.ruling in (Ruling.OPEN, Ruling.REFUSE):
            if message.room is None:
                self.dropped += 1
            elif message.ruling is Ruling.OPEN:
                self.tickets[key] = TicketRecord(key)
                self.outbox.append(OpenRoom(key, message.room, message.request))
            else:
                self.outbox.append(RefuseRoom(message.room, message.cause or _REFUSED))
        elif key in self.tickets:
            self._feed(key, _KINDS[message.ruling], message.cause)

    def _on_beat(self, session: Session, message: wire.Beat) -> None:
        link = session.link
        if not link.confirm(message.received_below):
            self.dropped += 1
            return
        if message.gap:
            self.outbox.extend(SendToLeader(encode(vote)) for vote in link.unconfirmed)
        if link.misses(message.sent_below):
            self._beat(session)

    # --- time

    def next_tick(self) -> float:
        """Return the earliest time at which `tick` may have work."""
        return float("-inf") if self._ending else self._due_at_s

    def tick(self, now: float) -> None:
        """Join, send heartbeats, act on the leader's silence, and end a bounded number of requests
        of a session that ended.
        """
        for _ in range(min(TICK_WORK, len(self._ending))):
            self._feed(self._ending.popleft(), MemberKind.LEADER_LOST, self._why_over)
        if now < self._due_at_s:
            return
        if self.session is not None and now - self._heard_at_s >= self.timing.lost_after_s:
            text = (
                f"rank {self.rank} has not heard the leader of its group for "
                f"{self.timing.lost_after_s:g} s"
            )
            self._leave(Cause(Code.PEER_LOST, text), now)
        if self.session is None:
            self._join()
            self._due_at_s = now + self.timing.repeat_after_s
        else:
            self._beat(self.session)
            self._due_at_s = now + self.timing.heartbeat_s

    def credit_stall(self, late_s: float, now: float) -> None:
        """Extend the leader's silence limit by the time during which the shell stalled."""
        self._heard_at_s = min(self._heard_at_s + late_s, now)

    def _join(self) -> None:
        self._send(
            wire.Join(
                member=self.incarnation,
                rank=self.rank,
                world_size=self.world_size,
                last_leader=self._leader,
                last_session=self._last_session,
                process=self._process,
            )
        )

    def _leave(self, cause: Cause, now: float) -> None:
        if self.session is None:
            return
        if self.session.is_watched:
            self.outbox.append(UnwatchLeader())
        self.session, self._why_over, self._due_at_s = None, cause, now
        # Without the leader, this rank cannot know what other ranks do about its requests, so it
        # fails them all. Each `tick` ends a bounded number of requests.
        self._ending = deque(self.tickets)

    def _beat(self, session: Session) -> None:
        link = session.link
        self._send(
            wire.Beat(
                leader=session.leader,
                member=self.incarnation,
                session=session.number,
                sent_below=link.sent_below,
                received_below=link.received_below,
                gap=link.asks,
            )
        )

    def _send(self, message: wire.ToLeader) -> None:
        self.outbox.append(SendToLeader(encode(message)))

    def vote(self, record: TicketRecord, vote: Vote) -> None:
        """Send a vote, unless the session with the request's leader has ended."""
        session = self.session
        # If its session is over, the request fails anyway.
        if session is None or session.leader != record.key.leader:
            return
        message = wire.RankVote(
            leader=session.leader,
            member=self.incarnation,
            session=session.number,
            seq=session.link.sent_below,
            ticket=record.key.ticket,
            vote=vote,
            cause=record.cause,
        )
        session.link.add(message)
        self._send(message)

    def _feed(self, key: TicketKey, kind: MemberKind, cause: Cause | None = None) -> None:
        """Feed one event to a request, unless the request ended. No other code changes its
        phase.
        """
        record = self.tickets.get(key)
        if record is None:
            return
        move = MEMBER.moves[record.phase, kind]
        if move is None:
            return
        record.phase = move.phase
        # The leader's cause replaces a local one, so that every rank reports the same cause.
        if record.cause is None or kind is MemberKind.GROUP_FAILED:
            record.cause = cause
        for command in move.commands:
            _RUN[command](self, record)


def _close_room(member: GroupMember, record: TicketRecord) -> None:
    member.outbox.append(CloseRoom(record.key, record.first_cause))


def _end(member: GroupMember, record: TicketRecord) -> None:
    del member.tickets[record.key]
    member.outbox.append(TicketEnded(record.key))


_RUN: dict[MemberCommand, Callable[[GroupMember, TicketRecord], None]] = {
    MemberCommand.VOTE_READY: lambda member, record: member.vote(record, Vote.READY),
    MemberCommand.VOTE_DONE: lambda member, record: member.vote(record, Vote.DONE),
    MemberCommand.VOTE_FAILED: lambda member, record: member.vote(record, Vote.FAILED),
    MemberCommand.START: lambda member, record: member.outbox.append(StartRoom(record.key)),
    MemberCommand.CLOSE_ROOM: _close_room,
    MemberCommand.TELL_SUCCESS: lambda member, record: member.outbox.append(
        RequestSettled(record.key, None)
    ),
    MemberCommand.TELL_FAILED: lambda m, record: m.outbox.append(
        RequestSettled(record.key, record.first_cause)
    ),
    MemberCommand.END: _end,
}
_KINDS = {
    Ruling.START: MemberKind.STARTED,
    Ruling.SUCCEED: MemberKind.SUCCEEDED,
    Ruling.FAIL: MemberKind.GROUP_FAILED,
}
