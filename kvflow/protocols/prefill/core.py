"""The machines of one prefill rank (peers, their grants, rooms), and the events between them.

A table never calls back: it returns commands, and running them feeds the next machine. No machine
is therefore entered twice at once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

from kvflow.protocols.commands import (
    CancelWrite,
    CloseRoute,
    PrefillCommand,
    RoomDone,
    RoomMatched,
    RoomReleased,
    RoomStopped,
    SendToDecode,
    StartWrite,
    WatchProcess,
)
from kvflow.protocols.earlier import EarlierLoans, EarlierWriter
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machines.deadlines import Deadlines
from kvflow.protocols.machines.grants import KeptBytes
from kvflow.protocols.machines.ledger import Ledger
from kvflow.protocols.machines.peer import TABLE as PEER_TABLE
from kvflow.protocols.machines.peer import PeerCommand, PeerKind, PeerPhase
from kvflow.protocols.machines.prefill_room import PrefillCommand as RoomCommand
from kvflow.protocols.machines.prefill_room import PrefillEvent, PrefillKind, PrefillPhase, step
from kvflow.protocols.machines.rendezvous import Announcement, Rendezvous, Side
from kvflow.protocols.pages.coverage import served_of
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import Observer, WriteOutcome
from kvflow.protocols.prefill.former import FormerDecodes
from kvflow.protocols.prefill.peers import DecodePeer, PrefillIdentity
from kvflow.protocols.prefill.records import Chunk, PrefillRoomRecord
from kvflow.protocols.prefill.tasks import Task, Timer
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.codec import encode, routing_id
from kvflow.protocols.wire.messages import (
    MAX_TEXT,
    MAX_UNPROVEN,
    WIRE_VERSION,
    GrantId,
    Incarnation,
    RoomId,
)

_NO_GRANT = GrantId(0)
WITHDRAWN = Cause(Code.CLIENT_GONE, "decode has withdrawn the room")
_NO_CAUSE = Cause(Code.PEER_LOST)  # for peer events that end no room


class PrefillCore:
    """The state of one prefill rank. Each kind of state is changed by one `feed_*` method only."""

    def __init__(
        self, identity: PrefillIdentity, observer: Observer, timing: Timing, bounds: Bounds
    ) -> None:
        self.identity, self.observer, self.timing, self.bounds = identity, observer, timing, bounds
        self.outbox: list[PrefillCommand] = []
        # A prefill lends no pages: its ledger holds the loans of decodes that closed over the same
        # pool.
        self.ledger: Ledger[EarlierWriter] = Ledger(
            int(bounds.quarantine_share * identity.layout.num_pages)
        )
        self.earlier = EarlierLoans(self.ledger, self.outbox, self._take_grant)
        self._last_grant = _NO_GRANT
        self.rooms: dict[RoomId, PrefillRoomRecord] = {}
        self.peers: dict[Incarnation, DecodePeer] = {}
        self.kept = KeptBytes()
        # Causes for rooms that a decode announced before it received its refusal.
        self.refused: OrderedDict[Incarnation, Cause] = OrderedDict()
        self.former = FormerDecodes(bounds.closed_grants)
        self.rendezvous: Rendezvous[DecodePeer] = Rendezvous(bounds.ended_halves)
        self.writes: dict[int, tuple[PrefillRoomRecord, Chunk]] = {}
        self.deadlines: Deadlines[Timer] = Deadlines()
        self.tasks: deque[Task] = deque()
        self.leaving: Cause | None = None
        self.stalled_s = 0.0
        self._served = served_of(identity.layout)
        self._serial = self._write = 0

    @property
    def unavailable_reason(self) -> str:
        """The reason, as text, why this prefill cannot move pages now; empty when it can.

        A long queue is no such reason, only a data plane that stands still.
        """
        if self.stalled_s <= self.timing.lost_after_s:
            return ""
        how = (
            "has died"
            if self.stalled_s == float("inf")
            else f"has not moved for {self.stalled_s:.0f} s"
        )
        return f"the worker of the {self.identity.address.backend} data plane {how}"

    # --- sending

    def send(self, peer: DecodePeer, message: wire.Message) -> None:
        """Queue a message. Pages wait for an AbortAck, so it leaves at once."""
        self.outbox.append(
            SendToDecode(peer.routing_id, encode(message), type(message) is wire.AbortAck)
        )

    def answer_register(
        self, target: Incarnation, asked: Incarnation, refusal: str, fresh_from: GrantId = _NO_GRANT
    ) -> None:
        """Accept (`refusal` empty) or refuse decode `target`, whose Register names `asked`."""
        answer = wire.Registered(
            source=self.identity.incarnation,
            target=target,
            wire_version=WIRE_VERSION,
            rank=self.identity.rank,
            refusal=refusal[:MAX_TEXT],
            address=self.identity.address,
            asked=asked,
            fresh_from=fresh_from,
            served=() if refusal else self._served,
        )
        self.outbox.append(SendToDecode(routing_id(target), encode(answer)))

    def say_goodbye(self, target: Incarnation, unproven: tuple[GrantId, ...]) -> None:
        """Send Goodbye, if it can name all unproven grants."""
        # A Goodbye proves the end of every grant that it does not name.
        if len(unproven) <= MAX_UNPROVEN:
            goodbye = wire.Goodbye(unproven=unproven, **self.lives(target))
            self.outbox.append(SendToDecode(routing_id(target), encode(goodbye)))

    def header(self, room: RoomId, grant: GrantId, peer: DecodePeer) -> dict[str, Any]:
        me = self.identity
        return {
            "room": room,
            "grant": grant,
            "rank": me.rank,
            "source": me.incarnation,
            "target": peer.incarnation,
        }

    def lives(self, target: Incarnation) -> dict[str, Any]:
        return {"source": self.identity.incarnation, "target": target}

    # --- rooms

    def new_room(
        self, room: RoomId, phase: PrefillPhase, rendezvous_s: float, now: float
    ) -> PrefillRoomRecord:
        self._serial += 1
        record = self.rooms[room] = PrefillRoomRecord(self._serial, room, phase, rendezvous_s, now)
        self.observer.room_opened()
        return record

    def set_deadline(self, record: PrefillRoomRecord) -> None:
        """Set the timer of a room. No call is needed when its deadline moves back, since the expiry
        checks the deadline again.
        """
        self.deadlines.set(Timer("room", record.room), record.due_at_s)

    def bind(self, record: PrefillRoomRecord, peer: DecodePeer, grant: GrantId) -> None:
        """Make this room answer for the grant."""
        record.peer, record.grant = peer, grant
        peer.grants.rooms[grant] = record

    def tell_begun(self, record: PrefillRoomRecord) -> None:
        """Send Begun if the engine is ready and decode announced the room but lent no pages yet."""
        if record.begun and record.phase is PrefillPhase.ANNOUNCED:
            assert record.peer is not None
            self.send(
                record.peer, wire.Begun(**self.header(record.room, record.grant, record.peer))
            )

    def offer(
        self, record: PrefillRoomRecord, message: wire.Bootstrap, pages: PageIndices, now: float
    ) -> None:
        """Add decode's half to a room: its pages and its prompt."""
        record.target_pages, record.prefix_tokens = pages, message.prefix_tokens
        record.bootstrap = (message.prompt_tokens, message.prompt_digest)
        assert record.peer is not None
        record.peer.grants.announcements.discard(record.grant)
        if record.prompt is not None:
            self.meet(record, now)
        else:
            self.set_deadline(record)

    def meet(self, record: PrefillRoomRecord, now: float) -> None:
        """Match the two halves of a room; they must agree on the prompt (I8)."""
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
        """Feed one event to a room and run the commands. No other code changes its state."""
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
        """Report chunks whose writes ended, in the order in which the chunks were queued."""
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
        """Keep the cause of a half that ended alone, for the other half when it arrives."""
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
        """Forget the announcement that was made under this grant."""
        # Its room is looked up: a later message about the grant may name another room.
        room = peer.grants.announcements.rooms.get(grant)
        if room is not None:
            self.rendezvous.forget_announcement(room, peer, grant)
            self.time_announcements()

    def time_announcements(self) -> None:
        """Keep a timer for the oldest announcement; call this after any change of announcements."""
        # A timer that is too early stays: its expiry calls this again.
        if (oldest := self.rendezvous.oldest_announced()) is None:
            self.deadlines.cancel(Timer("announced", 0))
        elif (timer := Timer("announced", 0)) not in self.deadlines:
            self.deadlines.set(timer, oldest[1].until_s)

    # --- peers

    def feed_peer(
        self, peer: DecodePeer, kind: PeerKind, now: float, cause: Cause = _NO_CAUSE
    ) -> None:
        """Feed one event to a peer, and run the commands; rooms that it ends receive `cause`. No
        other code changes a peer's phase.
        """
        move = PEER_TABLE.moves[peer.phase, kind]
        if move is None:
            return
        peer.phase = move.phase
        if peer.phase is PeerPhase.UP:
            self.deadlines.set(Timer("silence", peer.incarnation), now + self.timing.lost_after_s)
        for command in move.commands:
            _PEER_RUN[command](self, peer, cause, now)
        self.forget_if_idle(peer, now)

    def forget_if_idle(self, peer: DecodePeer, now: float) -> None:
        """Forget a decode that is gone, once its rooms ended and its announcements are void."""
        if (
            peer.phase is PeerPhase.GONE
            and not peer.grants.rooms
            and not peer.grants.announcements.rooms
        ):
            self.feed_peer(peer, PeerKind.IDLE, now)

    def make_place(self, among: Iterable[DecodePeer], now: float) -> bool:
        """Forget one of the silent decodes without open grants.

        Returns False if there is none, or if too many grants in doubt would be remembered.
        """
        # The death of a process on another host may never be observed, so silent decodes would
        # otherwise fill the table.
        if (peer := self.former.displace(among)) is None:
            return False
        self.feed_peer(peer, PeerKind.DISPLACED, now)
        return True

    def work(self, limit: float, now: float) -> None:
        """Run queued tasks for up to `limit` items in all."""
        while self.tasks and limit > 0:
            limit -= 1
            task = self.tasks[0]
            item = task.items.popleft()
            if not task.items:
                self.tasks.popleft()
            _TASKS[task.run](self, task, item, now)
        self.earlier.work(limit)

    @property
    def work_left(self) -> bool:
        """True while `work` has more to do."""
        return bool(self.tasks or self.earlier.tasks)

    def _take_grant(self) -> GrantId:
        """Return a new name for pages of an earlier node."""
        self._last_grant = GrantId(self._last_grant + 1)
        return self._last_grant

    def add_task(self, task: Task) -> None:
        """Queue a task, unless it has no items."""
        if task.items:
            self.tasks.append(task)

    def end_engine_half(self, room: RoomId, cause: Cause, now: float) -> None:
        """End the engine's half of a room, now or when it arrives: decode's will not arrive."""
        record = self.rooms.get(room)
        if record is None or record.ended:
            self.record_outcome(room, Side.DECODE, cause, now)
        elif record.phase is PrefillPhase.EXPECTED:
            self.feed_room(record, PrefillEvent(PrefillKind.ENDED_LOCALLY, cause=cause), now)
            # Decode knows the cause, and a later room of that id must not receive it.
            self.rendezvous.take(room, Side.DECODE)

    def void(self, room: RoomId, found: Announcement[DecodePeer], cause: Cause, now: float) -> None:
        """End an announcement that no offer will follow. Decode receives the cause now, and the
        engine's half when it arrives.
        """
        self.refuse_grant(found.peer, room, found.grant, cause)
        self.record_outcome(room, Side.DECODE, cause, now)
        self.forget_if_idle(found.peer, now)

    def announced(self, room: RoomId, now: float) -> Announcement[DecodePeer] | None:
        """Return the announcement of a room, or None.

        An announcement that was withdrawn, or whose decode is lost, is ended first.
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


# --- what a room's table asks for


def _tell_matched(core: PrefillCore, record: PrefillRoomRecord, now: float) -> None:
    core.outbox.append(RoomMatched(record.serial, record.prefix_tokens))


def _start_write(core: PrefillCore, record: PrefillRoomRecord, now: float) -> None:
    """Start the write of the newest chunk, onto the target pages that follow the earlier ones."""
    chunk = record.chunks[-1]
    if record.moving_at_s is None:
        record.moving_at_s = now
    targets = record.target_pages[record.placed : record.placed + chunk.num_pages]
    record.placed += chunk.num_pages
    assert record.peer is not None
    core.writes[chunk.write] = (record, chunk)
    core.outbox.append(
        StartWrite(chunk.write, record.serial, record.peer.incarnation, chunk.source_pages, targets)
    )


def _send_chunk_done(core: PrefillCore, record: PrefillRoomRecord, now: float) -> None:
    chunk, peer = record.report, record.peer
    assert chunk is not None and peer is not None
    me = core.identity
    done = wire.ChunkDone(
        room=record.room,
        grant=record.grant,
        source=me.incarnation,
        target=peer.incarnation,
        rank=me.rank,
        seq=chunk.seq,
        pages=chunk.num_pages,
        last=chunk.last,
        handoff=chunk.handoff,
        checksum=chunk.checksum,
    )
    _send(core, record, done)


def _send_failed(core: PrefillCore, record: PrefillRoomRecord, now: float) -> None:
    assert record.peer is not None
    header = core.header(record.room, record.grant, record.peer)
    _send(core, record, wire.RoomFailed(cause=record.first_cause, **header))


def _send_ack(core: PrefillCore, record: PrefillRoomRecord, drained: bool) -> None:
    assert record.peer is not None
    _send(
        core,
        record,
        wire.AbortAck(drained=drained, **core.header(record.room, record.grant, record.peer)),
    )


def _send(core: PrefillCore, record: PrefillRoomRecord, message: wire.Message) -> None:
    peer = record.peer
    assert peer is not None
    record.sent.append(message)
    if peer.phase is not PeerPhase.GONE:
        core.outbox.append(
            SendToDecode(peer.routing_id, encode(message), type(message) is wire.AbortAck)
        )


def _cancel_writes(core: PrefillCore, record: PrefillRoomRecord, now: float) -> None:
    record.cancelled_at_s = now
    core.outbox.extend(CancelWrite(chunk.write) for chunk in record.chunks if chunk.outcome is None)


def _tell_success(core: PrefillCore, record: PrefillRoomRecord, now: float) -> None:
    core.outbox.append(RoomDone(record.serial))


def _tell_ended(core: PrefillCore, record: PrefillRoomRecord, now: float) -> None:
    core.outbox.append(RoomStopped(record.serial, record.first_cause))


def _end(core: PrefillCore, record: PrefillRoomRecord, now: float) -> None:
    """Drop an ended room from every table; its last messages stay for a decode that missed them."""
    del core.rooms[record.room]
    core.deadlines.cancel(Timer("room", record.room))
    peer = record.peer
    if record.prompt is None:
        core.record_outcome(record.room, Side.DECODE, record.first_cause, now)
    elif peer is None:
        core.record_outcome(record.room, Side.ENGINE, record.first_cause, now)
    core.observer.room_ended(record.ending, now)
    core.outbox.append(RoomReleased(record.serial))
    if peer is not None:
        peer.grants.end(record.grant, tuple(record.sent))
        # The decode with the most kept bytes gives way, so that one does not crowd out the others.
        while core.kept.total > core.bounds.kept_bytes:
            max(core.peers.values(), key=lambda known: known.grants.kept_bytes).grants.evict()
        core.forget_if_idle(peer, now)


_RUN: dict[RoomCommand, Callable[[PrefillCore, PrefillRoomRecord, float], None]] = {
    RoomCommand.TELL_MATCHED: _tell_matched,
    RoomCommand.START_WRITE: _start_write,
    RoomCommand.SEND_CHUNK_DONE: _send_chunk_done,
    RoomCommand.CANCEL_WRITES: _cancel_writes,
    RoomCommand.SEND_FAILED: _send_failed,
    RoomCommand.SEND_DRAINED: lambda core, record, now: _send_ack(core, record, True),
    RoomCommand.SEND_UNPROVEN: lambda core, record, now: _send_ack(core, record, False),
    RoomCommand.TELL_SUCCESS: _tell_success,
    RoomCommand.TELL_ENDED: _tell_ended,
    RoomCommand.END: _end,
}


# --- one room of a task at a time


def _end_room(kind: PrefillKind) -> Callable[[PrefillCore, Task, PrefillRoomRecord, float], None]:
    def end(core: PrefillCore, task: Task, record: PrefillRoomRecord, now: float) -> None:
        if not record.ended:
            core.feed_room(record, PrefillEvent(kind, cause=task.cause), now)

    return end


def _void(core: PrefillCore, task: Task, announced: tuple[GrantId, RoomId], now: float) -> None:
    """Void an announcement of a lost decode, unless that decode came back meanwhile."""
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
    """End the room of a grant that decode withdrew, or its announcement if no room joined it."""
    grant, room = announced
    assert task.peer is not None
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
}


# --- what a peer's table asks for


def _accept(core: PrefillCore, peer: DecodePeer, cause: Cause, now: float) -> None:
    core.answer_register(
        peer.incarnation, core.identity.incarnation, core.unavailable_reason, peer.fresh_from
    )


def _refuse(core: PrefillCore, peer: DecodePeer, cause: Cause, now: float) -> None:
    core.answer_register(peer.incarnation, core.identity.incarnation, cause.text)
    core.former.remember_doubts(peer)
    core.refused[peer.incarnation] = cause
    if len(core.refused) > core.bounds.targets:
        core.refused.popitem(last=False)


def _beat(core: PrefillCore, peer: DecodePeer, cause: Cause, now: float) -> None:
    core.send(peer, wire.Heartbeat(**core.lives(peer.incarnation)))


def _watch(core: PrefillCore, peer: DecodePeer, cause: Cause, now: float) -> None:
    core.outbox.append(WatchProcess(peer.incarnation, peer.address))


def _lose_rooms(core: PrefillCore, peer: DecodePeer, cause: Cause, now: float) -> None:
    """Queue the end of a peer's rooms and announcements."""
    core.add_task(Task("void", peer.grants.announcements.rooms.items(), cause, peer))
    core.add_task(Task("lose", peer.grants.rooms.values(), cause, peer))


