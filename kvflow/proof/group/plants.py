"""Planted bugs of a group, each of which once existed or could exist. They are installed from
outside; seeds must find each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from kvflow.proof.group.run import RANKS, simulate
from kvflow.proof.sim.plants import Plant, hunted, installed
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

Installed = AbstractContextManager[object]
_FAILING: Move[MemberPhase, MemberCommand] = Move(MemberPhase.FAILING)


def _skips_local_failures() -> Installed:
    running = (MemberPhase.OPEN, MemberPhase.READY, MemberPhase.STARTED)
    return swapped_cells(
        tables.MEMBER, dict.fromkeys(((phase, MemberKind.FAILED) for phase in running), _FAILING)
    )


def _waits_for_the_decision() -> Installed:
    return swapped_cells(tables.MEMBER, {(MemberPhase.OPEN, MemberKind.GROUP_FAILED): None})


def _applies_as_they_come() -> Installed:
    on_decision = GroupMember._on_decision

    def careless(self: GroupMember, session: Session, message: wire.Decision) -> None:
        if message.seq > session.link.received_below:
            # Pretend that the decisions before this one were applied.
            session.link.received_below = message.seq
        on_decision(self, session, message)

    return swapped(GroupMember, "_on_decision", careless)


def _reports_twice() -> Installed:
    on_vote = GroupLeader._on_vote

    def twice(self: GroupLeader, member: Membership, message: wire.RankVote) -> None:
        late = message.ticket not in self.requests and message.seq == member.link.received_below
        on_vote(self, member, message)
        if late and message.vote is Vote.FAILED:
            self.outbox.append(RequestDecided(message.ticket, RoomId(0), message.cause))

    return swapped(GroupLeader, "_on_vote", twice)


def _keeps_the_last_cause() -> Installed:
    feed = GroupLeader._feed

    def other(
        self: GroupLeader, ticket: Ticket, kind: LeaderKind, cause: Cause | None = None
    ) -> None:
        if cause is not None and kind is LeaderKind.RANK_FAILED:
            cause = Cause(cause.code, "a rank of the group failed")
        feed(self, ticket, kind, cause)

    return swapped(GroupLeader, "_feed", other)


def _leader_lost_unseen() -> Installed:
    return swapped(GroupMember, "_leave", lambda self, cause, now: None)


def _rank_lost_unseen() -> Installed:
    lose = GroupLeader._lose

    def keeps(self: GroupLeader, member: Membership, text: str) -> None:
        lose(self, member, text)
        self._lost.clear()

    return swapped(GroupLeader, "_lose", keeps)


def _any_name_is_believed() -> Installed:
    receive = GroupLeader.receive

    def believes(self: GroupLeader, peer_id: bytes, frame: bytes, now: float) -> None:
        try:
            message = parse_at_leader(frame)
        except WireError:
            return receive(self, peer_id, frame, now)
        return receive(self, routing_id(message.member), frame, now)

    return swapped(GroupLeader, "receive", believes)


def _one_vote_for_two() -> Installed:
    on_vote = GroupLeader._on_vote

    def counts(self: GroupLeader, member: Membership, message: wire.RankVote) -> None:
        record = self.requests.get(message.ticket)
        if record is not None and message.seq == member.link.received_below:
            if record.phase is LeaderPhase.RUNNING and message.vote is Vote.READY:
                # This rank's vote was already counted, as the neighbour's.
                member.link.take(message.seq)
                return
            record.missing |= 1 << member.rank
            if record.missing & (record.missing - 1):
                record.missing &= ~(1 << (member.rank + 1) % self.world_size)
        on_vote(self, member, message)

    return swapped(GroupLeader, "_on_vote", counts)


def _starts_alone() -> Installed:
    move = Move(MemberPhase.STARTED, (MemberCommand.VOTE_READY, MemberCommand.START))
    return swapped_cells(
        tables.MEMBER,
        {
            (MemberPhase.OPEN, MemberKind.MATCHED): move,
            (MemberPhase.STARTED, MemberKind.STARTED): None,
        },
    )


PLANTS = (
    Plant(
        "local failure skipped",
        "a rank drains, and does not tell the leader",
        _skips_local_failures,
        "spread",
    ),
    Plant(
        "decision not carried out",
        "a rank that waits keeps its room",
        _waits_for_the_decision,
        "spread",
    ),
    Plant(
        "decisions out of order",
        "a rank applies what comes, and waits for nothing",
        _applies_as_they_come,
        "order",
    ),
    Plant(
        "failure reported twice",
        "each rank's failure is told to the client",
        _reports_twice,
        "once",
    ),
    Plant(
        "cause lost",
        "the leader tells a failure in its own words",
        _keeps_the_last_cause,
        "first cause",
    ),
    Plant("leader lost unseen", "a rank goes on without its leader", _leader_lost_unseen, "I5"),
    Plant("rank lost unseen", "requests of a rank that is lost stay open", _rank_lost_unseen, "I5"),
    Plant(
        "any name believed", "the leader does not look who speaks", _any_name_is_believed, "start"
    ),
    Plant(
        "one vote for two",
        "a rank's vote counts for the next one, too",
        _one_vote_for_two,
        "success",
    ),
    Plant("starts alone", "a rank starts when it is ready", _starts_alone, "start"),
)


def all_plants() -> tuple[Plant, ...]:
    return PLANTS


def planted(name: str) -> Installed:
    """Return a context that installs the named plant, if any. Raises: MisuseError."""
    return installed(name, PLANTS, "a group")


def hunt(
    name: str,
    seeds: Sequence[int],
    say: Callable[[str], None] = lambda _: None,
    *,
    ranks: int = RANKS,
) -> dict[str, Any]:
    """Find the first seed that shows a plant, and what it broke; no seed if all pass."""
    with planted(name):
        return hunted(name, seeds, partial(simulate, ranks=ranks), say)
