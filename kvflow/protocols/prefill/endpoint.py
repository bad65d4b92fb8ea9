"""The endpoint of one prefill rank: rooms, decodes and their grants, rendezvous, deadlines.

It decides and does not act: it uses no asyncio, clock, socket or thread. Methods receive the time,
and `commands()` returns the work for the shell. See core.py for rooms, and peers.py for decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from kvflow.protocols.arguments import check_chunk, room_id
from kvflow.protocols.commands import OpenRoute, PrefillCommand
from kvflow.protocols.errors import Cause, Code, MisuseError, RoomInUseError, room_error
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machinery import TICK_WORK, RoomsEndpoint, Task, Timer, parsed
from kvflow.protocols.machines.grants import GrantCommand, GrantKind
from kvflow.protocols.machines.peer import PeerKind, PeerPhase
from kvflow.protocols.machines.prefill_room import TERMINAL, PrefillEvent, PrefillKind, PrefillPhase
from kvflow.protocols.machines.rendezvous import Side
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.pages.spaces import Counts, counts_less
from kvflow.protocols.ports import Observer, WriteOutcome
from kvflow.protocols.prefill.core import DRAINS, GRANT_RUN, PrefillCore
from kvflow.protocols.prefill.peers import DecodePeer, PrefillIdentity
from kvflow.protocols.prefill.records import Chunk, PrefillRoomRecord
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.codec import routing_id
from kvflow.protocols.wire.messages import Incarnation, RoomId, ToPrefill

_MESSAGES = msgspec.msgpack.Decoder(ToPrefill)


class PrefillEndpoint(RoomsEndpoint[PrefillCommand]):
    """The protocol endpoint of one prefill incarnation."""

    core: PrefillCore

    def __init__(
        self,
        identity: PrefillIdentity,
        *,
        observer: Observer,
        timing: Timing | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self.core = PrefillCore(identity, observer, timing or Timing(), bounds or Bounds())
        self.outbox = self.core.outbox

    def __repr__(self) -> str:
        core = self.core
        known = f"{len(core.rooms)} rooms, {len(core.peers)} decodes, {len(core.writes)} writes"
        return f"<PrefillEndpoint {core.identity.incarnation:016x}: {known}>"

    # --- what is known

    @property
    def rooms(self) -> Mapping[RoomId, PrefillRoomRecord]:
        """Open rooms by id, including those that are draining."""
        return self.core.rooms

    @property
    def peers(self) -> Iterable[DecodePeer]:
        """Decodes that prefill has not forgotten, including those that are silent or gone."""
        return self.core.peers.values()

    @property
    def unavailable_reason(self) -> str:
        """The reason why this prefill cannot move pages now, or an empty string when it can."""
        return self.core.unavailable_reason

    def note_stall(self, stalled_s: float) -> None:
        """Record how long the data plane's worker has made no progress: see `ports.DataPlane`."""
        self.core.stalled_s = stalled_s

    # --- rooms

    def open_room(
        self,
        room: int,
        prompt_tokens: int,
        digest: bytes,
        *,
        now: float,
        rendezvous_s: float | None = None,
        deadline_at_s: float = float("inf"),
    ) -> PrefillRoomRecord:
        """Open the engine's half of a room.

        If no decode has announced the room, it waits up to `rendezvous_s` for decode's half.

        Raises: MisuseError if `room` is not a room id, RoomInUseError while an earlier room with
        that id is open or drains, AbortedError while shutting down. If the earlier room drains,
        decode's half of the new room receives the same cause when it arrives.
        """
        core, number = self.core, room_id(room)
        if core.leaving is not None:
            raise room_error(core.leaving)
        record = core.rooms.get(number)
        if record is not None and record.prompt is not None:
            if not record.ended:
                raise RoomInUseError(f"room {room} is in use")
            error = RoomInUseError(DRAINS.format(room))
            core.record_outcome(number, Side.ENGINE, error.cause(), now)
            raise error
        wait_s = core.timing.rendezvous_s if rendezvous_s is None else rendezvous_s
        if record is None:
            record = core.new_room(number, PrefillPhase.EXPECTED, wait_s, now)
        record.prompt, record.own_deadline_at_s = (prompt_tokens, digest), deadline_at_s
        if record.bootstrap is not None:
            if deadline_at_s < float("inf"):
                core.set_deadline(record)
            core.meet(record, now)
        elif (announced := core.announced(number, now)) is not None:
            core.forget_announcement(announced.peer, announced.grant)
            announced.peer.grants.feed(announced.grant, GrantKind.JOIN)
            core.bind(record, announced.peer, announced.grant)
            core.feed_room(record, PrefillEvent(PrefillKind.ANNOUNCED), now)
            core.set_deadline(record)
        elif cause := core.rendezvous.take(number, Side.ENGINE):
            core.feed_room(record, PrefillEvent(PrefillKind.ENDED_LOCALLY, cause=cause), now)
            # Ending the room recorded an outcome for decode's half. Decode knows the cause already,
            # and a later room with that id must not receive it.
            core.rendezvous.take(number, Side.DECODE)
        else:
            core.set_deadline(record)
        return record

    def begin_room(self, record: PrefillRoomRecord) -> None:
        """Report that the engine has a place for the whole prompt, or is sure to get one.

        Pages that decode lends after this do not lie idle until another room ends. Prefill sends
        Begun as soon as decode announces the room, and again whenever decode repeats the
        announcement.
        """
        record.begun = True
        self.core.tell_begun(record)

    def refuse_room(self, room: int, cause: Cause, now: float) -> None:
        """Refuse decode's half of a room, now or when it arrives. The engine's half will not
        arrive.
        """
        core, number = self.core, room_id(room)
        record = core.rooms.get(number)
        announced = core.announced(number, now)
        if record is not None:
            if record.prompt is None:
                self.close_room(record, cause, now)
            # The record belongs to an earlier room that still drains. The refusal is for the next
            # room with that id.
            elif record.ended:
                core.record_outcome(number, Side.ENGINE, cause, now)
        elif announced is not None:
            core.refuse_grant(announced.peer, number, announced.grant, cause)
        else:
            core.record_outcome(number, Side.ENGINE, cause, now)

    def queue_chunk(
        self,
        record: PrefillRoomRecord,
        source_pages: PageIndices,
        *,
        last: bool,
        handoff: bytes,
        now: float,
        checked: bool = False,
    ) -> None:
        """Queue a write of our `source_pages` (int32 [n]) onto as many of decode's places, the next
        ones of each space.

        `StartWrite` is issued even if n is 0, and the room ends only after that write, so this call
        never ends the room. Pass `checked=True` if `check_chunk` accepted the arguments.

        Raises: MisuseError before the halves match, after the last chunk, for a number of pages
        that does not fit, and for a handoff before the last chunk. CapacityError for a handoff that
        is too large. LayoutError for places that are not in the order of the spaces. The room's own
        error once the room ends. A call that raises queues no chunk.
        """
        core = self.core
        if checked:
            counts = core.identity.layout.counted(source_pages)
        else:
            counts = self.check_chunk(record, source_pages, last, len(handoff))
        record.chunks.append(
            Chunk(core.write_id(), record.state.queued, source_pages, counts, last, handoff)
        )
        core.feed_room(record, PrefillEvent(PrefillKind.CHUNK_QUEUED, last=last), now)

    def check_chunk(
        self, record: PrefillRoomRecord, source_pages: PageIndices, last: bool, handoff_bytes: int
    ) -> Counts:
        """Check the arguments of `queue_chunk` without queueing. Returns how many places of each
        space the chunk has. Raises: see `queue_chunk`.
        """
        state = record.state
        if state.phase > PrefillPhase.TRANSFERRING and state.phase is not PrefillPhase.SUCCESS:
            raise room_error(record.first_cause)
        if state.phase < PrefillPhase.WAITING_FOR_INPUT:
            raise MisuseError(f"room {record.room}: send() before matched()")
        if state.last_queued:
            raise MisuseError(f"room {record.room}: send() after the last chunk")
        layout = self.core.identity.layout
        if len(layout.spaces) > 1:
            layout.check_order(source_pages)
        counts, left = layout.counted(source_pages), counts_less(record.wanted, record.placed)
        check_chunk(record.room, layout, counts, left, last, handoff_bytes)
        return counts

    def write_ended(
        self,
        write: int,
        outcome: WriteOutcome,
        now: float,
        *,
        error: str = "",
        checksum: bytes = b"",
    ) -> None:
        """Report the end of a started write: no part of it runs any more."""
        found = self.core.writes.pop(write, None)
        if found is None:
            return
        record, chunk = found
        chunk.outcome, chunk.error, chunk.checksum = outcome, error, checksum
        self.core.settle_chunks(record, now)

    def close_room(self, record: PrefillRoomRecord, cause: Cause, now: float) -> None:
        """End the room in any state. A decode that announced the room or offered pages for it is
        notified at once, and running writes are drained. Has no effect on a room that ended.
        """
        if record.state.phase not in TERMINAL:
            self.core.feed_room(record, PrefillEvent(PrefillKind.ENDED_LOCALLY, cause=cause), now)

    # --- peers

    def receive(
        self, peer_id: bytes, frame: bytes, now: float, sender_address: Callable[[], str] = str
    ) -> None:
        """Handle a frame from the decode whose routing id is `peer_id`. Malformed, foreign and
        stale frames are counted and have no effect on rooms (I7).

        `sender_address` returns the network address that the frame came from, or an empty string if
        it is not known. It is called only for a new decode.
        """
        core = self.core
        message = parsed(_MESSAGES, frame)
        if message is None:
            core.observer.message_dropped("malformed")
            return
        peer = core.peers.get(message.target)
        if peer_id != (routing_id(message.target) if peer is None else peer.routing_id):
            core.observer.message_dropped("foreign")
            return
        if message.source != core.identity.incarnation:
            core.observer.message_dropped("stale")
            core.answer_register(
                message.target, message.source, "another incarnation serves here now"
            )
        elif type(message) is wire.Register:
            core.register(message, now, sender_address)
        elif type(message) is wire.Goodbye:
            core.goodbye_received(message, now)
        elif peer is None and isinstance(message, wire.Announce | wire.Abort):
            _on_room_of_refused(core, message, now)
        elif peer is None or type(message) not in _READ_IN[peer.phase]:
            core.observer.message_dropped("stale")
        else:
            peer.received_at_s = now
            if peer.phase is PeerPhase.SILENT:
                core.feed_peer(peer, PeerKind.HEARD, now)
            HANDLERS[type(message)](core, peer, message, now)
            if peer.pace_s and not peer.grants.all_ended:
                # The decode has a room now, so its silence is noticed as soon as that of any other.
                core.deadlines.advance(
                    Timer("silence", peer.incarnation), now + core.timing.lost_after_s
                )
        if core.tasks:
            core.work(TICK_WORK, now)

    def route_opened(self, incarnation: Incarnation, now: float) -> bool:
        """Report that the data plane can reach a decode's pool. Returns False if that decode is
        already forgotten: the caller must then close the route.
        """
        peer = self.core.peers.get(incarnation)
        if peer is None:
            return False
        if peer.phase is PeerPhase.OPENING:
            self.core.feed_peer(peer, PeerKind.ROUTE_OPENED, now)
            peer.received_at_s = now
        return True

    def route_refused(self, incarnation: Incarnation, reason: str, now: float) -> None:
        """Refuse a decode whose pool the data plane cannot reach. The decode receives `reason`."""
        # The decode is forgotten at once: a stranger may register under a new incarnation each
        # time, and must not fill the table.
        peer = self.core.peers.get(incarnation)
        if peer is not None and peer.phase is PeerPhase.OPENING:
            self.core.feed_peer(peer, PeerKind.ROUTE_REFUSED, now, Cause(Code.REFUSED, reason))
            self.core.work(TICK_WORK, now)

    def route_short(self, incarnation: Incarnation, reason: str, now: float) -> None:
        """Report that this machine lacks descriptors, memory or staging for a decode's route. If
        some silent decode can be forgotten, its resources are freed and `OpenRoute` is issued
        again. Otherwise the new decode is refused.
        """
        core = self.core
        peer = core.peers.get(incarnation)
        if peer is None or peer.phase is not PeerPhase.OPENING:
            return
        if core.make_place(self.peers, now):
            core.outbox.append(OpenRoute(incarnation, peer.address, peer.layout))
        else:
            self.route_refused(incarnation, reason, now)

    def peer_died(self, incarnation: Incarnation, now: float) -> None:
        """End the rooms of a decode whose process died. `CloseRoute` follows once they end."""
        peer = self.core.peers.get(incarnation)
        if peer is not None and peer.phase in (PeerPhase.UP, PeerPhase.SILENT, PeerPhase.PARTING):
            cause = Cause(Code.PEER_LOST, f"decode {incarnation:016x} died")
            self.core.feed_peer(peer, PeerKind.DIED, now, cause)
            self.core.work(TICK_WORK, now)

    def declare_dead(self, incarnation: Incarnation) -> tuple[int, int]:
        """End the loans that earlier nodes over this pool made to a prefill that an operator
        declares dead. Returns the same counts as `DecodeEndpoint.declare_dead`.

        Raises: MisuseError if that incarnation owes no loan.
        """
        earlier = self.core.earlier
        if not earlier.of(incarnation):
            raise MisuseError(
                f"no prefill {incarnation:016x} owes a loan of an earlier node over this pool"
            )
        self.core.observer.declared_dead += 1
        return earlier.declare_dead(incarnation)

    def leave(self, now: float) -> None:
        """End all rooms, and open no more. `rooms` is empty once their writes end."""
        core = self.core
        why = core.leaving = Cause(Code.SHUTDOWN, "prefill is shutting down")
        core.add_task(Task("end", core.rooms.values(), cause=why))
        core.add_task(Task("refuse", core.rendezvous.announced.items(), cause=why))
        core.work(TICK_WORK, now)

    def part(self, now: float) -> None:
        """Send Goodbye to every decode, and repeat it until it is acknowledged.

        Call this after `leave`, when no write runs any more. The Goodbye names every grant that is
        still open or in doubt, and so proves nothing about those.
        """
        self.core.add_task(Task("leave", self.peers))
        self.core.work(TICK_WORK, now)

    def parting(self, now: float) -> bool:
        """Return True while a Goodbye is still to be sent, or `unparted` yields a decode."""
        return bool(self.core.tasks) or any(True for _ in self.unparted(now))

    def unparted(self, now: float) -> Iterator[DecodePeer]:
        """Yield the decodes that were alive recently but have not acknowledged a Goodbye, after
        `part`.
        """
        untold = bool(self.core.tasks)  # some decodes have not been told yet
        for peer in self.peers:
            left = peer.phase is PeerPhase.PARTING or (untold and peer.phase is not PeerPhase.GONE)
            if left and peer.received_at_s > now - self.core.silent_after_s(peer):
                yield peer

    def credit_stall(self, late_s: float, now: float) -> None:
        """Extend the peers' silence limits and the rooms' waits by the `late_s` seconds for which
        the shell was stalled.

        Messages that arrived during the stall are still unread, so the peers may not have been
        silent. To measure `late_s`, a shell must tick once per heartbeat interval, whether or not a
        tick is due.
        """
        for peer in self.peers:
            # A message that was read after the stall may have updated `received_at_s` already, so
            # the sum is capped at `now`.
            peer.received_at_s = min(peer.received_at_s + late_s, now)
        # A room's deadline may have passed during the stall, even though the half that it waits for
        # has arrived and will be read after this call. So the deadline moves by one more heartbeat
        # interval.
        for record in self.core.rooms.values():
            record.deadline_at_s += min(
                late_s + self.core.timing.heartbeat_s, now - record.opened_at_s
            )

    # --- time

    def tick(self, now: float) -> None:
        """Act on deadlines that passed by `now`, and on peers that fell silent.

        A tick does a bounded amount of work. `next_tick` returns the time of the next tick.
        """
        core = self.core
        was_idle = not core.work_left
        core.work(TICK_WORK, now)
        for _ in range(TICK_WORK):
            timer = core.deadlines.pop_due(now)
            if timer is None:
                break
            self._expire(timer, now)
        if was_idle:
            core.work(TICK_WORK, now)

    def _expire(self, timer: Timer, now: float) -> None:
        core = self.core
        if timer.kind == "outcomes":
            core.rendezvous.expire(now)
            core.deadlines.set(timer, core.rendezvous.next_expiry_s())
        elif timer.kind == "announced":
            self._expire_announcement(now)
        elif timer.kind == "goodbye":
            peer = core.peers[Incarnation(timer.key)]
            if peer.phase is PeerPhase.PARTING:
                core.feed_peer(peer, PeerKind.REPEAT_DUE, now)
        elif timer.kind == "silence":
            peer = core.peers[Incarnation(timer.key)]
            if peer.phase is not PeerPhase.UP:
                # The decode is gone and its last writes are awaited, or it is parting.
                return
            silent_s = core.silent_after_s(peer)
            if peer.received_at_s + silent_s > now:
                core.deadlines.set(timer, core.silent_at_s(peer))
            else:
                text = f"decode {peer.incarnation:016x} was silent for {silent_s:g} s"
                core.feed_peer(peer, PeerKind.SILENCE_DUE, now, Cause(Code.PEER_LOST, text))
        else:
            record = core.rooms[RoomId(timer.key)]
            if record.due_at_s > now:
                core.set_deadline(record)
                return
            waits = now < record.own_deadline_at_s
            text = f"room {record.room}: nothing more came for {now - record.opened_at_s:.1f} s"
            self.close_room(record, Cause(Code.RENDEZVOUS if waits else Code.DEADLINE, text), now)

    def _expire_announcement(self, now: float) -> None:
        core = self.core
        if (oldest := core.rendezvous.oldest_announced()) is not None and oldest[1].until_s <= now:
            room, announced = oldest
            text = f"room {room}: prefill's half has not come within {core.timing.announced_s:g} s"
            core.refuse_grant(announced.peer, room, announced.grant, Cause(Code.RENDEZVOUS, text))
        core.time_announcements()


