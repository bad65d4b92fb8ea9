"""The machines of one decode (rooms, links, loans), and the events that pass between them.

A table returns commands instead of calling back. Running a command may feed another machine or the
same one, but only after the step that returned the command is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvflow.protocols.commands import (
    DecodeCommand,
    FreePages,
    Linked,
    PeerKey,
    QuarantinePages,
    RoomEnded,
    RoomFailed,
    RoomLanded,
    SendToPrefill,
    StopVerifying,
)
from kvflow.protocols.decode.links import DecodeIdentity, DecodeLinks, PrefillPeer
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.errors import CapacityError, Cause, Code
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machinery import Core, Task, Timer
from kvflow.protocols.machines.decode_room import DecodeCommand as RoomCommand
from kvflow.protocols.machines.decode_room import DecodeEvent, DecodeKind, DecodePhase, step
from kvflow.protocols.machines.ledger import Change, Lease, Ledger
from kvflow.protocols.machines.link import LinkCommand, LinkKind, LinkPhase
from kvflow.protocols.machines.loan import WRITABLE, LoanCommand, LoanKind, LoanPhase
from kvflow.protocols.ports import Observer
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.codec import encode
from kvflow.protocols.wire.messages import GrantId

MAX_REPEAT_AFTER_S = 8.0  # upper bound on the interval between repetitions


class DecodeCore(Core):
    """The state of one decode. Its `feed_*` methods feed the machines and run the commands.

    The keys of "deadline" and "stalled" timers are grants. Those of "link" and "repeat" timers are
    PeerKeys.
    """

    outbox: list[DecodeCommand]
    ledger: Ledger[PrefillPeer]

    def __init__(
        self,
        identity: DecodeIdentity,
        observer: Observer,
        timing: Timing,
        bounds: Bounds,
        verify: bool,
        staged: bool,
    ) -> None:
        super().__init__(identity.layout, observer, timing, bounds)
        self.identity, self.verify, self.staged = identity, verify, staged
        self.links = DecodeLinks(identity, timing, self.outbox, self.ledger)
        self.rooms: dict[GrantId, DecodeRoomRecord] = {}

    def feed_room(self, record: DecodeRoomRecord, event: DecodeEvent, now: float) -> None:
        """Feed one event to a room and run the commands that follow. After pages are lent, no other
        code changes the room's state.
        """
        record.state, commands = step(record.state, event)
        story = record.story
        # Landed chunks are the most common events. Without a follower, the story leaves out those
        # that lead to no command, to keep this path fast.
        if commands or event.kind is not DecodeKind.CHUNK_LANDED or story.follower is not None:
            story.tell(now, event.kind, record.state.phase, event.cause)
        for command in commands:
            _RUN[command](self, record, now)

    def feed_loan(
        self, lease: Lease[PrefillPeer], peer: PrefillPeer, kind: LoanKind, now: float
    ) -> None:
        self.loan_changed(self.ledger.feed(lease, peer, kind), now)

    def feed_answer(
        self, lease: Lease[PrefillPeer], peer: PrefillPeer, drained: bool, now: float
    ) -> None:
        """Feed prefill's answer about one loan: drained, or unproven."""
        # If the loan is not writable, prefill could not write under it, so no proof is needed.
        drained = drained or lease.loans[peer] not in WRITABLE
        self.feed_loan(lease, peer, LoanKind.DRAINED if drained else LoanKind.UNPROVEN, now)

    def abort(self, lease: Lease[PrefillPeer], peer: PrefillPeer, cause: Cause) -> None:
        abort = wire.Abort(room=lease.room, grant=lease.grant, cause=cause, **peer.between)
        # Pages wait for the answer, so the Abort leaves at once.
        self.outbox.append(SendToPrefill(peer.key, encode(abort), at_once=True))

    def loan_changed(self, change: Change[PrefillPeer], now: float) -> None:
        """Run the commands that follow a loan's change. End the room if it waited for its loans."""
        lease, peer = change.lease, change.source
        # A silent source receives its Aborts when it answers again (the task "ask"). Until then,
        # they would only fill the send queue of the link.
        if LoanCommand.SEND_ABORT in change.commands and (peer.usable or peer.asked_again):
            assert lease.cause is not None
            self.abort(lease, peer, lease.cause)
            if (repeat := Timer("repeat", peer.key)) not in self.deadlines:
                self.deadlines.set(repeat, now + peer.repeat_after_s)
        if (
            LoanCommand.RETURN in change.commands
            and peer.repeat_after_s > self.timing.repeat_after_s
        ):
            # The source answers now, so the other Aborts that it left unanswered were probably
            # lost. Repeat them soon, because the interval has grown long during its silence.
            self.repeat_from(peer, now + self.timing.repeat_after_s)
        if change.freed:
            self.outbox.append(FreePages(lease.grant))
        record = self.rooms.get(lease.grant)
        if record is not None and record.state.phase is DecodePhase.DRAINING:
            if not lease.loans:
                self.feed_room(record, DecodeEvent(DecodeKind.LOANS_ENDED), now)
            elif lease.doubtful:
                cause = Cause(Code.TRANSFER_ERROR, "prefill cannot prove where its writes went")
                self.feed_room(record, DecodeEvent(DecodeKind.LOANS_DOUBTFUL, cause=cause), now)
        if not peer.usable:
            self.drop_if_idle(peer, now)

    def feed_link(
        self, peer: PrefillPeer, kind: LinkKind, now: float, cause: Cause | None = None
    ) -> None:
        """Feed one event to a link, and queue the resulting tasks for its rooms and loans."""
        # This silence ends all rooms offered so far, but their Bootstraps may still be in transit.
        # Raising `fresh_from` prevents these Bootstraps from starting writes later.
        if kind is LinkKind.SILENCE_DUE:
            peer.asked_again, peer.fresh_from = False, self.next_grant
        for command in self.links.feed(peer, kind, now, cause):
            if command is LinkCommand.START_ROOMS:
                # Prefill dropped Aborts that it received before it knew this decode: repeat them.
                self.repeat_from(peer, now)
                self.for_each_loan(peer, "start")
            elif command is LinkCommand.LOSE_ROOMS:
                self.for_each_loan(peer, "lose", peer.cause)
            elif command is LinkCommand.ASK_LOANS:
                if kind is LinkKind.ACCEPTED or not peer.asked_again:
                    peer.asked_again = True
                    self.for_each_loan(peer, "ask")
            elif command is LinkCommand.PART:
                self.for_each_loan(peer, "part", peer.cause)
            else:  # END_LOANS
                self.for_each_loan(peer, "fenced")
        self.deadlines.set(Timer("link", peer.key), self.links.due_at_s(peer))
        self.drop_if_idle(peer, now)

    def registered(self, peer: PrefillPeer, message: wire.Registered, now: float) -> None:
        """Accept, refuse or replace the link whose Register this message answers."""
        # Two incarnations may share an address, although only one still runs. `asked` names the
        # incarnation that decode addressed, so the answer belongs to that link and not to the
        # sender's.
        key = PeerKey(message.asked or peer.key.incarnation, peer.key.control)
        asked = self.links.peers.get(key)
        if asked is None:
            self.observer.message_dropped("stale")
            return
        kind, cause = self.links.registered(asked, message)
        if kind is None:
            self.observer.message_dropped("stale")
            return
        if kind is LinkKind.ACCEPTED:
            asked.received_at_s = now
            asked.address = asked.address or message.address
            if asked.served is None:
                asked.served, asked.page_sizes = message.served, message.page_sizes
            self.ledger.note_known(asked, asked.fresh_from)
        self.feed_link(asked, kind, now, cause)

    def make_place(self, needed: Sequence[PrefillPeer | None], now: float) -> None:
        """Close the least recently used link if the limit on open links is reached. Idle links go
        first. If there are none, a silent link goes, and its loans wait for the fence or an
        operator. A room that is being opened has no loan yet, so its links may be idle. They are
        `needed`, with None for each rank that is not linked, and are not closed. Raises:
        CapacityError if every link is in use.
        """
        # A closed link stays in the table while it owes loans, but it holds no connection.
        open_ = [peer for peer in self.links.peers.values() if peer.phase is not LinkPhase.GONE]
        if len(open_) < self.bounds.links:
            return
        idle = [peer for peer in open_ if not self.ledger.owes(peer) and peer not in needed]
        idle = idle or [peer for peer in open_ if peer.phase is LinkPhase.SILENT]
        if not idle:
            raise CapacityError("links to prefill ranks", len(open_) + 1, self.bounds.links)
        self.feed_link(min(idle, key=lambda peer: peer.used_at_s), LinkKind.CLOSED, now)

    def land(
        self, record: DecodeRoomRecord, rank: int, message: wire.ChunkDone, now: float
    ) -> None:
        """Feed a landed chunk to its room. The room keeps the first handoff from any rank."""
        record.handoff = record.handoff or message.handoff
        event = DecodeEvent(DecodeKind.CHUNK_LANDED, rank, message.seq, message.pages, message.last)
        self.feed_room(record, event, now)

    def land_checked(self, record: DecodeRoomRecord, now: float) -> None:
        """Land the chunks that were verified or copied, or end the room if one differs."""
        # The room's machine accepts the chunks from a rank only in order, but checks may finish in
        # any order. So a finished check waits for the checks before it.
        while record.checks and record.checks[0].found is not None and record.receiving:
            check = record.checks[0]
            if (difference := check.difference()) is not None:
                if self.verify:
                    self.observer.mismatched += 1
                self.feed_room(record, DecodeEvent(DecodeKind.ENDED_LOCALLY, cause=difference), now)
            else:
                record.checks.pop(0)
                self.land(record, check.rank, check.message, now)

    def announce(self, record: DecodeRoomRecord) -> None:
        for peer in record.peers:
            announce = wire.Announce(room=record.room, grant=record.grant, **peer.between)
            self.outbox.append(SendToPrefill(peer.key, encode(announce)))

    def lend(self, record: DecodeRoomRecord, peer: PrefillPeer) -> None:
        """Send the Bootstrap that lends a room's pages to one rank."""
        prompt = record.prompt
        # Every room sends this message, and unpacking `peer.between` takes longer than naming its
        # fields.
        bootstrap = wire.Bootstrap(
            room=record.room,
            grant=record.grant,
            source=peer.key.incarnation,
            target=self.identity.incarnation,
            pages=record.packed_pages,
            prompt_tokens=prompt.tokens,
            prompt_digest=prompt.digest,
            prefix_tokens=prompt.prefix_tokens,
        )
        self.outbox.append(SendToPrefill(peer.key, encode(bootstrap)))

    def link_if_ready(self, record: DecodeRoomRecord, now: float) -> None:
        """Issue `Linked` if every rank is up. If the ranks do not cover our pool, end the room."""
        peers = record.peers
        for peer in peers:
            if peer.phase is not LinkPhase.UP:
                return
        if (why := self.links.coverage.get(peers)) is None:
            why = self.links.check_coverage(peers)
        if why:
            self.feed_room(
                record, DecodeEvent(DecodeKind.ENDED_LOCALLY, cause=Cause(Code.REFUSED, why)), now
            )
            return
        record.linked, record.ready_at_s = True, now
        self.outbox.append(Linked(record.grant))

    def recall(self, lease: Lease[PrefillPeer], cause: Cause, now: float) -> None:
        """Recall the open loans of a lease. Ranks receive Abort until they acknowledge it."""
        # A rank that left earlier Aborts unanswered is asked at long intervals only. The first
        # repetition of this new Abort must not wait that long.
        for change in self.ledger.recall(lease, cause, now):
            self.repeat_from(change.source, now + self.timing.repeat_after_s)
            self.loan_changed(change, now)

    def ask_as_at_first(self, record: DecodeRoomRecord, now: float) -> None:
        """Reset a room's Resync interval to its first value, because the room makes progress again
        after a stall. If another message about the room is lost, decode asks soon.
        """
        record.resync_after_s = self.timing.repeat_after_s
        self.deadlines.set(Timer("stalled", record.grant), now + record.resync_after_s)

    @property
    def proof_may_come(self) -> bool:
        """True while some rank can be expected to prove the end of a loan.

        Only ranks that are up count: a silent or closed one proves nothing now. A loan that a rank
        reported unproven does not count either: it may stay in doubt until the fence ends it.
        """
        up = [
            peer
            for peer in self.links.peers.values()
            if peer.phase is LinkPhase.UP and self.ledger.owes(peer)
        ]
        # A queued task may recall loans in doubt again, and then their proof may come.
        return any(self.tasks or self.ledger.awaits(peer) for peer in up)

    def drop_if_idle(self, peer: PrefillPeer, now: float) -> None:
        """Forget a link that is silent or gone and owes no loan. The next room dials again."""
        if peer.phase <= LinkPhase.PARTING or self.ledger.owes(peer):
            return
        self.links.feed(peer, LinkKind.CLOSED, now)
        self.links.drop(peer)
        self.ledger.forget_source(peer)
        self.deadlines.cancel(Timer("link", peer.key))
        self.deadlines.cancel(Timer("repeat", peer.key))

    def for_each_loan(self, peer: PrefillPeer, run: str, cause: Cause | None = None) -> None:
        self.add_task(Task(run, self.ledger.grants_of(peer), peer, cause))

    def run_task(self, task: Task, item: Any, now: float) -> None:
        _TASKS[task.run](self, task, item, now)

    # --- time

    def expire(
        self, timer: Timer, now: float, beliefs: dict[PrefillPeer, list[wire.Belief]]
    ) -> None:
        """Act on a timer that is due. Add questions for prefill to `beliefs`, by peer."""
        if timer.kind == "link":
            self.link_due(self.links.peers[timer.key], now)
        elif timer.kind == "repeat":
            self.repeat_aborts(timer, now)
        else:
            self._room_due(timer, self.rooms[timer.key], now, beliefs)

    def _room_due(
        self,
        timer: Timer,
        record: DecodeRoomRecord,
        now: float,
        beliefs: dict[PrefillPeer, list[wire.Belief]],
    ) -> None:
        if record.state.phase is DecodePhase.DRAINING:
            # The user already received its error, and the peer's "repeat" timer repeats the Aborts.
            return
        if timer.kind == "deadline":
            # The deadline counts from the arrival of the request, slightly before `opened_at_s`:
            # the difference is negative for a deadline of 0 s.
            given_s = max(0.0, round(record.deadline_at_s - record.opened_at_s, 2))
            text = f"room {record.room}: deadline of {given_s:g} s has passed"
            cause = Cause(Code.DEADLINE, text)
            self.feed_room(record, DecodeEvent(DecodeKind.ENDED_LOCALLY, cause=cause), now)
        elif (due_at_s := record.progress_at_s + record.resync_after_s) > now:
            self.deadlines.set(timer, due_at_s)
        else:
            self._ask_about(record, now, beliefs)

    def _ask_about(
        self, record: DecodeRoomRecord, now: float, beliefs: dict[PrefillPeer, list[wire.Belief]]
    ) -> None:
        """Ask prefill about a stalled room, or announce the room again, because a message may be
        lost. The interval doubles each time, up to a limit.
        """
        record.resync_after_s = self.back_off(record.resync_after_s)
        self.deadlines.set(Timer("stalled", record.grant), now + record.resync_after_s)
        if record.phase is DecodePhase.BOOTSTRAPPING:
            self.announce(record)
            return
        for rank, peer in enumerate(record.peers):
            if peer.phase is LinkPhase.UP and peer in record.lease.loans:
                belief = wire.Belief(record.room, record.grant, record.next_seq[rank])
                beliefs.setdefault(peer, []).append(belief)

    def link_due(self, peer: PrefillPeer, now: float) -> None:
        """Feed a link every event that is due at `now`, and set its next deadline."""
        while (due := self.links.expired(peer, now)) is not None:
            self.feed_link(peer, due[0], now, due[1])
        self.deadlines.set(Timer("link", peer.key), self.links.due_at_s(peer))

    def repeat_aborts(self, timer: Timer, now: float) -> None:
        peer = self.links.peers[timer.key]
        self.for_each_loan(peer, "repeat")
        peer.repeat_after_s = self.back_off(peer.repeat_after_s)

    def repeat_from(self, peer: PrefillPeer, at_s: float) -> None:
        """Repeat unacknowledged Aborts at `at_s` or sooner, and reset the interval between them."""
        peer.repeat_after_s = self.timing.repeat_after_s
        self.deadlines.advance(Timer("repeat", peer.key), at_s)

    def back_off(self, after_s: float) -> float:
        return min(2 * after_s, max(MAX_REPEAT_AFTER_S, self.timing.repeat_after_s))