def _close_route(core: PrefillCore, peer: DecodePeer, cause: Cause, now: float) -> None:
    core.outbox.append(CloseRoute(peer.incarnation))


def _forget(core: PrefillCore, peer: DecodePeer, cause: Cause, now: float) -> None:
    # A stranger without grants leaves no record. A decode that parted is recorded already, and none
    # of its grants begins again.
    if peer.has_had_grants and peer.incarnation not in core.former.parted:
        core.former.remember_grants(peer)
    core.deadlines.cancel(Timer("silence", peer.incarnation))
    core.deadlines.cancel(Timer("goodbye", peer.incarnation))
    peer.grants.forget()
    del core.peers[peer.incarnation]


def _say_goodbye(core: PrefillCore, peer: DecodePeer, cause: Cause, now: float) -> None:
    core.say_goodbye(peer.incarnation, peer.grants.unproven())
    core.deadlines.set(Timer("goodbye", peer.incarnation), now + core.timing.repeat_after_s)


_PEER_RUN: dict[PeerCommand, Callable[[PrefillCore, DecodePeer, Cause, float], None]] = {
    PeerCommand.SEND_ACCEPTED: _accept,
    PeerCommand.SEND_REFUSED: _refuse,
    PeerCommand.SEND_HEARTBEAT: _beat,
    PeerCommand.WATCH_PROCESS: _watch,
    PeerCommand.LOSE_ROOMS: _lose_rooms,
    PeerCommand.CLOSE_ROUTE: _close_route,
    PeerCommand.FORGET: _forget,
    PeerCommand.SEND_GOODBYE: _say_goodbye,
}
