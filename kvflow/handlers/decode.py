"""Decode's shell: awaits messages from its sockets, feeds the endpoint, and runs what comes out."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from kvflow.handlers.rooms import DecodeRoom
from kvflow.handlers.shell import Shell, fenced
from kvflow.handlers.verify import ChunkVerifier
from kvflow.protocols import commands as c
from kvflow.protocols.commands import PeerKey
from kvflow.protocols.decode import DecodeEndpoint
from kvflow.protocols.decode_rooms import Prompt
from kvflow.protocols.errors import CapacityError, Cause, Code, KvflowError, MisuseError, room_error
from kvflow.protocols.machines.decode_room import DecodePhase
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import Checksums, ControlSocket, DataPlane, PageStore, UnprovenLoan
from kvflow.protocols.wire.messages import GrantId, Incarnation
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.telemetry.counters import Counts

log = logging.getLogger(__name__)

Connect = Callable[[str, int], ControlSocket]
"""(control endpoint, our incarnation) -> DEALER. Raises: MisuseError for an address it cannot connect to."""
POLL_S = 0.1  # how often a socket is asked why it is not let in
_OPENING = "kvflow-room-"


class Quarantined:
    """The owner of pages whose room has ended while a loan on them has not."""

    __slots__ = ("grant",)

    def __init__(self, grant: int) -> None:
        self.grant = grant

    def __repr__(self) -> str:
        return f"quarantine({self.grant})"


class _Line(NamedTuple):
    """The connection to one prefill rank, and the task that reads it."""

    socket: ControlSocket
    reader: asyncio.Task[None]


class DecodeShell(Shell):
    """One decode endpoint on the event loop: sockets, pages, fences, and the rooms its users hold."""

    def __init__(
        self,
        endpoint: DecodeEndpoint,
        *,
        pages: PageStore,
        plane: DataPlane,
        connect: Connect,
        counts: Counts,
        now: Callable[[], float],
        checksums: Checksums | None = None,
    ) -> None:
        super().__init__(endpoint, endpoint.core.timing, counts, now)
        self.endpoint, self.pages, self.plane = endpoint, pages, plane
        self._connect, self.checksums = connect, checksums
        self.rooms: dict[GrantId, DecodeRoom] = {}  # open ones, and ended ones whose pages are not free
        self._lines: dict[PeerKey, _Line] = {}
        self._watches: dict[PeerKey, asyncio.Task[None]] = {}
        self._polled_at_s = 0.0

    # --- rooms

    @property
    def num_pages(self) -> int:
        return self.endpoint.core.identity.layout.num_pages

    def open(
        self,
        room: DecodeRoom,
        ranks: Sequence[RankInfo] | Callable[[], Awaitable[Sequence[RankInfo]]],
        prompt: Prompt,
        deadline_at_s: float,
        *,
        announce: bool = False,
    ) -> None:
        """Open a room at `ranks`, or at what they resolve to.

        Raises: MisuseError. Every other refusal is the room's: it is raised where the room is awaited.
        """
        if callable(ranks):
            work = self._resolve_and_open(room, ranks, prompt, deadline_at_s)
            room.opening = self.spawn(work, f"{_OPENING}{room.room}")
        else:
            self._open(room, ranks, prompt, deadline_at_s, announce=announce)

    async def _resolve_and_open(
        self,
        room: DecodeRoom,
        resolve: Callable[[], Awaitable[Sequence[RankInfo]]],
        prompt: Prompt,
        deadline_at_s: float,
    ) -> None:
        try:
            left_s = deadline_at_s - self.now()
            async with asyncio.timeout(None if left_s == float("inf") else left_s):
                ranks = await resolve()
        except asyncio.CancelledError:
            self._refused(room, room_error(Cause(Code.SHUTDOWN, "decode is shutting down")))
            raise
        except TimeoutError:
            text = f"room {room.room}: its deadline passed while the ranks of its prefill were asked for"
            self._refused(room, room_error(Cause(Code.DEADLINE, text)))
        except KvflowError as error:
            self._refused(room, error)
        else:
            room.opening = None
            if room.refused is not None:  # closed meanwhile: the prefill legs are told
                self.refuse(room.room, ranks, room.refused)
            else:
                self._open(room, ranks, prompt, deadline_at_s, announce=True)

    def _open(
        self, room: DecodeRoom, ranks: Sequence[RankInfo], prompt: Prompt, deadline_at_s: float, *, announce: bool
    ) -> None:
        endpoint, now = self.endpoint, self.now()
        try:
            room.grant = endpoint.open_room(
                room.room, ranks, prompt, now=now, deadline_at_s=deadline_at_s, announce=announce
            )
        except CapacityError as error:
            self._refused(room, error)
        except MisuseError as error:
            self._refused(room, error)
            if room.opening is None:
                raise
        except KvflowError as error:
            self._refused(room, error)
        else:
            room.record = endpoint.rooms[room.grant]
            room.owner = ("grant", room.grant)
            self.rooms[room.grant] = room
            if self.checksums is not None:
                room.verifier = ChunkVerifier(self.pages, self.checksums, room.idle)
        self.run()

    def _refused(self, room: DecodeRoom, error: KvflowError) -> None:
        """It ended before the endpoint knew of it, and has no pages."""
        if room.refused is None:
            room.refused = error.cause()
        room.tell_failed(error)
        room.pages_freed()
        self.call_back(room.take_callbacks())

    def refuse(self, room: int, ranks: Sequence[RankInfo], cause: Cause) -> None:
        """Tell the prefill legs of a request that is refused here; where none can be reached there is nothing to do."""
        try:
            self.endpoint.refuse_room(room, ranks, cause, self.now())
        except MisuseError:
            raise
        except KvflowError as error:
            log.info("cannot tell prefill that room %d is refused: %s", room, error)
        self.run()

    def close_room(self, room: DecodeRoom, cause: Cause) -> None:
        if room.record is not None:
            self.endpoint.close_room(room.grant, cause, self.now())
        elif room.refused is None:
            self._refused(room, room_error(cause))
        self.run()

    # --- links

    def declare_dead(self, incarnation: int, why: str) -> None:
        """See `DecodeEndpoint.declare_dead`."""
        loans, pages = self.endpoint.declare_dead(Incarnation(incarnation), why, self.now())
        log.warning(
            "prefill %016x is declared dead (%s): %d loans end without proof, %d pages leave quarantine",
            incarnation, why, loans, pages,
        )  # fmt: skip
        self.run()

    async def _read(self, key: PeerKey, socket: ControlSocket) -> None:
        """Consume one link's messages until cancelled; what goes wrong with one is counted, the loop goes on (I7)."""
        endpoint = self.endpoint
        while (line := self._lines.get(key)) is not None and line.socket is socket:
            for _, frame in await socket.receive():
                try:
                    endpoint.receive(key, frame, self.now())
                except Exception:
                    self.counts.handler_errors += 1
                    log.exception("a message of prefill %016x failed", key.incarnation)
            self.run()

    async def _watch(self, command: c.WatchWriter) -> None:
        if await fenced(self.plane, command.address, self.timing, self.counts):
            self.endpoint.writer_died(command.peer, self.now())
            self.run()

    def tick(self, now: float) -> None:
        if now - self._polled_at_s >= POLL_S:
            self._polled_at_s = now
            for key, line in list(self._lines.items()):
                if reason := line.socket.lockout_reason:  # asked in every phase: what it has to tell must not pile up
                    self.endpoint.locked_out(key, reason, now)
        super().tick(now)

    # --- the end

    def leave(self) -> None:
        """No new room from here on, and every room is aborted; `close` waits for what follows."""
        self.leaving = True
        self.endpoint.leave(self.now())
        for task in self._tasks:
            if task.get_name().startswith(_OPENING):
                task.cancel()
        self.run()

    async def close(self) -> list[UnprovenLoan]:
        """Wait for the answers of prefills about their loans, then hang up. Call `leave` first.

        Returns what could not be proven: its pages must not be used until every writer named is known to have ended.
        """
        core = self.endpoint.core
        await self.wait_while(lambda: core.proof_may_come, self.timing.lost_after_s)
        self.endpoint.close(self.now())
        self.run()
        await self.stop()
        left = []
        for room in self.rooms.values():
            assert room.record is not None
            owner, held_in = (room.owner, None) if room.own_pages is None else (None, self.pages)
            writers = [peer.address for peer in room.record.lease.loans if peer.address is not None]
            left += [UnprovenLoan(writer, room.pages, owner, held_in) for writer in writers]
        self.rooms.clear()
        return left

    # --- commands

    def run_commands(self) -> None:
        outbox = self.endpoint.core.outbox
        while outbox:
            for command in self.endpoint.commands():
                _RUN[type(command)](self, command)
        if self.leaving:
            self.changed.set()

    def _send(self, command: c.SendToPrefill) -> None:
        line = self._lines.get(command.peer)
        if line is None or not line.socket.send(command.frame):
            self.counts.undelivered += 1

    def _dial(self, command: c.Dial) -> None:
        key = command.peer
        try:
            socket = self._connect(key.control, self.endpoint.core.identity.incarnation)
        except KvflowError as error:
            self.endpoint.locked_out(key, str(error), self.now())
            return
        self._lines[key] = _Line(socket, self.spawn(self._read(key, socket), f"kvflow-link-{key.control}"))

    def _hang_up(self, command: c.HangUp) -> None:
        line = self._lines.pop(command.peer, None)
        if line is not None:
            line.reader.cancel()
            line.socket.close()

    def _watch_writer(self, command: c.WatchWriter) -> None:
        key = command.peer
        task = self._watches[key] = self.spawn(self._watch(command), f"kvflow-fence-{key.control}")
        task.add_done_callback(functools.partial(self._watch_ended, key))

    def _watch_ended(self, key: PeerKey, task: asyncio.Task[None]) -> None:
        if self._watches.get(key) is task:
            del self._watches[key]

    def _stop_watch(self, command: c.StopWatch) -> None:
        task = self._watches.pop(command.peer, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def _linked(self, command: c.Linked) -> None:
        room = self.rooms[command.grant]
        room.linked = True
        if not room.held_back:
            self.offer(room)

    def offer(self, room: DecodeRoom) -> None:
        """Take the room's pages and lend them, once every rank is registered."""
        if room.ended or not room.linked or room.record is None:
            return
        wanted = room.record.num_pages
        try:
            if room.own_pages is None:
                room.pages = self.pages.take(wanted, room.owner)
            elif len(room.own_pages) != wanted:
                raise MisuseError(f"room {room.room}: {len(room.own_pages)} pages given, its prompt needs {wanted}")
            self.endpoint.lend(room.grant, room.pages, self.now())
        except KvflowError as error:
            room.tell_failed(error)
            self.endpoint.close_room(room.grant, error.cause(), self.now())
        else:
            room.tell_opened()
        self.run()

    def _verify(self, command: c.VerifyChunk) -> None:
        room = self.rooms[command.grant]
        assert room.verifier is not None
        pages: PageIndices = room.pages[command.first : command.first + command.count]
        room.verifier.begin(pages, functools.partial(self._summed, command))

    def _summed(self, command: c.VerifyChunk, checksum: bytes) -> None:
        self.endpoint.chunk_summed(command.grant, command.rank, command.seq, checksum, self.now())
        self.run()

    def _stop_verifying(self, command: c.StopVerifying) -> None:
        room = self.rooms[command.grant]
        if room.verifier is not None:
            room.verifier.cancel()

    def _landed(self, command: c.RoomLanded) -> None:
        self.rooms[command.grant].tell_landed(command.handoff)

    def _failed(self, command: c.RoomFailed) -> None:
        self.rooms[command.grant].tell_failed(room_error(command.cause))

    def _ended_room(self, command: c.RoomEnded) -> None:
        room = self.rooms[command.grant]
        room.over = True
        if room.phase is DecodePhase.SUCCESS:  # its pages are its user's
            room.pages_freed()
        self._forget(room)
        self.call_back(room.take_callbacks())

    def _forget(self, room: DecodeRoom) -> None:
        if room.over and room.free:
            del self.rooms[room.grant]

    def _quarantine(self, command: c.QuarantinePages) -> None:
        room = self.rooms[command.grant]
        if room.own_pages is None:
            owner = Quarantined(command.grant)
            self.pages.move(room.pages, room.owner, owner)
            room.owner = owner

    def _free(self, command: c.FreePages) -> None:
        room = self.rooms[command.grant]
        if room.own_pages is None and len(room.pages):
            self.pages.give_back(room.pages, room.owner)
        room.pages_freed()
        self._forget(room)


_RUN: dict[type, Callable[[DecodeShell, Any], None]] = {
    c.SendToPrefill: DecodeShell._send,
    c.Dial: DecodeShell._dial,
    c.HangUp: DecodeShell._hang_up,
    c.WatchWriter: DecodeShell._watch_writer,
    c.StopWatch: DecodeShell._stop_watch,
    c.Linked: DecodeShell._linked,
    c.VerifyChunk: DecodeShell._verify,
    c.StopVerifying: DecodeShell._stop_verifying,
    c.RoomLanded: DecodeShell._landed,
    c.RoomFailed: DecodeShell._failed,
    c.RoomEnded: DecodeShell._ended_room,
    c.QuarantinePages: DecodeShell._quarantine,
    c.FreePages: DecodeShell._free,
}