# --- what a room's table asks for


def _send_bootstrap(core: DecodeCore, record: DecodeRoomRecord, now: float) -> None:
    for peer in record.peers:
        # LEND yields no command, so `feed_loan` is not needed to act on the change.
        core.ledger.feed(record.lease, peer, LoanKind.LEND)
        core.lend(record, peer)


def _recall_loans(core: DecodeCore, record: DecodeRoomRecord, now: float) -> None:
    owed = bool(record.lease.loans)
    core.recall(record.lease, record.first_cause, now)
    # If there are no loans, `recall` feeds none, so `loan_changed` does not end the draining room.
    if not owed and record.phase is DecodePhase.DRAINING:
        core.feed_room(record, DecodeEvent(DecodeKind.LOANS_ENDED), now)


def _tell_failed(core: DecodeCore, record: DecodeRoomRecord, now: float) -> None:
    if record.checks:
        core.outbox.append(StopVerifying(record.grant))
    core.outbox.append(RoomFailed(record.grant, record.first_cause))


def _end(core: DecodeCore, record: DecodeRoomRecord, now: float) -> None:
    grant, lease = record.grant, record.lease
    del core.rooms[grant]
    if record.deadline_at_s < float("inf"):
        core.deadlines.cancel(Timer("deadline", grant))
    core.deadlines.cancel(Timer("stalled", grant))
    core.room_ended(record.ending, now)
    # After a success, the user keeps the pages. Pages that were never lent need no proof, because
    # no rank can write into them.
    if record.state.phase is not DecodePhase.SUCCESS:
        free = not record.lent or core.ledger.room_ended(lease)
        core.outbox.append(FreePages(grant) if free else QuarantinePages(grant))
    core.outbox.append(RoomEnded(grant))


