"""The shells of a group of prefill ranks: one for the leader, and one for each rank, including the
leader's own.

A shell reads frames from its socket, feeds its endpoint, and runs the endpoint's commands. A rank
reports to the leader what happens to its rooms, and applies the group's decisions to them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable

from kvflow.handlers.rooms import PrefillRoom
from kvflow.handlers.shell import Answer, Shell, seen_ended
from kvflow.protocols.arguments import check_cause
from kvflow.protocols.errors import Cause, Code, MisuseError, RoomInUseError, room_error
from kvflow.protocols.group import leader as group_leader
from kvflow.protocols.group import member as group_member
from kvflow.protocols.group.leader import GroupLeader
from kvflow.protocols.group.member import GroupMember, TicketKey
from kvflow.protocols.ports import ControlSocket, ProcessIdentity
from kvflow.protocols.wire.group import Ticket
from kvflow.protocols.wire.messages import Incarnation, RoomId
from kvflow.telemetry.counters import Counts

log = logging.getLogger(__name__)

WaitDead = Callable[[ProcessIdentity], Awaitable[None]]
"""Waits until the process ends.

Raises: TransferError if this host can never observe that end, OSError if it cannot do so now.
"""
OpenRoom = Callable[[TicketKey, RoomId, bytes], PrefillRoom]
"""Opens this rank's half of a room for the request that the leader received.

Every rank opens the rooms in the leader's order. Raises: KvflowError; the shell then refuses
decode's half, unless the room's id is in use.
"""
RefuseRoom = Callable[[RoomId, Cause], None]
"""Refuses a room at this rank, so that decode receives the cause. See `PrefillNode.refuse`."""

IsReady = Callable[[PrefillRoom, bytes], Awaitable[None]]
"""Waits until this rank can begin: decode's half has arrived, and the engine has everything else
that the request needs at this rank. The second argument is the request that the leader received.

