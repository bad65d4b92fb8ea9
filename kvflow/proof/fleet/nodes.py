"""Nodes of the fleet: a shipped endpoint, its pages, and a handler for each of its commands."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import numpy as np

from kvflow.proof.bare.clock import Clock
from kvflow.proof.fleet.judge import Pool, broken
from kvflow.proof.fleet.plan import LAYOUT, NUM_PAGES, PAGE_SIZE, Plan
from kvflow.protocols import commands as c
from kvflow.protocols.commands import PeerKey
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.decode.links import DecodeIdentity
from kvflow.protocols.decode.records import Prompt
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.ports import PlaneAddress, ProcessIdentity, WriteOutcome
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.prefill.peers import PrefillIdentity
from kvflow.protocols.prefill.records import PrefillRoomRecord
from kvflow.protocols.wire.codec import routing_id
from kvflow.protocols.wire.messages import GrantId, Incarnation, Rank
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.telemetry.counters import Counts

TICK_GRAIN_S = 0.005  # a tick handles everything that becomes due within this time
ROUTE_S, STEP_S, PAGE_S, KEPT_S = 0.002, (0.02, 0.5), 0.002, (0.5, 8.0)
LATE_S = (5.0, 30.0)  # until the last bytes of a write without proof arrive
# A room that is not over after this time past its deadline stands still (I4).
MARGIN_S = 1.0


def digest_of(room: int) -> bytes:
    return room.to_bytes(32, "little")


class Scene(Protocol):
    """The members of the world that nodes use."""

    plan: Plan
    rng: random.Random
    clock: Clock
    counts: tuple[Counts, Counts]  # of all prefills, and of all decodes
    seen: Counter[str]
    unproven: set[tuple[int, int]]  # grants with a write without proof

    def to_prefill(self, sender: DecodeHost, control: str, frame: bytes) -> None: ...

    def to_decode(self, sender: PrefillHost, peer_id: bytes, frame: bytes) -> None: ...

    def decode_of(self, incarnation: int) -> DecodeHost | None:
        """Return the living decode with this incarnation."""

    def are_apart(self, decode: DecodeHost, prefill: PrefillHost) -> bool:
        """Return True while the network is parted between the two."""

    def write_fails(self) -> bool: ...


class Host:
    """One life of a node. Its events are dropped once it is dead."""

    __slots__ = (
        *("_due_at_s", "_fires_at_s", "alive", "endpoint", "number", "parked", "pool"),
        "world",
    )
    RUN: ClassVar[dict[type, Callable[[Any, Any], None]]]

    def __init__(self, world: Scene, number: int, endpoint: Any, name: str) -> None:
        self.world, self.number, self.endpoint = world, number, endpoint
        self.pool = Pool(name, NUM_PAGES)
        self.alive = True
        self.parked: list[Any] | None = None  # `Clock` drops the events of a dead node
        self._due_at_s, self._fires_at_s = float("inf"), -1.0

    @property
    def incarnation(self) -> Incarnation:
        found: Incarnation = self.endpoint.core.identity.incarnation
        return found

    def die(self) -> None:
        self.alive, self.parked = False, []

    def run(self) -> None:
        """Run the endpoint's commands, and set its timer."""
        outbox, commands = self.endpoint.outbox, self.RUN
        while outbox:
            for command in self.endpoint.commands():
                commands[type(command)](self, command)
        at_s = self.endpoint.next_tick()
        if at_s >= self._due_at_s:
            return
        clock = self.world.clock
        self._due_at_s = at_s
        self._fires_at_s = max(at_s, clock.now + TICK_GRAIN_S)
        clock.later(self._fires_at_s - clock.now, self, self._tick, self._fires_at_s)

    def _tick(self, fires_at_s: float) -> None:
        # A timer that was set again in the meantime has another time.
        if fires_at_s == self._fires_at_s:
            self._due_at_s, self._fires_at_s = float("inf"), -1.0
            self.endpoint.tick(self.world.clock.now)
            self.run()


class Held:
    """A room, as decode's user holds it."""

    __slots__ = ("count", "opened_at_s", "over", "owned", "pages", "room", "told")

    def __init__(self, room: int, count: int, now: float) -> None:
        self.room, self.count, self.opened_at_s = room, count, now
        self.pages: list[int] = []
        self.owned = False  # True while the room's lease owns the pages
        self.told = self.over = False


