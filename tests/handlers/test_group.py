"""Ranks that agree: real sockets, a room at each rank, and one decode."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

import msgspec
import pytest

from kvflow.handlers.group import GroupRequest, LeaderShell, MemberShell, RankRequest
from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.node import PrefillNode
from kvflow.protocols.errors import (
    AbortedError,
    Cause,
    Code,
    KvflowError,
    LostError,
    MisuseError,
    RefusedError,
)
from kvflow.protocols.group.leader import GroupLeader
from kvflow.protocols.group.member import GroupMember, TicketKey
from kvflow.protocols.limits import Timing
from kvflow.protocols.machines.rendezvous import Side
from kvflow.protocols.ports import ProcessIdentity
from kvflow.protocols.wire.messages import Incarnation, RoomId
from kvflow.telemetry.counters import Counts
from kvflow.testing.pair import Pair, pair, until
from kvflow.transports.control.zmq import bind_router, connect_dealer
from kvflow.transports.host.identity import own_identity, wait_dead

PROMPT = range(20)
PATIENT = Timing(heartbeat_s=0.2, lost_after_s=60, repeat_after_s=0.05)
LATER = Cause(Code.ENGINE_ERROR, "this stage is out of memory")


class Ranks:
    """A leader, and a member at each prefill of a pair; the process of a rank is a child."""

    def __init__(self, nodes: Pair) -> None:
        self.nodes = nodes
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.processes: dict[int, ProcessIdentity] = {}
        for rank in range(len(nodes.prefills)):
            self.start_process(rank)
        self.leaders: list[LeaderShell] = []
        self.members: list[MemberShell] = []
        self.port = 0

    @property
    def leader(self) -> LeaderShell:
        return self.leaders[-1]

    def start_process(self, rank: int) -> None:
        self.children[rank] = subprocess.Popen(["sleep", "600"])
        self.processes[rank] = identity_of(self.children[rank].pid)

    def end_process(self, rank: int) -> None:
        self.children[rank].kill()
        self.children[rank].wait()

    def start_leader(self, life: int) -> None:
        socket, self.port = bind_router("127.0.0.1", self.port)
        leader = GroupLeader(
            Incarnation(life),
            len(self.nodes.prefills),
            now=monotonic(),
            timing=PATIENT,
            process=self.processes[0],
        )
        shell = LeaderShell(
            leader,
            socket=socket,
            refuse_room=self.nodes.prefills[0].refuse,
            wait_dead=wait_dead,
            counts=Counts((1,)),
            now=monotonic,
        )
        self.leaders.append(shell)

    def start_member(self, rank: int, life: int) -> MemberShell:
        node = self.nodes.prefills[rank]
        member = GroupMember(
            Incarnation(life),
            rank,
            len(self.nodes.prefills),
            now=monotonic(),
            timing=PATIENT,
            process=self.processes[rank],
        )

        def open_room(_key: TicketKey, room: RoomId, request: bytes) -> PrefillRoom:
            return node.room(room, list(request))

        shell = MemberShell(
            member,
            socket=connect_dealer(f"tcp://127.0.0.1:{self.port}", life),
            open_room=open_room,
            refuse_room=node.refuse,
            wait_dead=wait_dead,
            counts=Counts((1,)),
            now=monotonic,
        )
        self.members.append(shell)
        return shell

    async def complete(self) -> None:
        await until(lambda: not self.leader.leader.unavailable_reason)

    async def open(self, room: int) -> tuple[GroupRequest, DecodeRoom]:
        request = self.leader.open(room, bytes(PROMPT))
        return request, await self.nodes.decode.room(room, "sim", PROMPT)

    async def compute(self, member: MemberShell) -> RankRequest:
        request = await member.started()
        node = self.node_of(member)
        self.nodes.send_all(request.room, node=node, chunks=2)
        return request

    async def started(self) -> list[RankRequest]:
        return list(await asyncio.gather(*(member.started() for member in self.members)))

    async def serve(self, room: int) -> None:
        request, target = await self.open(room)
        await asyncio.gather(*(self.compute(member) for member in self.members))
        await request.decided()
        assert await target.landed() == b"handoff"
        target.close()

    def node_of(self, member: MemberShell) -> PrefillNode:
        return self.nodes.prefills[member.member.rank]

    async def rest(self) -> None:
        await self.nodes.rest()
        await until(
            lambda: not any(shell.requests or shell.member.tickets for shell in self.members)
        )
        assert not any(shell.requests or shell.leader.requests for shell in self.leaders)
        assert not any(shell.counts.handler_errors for shell in [*self.members, *self.leaders])

    async def close(self) -> None:
        for shell in self.members:
            await shell.drain(1.0)
        for leader in self.leaders:
            await leader.close()
            leader.socket.close()
        for shell in self.members:
            await shell.stop()
            shell.socket.close()
        for rank in self.children:
            self.end_process(rank)


def identity_of(pid: int) -> ProcessIdentity:
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return msgspec.structs.replace(own_identity(), pid=pid, start_ticks=ticks)


@asynccontextmanager
async def group(ranks: int, *, rests: bool = True) -> AsyncIterator[Ranks]:
    async with pair(ranks=ranks) as nodes:
        found = Ranks(nodes)
        try:
            found.start_leader(1000)
            for rank in range(ranks):
                found.start_member(rank, rank + 1)
            await found.complete()
            yield found
            if rests:
                await found.rest()
        finally:
            await found.close()


async def fail(error: type[KvflowError], text: str | None, *waiting: Awaitable[object]) -> None:
    for each in waiting:
        with pytest.raises(error, match=text):
            await each


async def test_every_rank_is_ready_before_one_starts_and_done_before_one_succeeds() -> None:
    async with group(3) as g:
        request, target = await g.open(7)
        started = await g.started()
        assert all(each.room.phase.name == "WAITING_FOR_INPUT" for each in started)
        for member, each in zip(g.members[:2], started, strict=False):
            g.nodes.send_all(each.room, node=g.node_of(member))
        await asyncio.gather(*(each.room.done() for each in started[:2]))
        assert not request.when_decided.given
        assert not any(each.when_settled.given for each in started)
        g.nodes.send_all(started[2].room, node=g.node_of(g.members[2]))
        await request.decided()
        await asyncio.gather(*(each.settled() for each in started))
        assert await target.landed() == b"handoff"
        target.close()


async def test_requests_start_in_one_order_on_every_rank() -> None:
    async with group(3) as g:
        pairs = [await g.open(room) for room in range(10)]
        orders = []
        for member in g.members:
            found = [await g.compute(member) for _ in pairs]
            orders.append([each.key.ticket for each in found])
        assert orders[0] == orders[1] == orders[2]
        assert sorted(orders[0]) == sorted(r.ticket for r, _ in pairs)
        await asyncio.gather(*(request.decided() for request, _ in pairs))
        for _, target in pairs:
            await target.landed()
            target.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
async def test_one_stage_fails_while_it_waits_and_all_let_go(stage: int) -> None:
    """No decode has come: the other stages would wait for it until their own deadlines."""
    async with group(4) as g:
        request = g.leader.open(7, bytes(PROMPT))
        await until(lambda: all(member.requests for member in g.members))
        rooms = [next(iter(member.requests.values())) for member in g.members]
        rooms[stage].room.close(LATER)
        waiting = [request.decided(), *(each.settled() for each in rooms)]
        await fail(RefusedError, "this stage is out of memory", *waiting)
        assert all(each.room.cause == LATER for each in rooms)


async def test_decode_aborts_and_every_stage_drains() -> None:
    async with group(4) as g:
        request, target = await g.open(7)
        rooms = await g.started()
        target.close(Cause(Code.CLIENT_GONE, "the client has gone"))
        await fail(AbortedError, "the client has gone", request.decided())
        await fail(KvflowError, None, *(each.settled() for each in rooms))


async def test_the_client_of_the_leader_goes() -> None:
    async with group(2) as g:
        request, target = await g.open(7)
        request.close()
        await fail(AbortedError, None, request.decided(), target.landed())


async def test_a_rank_that_cannot_open_its_room_fails_all() -> None:
    async with group(2) as g:
        other = g.nodes.prefills[1].room(7, PROMPT)  # the id is in use there
        request = g.leader.open(7, bytes(PROMPT))
        await fail(KvflowError, "room 7 is in use", request.decided())
        other.close()
        await until(lambda: not any(member.member.tickets for member in g.members))
        assert not any(member.counts.handler_errors for member in g.members)


async def test_a_rank_that_refuses_a_request_refuses_its_decode_too() -> None:
    async with group(2) as g:
        for room in (7, 8):
            early = await g.nodes.decode.room(room, "sim", PROMPT) if room == 7 else None
            request = g.leader.open(room, b"")  # no prompt
            await fail(KvflowError, "prompt is empty", request.decided())
            target = early or g.nodes.decode.room(room, "sim", PROMPT)
            await fail(KvflowError, "prompt is empty", target.landed())


@pytest.mark.parametrize("first", ["decode", "leader"])
async def test_what_the_leader_does_not_open_is_refused_at_every_rank(first: str) -> None:
    async with group(3) as g:
        g.leader.leader.member_died(Incarnation(3))
        early = await g.nodes.decode.room(7, "sim", PROMPT) if first == "decode" else None
        with pytest.raises(LostError, match="rank 2 of the group's 3 is missing"):
            g.leader.open(7, bytes(PROMPT))
        g.leader.refuse(8, LATER)
        if first == "leader":
            cores = [node.shell.endpoint.core for node in g.nodes.prefills[:2]]
            await until(lambda: all(len(core.rendezvous) == 2 for core in cores))
        target = early or g.nodes.decode.room(7, "sim", PROMPT)
        await fail(LostError, "rank 2 of the group's 3 is missing", target.landed())
        target = g.nodes.decode.room(8, "sim", PROMPT)
        await fail(RefusedError, "this stage is out of memory", target.landed())
        with pytest.raises(MisuseError, match="room id -1"):
            g.leader.refuse(-1, LATER)


async def test_the_leader_without_its_own_rank_refuses_here() -> None:
    async with group(2) as g:
        g.leader.leader.member_died(Incarnation(1))
        with pytest.raises(LostError, match="rank 0 of the group's 2 is missing"):
            g.leader.open(7, bytes(PROMPT))
        assert g.nodes.prefills[0].shell.endpoint.core.rendezvous.has_ended(RoomId(7), Side.ENGINE)


async def test_the_death_of_a_stage_is_seen_at_once_and_it_may_come_back() -> None:
    """Its heartbeats are awaited for a minute: it is the process that is watched."""
    async with group(3) as g:
        request, target = await g.open(7)
        rooms = await g.started()
        dead = g.members.pop(1)
        await dead.stop()
        dead.socket.close()
        rooms[1].room.close()  # with its process
        g.end_process(1)
        waiting = request.decided(), rooms[0].settled(), rooms[2].settled()
        await fail(LostError, "rank 1 of the group has died", *waiting)
        await fail(KvflowError, None, target.landed())
        with pytest.raises(LostError, match="rank 1 of the group's 3 is missing"):
            g.leader.open(8, bytes(PROMPT))
        g.start_process(1)
        g.start_member(1, 77)
        await g.complete()
        await g.rest()
        await g.serve(9)


async def test_a_leader_whose_end_is_cancelled_ends_all_the_same() -> None:
    async with group(1) as g:
        closing = asyncio.create_task(g.leader.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled() and g.leader.stopped and not g.leader._tasks


async def test_a_rank_that_is_refused_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with group(1) as g:
        # Before the first one has ended.
        first, second = g.members[0], g.start_member(0, 50)
        answers, receive = [], second.member.receive

        def received(frame: bytes, now: float) -> None:
            answers.append(frame)
            receive(frame, now)

        monkeypatch.setattr(second.member, "receive", received)
        with caplog.at_level(logging.INFO, "kvflow.handlers.group"):
            await until(lambda: len(answers) == 4)
            assert len(caplog.records) == 1
            text = (
                "rank 0 is not in its group, and asks on: rank 0 is taken by another process, "
                "until that has been"
            )
            assert caplog.records[0].levelno == logging.WARNING and caplog.text.count(text) == 1
            await first.stop()
            g.leader.leader.member_died(first.member.incarnation)
            g.leader.run()
            await until(lambda: second.member.session is not None)
            assert caplog.records[-1].message == "rank 0 is in its group"


async def test_the_death_of_the_leader_ends_what_it_has_opened() -> None:
    async with group(2) as g:
        _, target = await g.open(7)
        rooms = await g.started()
        for dead in (g.leaders.pop(), g.members.pop(0)):  # of one process
            await dead.stop()
            dead.socket.close()
        rooms[0].room.close()
        g.end_process(0)
        await fail(LostError, "the leader of the group has died", rooms[1].settled())
        await fail(KvflowError, None, target.landed())
        g.start_process(0)
        g.start_leader(2000)
        g.start_member(0, 78)
        await g.complete()
        await g.serve(8)


async def test_the_leader_shuts_down() -> None:
    async with group(2) as g:
        request, target = await g.open(7)
        await g.leader.close()
        await fail(AbortedError, "shutting down", request.decided())
        await fail(KvflowError, "shutting down", target.landed())


async def test_a_leader_that_shuts_down_refuses() -> None:
    async with group(2) as g:
        g.leader.leave()
        with pytest.raises(AbortedError, match="the leader of the group is shutting down"):
            g.leader.open(7, bytes(PROMPT))
        target = g.nodes.decode.room(7, "sim", PROMPT)
        await fail(AbortedError, "the leader of the group is shutting down", target.landed())
