"""The machines of one prefill rank (rooms, grants), and the events that pass between them.

A table returns commands instead of calling back. Running a command may feed another machine or the
same one, but only after the step that returned the command.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvflow.protocols.arguments import offered_places
from kvflow.protocols.commands import (
    CancelWrite,
    RoomDone,
    RoomMatched,
    RoomReleased,
    RoomStopped,
    SendToDecode,
    StartWrite,
)
from kvflow.protocols.errors import CapacityError, Cause, Code, KvflowError
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machinery import Task, Timer
from kvflow.protocols.machines.grants import GrantCommand, GrantKind
from kvflow.protocols.machines.peer import PeerPhase
from kvflow.protocols.machines.prefill_room import PrefillCommand as RoomCommand
from kvflow.protocols.machines.prefill_room import (
    PrefillEvent,
    PrefillKind,
    PrefillPhase,
    PrefillRoomState,
    step,
)
from kvflow.protocols.machines.rendezvous import Announcement, Rendezvous, Side
from kvflow.protocols.pages.fine import FinePages
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.pages.spaces import Counts, counts_fit, counts_sum, spans_at, taken
from kvflow.protocols.ports import Observer, WriteOutcome
from kvflow.protocols.prefill.peers import WITHDRAWN, DecodePeer, PrefillIdentity, PrefillPeers
from kvflow.protocols.prefill.records import Chunk, PrefillRoomRecord, fine_write, pinned_places
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.codec import encode
from kvflow.protocols.wire.messages import GrantId, RoomId

DRAINS = "room {} is in use: writes of the last room of that id still run"


class PrefillCore(PrefillPeers):
    """The state of one prefill rank. Its `feed_*` methods feed the machines and run the commands.

    A "room" timer has a room id as its key, and "silence" and "goodbye" timers have an incarnation.
    All rooms share one "outcomes" timer and one "announced" timer.
    """

    def __init__(
        self, identity: PrefillIdentity, observer: Observer, timing: Timing, bounds: Bounds
    ) -> None:
        super().__init__(identity, observer, timing, bounds)
        self.rooms: dict[RoomId, PrefillRoomRecord] = {}
        self.rendezvous: Rendezvous[DecodePeer] = Rendezvous(bounds.ended_halves)
        self.writes: dict[int, tuple[PrefillRoomRecord, Chunk]] = {}
        self._serial = self._write = 0

    def run_task(self, task: Task, item: Any, now: float) -> None:
        _TASKS[task.run](self, task, item, now)

    def header(self, room: RoomId, grant: GrantId, peer: DecodePeer) -> dict[str, Any]:
        me = self.identity
        return {
            "room": room,
            "grant": grant,
            "rank": me.rank,
            "source": me.incarnation,
            "target": peer.incarnation,
        }

    # --- rooms

    def new_room(
        self, room: RoomId, phase: PrefillPhase, rendezvous_s: float, now: float
    ) -> PrefillRoomRecord:
        self._serial += 1
        record = self.rooms[room] = PrefillRoomRecord(
            self._serial, room, PrefillRoomState(phase), now, now + rendezvous_s
        )
        self.observer.rooms_opened += 1
        return record

    def set_deadline(self, record: PrefillRoomRecord) -> None:
        """Set the timer of a room. No call is needed when the deadline moves to a later time,
        because the expiry of the timer reads the deadline again.
        """
        self.deadlines.set(Timer("room", record.room), record.due_at_s)

    def bind(self, record: PrefillRoomRecord, peer: DecodePeer, grant: GrantId) -> None:
        record.peer, record.grant = peer, grant
        peer.grants.rooms[grant] = record

    def tell_begun(self, record: PrefillRoomRecord) -> None:
        """Send Begun if the engine has a place for the prompt, and decode has announced the room
        but has not lent pages yet.
        """
        if record.begun and record.phase is PrefillPhase.ANNOUNCED:
            assert record.peer is not None
            self.send(
                record.peer, wire.Begun(**self.header(record.room, record.grant, record.peer))
            )

    def offer(
        self,
        record: PrefillRoomRecord,
        message: wire.Bootstrap,
        pages: PageIndices,
        wanted: Counts,
        fine: FinePages | None,
        now: float,
    ) -> None:
        """Record decode's half of a room, as `offered_places` returned it."""
        record.target_pages, record.prefix_tokens = pages, message.prefix_tokens
        record.wanted, record.placed, record.fine = wanted, (0,) * len(wanted), fine
        record.bootstrap = (message.prompt_tokens, message.prompt_digest)
        assert record.peer is not None
        record.peer.grants.announcements.discard(record.grant)
        if record.prompt is not None:
            self.meet(record, now)
        else:
            self.set_deadline(record)

    def meet(self, record: PrefillRoomRecord, now: float) -> None:
        """Match the two halves of a room, or end the room if their prompts differ (I8)."""
        if record.prompt == record.bootstrap:
            self.feed_room(record, PrefillEvent(PrefillKind.MATCHED), now)
            return
        assert record.prompt is not None and record.bootstrap is not None
        mine, theirs = record.prompt[0], record.bootstrap[0]
        text = (
            f"room {record.room}: prefill's prompt has {mine} tokens, decode's {theirs}, or their "
            "ids differ"
        )
        self.feed_room(
            record,
            PrefillEvent(PrefillKind.MISMATCHED, cause=Cause(Code.PROMPT_MISMATCH, text)),
            now,
        )

    def feed_room(self, record: PrefillRoomRecord, event: PrefillEvent, now: float) -> None:
        """Feed one event to a room and run the commands. No other code changes a room's state."""
        record.state, commands = step(record.state, event)
        if event.kind is None:
            record.story.tell(now, "write_ended", record.state.phase, event.cause or record.report)
        else:
            record.story.tell(now, event.kind, record.state.phase, event.cause)
            if event.kind is PrefillKind.MATCHED:
                record.ready_at_s = now
        for command in commands:
            _RUN[command](self, record, now)

    def write_id(self) -> int:
        self._write += 1
        return self._write

    def settle_chunks(self, record: PrefillRoomRecord, now: float) -> None:
        """Feed the ends of writes to their room, in the order in which the chunks were queued."""
        while record.chunks and record.chunks[0].outcome is not None:
            chunk = record.chunks.pop(0)
            outcome, cause = chunk.outcome, None
            is_moving = record.state.phase is PrefillPhase.TRANSFERRING
            if outcome is WriteOutcome.UNPROVEN or (
                outcome is WriteOutcome.CANCELLED and is_moving
            ):
                cause = chunk.failure
            record.report = chunk
            self.feed_room(record, PrefillEvent(None, outcome=outcome, cause=cause), now)

    def record_outcome(self, room: RoomId, side: Side, cause: Cause, now: float) -> None:
        """Keep the cause of a half that ended alone, for the other half to take when it arrives."""
        self.rendezvous.record_outcome(room, side, cause, now + self.timing.rendezvous_s)
        self.deadlines.set(Timer("outcomes", 0), self.rendezvous.next_expiry_s())

    def refuse_grant(self, peer: DecodePeer, room: RoomId, grant: GrantId, cause: Cause) -> None:
        """End a grant under which no write was started, and send decode the cause."""
        header = self.header(room, grant, peer)
        sent = (wire.RoomFailed(cause=cause, **header), wire.AbortAck(drained=True, **header))
        self.forget_announcement(peer, grant)
        peer.grants.end(grant, sent)
        for message in sent:
            self.send(peer, message)

    def forget_announcement(self, peer: DecodePeer, grant: GrantId) -> None:
        # The room is looked up by its grant, because a later message about the grant may name
        # another room.
        room = peer.grants.announcements.rooms.get(grant)
        if room is not None:
            self.rendezvous.forget_announcement(room, peer, grant)
            self.time_announcements()

    def time_announcements(self) -> None:
        """Keep a timer for the oldest announcement. Call this whenever announcements change."""
        # A timer that is too early stays: its expiry calls this again.
        if (oldest := self.rendezvous.oldest_announced()) is None:
            self.deadlines.cancel(Timer("announced", 0))
        elif (timer := Timer("announced", 0)) not in self.deadlines:
            self.deadlines.set(timer, oldest[1].until_s)

    def end_engine_half(self, room: RoomId, cause: Cause, now: float) -> None:
        """End the engine's half of a room, now or when it arrives. Decode's half will not come."""
        record = self.rooms.get(room)
        if record is None or record.ended:
            self.record_outcome(room, Side.DECODE, cause, now)
        elif record.phase is PrefillPhase.EXPECTED:
            self.feed_room(record, PrefillEvent(PrefillKind.ENDED_LOCALLY, cause=cause), now)
            # Decode knows the cause already, and a later room with that id must not receive it.
            self.rendezvous.take(room, Side.DECODE)

    def void(self, room: RoomId, found: Announcement[DecodePeer], cause: Cause, now: float) -> None:
        """End the announcement of a room that decode will not offer any more. Decode receives the
        cause now, and the engine's half receives it on arrival.
        """
        self.refuse_grant(found.peer, room, found.grant, cause)
        self.record_outcome(room, Side.DECODE, cause, now)
        self.forget_if_idle(found.peer, now)

    def announced(self, room: RoomId, now: float) -> Announcement[DecodePeer] | None:
        """Return the announcement of a room, or None. An announcement that was withdrawn, or whose
        decode is lost, is ended and not returned.
        """
        # The tasks that end such announcements may not have reached this one yet.
        found = self.rendezvous.announced.get(room)
        if found is None:
            return None
        if found.grant not in found.peer.grants.announcements.rooms:
            self.rendezvous.forget_announcement(room, found.peer, found.grant)
            self.time_announcements()
            self.record_outcome(room, Side.DECODE, WITHDRAWN, now)
        elif found.peer.phase not in (PeerPhase.OPENING, PeerPhase.UP):
            lost = Cause(
                Code.PEER_LOST,
                f"decode {found.peer.incarnation:016x}, which announced the room, is lost",
            )
            self.void(room, found, lost, now)
        else:
            return found
        return None

    def resend(self, peer: DecodePeer, grant: GrantId, next_seq: int) -> None:
        """Send the messages about one grant again, except ChunkDone of chunks below `next_seq`."""
        record = peer.grants.rooms.get(grant)
        for message in peer.grants.last_messages(grant) if record is None else record.sent:
            if type(message) is not wire.ChunkDone or message.seq >= next_seq:
                self.send(peer, message)