class DecodeHost(Host):
    __slots__ = ("lines", "rooms")
    endpoint: DecodeEndpoint

    def __init__(self, world: Scene, number: int, incarnation: Incarnation) -> None:
        endpoint = DecodeEndpoint(
            DecodeIdentity(incarnation, LAYOUT, address_of(incarnation)),
            observer=world.counts[1],
            timing=world.plan.timing,
            bounds=world.plan.bounds,
        )
        super().__init__(world, number, endpoint, f"decode {number}")
        self.rooms: dict[GrantId, Held] = {}
        self.lines: dict[str, list[PeerKey]] = {}  # dialled keys, by control address

    def begin(self, room: int, count: int, rank: RankInfo, leaves_after_s: float | None) -> None:
        now, world = self.world.clock.now, self.world
        prompt = Prompt(count * PAGE_SIZE, digest_of(room), 0)
        deadline_at_s = now + world.plan.deadline_s
        try:
            grant = self.endpoint.open_room(
                room, (rank,), prompt, now=now, deadline_at_s=deadline_at_s, announce=False
            )
        except KvflowError as error:
            world.seen[f"refused at decode: {error.code.name.lower()}"] += 1
        else:
            self.rooms[grant] = Held(room, count, now)
            world.seen["decode halves"] += 1
            if leaves_after_s is not None:
                world.clock.later(leaves_after_s, self, self._leave, grant)
        self.run()

    def _leave(self, grant: GrantId) -> None:
        cause = Cause(Code.CLIENT_GONE, "the client is gone")
        self.endpoint.close_room(grant, cause, self.world.clock.now)
        self.run()

    def read(self, control: str, frame: bytes) -> None:
        if keys := self.lines.get(control):
            self.endpoint.receive(keys[-1], frame, self.world.clock.now)
            self.run()

    def declare_dead(self, dead: set[int]) -> None:
        found = {peer.key.incarnation for peer in self.endpoint.peers} & dead
        for incarnation in sorted(found):
            self.endpoint.declare_dead(Incarnation(incarnation), "lost", self.world.clock.now)
        if found:
            self.run()

    def _lease(self, grant: GrantId) -> tuple[int, int]:
        return self.incarnation, grant

    # --- commands

    def _send(self, command: c.SendToPrefill) -> None:
        self.world.to_prefill(self, command.peer.control, command.frame)

    def _dial(self, command: c.Dial) -> None:
        self.lines.setdefault(command.peer.control, []).append(command.peer)

    def _hang_up(self, command: c.HangUp) -> None:
        keys = self.lines.get(command.peer.control, [])
        if command.peer in keys:
            keys.remove(command.peer)
        if not keys:
            self.lines.pop(command.peer.control, None)

    def _nothing(self, command: object) -> None:
        """Do nothing: no decode can see the process of a prefill on another machine."""

    def _linked(self, command: c.Linked) -> None:
        held, now = self.rooms[command.grant], self.world.clock.now
        pages = self.pool.take(held.count, self._lease(command.grant))
        if pages is None:
            self.world.seen["no pages at decode"] += 1
            cause = Cause(Code.CAPACITY, "no pages at decode")
            return self.endpoint.close_room(command.grant, cause, now)
        held.pages, held.owned = pages, True
        if not self.endpoint.lend(command.grant, np.array(pages, np.int32), now):
            self._return(command.grant, held)
        return None

    def _return(self, grant: GrantId, held: Held) -> None:
        if held.owned:
            self.pool.give_back(held.pages, self._lease(grant))
            held.owned = False

    def _tell(self, held: Held, how: str) -> None:
        if held.told:
            broken("I4", f"room {held.room} at {self.pool.name}: its user is told twice")
        held.told = True
        self.world.seen[how] += 1
        aged_s = self.world.clock.now - held.opened_at_s
        if aged_s > self.world.plan.deadline_s + MARGIN_S:
            broken("I4", f"room {held.room} at {self.pool.name}: told after {aged_s:.1f} s")

    def _landed(self, command: c.RoomLanded) -> None:
        held = self.rooms[command.grant]
        self._tell(held, "landed")
        if command.handoff != digest_of(held.room):
            broken("I9", f"room {held.room} got another room's handoff")
        for page in held.pages:
            if self.pool.cells[page] != held.room:
                text = f"room {held.room} succeeds, page {page} holds room {self.pool.cells[page]}"
                broken("I8", text)
        # The user keeps the pages for a while.
        for page in held.pages:
            self.pool.owners[page] = held
        held.owned = False
        kept_s = self.world.rng.uniform(*KEPT_S)
        self.world.clock.later(kept_s, self, self.pool.give_back, held.pages, held)

    def _failed(self, command: c.RoomFailed) -> None:
        code = command.cause.code.name.lower()
        self._tell(self.rooms[command.grant], f"failed at decode: {code}")

    def _ended(self, command: c.RoomEnded) -> None:
        held = self.rooms[command.grant]
        if held.over:
            broken("I4", f"room {held.room} ends at {self.pool.name} twice")
        if not held.told:
            broken("I4", f"room {held.room} ends at {self.pool.name}, and its user is not told")
        held.over = True
        self.world.seen["decode halves that ended"] += 1
        self._forget(command.grant, held)

    def _free(self, command: c.FreePages) -> None:
        held = self.rooms.get(command.grant)
        if held is None or (held.pages and not held.owned):
            return broken("I1", f"{self.pool.name}: grant {command.grant} is given back twice")
        self._return(command.grant, held)
        return self._forget(command.grant, held)

    def _forget(self, grant: GrantId, held: Held) -> None:
        if held.over and not held.owned:
            self.rooms.pop(grant, None)

    RUN: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        c.SendToPrefill: _send,
        c.Dial: _dial,
        c.HangUp: _hang_up,
        c.WatchWriter: _nothing,
        c.StopWatch: _nothing,
        c.Linked: _linked,
        c.RoomLanded: _landed,
        c.RoomFailed: _failed,
        c.RoomEnded: _ended,
        c.QuarantinePages: _nothing,
        c.FreePages: _free,
    }