_RUN: dict[RoomCommand, Callable[[DecodeCore, DecodeRoomRecord, float], None]] = {
    RoomCommand.SEND_BOOTSTRAP: _send_bootstrap,
    RoomCommand.RECALL_LOANS: _recall_loans,
    RoomCommand.TELL_LANDED: lambda core, record, now: core.outbox.append(
        RoomLanded(record.grant, record.handoff)
    ),
    RoomCommand.TELL_FAILED: _tell_failed,
    RoomCommand.END: _end,
}


# --- one loan of a peer at a time


def _lose(core: DecodeCore, task: Task, grant: GrantId, now: float) -> None:
    record = core.rooms.get(grant)
    if record is not None:
        core.feed_room(record, DecodeEvent(DecodeKind.SOURCE_LOST, cause=task.cause), now)
    assert task.peer is not None
    lease = core.ledger.find(task.peer, grant)
    if lease is not None:
        core.feed_loan(lease, task.peer, LoanKind.SOURCE_LOST, now)


def _part(core: DecodeCore, task: Task, grant: GrantId, now: float) -> None:
    """Apply prefill's Goodbye to one grant, as if RoomFailed and then AbortAck had arrived."""
    peer = task.peer
    assert peer is not None
    record = core.rooms.get(grant)
    if record is not None:
        core.feed_room(record, DecodeEvent(DecodeKind.ROOM_FAILED, cause=task.cause), now)
    lease = core.ledger.find(peer, grant)
    if lease is not None:
        core.feed_answer(lease, peer, grant not in peer.unproven, now)