# --- what a room's table asks for


def _start_write(core: PrefillCore, record: PrefillRoomRecord, now: float) -> None:
    chunk = record.chunks[-1]
    assert record.peer is not None
    if record.moving_at_s is None:
        record.moving_at_s = now
    core.writes[chunk.write] = (record, chunk)
    if record.fine is not None:
        core.outbox.append(fine_write(core.identity.layout, record, record.peer.incarnation))
        return
    if len(chunk.counts) == 1:
        # Most pools have one space, in which the next places are one slice.
        first, end = record.placed[0], record.placed[0] + chunk.counts[0]
        targets, record.placed = record.target_pages[first:end], (end,)
    else:
        spans = spans_at(record.wanted, record.placed, chunk.counts)
        targets = taken(record.target_pages, spans)
        record.placed = counts_sum(record.placed, chunk.counts)
    core.outbox.append(
        StartWrite(chunk.write, record.serial, record.peer.incarnation, chunk.source_pages, targets)
    )


def _send_chunk_done(core: PrefillCore, record: PrefillRoomRecord, now: float) -> None:
    chunk, peer, me = record.report, record.peer, core.identity
    assert chunk is not None and peer is not None
    # Every room sends this message, and unpacking `core.header` takes longer than naming fields.
    done = wire.ChunkDone(
        room=record.room,
        grant=record.grant,
        rank=me.rank,
        source=me.incarnation,
        target=peer.incarnation,
        seq=chunk.seq,
        pages=chunk.fine or chunk.counts,
        last=chunk.last,
        handoff=chunk.handoff,
        checksum=chunk.checksum,
    )
    _send(core, record, peer, done)