class Leg:
    """A room, as prefill's engine holds it."""

    __slots__ = ("count", "pages", "record", "released", "steps", "told")

    def __init__(self, record: PrefillRoomRecord, count: int) -> None:
        self.record, self.count = record, count
        self.pages: list[int] = []
        self.told = self.released = False
        self.steps = 0  # model steps that run


class PrefillHost(Host):
    __slots__ = ("control", "info", "legs", "routes", "writes")
    endpoint: PrefillEndpoint

    def __init__(self, world: Scene, number: int, incarnation: Incarnation) -> None:
        endpoint = PrefillEndpoint(
            PrefillIdentity(incarnation, Rank(0), LAYOUT, address_of(incarnation)),
            observer=world.counts[0],
            timing=world.plan.timing,
            bounds=world.plan.bounds,
        )
        super().__init__(world, number, endpoint, f"prefill {number}")
        self.control = f"tcp://10.{number >> 16}.{number >> 8 & 255}.{number & 255}:8998"
        self.info = RankInfo(0, 1, incarnation, self.control, "fake", "model")
        self.legs: dict[int, Leg] = {}
        self.routes: set[int] = set()
        self.writes: dict[int, bool] = {}  # running writes; True once cancelled

    def begin(self, room: int, count: int, fails_after_s: float | None) -> None:
        now, world = self.world.clock.now, self.world
        try:
            record = self.endpoint.open_room(room, count * PAGE_SIZE, digest_of(room), now=now)
        except KvflowError as error:
            world.seen[f"refused at prefill: {error.code.name.lower()}"] += 1
        else:
            leg = self.legs[record.serial] = Leg(record, count)
            world.seen["prefill halves"] += 1
            pages = self.pool.take(count, record.serial)
            if pages is None:
                world.seen["no pages at prefill"] += 1
                self._close(leg, Cause(Code.CAPACITY, "no pages at prefill"))
            else:
                leg.pages = pages
                if fails_after_s is not None:
                    cause = Cause(Code.ENGINE_ERROR, "the engine broke down")
                    world.clock.later(fails_after_s, self, self._fail, leg, cause)
        self.run()

    def _close(self, leg: Leg, cause: Cause) -> None:
        self.endpoint.close_room(leg.record, cause, self.world.clock.now)

    def _fail(self, leg: Leg, cause: Cause) -> None:
        if not leg.told:
            self._close(leg, cause)
            self.run()

    def read(self, peer_id: bytes, frame: bytes) -> None:
        self.endpoint.receive(peer_id, frame, self.world.clock.now)
        self.run()

    def _computed(self, leg: Leg) -> None:
        """End a model step, and send its pages in one to three chunks."""
        leg.steps -= 1
        if leg.released:
            self._free_pages(leg)
            return
        for page in leg.pages:
            self.pool.cells[page] = leg.record.room
        if leg.told:
            return
        now, pages = self.world.clock.now, np.array(leg.pages, np.int32)
        parts = np.array_split(pages, min(leg.count, 1 + leg.record.room % 3))
        for number, part in enumerate(parts, 1):
            last = number == len(parts)
            handoff = digest_of(leg.record.room) if last else b""
            self.endpoint.queue_chunk(leg.record, part, last=last, handoff=handoff, now=now)
        self.run()

    def _free_pages(self, leg: Leg) -> None:
        self.pool.give_back(leg.pages, leg.record.serial)
        leg.pages = []

    # --- commands

    def _send(self, command: c.SendToDecode) -> None:
        self.world.to_decode(self, command.peer_id, command.frame)

    def _open_route(self, command: c.OpenRoute) -> None:
        self.world.clock.later(ROUTE_S, self, self._route, command.peer)

    def _route(self, peer: Incarnation) -> None:
        self.routes.add(peer)
        if not self.endpoint.route_opened(peer, self.world.clock.now):
            self.routes.discard(peer)
        self.run()

    def _close_route(self, command: c.CloseRoute) -> None:
        self.routes.discard(command.peer)

    def _nothing(self, command: object) -> None:
        """Do nothing: no prefill can see the process of a decode on another machine."""

    def _start_write(self, command: c.StartWrite) -> None:
        if command.peer not in self.routes:
            broken("I2", f"{self.pool.name} writes to {command.peer:x}, and no route is open")
        self.writes[command.write] = False
        record = self.legs[command.serial].record
        sources, targets = command.source_pages.tolist(), command.target_pages.tolist()
        for_s = PAGE_S * len(targets) * (1 + 9 * self.world.rng.random())
        what = command.write, command.peer, record.grant, sources, targets
        self.world.clock.later(for_s, self, self._write_ends, *what)

    def _write_ends(
        self, write: int, peer: Incarnation, grant: GrantId, sources: list[int], targets: list[int]
    ) -> None:
        world, landing = self.world, len(targets)
        target = world.decode_of(peer)
        outcome, error = WriteOutcome.LANDED, ""
        if self.writes.pop(write):
            # It was cancelled between two slices.
            outcome, landing = WriteOutcome.CANCELLED, landing // 2
        elif target is None or world.are_apart(target, self) or world.write_fails():
            outcome, landing, error = WriteOutcome.UNPROVEN, landing // 2, "the network is gone"
            world.seen["writes without proof"] += 1
            world.unproven.add((peer, grant))
            late_s = world.rng.uniform(*LATE_S)
            rest = sources[landing:], targets[landing:]
            cells = [self.pool.cells[page] for page in rest[0]]
            world.clock.later(late_s, self, self._land, peer, grant, cells, rest[1])
        cells = [self.pool.cells[page] for page in sources[:landing]]
        self._land(peer, grant, cells, targets[:landing])
        self.endpoint.write_ended(write, outcome, world.clock.now, error=error)
        self.run()

    def _land(self, peer: int, grant: int, cells: list[int], targets: list[int]) -> None:
        """Let bytes arrive. The pages must still be on loan under the grant (I2)."""
        target = self.world.decode_of(peer)
        if target is None:
            return
        for cell, page in zip(cells, targets, strict=True):
            if (owner := target.pool.owners[page]) != (peer, grant):
                broken("I2", f"a byte of grant {grant} lands on page {page} of {owner!r}")
            target.pool.cells[page] = cell

    def _cancel_write(self, command: c.CancelWrite) -> None:
        if command.write in self.writes:
            self.writes[command.write] = True

    def _matched(self, command: c.RoomMatched) -> None:
        leg = self.legs[command.serial]
        if leg.pages:
            leg.steps += 1
            self.world.clock.later(self.world.rng.uniform(*STEP_S), self, self._computed, leg)

    def _tell(self, leg: Leg, how: str) -> None:
        if leg.told:
            broken("I4", f"room {leg.record.room} at {self.pool.name}: its user is told twice")
        leg.told = True
        self.world.seen[how] += 1

    def _done(self, command: c.RoomDone) -> None:
        self._tell(self.legs[command.serial], "sent")

    def _stopped(self, command: c.RoomStopped) -> None:
        code = command.cause.code.name.lower()
        self._tell(self.legs[command.serial], f"failed at prefill: {code}")

    def _released(self, command: c.RoomReleased) -> None:
        leg = self.legs.pop(command.serial, None)
        if leg is None:
            return  # the engine's half never came
        if not leg.told:
            broken("I4", f"room {leg.record.room} ends at {self.pool.name}, its user is not told")
        leg.released = True
        self.world.seen["prefill halves that ended"] += 1
        # The pages of a step belong to it until it ends (I13).
        if not leg.steps:
            self._free_pages(leg)

    RUN: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        c.SendToDecode: _send,
        c.OpenRoute: _open_route,
        c.CloseRoute: _close_route,
        c.WatchProcess: _nothing,
        c.StartWrite: _start_write,
        c.CancelWrite: _cancel_write,
        c.RoomMatched: _matched,
        c.RoomDone: _done,
        c.RoomStopped: _stopped,
        c.RoomReleased: _released,
    }


AnyHost = PrefillHost | DecodeHost


def address_of(incarnation: Incarnation) -> PlaneAddress:
    process = ProcessIdentity("boot", "pid:[1]", incarnation & 0xFFFFFF, 1)
    return PlaneAddress("fake", f"{incarnation:x}", process)


def peer_id_of(host: DecodeHost) -> bytes:
    return routing_id(host.incarnation)
