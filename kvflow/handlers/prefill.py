"""Prefill's shell: reads messages from its socket, feeds the endpoint, and runs its commands."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvflow.aio import ENDS_PROCESS, Turnstile
from kvflow.handlers.earlier import EarlierShell, log_declared
from kvflow.handlers.room_log import follow
from kvflow.handlers.room_log import log as room_log
from kvflow.handlers.rooms import PrefillRoom
from kvflow.handlers.shell import Shell, fenced
from kvflow.handlers.verify import NoSum, begun, summed_at_once
from kvflow.protocols import commands as c
from kvflow.protocols.errors import CapacityError, Cause, TransferError
from kvflow.protocols.pages import spaces
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import (
    Checksums,
    ChecksumTask,
    ControlSocket,
    DataPlane,
    PageStore,
    Pending,
    Quarantine,
    Route,
    Write,
    WriteOutcome,
)
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.prefill.peers import DecodePeer
from kvflow.protocols.wire.messages import GrantId, Incarnation
from kvflow.telemetry.counters import Counts

log = logging.getLogger(__name__)
# Verified chunks are divided into pieces of this size, and a room writes so many of them at a time:
# decode sums one piece while the next one travels. Smaller pieces cost the event loops more than
# they save. An abort ends all pieces of a chunk in one turn of the loop, 40 us each, so there are
# not too many.
_PIECE_BYTES, _WRITES_AT_ONCE, _MOST_PIECES = 64 << 20, 4, 48
# So many routes are opened, and processes begin to be watched, in one turn of the loop. Each takes
# some 200 us: without a limit, turns take 5 ms and more while thousands of decodes register.
BEGUN_PER_TURN = 2
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class _OpenWrite(NamedTuple):
    """A running write. The store holds its source pages until the write ends."""

    write: Write
    held_pages: PageIndices
    room: PrefillRoom
    checksum: bytes  # of the source pages, if it was computed at once


class _EndedWrite:
    """The write of a chunk that has no pages, or for which the data plane returned no write."""

    landed_bytes = total_bytes = 0

    def __init__(self, outcome: WriteOutcome, error: str = "") -> None:
        self.error = error
        self.done: asyncio.Future[WriteOutcome] = asyncio.get_running_loop().create_future()
        self.done.set_result(outcome)

    def cancel(self) -> None:
        """Do nothing, because the write has already ended."""


def write_report(write: Write) -> tuple[WriteOutcome, str, int]:
    """Return the outcome, the error text and the number of landed bytes of a write that is `done`.

    A write that breaks the contract of `ports.Write` is unproven.
    """
    outcome: Any
    error: Any
    landed_bytes: Any
    try:
        outcome, error, landed_bytes = write.done.result(), write.error, write.landed_bytes
        if (
            isinstance(outcome, WriteOutcome)
            and isinstance(error, str)
            and isinstance(landed_bytes, int)
        ):
            return outcome, error, landed_bytes
        text = (
            f"the data plane reported {outcome!r}, {error!r} and {landed_bytes!r} bytes of a write"
        )
    except ENDS_PROCESS:
        raise
    except BaseException as problem:
        log.exception("a write broke its contract")
        text = f"the data plane reported no outcome of a write: {type(problem).__name__}: {problem}"
    return WriteOutcome.UNPROVEN, text, 0


class ChecksummedWrite:
    """A write together with the checksum of its source pages. It ends when both end.

    If the checksum fails, a landed write counts as cancelled, because decode could not verify its
    bytes. Neither part runs before `begin`; a write that is cancelled before that never begins.
    """

    def __init__(self, parts: Callable[[], tuple[Write, ChecksumTask]]) -> None:
        """`parts` starts the write and the checksum."""
        self._parts = parts
        self._write: Write = _EndedWrite(WriteOutcome.CANCELLED)
        self._task: ChecksumTask = NoSum("")
        self._broken = ""  # the write's error; set when both parts are done
        self.done: asyncio.Future[WriteOutcome] = asyncio.get_running_loop().create_future()

    def begin(self) -> bool:
        """Start both parts. Returns False if the write was cancelled before."""
        if self.done.done():
            return False
        self._write, self._task = self._parts()
        for part in (self._write.done, self._task.done):
            part.add_done_callback(self._part_ended)
        return True

    @property
    def checksum(self) -> bytes:
        """Checksum of the source pages. Read it only after `done` resolves."""
        return self._task.done.result()

    @property
    def released(self) -> Pending[None]:
        """Resolves when the checksum's thread no longer reads the source pages."""
        return self._task.released

    @property
    def landed_bytes(self) -> int:
        return self._write.landed_bytes

    @property
    def total_bytes(self) -> int:
        return self._write.total_bytes

    @property
    def error(self) -> str:
        return self._broken or self._task.error

    def cancel(self) -> None:
        self._write.cancel()
        self._task.cancel()
        # Both parts of a write that has not begun count as ended.
        self._part_ended(None)

    def _part_ended(self, _: object) -> None:
        if self._write.done.done() and self._task.done.done() and not self.done.done():
            outcome, self._broken, _ = write_report(self._write)
            if self._task.error and outcome is WriteOutcome.LANDED:
                outcome = WriteOutcome.CANCELLED
            self.done.set_result(outcome)