def _send_ended(
    core: PrefillCore, record: PrefillRoomRecord, kind: type[wire.Message], **fields: Any
) -> None:
    peer = record.peer
    assert peer is not None
    _send(core, record, peer, kind(**core.header(record.room, record.grant, peer), **fields))


def _send(
    core: PrefillCore, record: PrefillRoomRecord, peer: DecodePeer, message: wire.Message
) -> None:
    """Keep a message about a room's grant, in case decode asks for it again. Send it unless decode
    is gone.
    """
    record.sent.append(message)
    if peer.phase is not PeerPhase.GONE:
        at_once = isinstance(message, wire.AbortAck)
        core.outbox.append(SendToDecode(peer.routing_id, encode(message), at_once))


def _cancel_writes(core: PrefillCore, record: PrefillRoomRecord, now: float) -> None:
    record.cancelled_at_s = now
    core.outbox.extend(CancelWrite(chunk.write) for chunk in record.chunks if chunk.outcome is None)


def _end(core: PrefillCore, record: PrefillRoomRecord, now: float) -> None:
    del core.rooms[record.room]
    core.deadlines.cancel(Timer("room", record.room))
    peer = record.peer
    if record.prompt is None:
        core.record_outcome(record.room, Side.DECODE, record.first_cause, now)
    elif peer is None:
        core.record_outcome(record.room, Side.ENGINE, record.first_cause, now)
    core.room_ended(record.ending, now)
    core.outbox.append(RoomReleased(record.serial))
    if peer is not None:
        peer.grants.end(record.grant, tuple(record.sent))
        # Evict grants of the decode with the most kept bytes, so that it cannot crowd out the
        # others.
        while core.kept.total > core.bounds.kept_bytes:
            max(core.peers.values(), key=lambda known: known.grants.kept_bytes).grants.evict()
        if peer.phase is PeerPhase.GONE:
            core.forget_if_idle(peer, now)


