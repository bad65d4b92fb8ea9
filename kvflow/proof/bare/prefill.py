"""One prefill rank: a shipped `PrefillEndpoint`, its engine, its routes and its writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from kvflow.proof.bare.decode import Decode
from kvflow.proof.bare.holds import Leg
from kvflow.proof.bare.job import PrefillJob
from kvflow.proof.bare.node import CLOSE_LOOK_S, Scene, address_of
from kvflow.proof.bare.pages import Pages
from kvflow.proof.bare.turns import Turns
from kvflow.proof.bare.wire import Burst, parsed
from kvflow.proof.bare.writes import PacedWrite, Writer
from kvflow.proof.rules.both_sides import is_linked
from kvflow.proof.rules.transfers import handoff_of
from kvflow.proof.sim.chunks import positions
from kvflow.proof.sim.times import THREAD_S
from kvflow.protocols import commands as c
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.prefill.peers import PrefillIdentity
from kvflow.protocols.wire.messages import Incarnation, Rank
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.telemetry.counters import Counts
from kvflow.testing.shards import shard_layout


class Prefill(Writer):
    """One life of a prefill rank: its shipped endpoint, and a handler for each of its commands."""

    endpoint: PrefillEndpoint

    def __init__(
        self, world: Scene, group: int, rank: int, world_size: int, incarnation: Incarnation
    ) -> None:
        name = f"prefill {group}.{rank}" if world_size > 1 else f"prefill {group}"
        layout = shard_layout(world.variety.layout, rank, world_size)
        identity = PrefillIdentity(incarnation, Rank(rank), layout.served, address_of(incarnation))
        self.endpoint = PrefillEndpoint(
            identity, observer=Counts(), timing=world.timing, bounds=world.bounds
        )
        super().__init__(world, name, group, self.endpoint)
        self.control = f"tcp://10.0.{group}.{rank}:8998"
        self.info = RankInfo(rank, world_size, incarnation, self.control, "fake", "model")
        self.rank = rank
        self.legs: dict[int, Leg] = {}  # by serial, until released
        self.pages = Pages(name, world.rules, layout, world.variety.page_sizes)
        self.cells = [None] * len(self.pages.place_of)
        self.watches: set[int] = set()
        self.turns: Turns[Leg] = Turns()
        self.writes: dict[int, PacedWrite] = {}  # running writes, by number
        self._stalled_from_s = float("inf")

    # --- requests

    def begin(self, job: PrefillJob) -> None:
        now, endpoint = self.clock.now, self.endpoint
        try:
            if job.refused:
                job.error = job.cause(Code.CAPACITY, "the engine will not have it")
                return self.refuse_room(job.room, job.error)
            deadline_at_s = float("inf") if job.deadline_s is None else now + job.deadline_s
            record = endpoint.open_room(
                job.room,
                job.tokens,
                job.digest,
                now=now,
                rendezvous_s=job.rendezvous_s,
                deadline_at_s=deadline_at_s,
            )
        except KvflowError as error:
            self.say(f"room {job.room}: {error}")
            job.error = error.cause()
            return None
        else:
            job.at = leg = self.legs[record.serial] = Leg(record, job)
            fails = self.world.faults.of_take()
            pages = None if fails else self.pages.take(job.wanted, record)
            if pages is None:
                self.close_room(leg, job.cause(Code.CAPACITY, "no pages at prefill"))
            else:
                leg.pages = pages
                if job.begins_after_s is not None:
                    leg.queues = True
                    self.clock.later(job.begins_after_s, self, self._queue, leg)
        finally:
            self.run()

    def end(self, job: PrefillJob, how: str) -> None:
        if job.at is not None and not job.at.told:
            self.close_room(job.at, job.cause(Code.CLIENT_GONE, how))
            self.run()

    def refuse_room(self, room: int, cause: Cause) -> None:
        self.endpoint.refuse_room(room, cause, self.clock.now)

    def close_room(self, leg: Leg, cause: Cause) -> None:
        self.say(f"room {leg.record.room}: {cause}")
        self.endpoint.close_room(leg.record, cause, self.clock.now)

    def _queue(self, leg: Leg) -> None:
        """Queue the leg for its turn.

        Ranks of a group have no common queue, so two of them could wait for each other. Their legs
        begin at once instead.
        """
        if self.info.world_size == 1:
            self.turns.ask(leg, self._take_turn)
        elif not leg.told:
            self._take_turn(leg)
        self.run()

    def _take_turn(self, leg: Leg) -> None:
        leg.queues = False
        self.say(f"room {leg.record.room} begins")
        self.endpoint.begin_room(leg.record)
        if leg.matched:
            self.compute(leg)

    def ready(self, leg: Leg) -> None:
        if leg.pages and not leg.queues:
            self.compute(leg)

    def compute(self, leg: Leg) -> None:
        if leg.number == leg.job.fails_at:
            self.close_room(leg, leg.job.cause(Code.ENGINE_ERROR, "the engine broke down"))
            return
        leg.computing = True
        # The pages of a step belong to it until it ends (I13), even if the room is gone.
        for position in leg.chunks[leg.number]:
            self.pages.readers[leg.pages[position]] += 1
        self.wait(THREAD_S, self._computed, leg)

    def _computed(self, leg: Leg) -> None:
        leg.computing = False
        which = leg.chunks[leg.number]
        chunk = [leg.pages[position] for position in which]
        for page in chunk:
            self.pages.readers[page] -= 1
        if leg.released:
            return self._free_pages(leg)
        held = self.pages.tokens_of(leg.job.tokens)
        for position, page in zip(which, chunk, strict=True):
            for part, token in zip(self.pages.parts_of(page), held[position], strict=True):
                self.cells[part] = (leg.job.digest, token)
        if leg.told:
            return None
        leg.number += 1
        last = leg.number == len(leg.chunks)
        handoff = handoff_of(leg.job.digest) if last else b""
        self.endpoint.queue_chunk(
            leg.record, np.array(chunk, np.int32), last=last, handoff=handoff, now=self.clock.now
        )
        if not last:
            self.compute(leg)
        return self.run()

    def _free_pages(self, leg: Leg) -> None:
        for page in leg.pages:
            for part in self.pages.parts_of(page):
                self.cells[part] = None
        self.pages.give_back(leg.pages, leg.record)
        leg.pages = []

    # --- links

    def read(self, burst: Burst) -> None:
        self._note_stall()
        for peer_id, frame, spoilt in burst:
            self.malformed += spoilt
            self.endpoint.receive(peer_id, frame, self.clock.now)
        self.run()

    def tick(self, now: float) -> None:
        self._note_stall()
        self.endpoint.tick(now)

    def stall(self, for_s: float) -> None:
        self._stalled_from_s = now = self.clock.now
        self.stalled_until_s = now + for_s

    def _note_stall(self) -> None:
        if self._stalled_from_s > (now := self.clock.now):
            return
        stands = bool(self.writes) and now < self.stalled_until_s
        self.endpoint.note_stall(now - self._stalled_from_s if stands else 0.0)
        if now >= self.stalled_until_s:
            self._stalled_from_s = float("inf")

    def known_dead(self, watched: int) -> None:
        if watched in self.watches:
            self.watches.discard(watched)
            self.endpoint.peer_died(Incarnation(watched), self.clock.now)
            self.run()

    def _route(self, peer: Incarnation) -> None:
        if not self.world.nodes[peer].alive:
            self.endpoint.route_refused(peer, "nobody answers there", self.clock.now)
        elif self.world.refuses_route():
            self.say(f"refuses decode {peer:x}")
            self.endpoint.route_refused(peer, "on purpose", self.clock.now)
        else:
            self.routes.add(peer)
            # The link is up only from now on, so the oracles count this as a disturbance.
            self.world.wire.disturbed(self.control, self.world.nodes[peer])
            if not self.endpoint.route_opened(peer, self.clock.now):
                self.routes.discard(peer)
        self.run()

    # --- the end

    def look_again(self, until_s: float) -> None:
        if self.endpoint.rooms and self.clock.now < until_s:
            return self.wait(CLOSE_LOOK_S, self.look_again, until_s)
        return self.part()

    def has_parted(self) -> None:
        linked = [
            node
            for node in self.world.living(Decode)
            if is_linked(node.endpoint.peers, self.incarnation)
        ]
        self.rules.left(self, self.control, self.endpoint.core.former.parted, linked)
        return self.world.kill(self, "has left")

    def died(self) -> None:
        self.rules.transfers.died(self.incarnation)

    # --- commands

    def _send(self, command: c.SendToDecode) -> None:
        frame = command.frame
        self.rules.transfers.sent(self, parsed(frame, to_prefill=False), None)
        decode = self.world.by_peer_id.get(command.peer_id)
        if decode is not None and self.world.wire.lines.get((self.control, decode.incarnation)):
            self.world.wire.carry(self, self.control, decode, frame)

    def _open_route(self, command: c.OpenRoute) -> None:
        self.wait(THREAD_S, self._route, command.peer)

    def _close_route(self, command: c.CloseRoute) -> None:
        self.routes.discard(command.peer)
        # A living decode may lose its place at this rank, so this counts as a disturbance.
        self.world.wire.disturbed(self.control, self.world.nodes[command.peer])
        self.watches.discard(command.peer)
        self.rules.transfers.route_closed(self, command.peer)

    def _watch(self, command: c.WatchProcess) -> None:
        self.watches.add(command.peer)
        self.world.watch(self, command.address, command.peer)

    def _start_write(self, command: c.StartWrite) -> None:
        if command.peer not in self.routes:
            text = f"{self.name}: a write to {command.peer:x}, and no route is open"
            self.rules.broken("I2", text)
        target = self.world.nodes[command.peer]
        assert isinstance(target, Decode)
        write = PacedWrite(self, target, self.legs[command.serial], command)
        self.writes[command.write] = write
        if self._traced:
            how = write.fault or "no fault"
            self.say(f"write {write.sources} -> {write.targets} of grant {write.key[2]}, {how}")
        self.rules.transfers.write_began(write)
        write.begin()

    def write_ended(self, write: PacedWrite, checksum: bytes) -> None:
        del self.writes[write.number]
        assert write.outcome is not None
        error = "" if not write.fault else f"scripted {write.fault}"
        self.endpoint.write_ended(
            write.number, write.outcome, self.clock.now, error=error, checksum=checksum
        )
        self.run()

    def _cancel_write(self, command: c.CancelWrite) -> None:
        if (write := self.writes.get(command.write)) is not None:
            write.cancelled = True

    def _matched(self, command: c.RoomMatched) -> None:
        leg = self.legs[command.serial]
        self.say(f"room {leg.record.room} is matched")
        self.rules.rooms.matched(self.incarnation, leg.record)
        leg.matched, job = True, leg.job
        wanted = job.wanted
        if command.prefix_tokens:
            wanted = job.layout.wanted(job.tokens, command.prefix_tokens)
        prefix_pages = job.layout.first_page(job.tokens, command.prefix_tokens)
        leg.chunks = positions(job.wanted, wanted, job.chunks_after(prefix_pages, wanted))
        self.ready(leg)

    def _done(self, command: c.RoomDone) -> None:
        leg = self.legs[command.serial]
        self.say(f"room {leg.record.room} is done")
        self._tell(leg, None)
        leg.job.succeeded = True
        self.turns.end(leg)

    def _stopped(self, command: c.RoomStopped) -> None:
        leg = self.legs[command.serial]
        self.say(f"room {leg.record.room} stops: {command.cause}")
        self._tell(leg, command.cause)
        leg.failed = True
        self.turns.end(leg)

    def _tell(self, leg: Leg, cause: Cause | None) -> None:
        self.rules.rooms.told_at_prefill(self.incarnation, leg.record, cause)
        leg.told = True

    def _released(self, command: c.RoomReleased) -> None:
        leg = self.legs.pop(command.serial, None)
        record = self.rules.rooms.record_of(self.incarnation, command.serial)
        in_table = self.endpoint.rooms.get(record.room) is record
        self.rules.rooms.released(self.incarnation, command.serial, in_table=in_table)
        if leg is not None:
            leg.released = True
            if not leg.computing:
                self._free_pages(leg)

    RUN: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        c.SendToDecode: _send,
        c.OpenRoute: _open_route,
        c.CloseRoute: _close_route,
        c.WatchProcess: _watch,
        c.StartWrite: _start_write,
        c.CancelWrite: _cancel_write,
        c.RoomMatched: _matched,
        c.RoomDone: _done,
        c.RoomStopped: _stopped,
        c.RoomReleased: _released,
    }