def _start(core: DecodeCore, task: Task, grant: GrantId, now: float) -> None:
    record = core.rooms.get(grant)
    if record is not None and not record.linked:
        core.link_if_ready(record, now)


def _loan_task(
    kind: LoanKind, phases: tuple[LoanPhase, ...]
) -> Callable[[DecodeCore, Task, GrantId, float], None]:
    """Return a task that feeds `kind` to a loan if it is still in one of `phases`."""

    def feed(core: DecodeCore, task: Task, grant: GrantId, now: float) -> None:
        assert task.peer is not None
        lease = core.ledger.find(task.peer, grant)
        if lease is not None and lease.loans[task.peer] in phases:
            core.feed_loan(lease, task.peer, kind, now)

    return feed


def _repeat(core: DecodeCore, task: Task, grant: GrantId, now: float) -> None:
    assert task.peer is not None
    lease = core.ledger.find(task.peer, grant)
    if lease is None or lease.loans[task.peer] not in (LoanPhase.RECALLED, LoanPhase.WITHDRAWN):
        return
    # One timer serves all loans of a peer. If a lease was recalled just before the timer expired,
    # the rank had no time to answer, so the lease is not overdue yet.
    if now - lease.recalled_at_s >= core.timing.repeat_after_s:
        core.ledger.note_overdue(lease)
    core.feed_loan(lease, task.peer, LoanKind.REPEAT_DUE, now)


def _close(core: DecodeCore, task: Task, grant: GrantId, now: float) -> None:
    record = core.rooms.get(grant)
    if record is not None:
        core.feed_room(record, DecodeEvent(DecodeKind.ENDED_LOCALLY, cause=task.cause), now)


_TASKS: dict[str, Callable[[DecodeCore, Task, GrantId, float], None]] = {
    "start": _start,
    "lose": _lose,
    "ask": _loan_task(LoanKind.SOURCE_BACK, (LoanPhase.DOUBTFUL,)),
    "fenced": _loan_task(LoanKind.FENCED, (LoanPhase.DOUBTFUL,)),
    "repeat": _repeat,
    "close": _close,
    "part": _part,
}