Raises: the KvflowError that ended the room.
"""

_LEAVING = Cause(Code.SHUTDOWN, "the leader of the group is shutting down")


class GroupRequest:
    """One request at the leader, with its outcome on all ranks."""

    def __init__(self, shell: LeaderShell, ticket: Ticket, room: RoomId) -> None:
        self._shell, self.ticket, self.room = shell, ticket, room
        self.when_decided: Answer[None] = Answer()

    async def decided(self) -> None:
        """Wait until the request succeeded on every rank.

        Raises: the KvflowError that ended the request.
        """
        await self.when_decided.get()

    def close(self, cause: Cause | None = None) -> None:
        self._shell.close_request(self, check_cause(cause))


class LeaderShell(Shell):
    def __init__(
        self,
        leader: GroupLeader,
        *,
        socket: ControlSocket,
        refuse_room: RefuseRoom,
        wait_dead: WaitDead,
        counts: Counts,
        now: Callable[[], float],
    ) -> None:
        """`refuse_room` refuses a room at rank 0, which runs in this process."""
        super().__init__(leader, leader.timing, counts, now)
        self.leader, self.socket, self._refuse_room, self._wait_dead = (
            leader,
            socket,
            refuse_room,
            wait_dead,
        )
        self.requests: dict[Ticket, GroupRequest] = {}
        self._watches: dict[Incarnation, asyncio.Task[None]] = {}
        self.runners = {
            group_leader.SendToMember: self._send,
            group_leader.RequestDecided: self._decided,
            group_member.RefuseRoom: self._refuse_here,
            group_leader.WatchMember: self._watch,
            group_leader.UnwatchMember: self._unwatch,
        }
        read = self.consume(
            socket, lambda sender, frame: leader.receive(sender, frame, now()), "a rank"
        )
        self.spawn(read, "kvflow-group-leader-read")
        self.run()

    def open(self, room: int, request: bytes) -> GroupRequest:
        """Open a room on every rank.

        The method is synchronous, so that the caller learns of a refusal before it does any work.
        Each rank passes `request` to its `open_room`. If this method raises, every rank refuses
        decode's half with that cause (unless `room` is not a room id), so do not call `refuse` too.

        Raises: the errors of `GroupLeader.open` (room in use, capacity, a rank is missing), and
        AbortedError while shutting down.
        """
        try:
            if self.leaving:
                self.leader.refuse(room, _LEAVING)
                raise room_error(_LEAVING)
            ticket = self.leader.open(room, request)
            found = self.requests[ticket] = GroupRequest(
                self, ticket, self.leader.requests[ticket].room
            )
        finally:
            self.run()
        return found

    def refuse(self, room: int, cause: Cause) -> None:
        """Refuse a room on every rank instead of opening it. See `PrefillNode.refuse` for one rank.

        Raises: MisuseError if `room` is not a room id.
        """
        self.leader.refuse(room, check_cause(cause))
        self.run()

    def close_request(self, request: GroupRequest, cause: Cause) -> None:
        self.leader.close(request.ticket, cause)
        self.run()

    def leave(self) -> None:
        """Refuse new requests, and end every open one."""
        self.leaving = True
        for request in list(self.requests.values()):
            self.leader.close(request.ticket, _LEAVING)
        self.run()

    async def close(self) -> None:
        self.leave()
        try:
            # A socket may send only at the end of a turn, so the last decisions need one more turn.
            await asyncio.sleep(0)
        finally:
            await self.stop()

    async def stop(self) -> None:
        await super().stop()
        # A stopped shell reads no more messages, so no decision can arrive for these requests.
        for request in self.requests.values():
            request.when_decided.give(None, _LEAVING)

    async def _until_dead(self, command: group_leader.WatchMember) -> None:
        rank = f"rank {command.member:016x}"
        if await seen_ended(
            lambda: self._wait_dead(command.process), rank, self.timing, self.counts
        ):
            self.leader.member_died(command.member)
            self.run()

    # --- commands

    def _send(self, command: group_leader.SendToMember) -> None:
        if not self.socket.send(command.frame, command.routing_id, at_once=True):
            self.counts.undelivered += 1

    def _refuse_here(self, command: group_member.RefuseRoom) -> None:
        self._refuse_room(command.room, command.cause)

    def _decided(self, command: group_leader.RequestDecided) -> None:
        request = self.requests.pop(command.ticket)
        if command.cause is not None:
            log.info("room %d failed on every rank: %s", command.room, command.cause)
        request.when_decided.give(None, command.cause)

    def _watch(self, command: group_leader.WatchMember) -> None:
        self._watches[command.member] = self.spawn(
            self._until_dead(command), f"kvflow-rank-{command.member:016x}"
        )

    def _unwatch(self, command: group_leader.UnwatchMember) -> None:
        self.cancel(self._watches.pop(command.member, None))


class RankRequest:
    """One request at one rank, with this rank's half of its room."""

    def __init__(self, key: TicketKey, room: PrefillRoom, request: bytes) -> None:
        self.key, self.room, self.request = key, room, request
        self.when_settled: Answer[None] = Answer()

    async def settled(self) -> None:
        """Wait until the request succeeded on every rank.

        Raises: the KvflowError that ended the request.
        """
        await self.when_settled.get()


