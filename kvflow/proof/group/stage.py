"""One rank of a group: a prefill whose rooms follow the group's decisions. Rank 0 also leads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from kvflow.proof.bare.holds import Leg
from kvflow.proof.bare.node import Scene
from kvflow.proof.bare.prefill import Prefill
from kvflow.proof.group.alarm import Alarm
from kvflow.proof.group.client import Client, StageJob
from kvflow.proof.group.forge import forged
from kvflow.proof.group.lines import Lines
from kvflow.proof.group.rules import Agreement
from kvflow.protocols import commands as c
from kvflow.protocols.errors import Cause, Code, KvflowError, room_error
from kvflow.protocols.group import leader as group_leader
from kvflow.protocols.group import member as group_member
from kvflow.protocols.group.leader import GroupLeader
from kvflow.protocols.group.member import GroupMember, TicketKey
from kvflow.protocols.wire.codec import routing_id
from kvflow.protocols.wire.group import Ticket
from kvflow.protocols.wire.messages import Incarnation

GONE = Cause(Code.PEER_LOST, "the connection to the leader of the group is lost")
_LEAVING = Cause(Code.SHUTDOWN, "the leader of the group shuts down")


class Group(NamedTuple):
    lines: Lines
    agreement: Agreement
    # In this proof, the body of a request is the index of its client in `clients`.
    clients: list[Client]
    forges: bool  # True if ranks send votes in each other's name


class Stage(Prefill):
    """One life of a rank: a prefill, its member of the group and, at rank 0, the leader."""

    def __init__(
        self,
        world: Scene,
        group: Group,
        number: int,
        rank: int,
        world_size: int,
        incarnation: Incarnation,
    ) -> None:
        super().__init__(world, number, rank, world_size, incarnation)
        now, timing = self.clock.now, world.timing
        self.lines, self.agreement, self.clients, self._forges = group
        self.member = GroupMember(incarnation, rank, world_size, now=now, timing=timing)
        self.leader: GroupLeader | None = None
        self.callers: dict[Client, None] = {}  # clients that wait for the leader's answer
        self.by_ticket: dict[Ticket, Client] = {}
        self.by_key: dict[TicketKey, Leg] = {}  # legs until released
        self._alarms = [Alarm(self, self.member)]
        self._runs = False
        self.lines.members[routing_id(incarnation)] = self
        if rank == 0:
            self.leader = GroupLeader(
                incarnation,
                world_size,
                now=now,
                timing=timing,
                bounds=world.bounds,
                first=incarnation,
            )
            self.lines.leaders[number] = self
            self._alarms.append(Alarm(self, self.leader))

    # --- the leader's clients

    def ask(self, client: Client) -> None:
        assert self.leader is not None
        try:
            if self.leaving:
                self.leader.refuse(client.room, _LEAVING)
                raise room_error(_LEAVING)
            client.ticket = ticket = self.leader.open(client.room, client.request)
        except KvflowError as error:
            self.say(f"room {client.room}: {error}")
            self._answer(client, self.agreement.given(error.cause()))
        else:
            self.by_ticket[ticket] = client
            self.agreement.asked(self, ticket)
        self.run()

    def client_goes(self, client: Client, how: str) -> None:
        assert self.leader is not None
        if client.ticket is not None and not client.told:
            cause = self.agreement.given(client.cause(Code.CLIENT_GONE, how))
            self.leader.close(client.ticket, cause)
            self.run()

    def _answer(self, client: Client, cause: Cause | None) -> None:
        self.callers.pop(client, None)
        client.tell(cause)

    def died(self) -> None:
        super().died()
        self.lines.unplug(self)
        for client in self.callers:
            client.tell(GONE)
        self.callers.clear()

    # --- the group's own frames

    def receive_from_leader(self, frame: bytes) -> None:
        self.agreement.member_receives(self, frame)
        self.run()

    def receive_from_member(self, peer_id: bytes, frame: bytes) -> None:
        self.agreement.leader_receives(self, peer_id, frame)
        self.run()

    def leader_gone(self, incarnation: Incarnation) -> None:
        if self.member.session is not None and self.member.session.leader == incarnation:
            self.member.leader_gone(self.clock.now)
            self.run()

    def member_died(self, incarnation: Incarnation) -> None:
        assert self.leader is not None
        self.leader.member_died(incarnation)
        self.run()

    # --- what endpoints ask for

    def run(self) -> None:
        """Run the commands of endpoint, member and leader in turn, until none has more."""
        # Commands open and close rooms, which calls `run` again. The outer call does the work.
        if self._runs:
            return
        self._runs, leader = True, self.leader
        while True:
            super().run()
            if self.member.outbox:
                for said in self.member.commands():
                    _OF_MEMBER[type(said)](self, said)
            elif leader is not None and (decided := leader.commands()):
                for told in decided:
                    _OF_LEADER[type(told)](self, told)
            else:
                break
        self._runs = False
        self.agreement.membership(self)
        for alarm in self._alarms:
            alarm.set()

    def _to_leader(self, command: group_member.SendToLeader) -> None:
        self.lines.to_leader(self, command.frame)
        if self._forges:
            others = [rank for rank in self.lines.members.values() if rank is not self]
            other = self.world.rng.choice(others).member if others else None
            if other and (lie := forged(command.frame, other)) is not None:
                self.lines.to_leader(self, lie)

    def _open(self, command: group_member.OpenRoom) -> None:
        key = command.key
        self.agreement.opens(self, key)
        job = self.clients[int.from_bytes(command.request, "big")].job(self.rank, key)
        self.begin(job)
        if job.at is not None:
            self.by_key[key] = job.at
            return
        assert job.error is not None
        if not job.refused and job.error.code is not Code.ROOM_IN_USE:
            self.refuse_room(job.room, job.error)
        self.agreement.failed(self, key)
        self.member.failed(key, job.error)
        self.member.released(key)

    def _start(self, command: group_member.StartRoom) -> None:
        self.agreement.starts(self, command.key)
        leg = self.by_key[command.key]
        if not leg.told:
            self.compute(leg)

    def _close(self, command: group_member.CloseRoom) -> None:
        self.close_room(self.by_key[command.key], self.agreement.given(command.cause))

    def _refuse(self, command: group_member.RefuseRoom) -> None:
        self.refuse_room(command.room, self.agreement.given(command.cause))

    def _settled(self, command: group_member.RequestSettled) -> None:
        self.agreement.settled(self, command.key, command.cause)

    def _ended(self, command: group_member.TicketEnded) -> None:
        if command.key in self.by_key:
            text = f"{self.name}: request {command.key.ticket} has ended, and its room has not"
            self.rules.broken("drain", text)

    def _to_member(self, command: group_leader.SendToMember) -> None:
        self.agreement.decides(command.frame)
        self.lines.to_member(self, command.routing_id, command.frame)

    def _decided(self, command: group_leader.RequestDecided) -> None:
        self.agreement.decided(self, command.ticket, command.cause)
        client = self.by_ticket[command.ticket]
        self.say(f"request {command.ticket} of room {client.room}: {command.cause or 'success'}")
        self._answer(client, command.cause)

    # --- what happens to this rank's half of a room

    def ready(self, leg: Leg) -> None:
        """Vote READY. The engine starts when the group starts."""
        if leg.pages:
            self.agreement.ready(self, _key(leg))
            self.member.matched(_key(leg))

    def _stopped(self, command: c.RoomStopped) -> None:
        Prefill.RUN[c.RoomStopped](self, command)
        key = _key(self.legs[command.serial])
        self.agreement.failed(self, key)
        self.member.failed(key, command.cause)

    def _released(self, command: c.RoomReleased) -> None:
        leg = self.legs.get(command.serial)
        Prefill.RUN[c.RoomReleased](self, command)
        if leg is None:
            return
        key = _key(leg)
        del self.by_key[key]
        if not leg.failed:
            self.agreement.landed(self, key)
            self.member.landed(key)
        else:
            self.member.released(key)

    RUN: ClassVar[dict[type, Callable[[Any, Any], None]]] = Prefill.RUN | {
        c.RoomStopped: _stopped,
        c.RoomReleased: _released,
    }


_OF_MEMBER: dict[type, Callable[[Stage, Any], None]] = {
    group_member.SendToLeader: Stage._to_leader,
    group_member.OpenRoom: Stage._open,
    group_member.StartRoom: Stage._start,
    group_member.CloseRoom: Stage._close,
    group_member.RefuseRoom: Stage._refuse,
    group_member.RequestSettled: Stage._settled,
    group_member.TicketEnded: Stage._ended,
}
_OF_LEADER: dict[type, Callable[[Stage, Any], None]] = {
    group_leader.SendToMember: Stage._to_member,
    group_leader.RequestDecided: Stage._decided,
    group_member.RefuseRoom: Stage._refuse,
}


def _key(leg: Leg) -> TicketKey:
    assert isinstance(leg.job, StageJob)
    return leg.job.key