_RUN: dict[RoomCommand, Callable[[PrefillCore, PrefillRoomRecord, float], None]] = {
    RoomCommand.TELL_MATCHED: lambda core, record, now: core.outbox.append(
        RoomMatched(record.serial, record.prefix_tokens)
    ),
    RoomCommand.START_WRITE: _start_write,
    RoomCommand.SEND_CHUNK_DONE: _send_chunk_done,
    RoomCommand.CANCEL_WRITES: _cancel_writes,
    RoomCommand.SEND_FAILED: lambda core, record, now: _send_ended(
        core, record, wire.RoomFailed, cause=record.first_cause
    ),
    RoomCommand.SEND_DRAINED: lambda core, record, now: _send_ended(
        core, record, wire.AbortAck, drained=True
    ),
    RoomCommand.SEND_UNPROVEN: lambda core, record, now: _send_ended(
        core, record, wire.AbortAck, drained=False
    ),
    RoomCommand.TELL_SUCCESS: lambda core, record, now: core.outbox.append(RoomDone(record.serial)),
    RoomCommand.TELL_ENDED: lambda core, record, now: core.outbox.append(
        RoomStopped(record.serial, record.first_cause)
    ),
    RoomCommand.END: _end,
}


# --- one item of a task at a time


def _end_room(kind: PrefillKind) -> Callable[[PrefillCore, Task, PrefillRoomRecord, float], None]:
    def end(core: PrefillCore, task: Task, record: PrefillRoomRecord, now: float) -> None:
        if not record.ended:
            core.feed_room(record, PrefillEvent(kind, cause=task.cause), now)

    return end


def _void(core: PrefillCore, task: Task, announced: tuple[GrantId, RoomId], now: float) -> None:
    """Void an announcement from a lost decode, unless that decode is up again."""
    grant, room = announced
    assert task.peer is not None
    found = core.rendezvous.find(room, task.peer, grant)
    if found is not None and not task.peer.is_up:
        core.void(room, found, task.cause, now)


def _refuse_announced(
    core: PrefillCore, task: Task, announced: tuple[RoomId, Announcement[DecodePeer]], now: float
) -> None:
    room, found = announced
    if core.rendezvous.find(room, found.peer, found.grant) is not None:
        core.refuse_grant(found.peer, room, found.grant, task.cause)


def _withdraw(core: PrefillCore, task: Task, announced: tuple[GrantId, RoomId], now: float) -> None:
    grant, room = announced
    if (record := task.peer.grants.rooms.get(grant)) is not None:
        core.feed_room(record, PrefillEvent(PrefillKind.ABORT_RECEIVED, cause=task.cause), now)
    elif core.rendezvous.find(room, task.peer, grant) is not None:
        core.rendezvous.forget_announcement(room, task.peer, grant)
        core.time_announcements()
        core.end_engine_half(room, task.cause, now)