# --- messages of decodes


def _on_room_of_refused(core: PrefillCore, message: wire.Announce | wire.Abort, now: float) -> None:
    cause = core.refused.get(message.target)
    if cause is None:
        core.observer.message_dropped("stale")
        return
    if isinstance(message, wire.Announce):
        if core.rendezvous.has_ended(message.room, Side.ENGINE):
            # The engine's outcome is kept: if this decode is accepted later, it announces the room
            # again and then receives that outcome.
            return
        core.end_engine_half(
            message.room, Cause(cause.code, f"prefill refused this decode: {cause.text}"), now
        )
    else:
        core.end_engine_half(message.room, message.cause, now)


def _on_grant(kind: GrantKind) -> Callable[[PrefillCore, DecodePeer, Any, float], None]:
    def handle(core: PrefillCore, peer: DecodePeer, message: Any, now: float) -> None:
        for command in peer.grants.feed(message.grant, kind):
            GRANT_RUN[command](core, peer, message, now)

    return handle


def _on_resync(core: PrefillCore, peer: DecodePeer, message: wire.Resync, now: float) -> None:
    unknown: list[wire.Belief] = []
    # A message may name a grant many times. Answering each grant once bounds the work.
    for belief in {belief.grant: belief for belief in message.rooms}.values():
        record = peer.grants.rooms.get(belief.grant)
        # A room without a Bootstrap is only announced: its grant is reported as unknown, so that
        # decode sends the Bootstrap.
        offered = record is None or record.bootstrap is not None
        for command in peer.grants.feed(belief.grant, GrantKind.ASK):
            if command is GrantCommand.RESEND and offered:
                core.resend(peer, belief.grant, belief.next_seq)
            else:
                unknown.append(belief)
    if unknown:
        core.send(peer, wire.Resync(rooms=tuple(unknown), **core.lives(peer.incarnation)))