def _is_short(error: BaseException | None) -> bool:
    """Return True if the error, or one of its causes, is a shortage of descriptors, memory or
    staging. Such a shortage may end when the route to another decode is closed.
    """
    while error is not None:
        if isinstance(error, CapacityError) or (
            isinstance(error, OSError) and error.errno in _SHORT
        ):
            return True
        error = error.__cause__
    return False


class PrefillShell(Shell):
    """The asyncio side of one prefill endpoint."""

    def __init__(
        self,
        endpoint: PrefillEndpoint,
        *,
        pages: PageStore,
        plane: DataPlane,
        socket: ControlSocket,
        counts: Counts,
        now: Callable[[], float],
        stores: Sequence[tuple[Quarantine, PageStore]],
        checksums: Checksums | None = None,
    ) -> None:
        """With `checksums`, every chunk carries the checksum of its source pages to decode.

        `stores` pairs `pages` with its pool's quarantine. With staging, a second pair has the
        staging store and the quarantine of its pool.
        """
        core = endpoint.core
        super().__init__(endpoint, core.timing, counts, now)
        self.endpoint, self.pages, self.plane, self.socket = endpoint, pages, plane, socket
        self.num_pages, self.room_bytes = (
            core.identity.layout.num_places,
            core.identity.layout.room_bytes,
        )
        self.checksums = checksums
        page_bytes = endpoint.core.identity.layout.place_bytes[0]
        self._piece_pages = max(1, _PIECE_BYTES // max(1, page_bytes))
        self.rooms: dict[int, PrefillRoom] = {}
        self.routes: dict[Incarnation, Route] = {}
        self._writes: dict[int, _OpenWrite] = {}
        self._watches: dict[Incarnation, asyncio.Task[None]] = {}
        self._opening, self._watching = Turnstile(BEGUN_PER_TURN), Turnstile(BEGUN_PER_TURN)
        self._queued: dict[Incarnation, asyncio.Future[None]] = {}  # routes that wait for a turn
        self._last_grants: list[tuple[DecodePeer, GrantId]] = []
        self.runners = {
            c.SendToDecode: self._send,
            c.OpenRoute: self._open_route,
            c.CloseRoute: self._close_route,
            c.WatchProcess: self._watch_process,
            c.StartWrite: self._start_write,
            c.CancelWrite: self._cancel_write,
            c.RoomMatched: self._matched,
            c.RoomDone: self._done,
            c.RoomStopped: self._stopped,
            c.RoomReleased: self._released,
        }
        self.quarantine = stores[0][0]
        self.earlier = EarlierShell(self, endpoint.earlier, plane, stores)
        self.runners[c.FreePages] = self.earlier.free
        read = self.consume(
            socket,
            lambda sender, frame: endpoint.receive(sender, frame, now(), socket.sender_address),
            "a decode",
            before=self._note_stall,
        )
        self.spawn(read, "kvflow-prefill-read")

    # --- rooms

    def open(
        self,
        room: int,
        prompt_tokens: int,
        digest: bytes,
        *,
        rendezvous_s: float | None,
        deadline_at_s: float,
    ) -> PrefillRoom:
        """Open the engine's half of a room.

        Raises: MisuseError if the id is in use, AbortedError while shutting down.
        """
        record = self.endpoint.open_room(
            room,
            prompt_tokens,
            digest,
            now=self.now(),
            rendezvous_s=rendezvous_s,
            deadline_at_s=deadline_at_s,
        )
        handle = self.rooms[record.serial] = PrefillRoom(self, record)
        if room_log.isEnabledFor(logging.DEBUG):
            follow(handle)
        self.run()
        return handle

    def refuse(self, room: int, cause: Cause) -> None:
        self.endpoint.refuse_room(room, cause, self.now())
        self.run()

    def send_chunk(self, room: PrefillRoom, pages: PageIndices, last: bool, handoff: bytes) -> None:
        counts = self.endpoint.check_chunk(room.record, pages, last, len(handoff))
        self.quarantine.check(pages)
        # `hold` fails for pages without an owner, and no write may be queued for such pages.
        self.pages.hold(pages)
        queued = 0
        try:
            for piece in self._pieces(pages, counts):
                ends = queued + piece.size == pages.size
                self.endpoint.queue_chunk(
                    room.record,
                    piece,
                    last=last and ends,
                    handoff=handoff if ends else b"",
                    now=self.now(),
                    checked=True,
                )
                queued += piece.size
        except BaseException:
            self.pages.unhold(pages[queued:])
            raise
        self.run()

    def _pieces(self, pages: PageIndices, counts: spaces.Counts) -> list[PageIndices]:
        """Return the chunks in which `pages` travel.

        A verified chunk is divided, so that decode sums a piece while the next one travels. Only
        pages of the first space leave before the last piece, which has all else.
        """
        each = max(self._piece_pages, -(-int(counts[0]) // _MOST_PIECES))
        if self.checksums is None or counts[0] <= each:
            return [pages]
        return np.split(pages, range(each, counts[0], each))

    def begin_room(self, room: PrefillRoom) -> None:
        self.endpoint.begin_room(room.record)
        self.run()

    def close_prefill_room(self, room: PrefillRoom, cause: Cause) -> None:
        self.endpoint.close_room(room.record, cause, self.now())
        self.run()

    # --- peers

    def declare_dead(self, incarnation: int, why: str) -> None:
        """Declare dead a prefill to which an earlier node over this pool lent pages.

        See `PrefillEndpoint.declare_dead`. Raises: the errors of that method, and MisuseError if
        the process runs on this host.
        """
        self.earlier.check_unseen(incarnation)
        log_declared(incarnation, why, self.endpoint.declare_dead(Incarnation(incarnation)))
        self.run()

    def _note_stall(self) -> None:
        try:
            stalled_s = float(self.plane.stalled_s)
        except ENDS_PROCESS:
            raise
        except BaseException:
            self.counts.handler_errors += 1
            log.exception("the data plane did not say for how long it stands still")
        else:
            self.endpoint.note_stall(stalled_s)

    async def _connect(self, command: c.OpenRoute) -> None:
        route = await self.plane.connect(command.address, command.layout)
        if not callable(getattr(route, "write", None)):
            raise TransferError(
                f"connect() of {self.plane!r} returned {route!r}, which is no route"
            )
        self.routes[command.peer] = route

    def _connected(self, peer: Incarnation, error: BaseException | None) -> None:
        if error is None:
            # The decode may have been forgotten. If the route was stored before that,
            # `_close_route` has closed it.
            known = self.endpoint.route_opened(peer, self.now())
            if not known and (route := self.routes.pop(peer, None)) is not None:
                route.close()
        elif not self.stopped:
            why = self.explained(error, f"opening the way to decode {peer:016x}")
            refuse = self.endpoint.route_short if _is_short(error) else self.endpoint.route_refused
            refuse(peer, str(why) or type(why).__name__, self.now())

    async def _watch(self, command: c.WatchProcess) -> None:
        await self._watching.passed()
        if await fenced(self.plane, command.address, self.timing, self.counts):
            self.endpoint.peer_died(command.peer, self.now())
            self.run()

    def tick(self, now: float) -> None:
        self._note_stall()
        super().tick(now)

    # --- shutdown

    def leave(self) -> None:
        """Refuse new rooms, and end every open one. `drain` waits for their writes."""
        if not self.leaving:
            self._last_grants = [
                (peer, grant) for peer in self.endpoint.peers for grant in peer.grants.rooms
            ]
        self.leaving = True
        self.endpoint.leave(self.now())
        self.run()

    async def drain(self, patience_s: float) -> None:
        """Wait at most `patience_s` until the writes of every room end, then at most two heartbeat
        intervals until the decodes confirm that the rooms ended.
        """
        self.leave()
        core = self.endpoint.core
        await self.wait_while(lambda: bool(core.rooms or core.tasks), patience_s)
        await self.wait_while(self._awaits_confirmation, 2 * self.timing.heartbeat_s)
        if left := [peer for peer, grant in self._last_grants if _is_unconfirmed(peer, grant)]:
            names = ", ".join(sorted({f"{peer.incarnation:016x}" for peer in left}))
            log.warning("the ends of %d rooms are not confirmed by decode %s", len(left), names)

    def _awaits_confirmation(self) -> bool:
        """Return True while the end of a room is not confirmed by its decode, which is up."""
        # This is asked after every message, so each room is looked at until it is confirmed, and
        # never again.
        last = self._last_grants
        while last and not _is_unconfirmed(*last[-1]):
            last.pop()
        return bool(last)

    async def part(self) -> None:
        """Wait until every room ends, send Goodbye to every decode, and wait for the answers.

        Each of the two waits takes at most two heartbeat intervals. Call this once, after `drain`.
        If writes still run after `drain`, close the data plane first, which ends them.
        """
        await self.wait_while(lambda: bool(self.endpoint.rooms), 2 * self.timing.heartbeat_s)
        self.endpoint.part(self.now())
        self.run()
        await self.wait_while(
            lambda: self.endpoint.parting(self.now()), 2 * self.timing.heartbeat_s
        )
        if left := list(self.endpoint.unparted(self.now())):
            names = ", ".join(f"{peer.incarnation:016x}" for peer in left)
            log.warning(
                "the goodbye is not acknowledged by decode %s: what it has lent here may stay on "
                "loan",
                names,
            )

    async def close(self) -> None:
        """Stop the tasks, and close the routes. Close the data plane first, so that no write
        runs.
        """
        for turn in self._queued.values():
            turn.cancel()
        await self.stop()
        self.earlier.leave()
        for route in self.routes.values():
            self.guard(route.close, f"closing {route!r}")
        self.routes.clear()

    # --- commands

    def _send(self, command: c.SendToDecode) -> None:
        if not self.socket.send(command.frame, command.peer_id, command.at_once):
            self.counts.undelivered += 1

    def _open_route(self, command: c.OpenRoute) -> None:
        if (turn := self._opening.queue()) is None:
            self._begin_route(command)
            return
        self._queued[command.peer] = turn
        turn.add_done_callback(functools.partial(self._has_turn, command))

    def _has_turn(self, command: c.OpenRoute, turn: asyncio.Future[None]) -> None:
        # Decodes that leave meanwhile must not keep others waiting, or be kept themselves.
        if not turn.cancelled():
            del self._queued[command.peer]
            self._begin_route(command)

    def _begin_route(self, command: c.OpenRoute) -> None:
        ended = functools.partial(self._connected, command.peer)
        self.spawn(self._connect(command), f"kvflow-route-{command.peer:016x}", ended=ended)

    def _close_route(self, command: c.CloseRoute) -> None:
        if (turn := self._queued.pop(command.peer, None)) is not None:
            turn.cancel()
        self.cancel(self._watches.pop(command.peer, None))
        if (route := self.routes.pop(command.peer, None)) is not None:
            route.close()

    def _watch_process(self, command: c.WatchProcess) -> None:
        task = self.spawn(self._watch(command), f"kvflow-watch-{command.peer:016x}")
        self._watches[command.peer] = task
        task.add_done_callback(functools.partial(self._watch_ended, command.peer))

    def _watch_ended(self, peer: Incarnation, task: asyncio.Task[None]) -> None:
        # If the peer came back, another task watches it.
        if self._watches.get(peer) is task:
            del self._watches[peer]

    def _start_write(self, command: c.StartWrite) -> None:
        """Start a write. `send_chunk` already holds its source pages."""
        room = self.rooms[command.serial]
        write, checksum = self._write_of(command, room)
        held = command.source_pages if command.held_pages is None else command.held_pages
        self._writes[command.write] = _OpenWrite(write, held, room, checksum)
        room.writes[command.write] = write
        # The callback runs in a later turn, so no room ends inside the engine's call to `send`.
        write.done.add_done_callback(functools.partial(self._write_ended, command.write))

    def _write_of(self, command: c.StartWrite, room: PrefillRoom) -> tuple[Write, bytes]:
        """Return the write of a chunk, and its checksum if that was computed at once."""
        if not command.source_pages.size:
            return _EndedWrite(WriteOutcome.LANDED), b""
        if (checksums := self.checksums) is None:
            return self._begin_write(command, room), b""
        of: tuple[Any, ...] = (command.source_pages,)
        if command.page_sizes:
            of = (*of, None, command.page_sizes)
        is_next = len(room.writes) < _WRITES_AT_ONCE
        if is_next and (checksum := summed_at_once(checksums, *of)):
            return self._begin_write(command, room), checksum

        def parts() -> tuple[Write, ChecksumTask]:
            write = self._begin_write(command, room)
            if isinstance(write, _EndedWrite):
                return write, NoSum("")
            return write, begun(checksums.begin, *of)

        write = ChecksummedWrite(parts)
        if is_next:
            write.begin()
        else:
            room.queued.append(write.begin)
        return write, b""

    def _begin_write(self, command: c.StartWrite, room: PrefillRoom) -> Write:
        try:
            write: Write = self.routes[command.peer].write(
                command.source_pages, command.target_pages
            )
        except BaseException as problem:  # noqa: BLE001 - `explained` raises what must pass
            return _EndedWrite(
                WriteOutcome.CANCELLED, str(self.explained(problem, f"room {room.room}: its write"))
            )
        # Bytes may be on their way, so only an unproven outcome is safe.
        if not asyncio.isfuture(getattr(write, "done", None)):
            route = self.routes[command.peer]
            return _EndedWrite(
                WriteOutcome.UNPROVEN, f"write() of {route!r} returned {write!r}, which is no write"
            )
        return write

    def _write_ended(self, number: int, done: asyncio.Future[WriteOutcome]) -> None:
        write, held_pages, room, checksum = self._writes.pop(number)
        del room.writes[number]
        outcome, error, landed_bytes = write_report(write)
        room.landed_before += landed_bytes
        if isinstance(write, ChecksummedWrite):
            checksum = write.checksum
        self.endpoint.write_ended(number, outcome, self.now(), error=error, checksum=checksum)
        self.counts.bytes_written += landed_bytes
        # A late checksum still reads the pages, so they stay held until its thread returns.
        if isinstance(write, ChecksummedWrite) and not write.released.done():
            room.readers += 1
            write.released.add_done_callback(lambda _: self._read_no_more(room, held_pages))
            self.run()
        else:
            # `unhold` takes 100 us for 256 pages. The message that returns decode's pages goes
            # first.
            self.run(then=functools.partial(self.pages.unhold, held_pages))
        # If this write failed its room, `run` has cancelled the queued ones.
        while room.queued and not room.queued.popleft()():
            pass

    def _read_no_more(self, room: PrefillRoom, held_pages: PageIndices) -> None:
        self.guard(lambda: self.pages.unhold(held_pages), "letting source pages go")
        room.readers -= 1
        if room.over and not room.readers:
            room.when_released.give(None)

    def _cancel_write(self, command: c.CancelWrite) -> None:
        opened = self._writes.get(command.write)
        if opened is not None:
            opened.write.cancel()

    def _matched(self, command: c.RoomMatched) -> None:
        self.rooms[command.serial].when_matched.give(command.prefix_tokens)

    def _done(self, command: c.RoomDone) -> None:
        room = self.rooms[command.serial]
        room.when_done.give(None)
        if room.callbacks:
            self.call_back_later(room.callbacks)

    def _stopped(self, command: c.RoomStopped) -> None:
        room = self.rooms[command.serial]
        room.when_matched.give(None, command.cause)
        room.when_done.give(None, command.cause)
        if room.callbacks:
            self.call_back_later(room.callbacks)

    def _released(self, command: c.RoomReleased) -> None:
        room = self.rooms.pop(command.serial, None)
        # There is no handle if the engine's half never arrived.
        if room is not None:
            room.over = True
            if not room.readers:
                room.when_released.give(None)


def _is_unconfirmed(peer: DecodePeer, grant: GrantId) -> bool:
    return peer.is_up and bool(peer.grants.last_messages(grant))