_TASKS: dict[str, Callable[[PrefillCore, Task, Any, float], None]] = {
    "end": _end_room(PrefillKind.ENDED_LOCALLY),
    "lose": _end_room(PrefillKind.TARGET_LOST),
    "void": _void,
    "refuse": _refuse_announced,
    "withdraw": _withdraw,
    "leave": lambda core, _, peer, now: core.leave_peer(peer, now),
}


# --- what a grant's table asks for


def _expect(core: PrefillCore, peer: DecodePeer, message: wire.Announce, now: float) -> None:
    """Keep the announcement of a room, join it with the engine's half, or refuse it. The engine's
    half of an announced room has no rendezvous deadline.
    """
    record, grant = core.rooms.get(message.room), message.grant
    peer.grants.announcements.add(grant, message.room)
    if _refuse_pinned(core, peer, message, now):
        return
    if core.leaving is not None:
        core.refuse_grant(peer, message.room, grant, core.leaving)
    elif record is not None and record.phase is PrefillPhase.EXPECTED:
        peer.grants.feed(grant, GrantKind.JOIN)
        core.bind(record, peer, grant)
        core.feed_room(record, PrefillEvent(PrefillKind.ANNOUNCED), now)
        core.tell_begun(record)
    elif record is not None or core.announced(message.room, now) is not None:
        core.refuse_grant(peer, message.room, grant, _in_use(core, message, record, now))
    elif cause := core.rendezvous.take(message.room, Side.DECODE):
        core.refuse_grant(peer, message.room, grant, cause)
    elif len(core.rendezvous.announced) >= core.bounds.rooms:
        full = CapacityError(
            "announced rooms at prefill", len(core.rendezvous.announced) + 1, core.bounds.rooms
        )
        core.refuse_grant(peer, message.room, grant, full.cause())
    else:
        core.rendezvous.announced[message.room] = Announcement(
            peer, grant, now + core.timing.announced_s
        )
        core.time_announcements()


def _admit(core: PrefillCore, peer: DecodePeer, message: wire.Bootstrap, now: float) -> None:
    if message.grant in peer.grants.announcements.rooms:
        core.forget_announcement(peer, message.grant)
    if _refuse_pinned(core, peer, message, now):
        return
    record = core.rooms.get(message.room)
    try:
        offered = offered_places(core.identity.layout, peer.layout, message, peer.page_sizes)
        cause = _unwelcome(core, message, record, now)
    except KvflowError as error:
        core.refuse_grant(peer, message.room, message.grant, error.cause())
        return
    if cause is not None:
        core.refuse_grant(peer, message.room, message.grant, cause)
        return
    if record is None:
        record = core.new_room(
            message.room, PrefillPhase.BOOTSTRAPPED, core.timing.rendezvous_s, now
        )
    core.bind(record, peer, message.grant)
    core.offer(record, message, *offered, now)


def _refuse_pinned(
    core: PrefillCore, peer: DecodePeer, message: wire.Announce | wire.Bootstrap, now: float
) -> bool:
    """Refuse a room if writes for ended rooms of this decode still hold too many of our pages. Both
    halves receive the cause. Returns True if the room is refused.
    """
    if core.bounds.pinned_share == 1:
        return False
    # Writes that were cancelled a moment ago do not count: on a healthy route they end within
    # milliseconds.
    counts = core.identity.layout.counts
    limits = tuple(map(core.bounds.pinned_limit, counts))
    until_s = now - core.timing.repeat_after_s
    found = pinned_places(core.writes.values(), len(counts), peer, until_s)
    if counts_fit(found, limits):
        return False
    pinned, limit, size = next(
        (n, most, space.page_size)
        for n, most, space in zip(found, limits, core.identity.layout.spaces, strict=True)
        if n > most
    )
    held = "held by writes to this decode that do not end"
    what = f"tokens {held}, in whole pages" if size else f"rows {held}"
    cause = CapacityError(what, pinned * (size or 1), limit * (size or 1)).cause()
    core.refuse_grant(peer, message.room, message.grant, cause)
    # If another decode has announced the room, the engine's half waits for that decode.
    if message.room not in core.rendezvous.announced:
        core.end_engine_half(message.room, cause, now)
    return True