def _on_heartbeat(core: PrefillCore, peer: DecodePeer, message: wire.Heartbeat, now: float) -> None:
    withdrawn = peer.grants.settle(message.settled_below, message.settled)
    if withdrawn is None:
        # The heartbeat settles grants that this decode never sent, so it cannot be genuine.
        core.observer.message_dropped("foreign")
        return
    core.end_withdrawn(peer, withdrawn)
    # Without an answer, decode considers this prefill silent and ends its rooms. That is intended
    # while the data plane is stalled.
    if not core.unavailable_reason:
        core.beat(peer, now)


def _on_goodbye_ack(
    core: PrefillCore, peer: DecodePeer, message: wire.GoodbyeAck, now: float
) -> None:
    if peer.phase is PeerPhase.PARTING:
        core.part(peer, now)
    else:
        core.observer.message_dropped("stale")


HANDLERS: dict[type, Callable[[PrefillCore, DecodePeer, Any, float], None]] = {
    wire.Announce: _on_grant(GrantKind.ANNOUNCE),
    wire.Bootstrap: _on_grant(GrantKind.BOOTSTRAP),
    wire.Abort: _on_grant(GrantKind.ABORT),
    wire.Resync: _on_resync,
    wire.Heartbeat: _on_heartbeat,
    wire.GoodbyeAck: _on_goodbye_ack,
}

_READ_IN: dict[PeerPhase, Collection[type]] = {
    PeerPhase.OPENING: (wire.Announce, wire.Abort, wire.Heartbeat),  # messages that need no route
    PeerPhase.UP: HANDLERS,
    PeerPhase.SILENT: HANDLERS,
    PeerPhase.PARTING: HANDLERS,
    PeerPhase.GONE: (),
}