class MemberShell(Shell):
    def __init__(
        self,
        member: GroupMember,
        *,
        socket: ControlSocket,
        open_room: OpenRoom,
        refuse_room: RefuseRoom,
        wait_dead: WaitDead,
        counts: Counts,
        now: Callable[[], float],
        ready: IsReady | None = None,
    ) -> None:
        """`ready` defaults to waiting until the room is matched."""
        super().__init__(member, member.timing, counts, now)
        self.member, self.socket, self._wait_dead = member, socket, wait_dead
        self._open_room, self._refuse_room, self._ready = open_room, refuse_room, ready
        self.requests: dict[TicketKey, RankRequest] = {}
        self._started: asyncio.Queue[RankRequest] = asyncio.Queue()
        self._watch_task: asyncio.Task[None] | None = None
        self._refusal = ""  # the refusal that was logged last
        self.runners = {
            group_member.SendToLeader: self._send,
            group_member.OpenRoom: self._open,
            group_member.StartRoom: self._start,
            group_member.CloseRoom: self._close_room,
            group_member.RefuseRoom: self._refuse,
            group_member.RequestSettled: self._settled,
            group_member.TicketEnded: self._ended_here,
            group_member.WatchLeader: self._watch,
            group_member.UnwatchLeader: self._unwatch,
        }
        read = self.consume(socket, lambda _, frame: self._receive(frame), "the group's leader")
        self.spawn(read, "kvflow-group-member-read")
        self.run()

    async def started(self) -> RankRequest:
        """Wait for the next request that starts, and return it. The request may be over already.
        Every rank returns requests in the same order.
        """
        return await self._started.get()

    async def drain(self, patience_s: float) -> None:
        """Wait until every request ends, for at most `patience_s`. Close the rooms first."""
        self.leaving = True
        await self.wait_while(lambda: bool(self.member.tickets), patience_s)

    async def stop(self) -> None:
        await super().stop()
        gone = Cause(Code.SHUTDOWN, f"rank {self.member.rank} of the group is shutting down")
        # A stopped shell reads no more messages, so no decision can arrive for these requests.
        for request in self.requests.values():
            request.when_settled.give(None, gone)

    def _receive(self, frame: bytes) -> None:
        self.member.receive(frame, self.now())
        self._log_refusal()

    def _log_refusal(self) -> None:
        """Log each new refusal once: a refused rank repeats Join, and is refused again."""
        if (refusal := self.member.refusal) == self._refusal:
            return
        self._refusal = refusal
        if refusal:
            log.warning("rank %d is not in its group, and asks on: %s", self.member.rank, refusal)
        else:
            log.info("rank %d is in its group", self.member.rank)

    async def _follow(self, request: RankRequest) -> None:
        room = request.room
        if self._ready is not None:
            await self._ready(room, request.request)
        await room.matched()
        self.member.matched(request.key)
        self.run()
        await room.done()

    def _followed(self, request: RankRequest, error: BaseException | None) -> None:
        """Report to `member` how this rank's room ended.

        An error from the engine's `ready` also ends the room. A failure is reported at once. A
        success, or the release of a failed room, is reported once the room's writes are drained.
        """
        if self.stopped:
            # The leader observes the end of the membership, and `stop` answers the users who wait.
            return
        member, key, room = self.member, request.key, request.room
        if error is not None:
            cause = self.explained(error, f"room {room.room} at rank {member.rank}").cause()
            member.failed(key, cause)
            room.close(cause)

        def released(_: BaseException | None) -> None:
            (member.landed if error is None else member.released)(key)

        self.spawn(room.released(), f"kvflow-group-release-{room.room}", ended=released)

    async def _until_dead(self, process: ProcessIdentity) -> None:
        if await seen_ended(
            lambda: self._wait_dead(process), "the leader", self.timing, self.counts
        ):
            self.member.leader_gone(self.now())
            self.run()

    # --- commands

    def _send(self, command: group_member.SendToLeader) -> None:
        if not self.socket.send(command.frame, at_once=True):
            self.counts.undelivered += 1

    def _open(self, command: group_member.OpenRoom) -> None:
        try:
            room = self._open_room(command.key, command.room, command.request)
            if not isinstance(room, PrefillRoom):
                raise MisuseError(f"open_room() returned {room!r}, which is no PrefillRoom")
        except BaseException as problem:  # noqa: BLE001 - `explained` raises what must pass
            cause = self.explained(problem, f"opening room {command.room}").cause()
            # If the id is in use, decode's half belongs to the other room, or the node has refused
            # it.
            if not isinstance(problem, RoomInUseError):
                self.guard(
                    lambda: self._refuse_room(command.room, cause), f"refusing room {command.room}"
                )
            self.member.failed(command.key, cause)
            self.member.released(command.key)
            return
        request = self.requests[command.key] = RankRequest(command.key, room, command.request)
        ended = functools.partial(self._followed, request)
        self.spawn(self._follow(request), f"kvflow-group-room-{command.room}", ended=ended)

    def _start(self, command: group_member.StartRoom) -> None:
        self._started.put_nowait(self.requests[command.key])

    def _close_room(self, command: group_member.CloseRoom) -> None:
        self.requests[command.key].room.close(command.cause)

    def _refuse(self, command: group_member.RefuseRoom) -> None:
        self._refuse_room(command.room, command.cause)

    def _settled(self, command: group_member.RequestSettled) -> None:
        request = self.requests.get(command.key)
        if request is not None:
            request.when_settled.give(None, command.cause)

    def _ended_here(self, command: group_member.TicketEnded) -> None:
        self.requests.pop(command.key, None)

    def _watch(self, command: group_member.WatchLeader) -> None:
        self._watch_task = self.spawn(
            self._until_dead(command.process), "kvflow-group-leader-watch"
        )

    def _unwatch(self, command: group_member.UnwatchLeader) -> None:
        watch, self._watch_task = self._watch_task, None
        self.cancel(watch)