def _unwelcome(
    core: PrefillCore, message: wire.Bootstrap, record: PrefillRoomRecord | None, now: float
) -> Cause | None:
    """Return the cause for which this offer is refused, or None if it is welcome.

    Raises: CapacityError if too many rooms are open.
    """
    if core.leaving is not None:
        return core.leaving
    if core.announced(message.room, now) is not None:
        return _in_use(core, message, record, now)
    if record is not None:
        expected = record.phase is PrefillPhase.EXPECTED
        return None if expected else _in_use(core, message, record, now)
    if cause := core.rendezvous.take(message.room, Side.DECODE):
        return cause
    if len(core.rooms) >= core.bounds.rooms:
        raise CapacityError("rooms at prefill", len(core.rooms) + 1, core.bounds.rooms)
    return None


def _in_use(
    core: PrefillCore,
    message: wire.Announce | wire.Bootstrap,
    record: PrefillRoomRecord | None,
    now: float,
) -> Cause:
    if record is None or not record.ended:
        return Cause(Code.ROOM_IN_USE, f"room {message.room} has a decode already")
    cause = Cause(Code.ROOM_IN_USE, DRAINS.format(message.room))
    # The engine's half of the refused room has not arrived yet. It receives the same cause on
    # arrival.
    core.record_outcome(message.room, Side.DECODE, cause, now)
    return cause


def _tell_room(
    core: PrefillCore,
    peer: DecodePeer,
    message: wire.Announce | wire.Bootstrap | wire.Abort,
    now: float,
) -> None:
    record = peer.grants.rooms[message.grant]
    if isinstance(message, wire.Announce):
        core.tell_begun(record)
    elif isinstance(message, wire.Abort):
        core.feed_room(record, PrefillEvent(PrefillKind.ABORT_RECEIVED, cause=message.cause), now)
    elif record.bootstrap is None and record.room == message.room:
        try:
            offered = offered_places(core.identity.layout, peer.layout, message, peer.page_sizes)
        except KvflowError as error:
            core.feed_room(record, PrefillEvent(PrefillKind.MISMATCHED, cause=error.cause()), now)
        else:
            core.offer(record, message, *offered, now)


def _resend_all(
    core: PrefillCore, peer: DecodePeer, message: wire.Announce | wire.Bootstrap, now: float
) -> None:
    core.resend(peer, message.grant, 0)


def _refuse_stale(
    core: PrefillCore, peer: DecodePeer, message: wire.Announce | wire.Bootstrap, now: float
) -> None:
    text = f"grant {message.grant} is below {peer.grants.low_water}: it has ended"
    header = core.header(message.room, message.grant, peer)
    core.send(peer, wire.RoomFailed(cause=Cause(Code.STALE_GRANT, text), **header))
    core.send(peer, wire.AbortAck(drained=peer.grants.is_drained(message.grant), **header))


def _end_other_half(core: PrefillCore, peer: DecodePeer, message: wire.Abort, now: float) -> None:
    """End an aborted grant that has no room at this prefill, and end the engine's half too. Either
    decode offered no pages, or its Bootstrap was lost.
    """
    core.forget_announcement(peer, message.grant)
    peer.grants.end(message.grant, ())
    # If another decode has announced the room since, the engine's half waits for that decode.
    if message.room not in core.rendezvous.announced:
        core.end_engine_half(message.room, message.cause, now)


def _acknowledge(core: PrefillCore, peer: DecodePeer, message: wire.Abort, now: float) -> None:
    drained = peer.grants.is_drained(message.grant)
    core.send(
        peer, wire.AbortAck(drained=drained, **core.header(message.room, message.grant, peer))
    )


GRANT_RUN: dict[GrantCommand, Callable[[PrefillCore, DecodePeer, Any, float], None]] = {
    GrantCommand.EXPECT: _expect,
    GrantCommand.ADMIT: _admit,
    GrantCommand.TELL_ROOM: _tell_room,
    GrantCommand.RESEND: _resend_all,
    GrantCommand.REFUSE_STALE: _refuse_stale,
    GrantCommand.END_OTHER_HALF: _end_other_half,
    GrantCommand.ACKNOWLEDGE: _acknowledge,
}
