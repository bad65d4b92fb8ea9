"""Rules that must hold in a group, checked against its rooms, its frames and the commands that its
leader and members issue.

- order: every member applies the decisions of one leader's log in the order of the log, without a
  gap;
- start: a request starts only when every rank is ready;
- success: the group succeeds only after every rank lands, and a rank settles a success only
  after the group's decision;
- once: a request is decided once, its client gets one answer, and each rank settles it once;
- first cause: a failed request has the cause of the first failure that reached the leader;
- spread: while the lines are up, a failure of one rank ends the room at every rank within a second;
- patience: a rank or a leader is abandoned only for a reason.

`rest` reports what must not be left over.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, NamedTuple

from kvflow.proof.bare.clock import Clock
from kvflow.proof.group.lines import Lines, Process
from kvflow.proof.rules.judge import Judge
from kvflow.proof.sim.times import HEAR_S, PATIENCE_S
from kvflow.protocols.errors import Cause, WireError
from kvflow.protocols.group.leader import GroupLeader, Membership
from kvflow.protocols.group.member import Session, TicketKey
from kvflow.protocols.wire import group as wire
from kvflow.protocols.wire.codec import parse_at_leader, parse_at_member
from kvflow.protocols.wire.group import Ruling, Ticket, Vote
from kvflow.protocols.wire.messages import Incarnation

SPREAD_S = HEAR_S
_A_MOMENT_S = 1e-6


class Entry(NamedTuple):
    ticket: Ticket
    ruling: Ruling
    cause: Cause | None


Membered = tuple[Incarnation, Incarnation, int]
"""A session: its member, its leader and its number."""


class Agreement:
    def __init__(self, judge: Judge, clock: Clock, lines: Lines) -> None:
        self.broken, self.clock, self.lines, self.ranks = judge.broken, clock, lines, range(0)
        self.counts: Counter[str] = Counter()
        # Causes that a rank's room got from the group. The rank itself may have had no trouble.
        self.group_causes: set[Cause] = set()
        self._log: dict[tuple[Incarnation, int], Entry] = {}
        self._numbers: dict[tuple[TicketKey, Ruling], int] = {}
        self._next: dict[Membered, int] = {}  # number of the next decision to apply
        self._shown: dict[Membered, int] = {}  # number of the last decision with a visible effect
        self._ready: dict[TicketKey, set[int]] = defaultdict(set)
        self._landed: dict[TicketKey, set[int]] = defaultdict(set)
        self._decided: dict[TicketKey, Cause | None] = {}
        self._settled: set[tuple[Incarnation, TicketKey]] = set()
        self._opened: dict[tuple[Incarnation, TicketKey], Session] = {}
        self._sessions: dict[Incarnation, Session | None] = {}
        self._members: dict[Incarnation, dict[Any, Membership]] = {}
        self._first: Cause | None = None  # cause of the failure that the leader is reading
        # Pairs (process that gave up, process on which it gave up). The latter may then give up.
        self._given_up_by: set[tuple[Incarnation, Incarnation]] = set()

    # --- the log

    def decides(self, frame: bytes) -> None:
        message = parse_at_member(frame)
        if not isinstance(message, wire.Decision):
            return
        entry = Entry(message.ticket, message.ruling, message.cause)
        at = message.leader, message.number
        if at not in self._log:
            self._log[at] = entry
            self.counts["started"] += message.ruling is Ruling.START
        if self._log[at] != entry:
            text = f"decision {message.number} is {entry}, and was {self._log[at]} for another rank"
            self.broken("order", text)
        self._numbers[TicketKey(message.leader, message.ticket), message.ruling] = message.number

    def member_receives(self, stage: Process, frame: bytes) -> None:
        """Pass a frame to the member, and verify which decision it applies."""
        member, session = stage.member, stage.member.session
        before = 0 if session is None else session.link.received_below
        member.receive(frame, self.clock.now)
        if session is None or session is not member.session:
            return
        applied = session.link.received_below - before
        if not applied:
            return
        message = parse_at_member(frame)
        assert isinstance(message, wire.Decision)
        where = (member.incarnation, session.leader, session.number)
        expected = self._next[where]
        if applied != 1 or message.number != expected:
            text = f"{stage.name} applies decision {message.number} where {expected} comes next"
            self.broken("order", text)
        self._next[where] = expected + 1

    def _shows(self, stage: Process, key: TicketKey, ruling: Ruling) -> None:
        """Verify that the visible effects of decisions at a rank follow the order of the log."""
        session, number = stage.member.session, self._numbers.get((key, ruling))
        if session is None or session.leader != key.leader:
            return
        where = (stage.incarnation, session.leader, session.number)
        what = f"{stage.name}: {ruling.name} of request {key.ticket}"
        if number is None:
            return self.broken("order", f"{what} was not decided")
        if number <= self._shown.get(where, -1):
            self.broken("order", f"{what} comes after later decisions")
        self._shown[where] = number

    # --- what a rank does

    def opens(self, stage: Process, key: TicketKey) -> None:
        self._shows(stage, key, Ruling.OPEN)
        session = stage.member.session
        assert session is not None
        self._opened[stage.incarnation, key] = session

    def ready(self, stage: Process, key: TicketKey) -> None:
        self._ready[key].add(stage.rank)

    def starts(self, stage: Process, key: TicketKey) -> None:
        if missing := set(self.ranks) - self._ready[key]:
            text = f"{stage.name} starts request {key.ticket}"
            self.broken("start", f"{text}, and ranks {sorted(missing)} are not ready")
        self._shows(stage, key, Ruling.START)

    def landed(self, stage: Process, key: TicketKey) -> None:
        self._landed[key].add(stage.rank)

    def failed(self, stage: Process, key: TicketKey) -> None:
        session = stage.member.session
        if session is not None and session is self._opened[stage.incarnation, key]:
            self.clock.later(SPREAD_S, None, self._has_spread, key, self.clock.now)

    def settled(self, stage: Process, key: TicketKey, cause: Cause | None) -> None:
        at = stage.incarnation, key
        if at in self._settled:
            self.broken("once", f"{stage.name} is told twice what became of request {key.ticket}")
        self._settled.add(at)
        if cause is None and (key not in self._decided or self._decided[key] is not None):
            self.broken("success", f"{stage.name} takes request {key.ticket} for a success, alone")
        if stage.member.session is self._opened[at]:
            self._shows(stage, key, Ruling.FAIL if cause else Ruling.SUCCEED)
            if key in self._decided and self._decided[key] != cause:
                text = f"{stage.name}: request {key.ticket} ends with {cause}"
                self.broken("order", f"{text}, not {self._decided[key]}")

    def given(self, cause: Cause) -> Cause:
        self.group_causes.add(cause)
        return cause

    # --- what the leader does

    def asked(self, stage: Process, ticket: Ticket) -> None:
        self.counts["opened"] += 1

    def leader_receives(self, stage: Process, peer_id: bytes, frame: bytes) -> None:
        """Pass a frame to the leader, and verify that an accepted failure decides its request."""
        leader = stage.leader
        assert leader is not None
        vote = _failure(frame)
        ticket = Ticket(0) if vote is None else vote.ticket
        member = None if vote is None else _membership(leader, vote)
        # The leader accepts only the next vote of a session. It ignores repeated and early ones.
        takes = member is not None and vote is not None and vote.seq == member.link.received_below
        open_ = ticket in leader.requests
        leader.receive(peer_id, frame, self.clock.now)
        if takes and open_:
            assert vote is not None
            self._first = vote.cause
            if ticket in leader.requests:
                text = f"request {ticket} goes on, and rank {member and member.rank} has failed"
                self.broken("first cause", text)

    def decided(self, stage: Process, ticket: Ticket, cause: Cause | None) -> None:
        key, first = TicketKey(stage.incarnation, ticket), self._first
        self._first = None
        if key in self._decided:
            text = f"request {ticket} is decided twice: {self._decided[key]}, then {cause}"
            self.broken("once", text)
        self._decided[key] = cause
        if first is not None and cause != first:
            text = f"request {ticket} fails with {cause}, the first was {first}"
            self.broken("first cause", text)
        if cause is None and (missing := set(self.ranks) - self._landed[key]):
            text = f"request {ticket} succeeds, and has not landed at ranks {sorted(missing)}"
            self.broken("success", text)
        self.counts["succeeded" if cause is None else f"failed {cause.code}"] += 1
        if cause is not None:
            self.clock.later(SPREAD_S, None, self._has_spread, key, self.clock.now)

    # --- spread

    def _has_spread(self, key: TicketKey, since_s: float) -> None:
        """Verify that a failure ended the room at every rank, once no rank is in trouble."""
        if all(leader.incarnation != key.leader for leader in self.lines.leaders.values()):
            return
        stages = [rank for rank in self.lines.members.values() if _in_session(rank, key)]
        troubled_at_s = max(self._troubled_at_s(rank) for rank in self.lines.members.values())
        if len(stages) < len(self.ranks):
            # A rank is missing: either it comes back, or the group must first notice its silence.
            troubled_at_s = self.clock.now
        if troubled_at_s >= since_s:
            wait_s = max(troubled_at_s + SPREAD_S - self.clock.now, _A_MOMENT_S)
            since_s = troubled_at_s + _A_MOMENT_S
            self.clock.later(wait_s, None, self._has_spread, key, since_s)
            return
        for stage in stages:
            leg = stage.by_key.get(key)
            if leg is not None and not leg.told:
                text = f"request {key.ticket} has failed, and {stage.name} has its room open"
                self.broken("spread", text)
        if key not in self._decided:
            text = f"request {key.ticket} has failed at a rank, and its client was not told"
            self.broken("spread", text)

    def _troubled_at_s(self, rank: Process) -> float:
        now = self.clock.now
        if not rank.up or rank.displaced or rank.incarnation in self.lines.cut:
            return now
        return max(rank.troubled_at_s, self.lines.trouble.get(rank.incarnation, -1.0))

    # --- patience

    def membership(self, stage: Process) -> None:
        """Verify that every session that ended since the last call had a reason to end."""
        session, known = stage.member.session, self._sessions.get(stage.incarnation)
        if session is not known:
            self._sessions[stage.incarnation] = session
            if known is not None:
                self._given_up(stage, known.leader, f"{stage.name} leaves the group")
        leader = stage.leader
        if leader is None:
            return
        members = self._members.get(stage.incarnation, {})
        if members != leader.members:
            for rank, member in members.items():
                if leader.members.get(rank) is not member:
                    self.counts["ranks lost"] += 1
                    self._given_up(stage, member.incarnation, f"the leader gives up rank {rank}")
            # A new member applies the decisions from now on.
            for member in leader.members.values():
                self._next.setdefault(
                    (member.incarnation, leader.incarnation, member.session), leader.decisions
                )
            self._members[stage.incarnation] = dict(leader.members)

    def _given_up(self, stage: Process, other: Incarnation, text: str) -> None:
        """Verify that `stage` or `other` was in trouble, or that `other` gave up first."""
        found = [rank for rank in self.lines.members.values() if rank.incarnation == other]
        excused = (other, stage.incarnation) in self._given_up_by
        self._given_up_by.discard((other, stage.incarnation))
        if not found or stage.displaced or excused:
            return
        self._given_up_by.add((stage.incarnation, other))
        troubled_at_s = max(self._troubled_at_s(rank) for rank in (stage, *found))
        if self.clock.now - troubled_at_s > PATIENCE_S:
            self.broken("patience", f"{text}, and nothing has happened to the two")


def _failure(frame: bytes) -> wire.RankVote | None:
    try:
        message = parse_at_leader(frame)
    except WireError:
        return None
    return message if isinstance(message, wire.RankVote) and message.vote is Vote.FAILED else None


def _membership(leader: GroupLeader, vote: wire.RankVote) -> Membership | None:
    for member in leader.members.values():
        accepted = leader.incarnation, member.incarnation, member.session
        if (vote.leader, vote.member, vote.session) == accepted:
            return member
    return None


def _in_session(rank: Process, key: TicketKey) -> bool:
    session = rank.member.session
    return session is not None and session.leader == key.leader
