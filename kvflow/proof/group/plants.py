"""Planted bugs in groups, each of which some seed must find."""

from __future__ import annotations

from kvflow.proof.plant import Installed, Plant, planting
from kvflow.proof.sim.swap import swapped, swapped_cells
from kvflow.protocols.errors import Cause, WireError
from kvflow.protocols.group.leader import GroupLeader, Membership, RequestDecided
from kvflow.protocols.group.member import GroupMember, Session
from kvflow.protocols.machines import group as tables
from kvflow.protocols.machines.group import (
    LeaderKind,
    LeaderPhase,
    MemberCommand,
    MemberKind,
    MemberPhase,
)
from kvflow.protocols.machines.tables import Move
from kvflow.protocols.wire import group as wire
from kvflow.protocols.wire.codec import parse_at_leader, routing_id
from kvflow.protocols.wire.group import Ticket, Vote
from kvflow.protocols.wire.messages import RoomId

PLANTS: list[Plant] = []
bug = planting(PLANTS)

_FAILING: Move[MemberPhase, MemberCommand] = Move(MemberPhase.FAILING)


@bug("local failure skipped", group=(0, "spread"))
def _skips_local_failures() -> Installed:
    """A rank drains, and does not tell the leader."""
    running = (MemberPhase.OPEN, MemberPhase.READY, MemberPhase.STARTED)
    return swapped_cells(
        tables.MEMBER, dict.fromkeys(((phase, MemberKind.FAILED) for phase in running), _FAILING)
    )


@bug("decision not carried out", group=(1, "spread"))
def _waits_for_the_decision() -> Installed:
    """A rank that waits keeps its room."""
    return swapped_cells(tables.MEMBER, {(MemberPhase.OPEN, MemberKind.GROUP_FAILED): None})


@bug("decisions out of order", group=(1, "order"))
def _applies_as_they_come() -> Installed:
    """A rank applies what comes, and waits for nothing."""
    on_decision = GroupMember._on_decision

    def careless(self: GroupMember, session: Session, message: wire.Decision) -> None:
        if message.seq > session.link.received_below:
            # Pretend that the decisions before this one were applied.
            session.link.received_below = message.seq
        on_decision(self, session, message)

    return swapped(GroupMember, "_on_decision", careless)


@bug("failure reported twice", group=(0, "once"))
def _reports_twice() -> Installed:
    """Each rank's failure is told to the client."""
    on_vote = GroupLeader._on_vote

    def twice(self: GroupLeader, member: Membership, message: wire.RankVote) -> None:
        late = message.ticket not in self.requests and message.seq == member.link.received_below
        on_vote(self, member, message)
        if late and message.vote is Vote.FAILED:
            self.outbox.append(RequestDecided(message.ticket, RoomId(0), message.cause))

    return swapped(GroupLeader, "_on_vote", twice)


@bug("cause lost", group=(0, "first cause"))
def _keeps_the_last_cause() -> Installed:
    """The leader tells a failure in its own words."""
    feed = GroupLeader._feed

    def other(
        self: GroupLeader, ticket: Ticket, kind: LeaderKind, cause: Cause | None = None
    ) -> None:
        if cause is not None and kind is LeaderKind.RANK_FAILED:
            cause = Cause(cause.code, "a rank of the group failed")
        feed(self, ticket, kind, cause)

    return swapped(GroupLeader, "_feed", other)


@bug("leader lost unseen", group=(5, "I5"))
def _leader_lost_unseen() -> Installed:
    """A rank goes on without its leader."""
    return swapped(GroupMember, "_leave", lambda self, cause, now: None)


@bug("rank lost unseen", group=(5, "I5"))
def _rank_lost_unseen() -> Installed:
    """Requests of a rank that is lost stay open."""
    lose = GroupLeader._lose

    def keeps(self: GroupLeader, member: Membership, text: str) -> None:
        lose(self, member, text)
        self._lost.clear()

    return swapped(GroupLeader, "_lose", keeps)


@bug("any name believed", group=(20, "start"))
def _any_name_is_believed() -> Installed:
    """The leader does not look who speaks."""
    receive = GroupLeader.receive

    def believes(self: GroupLeader, peer_id: bytes, frame: bytes, now: float) -> None:
        try:
            message = parse_at_leader(frame)
        except WireError:
            return receive(self, peer_id, frame, now)
        return receive(self, routing_id(message.member), frame, now)

    return swapped(GroupLeader, "receive", believes)


@bug("one vote for two", group=(0, "success"))
def _one_vote_for_two() -> Installed:
    """A rank's vote counts for the next one, too."""
    on_vote = GroupLeader._on_vote

    def counts(self: GroupLeader, member: Membership, message: wire.RankVote) -> None:
        record = self.requests.get(message.ticket)
        if record is not None and message.seq == member.link.received_below:
            if record.phase is LeaderPhase.RUNNING and message.vote is Vote.READY:
                # This rank's vote was already counted, together with its neighbour's.
                member.link.take(message.seq)
                return
            record.missing |= 1 << member.rank
            if record.missing & (record.missing - 1):
                record.missing &= ~(1 << (member.rank + 1) % self.world_size)
        on_vote(self, member, message)

    return swapped(GroupLeader, "_on_vote", counts)


@bug("starts alone", group=(0, "start"))
def _starts_alone() -> Installed:
    """A rank starts when it is ready."""
    move = Move(MemberPhase.STARTED, (MemberCommand.VOTE_READY, MemberCommand.START))
    return swapped_cells(
        tables.MEMBER,
        {
            (MemberPhase.OPEN, MemberKind.MATCHED): move,
            (MemberPhase.STARTED, MemberKind.STARTED): None,
        },
    )
