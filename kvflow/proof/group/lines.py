"""Connections between the leader of a group and its members, with the faults of any other link."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from kvflow.proof.bare.clock import Clock
from kvflow.proof.rules.words import worded
from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.times import DELAY_S, FRAME_S, TICK_S
from kvflow.protocols.errors import WireError
from kvflow.protocols.group.leader import GroupLeader
from kvflow.protocols.group.member import GroupMember, TicketKey
from kvflow.protocols.wire.codec import parse_at_leader, parse_at_member, routing_id
from kvflow.protocols.wire.messages import Incarnation


class Process(Protocol):
    incarnation: Incarnation
    name: str
    group: int
    rank: int
    alive: bool
    displaced: bool
    parked: list[Any] | None
    troubled_at_s: float
    leader: GroupLeader | None
    by_key: dict[TicketKey, Any]  # leg of each open request

    @property
    def up(self) -> bool: ...

    @property
    def member(self) -> GroupMember: ...

    def wait(
        self, span: tuple[float, float], do: Callable[..., object], *arguments: Any
    ) -> None: ...

    def receive_from_member(self, peer_id: bytes, frame: bytes) -> None:
        """Pass a member's frame to the leader in this process."""

    def receive_from_leader(self, frame: bytes) -> None: ...

    def member_died(self, incarnation: Incarnation) -> None:
        """Report the death of a member to the leader in this process."""

    def leader_gone(self, incarnation: Incarnation) -> None: ...

    def say(self, what: str) -> None: ...


class Lines:
    """All lines of one run, each a member's connection to the address of its leader."""

    def __init__(self, clock: Clock, rng: random.Random, faults: Faults, *, traced: bool) -> None:
        self.clock, self.rng, self.faults, self._traced = clock, rng, faults, traced
        self.leaders: dict[int, Process] = {}  # process that answers as leader, by group
        self.members: dict[bytes, Process] = {}  # by routing id
        self.cut: set[int] = set()  # incarnations of ranks that are cut off from their group
        self.jammed: dict[int, list[tuple[Process, bool, bytes]]] = {}
        self.trouble: dict[int, float] = {}  # time of the last disturbance, by member
        self._last_at: dict[tuple[int, bool], float] = {}

    def unplug(self, rank: Process) -> None:
        del self.members[routing_id(rank.incarnation)]
        if self.leaders.get(rank.group) is rank:
            del self.leaders[rank.group]

    def to_leader(self, member: Process, frame: bytes) -> None:
        self._carry(member, self.leaders.get(member.group), frame, to_leader=True)

    def to_member(self, leader: Process, peer_id: bytes, frame: bytes) -> None:
        member = self.members.get(peer_id)
        if member is not None and self.leaders.get(leader.group) is leader:
            self._carry(member, leader, frame, to_leader=False)

    def _carry(
        self, member: Process, leader: Process | None, frame: bytes, *, to_leader: bool
    ) -> None:
        if self._traced:
            sender = member if to_leader else leader or member
            sender.say(f"to {_receiver(member, leader, to_leader)}: {_worded(frame)}")
        if leader is None:
            return self.disturbed(member)
        # The leader and its own rank are one process, so no network is between them.
        if leader is member:
            return self.clock.later(TICK_S, None, self._deliver, member, to_leader, frame)
        ends = (member.incarnation, leader.incarnation)
        if not self.cut.isdisjoint(ends):
            return self.disturbed(member)
        for end in ends:
            if end in self.jammed:
                self.jammed[end].append((member, to_leader, frame))
                return self.disturbed(member)
        return self._with_faults(member, to_leader, frame)

    def _with_faults(self, member: Process, to_leader: bool, frame: bytes) -> None:
        clock, rng = self.clock, self.rng
        now, fault = clock.now, self.faults.of_frame()
        at_s = now + rng.uniform(*FRAME_S)
        if fault == "drop":
            return self.disturbed(member)
        if fault == "reorder":
            # `_last_at` stays as it was, so that later frames of the line may overtake this one.
            late_s = at_s + 3 * rng.uniform(*FRAME_S) - now
            return clock.later(late_s, None, self._deliver, member, to_leader, frame)
        if fault == "delay":
            self.disturbed(member)
            at_s += rng.uniform(*DELAY_S)
            clock.later(at_s - now, None, self.disturbed, member)
        line = member.incarnation, to_leader
        self._last_at[line] = at_s = max(at_s, self._last_at.get(line, 0.0) + TICK_S)
        clock.later(at_s - now, None, self._deliver, member, to_leader, frame)
        if fault == "duplicate":
            late_s = at_s - now + rng.uniform(*FRAME_S)
            clock.later(late_s, None, self._deliver, member, to_leader, frame)
        elif fault == "garbage":
            clock.later(at_s - now, None, self._deliver, member, to_leader, _garbage(rng, frame))
        return None

    def _deliver(self, member: Process, to_leader: bool, frame: bytes) -> None:
        if not member.alive:
            return
        if not to_leader:
            self._tell(member, member.receive_from_leader, frame)
        elif (leader := self.leaders.get(member.group)) is not None:
            self._tell(leader, leader.receive_from_member, routing_id(member.incarnation), frame)

    @staticmethod
    def _tell(rank: Process, do: Any, *arguments: Any) -> None:
        if rank.parked is None:
            do(*arguments)
        else:
            rank.parked.append((do, arguments))

    def unjam(self, rank: Process) -> None:
        for member, to_leader, frame in self.jammed.pop(rank.incarnation, ()):
            self.disturbed(member)
            self._last_at[member.incarnation, to_leader] = self.clock.now + TICK_S
            self.clock.later(TICK_S, None, self._deliver, member, to_leader, frame)

    def disturbed(self, member: Process) -> None:
        self.trouble[member.incarnation] = self.clock.now


def _receiver(member: Process, leader: Process | None, to_leader: bool) -> str:
    if not to_leader:
        return member.name
    return "no leader" if leader is None else f"the leader in {leader.name}"


def _worded(frame: bytes) -> str:
    for parse in (parse_at_leader, parse_at_member):
        with suppress(WireError):
            return worded(parse(frame), {"leader", "member", "wire_version", "request"})
    return worded(None)


def _garbage(rng: random.Random, frame: bytes) -> bytes:
    at = rng.randrange(len(frame))
    return rng.choice((frame[:at], b"\xc1" + frame[at:], b"\xc1" + rng.randbytes(at)))
