"""A shipped PrefillEndpoint as a hashable value, and the events that it can receive.

The endpoint makes every decision. The value adds the state around it: the writes that run or may
still land, the open routes, and the results that its engine received.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from kvflow.proof.walk.world import (
    DECODE,
    LATER,
    OTHER,
    SUM,
    ViolationError,
    Word,
    World,
    word_of,
)
from kvflow.protocols import commands as c
from kvflow.protocols.arguments import prompt_digest
from kvflow.protocols.errors import KvflowError, MisuseError
from kvflow.protocols.machinery import Timer
from kvflow.protocols.machines.grants import GrantPhase
from kvflow.protocols.machines.peer import PeerPhase
from kvflow.protocols.machines.prefill_room import TERMINAL
from kvflow.protocols.ports import WriteOutcome
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.codec import parse_at_decode, routing_id
from kvflow.protocols.wire.messages import Incarnation, RoomId


class Write(NamedTuple):
    """A running write. The endpoint numbers writes from 1, in the order of `Prefill.writes`."""

    peer: Incarnation
    grant: int
    pages: int  # a bit for each place that it writes, by its position in the room's list
    reaches: int  # a bit for each space of its grant that it writes into; see `Grant.home`
    cancelled: bool = False


class Room(NamedTuple):
    room: int
    matched: bool = False
    told: bool = False


class Other(IntEnum):
    """The state of another decode, which competes for a place at prefill."""

    ABSENT = 0
    HERE = 1
    DEAD = 2


class Prefill(NamedTuple):
    """The state of one prefill rank in the walk."""

    endpoint: int  # number on the shelf, or -1 if the process is dead
    life: int = 1
    writes: tuple[Write, ...] = ()
    # A bit for each space of each grant that a doubtful write, or a dead process's write, may still
    # reach.
    late: int = 0
    landed: tuple[int, ...] = ()  # for each grant, a bit for each place that landed
    rooms: tuple[Room, ...] = ()  # open rooms of the engine
    asked: int = 0  # number of rooms that the engine opened or refused
    routes: tuple[tuple[Incarnation, bool], ...] = ()  # (peer, True if the route is open)
    watched: frozenset[Incarnation] = frozenset()
    target_gone: bool = False  # True once decode's process is dead
    other: Other = Other.ABSENT
    stalled: bool = False
    left: bool = False
    parted: bool = False  # True once it sends Goodbye
    named: bool = False  # True if its Goodbye named an unproven grant
    # The walk reads these fields without restoring the endpoint.
    knows: bool = False  # True while decode is up and its heartbeats are answered
    silent: bool = False  # True while decode counts as silent
    oldest: int = 0  # the lowest grant that it remembers, or 0
    doubts: bool = False
    idle: bool = True  # True while no room, announcement, write or task is open
    outcomes: bool = False

    @property
    def alive(self) -> bool:
        return self.endpoint >= 0

    @property
    def gone(self) -> bool:
        """True if the first life is over."""
        return self.life > 1 or not self.alive

    @property
    def writing(self) -> int:
        """A bit for each space of each grant into which a write may still move bytes."""
        # A dead decode's memory is gone, so no write can reach it.
        if self.target_gone:
            return 0
        found = self.late
        for write in self.writes:
            found |= write.reaches
        return found


class PrefillSide:
    """A prefill rank while it handles one event."""

    def __init__(
        self, value: Prefill, world: World, endpoint: PrefillEndpoint | None = None
    ) -> None:
        self.value, self.world = value, world
        self.endpoint: PrefillEndpoint = endpoint or world.prefills.take(value.endpoint)
        self.core = self.endpoint.core
        self.writes: dict[int, Write] = dict(enumerate(value.writes, 1))
        self.landed = list(value.landed or (0,) * (world.bounds.last_grant + 1))
        # Keys are serials. In a tidied endpoint the serial of a room is its id.
        self.rooms = {known.room: known for known in value.rooms}
        self.routes = dict(value.routes)
        self.watched = set(value.watched)
        self.words: list[Word] = []

    # --- what happens

    def run(self, do: Callable[[PrefillSide], None]) -> Prefill:
        """Return the state after `do` and the commands that it causes. Raises: AssertionError."""
        peer = self.core.peers.get(DECODE)
        phases = peer.grants._phases.items() if peer else ()
        closed = [grant for grant, phase in phases if phase > GrantPhase.OPEN]
        rooms = self.core.rooms.values()
        known = [(r, r.state.cause) for r in rooms if r.state.cause is not None]
        do(self)
        while True:
            if not self.world.bounds.step_by_step:
                while self.core.tasks:
                    self.endpoint.tick(0.0)
            if not (found := self.endpoint.commands()):
                break
            for command in found:
                _RUN[type(command)](self, command)
        if any(record.state.cause != cause for record, cause in known):
            raise ViolationError("I4: prefill's room forgot its first cause")
        if peer is not None and any(
            peer.grants.phase(grant) is GrantPhase.OPEN for grant in closed
        ):
            raise ViolationError("I6: a grant that was closed is open again")
        return self._seen()

    def put(self, **changes: Any) -> None:
        self.value = self.value._replace(**changes)

    def _seen(self) -> Prefill:
        core = self.core
        peer = core.peers.get(DECODE)
        known = peer is not None and peer.phase is PeerPhase.UP and not self.value.stalled
        remembered, doubts = [], False
        if peer is not None:
            grants = peer.grants
            oldest = list(grants._sent)[:1]
            remembered = [*oldest, *grants._evicted_in_doubt, *grants.announcements.rooms]
            doubts = any(not grants.is_drained(grant) for grant in grants._phases)
        serials = {record.serial: record.room for record in core.rooms.values()}
        rooms = [room._replace(room=serials[serial]) for serial, room in self.rooms.items()]
        running = list(core.writes)
        if any(record.phase in TERMINAL for record in core.rooms.values()):
            raise ViolationError("I5: a room that has ended is in a table")
        if set(running) != set(self.writes):
            raise ViolationError("I5: the endpoint counts other writes than those that run")
        return self.value._replace(
            endpoint=self.world.prefills.put(self.endpoint),
            writes=tuple(self.writes[write] for write in running),
            landed=tuple(self.landed),
            rooms=tuple(sorted(rooms)),
            routes=tuple(sorted(self.routes.items())),
            watched=frozenset(self.watched),
            knows=known,
            silent=peer is not None and peer.phase is PeerPhase.SILENT,
            oldest=min(remembered, default=0),
            doubts=doubts,
            idle=not (core.rooms or core.rendezvous.announced or core.writes or core.tasks),
            outcomes=bool(len(core.rendezvous)),
        )

    def due(self, timer: Timer) -> None:
        if timer.kind == "room":
            self.core.rooms[RoomId(timer.key)].deadline_at_s = 0.0
        self.core.deadlines.set(timer, 0.0)
        self.endpoint.tick(0.0)

    def open_room(self, *, other_prompt: bool = False) -> None:
        """Open the engine's next room, unless the endpoint refuses it."""
        world = self.world
        room = world.bounds.rooms[self.value.asked]
        digest = prompt_digest([7]) if other_prompt else world.digest
        self.put(asked=self.value.asked + 1)
        # Commands name a room by its serial. A half that decode opened already has one.
        serial = self.core._serial + 1
        known = self.core.rooms.get(RoomId(room))
        if known is not None and known.prompt is None:
            serial = known.serial
        before = dict(self.rooms)
        self.rooms[serial] = Room(room)
        try:
            self.endpoint.open_room(room, world.tokens, digest, now=0.0)
        except KvflowError:
            self.rooms = before
        else:
            if self.value.left:
                raise ViolationError("I4: prefill is shutting down, and opens a room")

    def refuse_room(self) -> None:
        room = self.world.bounds.rooms[self.value.asked]
        self.put(asked=self.value.asked + 1)
        self.endpoint.refuse_room(room, LATER, 0.0)

    def send(self, room: int) -> None:
        record = self.core.rooms[RoomId(room)]
        chunks, done = self.world.bounds.chunks, record.state.queued
        source, last = self.world.sources(done), done + 1 >= chunks
        try:
            self.endpoint.queue_chunk(
                record, source, last=last, handoff=b"handoff" if last else b"", now=0.0
            )
        except MisuseError as error:
            text = f"I8: a chunk that decode's pages have room for is refused: {error}"
            raise ViolationError(text) from None
        if record.ended:
            raise ViolationError("I4: a room ends inside of its engine's own call")

    def close_room(self, room: int) -> None:
        self.endpoint.close_room(self.core.rooms[RoomId(room)], LATER, 0.0)

    def write_ended(self, number: int, outcome: WriteOutcome) -> None:
        write = self.writes.pop(number)
        if outcome is WriteOutcome.LANDED:
            self.landed[write.grant] |= write.pages
        elif outcome is WriteOutcome.UNPROVEN and write.peer == DECODE:
            self.put(late=self.value.late | write.reaches)
        checksum = SUM if self.world.bounds.verify else b""
        self.endpoint.write_ended(number, outcome, 0.0, checksum=checksum)

    def hear(self, word: Word) -> None:
        self.endpoint.receive(routing_id(word.target), self.world.frame(word, 0), 0.0)

    def other_registers(self) -> None:
        self.put(other=Other.HERE)
        frame = self.world.frame(self.world.register(OTHER), 0)
        self.endpoint.receive(routing_id(OTHER), frame, 0.0)

    def route(self, peer: Incarnation, *, opened: bool) -> None:
        if opened:
            self.routes[peer] = True
            if not self.endpoint.route_opened(peer, 0.0):
                del self.routes[peer]
        else:
            del self.routes[peer]
            self.endpoint.route_refused(peer, "no way", 0.0)

    def peer_died(self, peer: Incarnation) -> None:
        self.watched.discard(peer)
        self.endpoint.peer_died(peer, 0.0)

    def stall(self, stalled_s: float) -> None:
        self.put(stalled=stalled_s > 0)
        self.endpoint.note_stall(stalled_s)

    def leave(self) -> None:
        self.put(left=True)
        self.endpoint.leave(0.0)

    def part(self) -> None:
        peer = self.core.peers.get(DECODE)
        self.put(parted=True, named=peer is not None and bool(peer.grants.unproven()))
        self.endpoint.part(0.0)

    # --- what it asks its shell to do

    def _send(self, command: c.SendToDecode) -> None:
        message = parse_at_decode(command.frame)
        if command.peer_id != routing_id(DECODE) or self.value.target_gone:
            return
        if type(message) is wire.ChunkDone:
            places = self.world.chunk_bits[message.seq]
            if any(message.pages) and self.landed[message.grant] & places != places:
                text = f"I3: chunk {message.seq} is said to have landed, and its write has not"
                raise ViolationError(text)
            if message.pages != self.world.fills[message.seq]:
                text = f"I3: chunk {message.seq} is said to have {message.pages} places"
                raise ViolationError(text)
        # Prefill's heartbeats never change decode's state, as test_walk checks.
        if type(message) is not wire.Heartbeat:
            self.words.append(word_of(message))

    def _open_route(self, command: c.OpenRoute) -> None:
        if command.peer in self.routes:
            raise ViolationError("I5: a second route is opened to one decode")
        self.routes[command.peer] = False

    def _close_route(self, command: c.CloseRoute) -> None:
        if self.routes.pop(command.peer, None) is None:
            raise ViolationError("I5: a route is closed that is not open")
        self.watched.discard(command.peer)
        if any(write.peer == command.peer for write in self.writes.values()):
            raise ViolationError("I2: a route is closed while a write runs on it")

    def _watch(self, command: c.WatchProcess) -> None:
        self.watched.add(command.peer)

    def _start_write(self, command: c.StartWrite) -> None:
        if not self.routes.get(command.peer):
            raise ViolationError("I2: a write is started without a route")
        sources, targets = (
            [self.world.position(place) for place in places.tolist()]
            for places in (command.source_pages, command.target_pages)
        )
        if sources != targets:
            raise ViolationError("I8: pages are written to another place of the prompt")
        grant = self.core.writes[command.write][0].grant
        pages = sum(1 << position for position in targets)
        reaches = self.world.reached(grant, pages)
        self.writes[command.write] = Write(command.peer, grant, pages, reaches)

    def _cancel_write(self, command: c.CancelWrite) -> None:
        self.writes[command.write] = self.writes[command.write]._replace(cancelled=True)

    def _matched(self, command: c.RoomMatched) -> None:
        self.rooms[command.serial] = self.rooms[command.serial]._replace(matched=True)

    def _tell(self, command: c.RoomDone | c.RoomStopped) -> None:
        known = self.rooms.get(command.serial)
        if known is None or known.told:
            raise ViolationError("I4: prefill's engine is told two endings")
        self.rooms[command.serial] = known._replace(told=True)

    def _released(self, command: c.RoomReleased) -> None:
        known = self.rooms.pop(command.serial, None)
        if known is not None and not known.told:
            raise ViolationError("I4: prefill's room ends, and its engine is not told")


_RUN: dict[type, Callable[[PrefillSide, Any], None]] = {
    c.SendToDecode: PrefillSide._send,
    c.OpenRoute: PrefillSide._open_route,
    c.CloseRoute: PrefillSide._close_route,
    c.WatchProcess: PrefillSide._watch,
    c.StartWrite: PrefillSide._start_write,
    c.CancelWrite: PrefillSide._cancel_write,
    c.RoomMatched: PrefillSide._matched,
    c.RoomDone: PrefillSide._tell,
    c.RoomStopped: PrefillSide._tell,
    c.RoomReleased: PrefillSide._released,
}
