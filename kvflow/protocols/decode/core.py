"""The machines of one decode (rooms, links, loans), and the events that pass between them.

A table never calls back: it returns commands, and running them feeds the next machine. No machine
is therefore entered twice at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvflow.protocols.commands import (
    DecodeCommand,
    FreePages,
    Linked,
    QuarantinePages,
    RoomEnded,
    RoomFailed,
    RoomLanded,
    StopVerifying,
)
from kvflow.protocols.decode.links import DecodeIdentity, DecodeLinks, PrefillPeer
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.earlier import EarlierLoans
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machines.deadlines import Deadlines
from kvflow.protocols.machines.decode_room import DecodeCommand as RoomCommand
from kvflow.protocols.machines.decode_room import DecodeEvent, DecodeKind, DecodePhase, step
from kvflow.protocols.machines.ledger import Change, Lease, Ledger
from kvflow.protocols.machines.link import LinkCommand, LinkKind, LinkPhase
from kvflow.protocols.machines.loan import WRITABLE, LoanCommand, LoanKind, LoanPhase
from kvflow.protocols.ports import Observer
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.messages import GrantId

MAX_REPEAT_AFTER_S = 8.0  # upper bound of the interval between repetitions


class Timer(msgspec.Struct, frozen=True, gc=False):
    """The purpose of a deadline.

    `key` is a grant for "deadline" and "stalled", and a PeerKey for "link" and "repeat".
    """

    kind: str
    key: Any


class Task:
    """Work on many rooms or loans, done one grant at a time so that no tick takes long."""

    __slots__ = ("cause", "grants", "peer", "run")

    def __init__(
        self, run: str, grants: Iterable[GrantId], peer: PrefillPeer | None, cause: Cause | None
    ) -> None:
        self.run, self.peer, self.cause = run, peer, cause
        self.grants = deque(grants)


class DecodeCore:
    """The state of one decode. Each kind of state is changed by one `feed_*` method only."""

    def __init__(
        self,
        identity: DecodeIdentity,
        observer: Observer,
        timing: Timing,
        bounds: Bounds,
        verify: bool,
        staged: bool,
    ) -> None:
        self.identity, self.observer, self.timing, self.verify = identity, observer, timing, verify
        self.staged = staged
        self.next_grant = GrantId(1)
        self.outbox: list[DecodeCommand] = []
        self.links = DecodeLinks(identity, timing, bounds, self.outbox)
        self.ledger: Ledger[PrefillPeer] = Ledger(
            int(bounds.quarantine_share * identity.layout.num_pages)
        )
        self.earlier = EarlierLoans(self.ledger, self.outbox, self.take_grant)
        self.rooms: dict[GrantId, DecodeRoomRecord] = {}
        self.deadlines: Deadlines[Timer] = Deadlines()
        self.tasks: deque[Task] = deque()

    def feed_room(self, record: DecodeRoomRecord, event: DecodeEvent, now: float) -> None:
        """Feed one event to a room and run the commands that follow. No other code changes a room's
        state after it is lent.
        """
        record.state, commands = step(record.state, event)
        story = record.story
        # Chunks are the commonest event. Without a follower they are left out of the story, which
        # keeps this path fast.
        if commands or event.kind is not DecodeKind.CHUNK_LANDED or story.follower is not None:
            story.tell(now, event.kind, record.state.phase, event.cause)
        for command in commands:
            _RUN[command](self, record, now)

    def feed_loan(
        self, lease: Lease[PrefillPeer], peer: PrefillPeer, kind: LoanKind, now: float
    ) -> None:
        """Feed one event to one loan, and act on the result."""
        self.loan_changed(self.ledger.feed(lease, peer, kind), now)

    def feed_answer(
        self, lease: Lease[PrefillPeer], peer: PrefillPeer, drained: bool, now: float
    ) -> None:
        """Feed prefill's answer about one loan: drained, or unproven."""
        # Prefill could not write to a loan that is not writable, so no proof about it is needed.
        drained = drained or lease.loans[peer] not in WRITABLE
        self.feed_loan(lease, peer, LoanKind.DRAINED if drained else LoanKind.UNPROVEN, now)

    def loan_changed(self, change: Change[PrefillPeer], now: float) -> None:
        """Run the commands that follow from a change of one loan, and end a room that waited for
        it.
        """
        lease, peer = change.lease, change.source
        # A silent source receives its Aborts when it answers again ("ask"): before that they would
        # only fill its send queue.
        if LoanCommand.SEND_ABORT in change.commands and (peer.usable or peer.asked_again):
            assert lease.cause is not None
            abort = wire.Abort(
                room=lease.room, grant=lease.grant, cause=lease.cause, **self.between(peer)
            )
            self.links.send(peer, abort)
            if (repeat := Timer("repeat", peer.key)) not in self.deadlines:
                self.deadlines.set(repeat, now + peer.repeat_after_s)
        if (
            LoanCommand.RETURN in change.commands
            and peer.repeat_after_s > self.timing.repeat_after_s
        ):
            # The source answers now, so its other unanswered Aborts were probably lost: repeat them
            # soon instead of at the long interval that its silence led to.
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
        self.drop_if_idle(peer, now)

    def feed_link(
        self, peer: PrefillPeer, kind: LinkKind, now: float, cause: Cause | None = None
    ) -> None:
        """Feed one event to a link, and queue what follows for its rooms and loans."""
        # Every room offered so far ends with this silence. Raising `fresh_from` keeps a Bootstrap
        # of theirs that is still travelling from starting writes later.
        if kind is LinkKind.SILENCE_DUE:
            peer.asked_again, peer.fresh_from = False, self.next_grant
        for command in self.links.feed(peer, kind, now, self.ledger, cause):
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

    def land(
        self, record: DecodeRoomRecord, rank: int, message: wire.ChunkDone, now: float
    ) -> None:
        """Feed a landed chunk to its room. The first hand-over that a rank sends is kept."""
        record.handoff = record.handoff or message.handoff
        event = DecodeEvent(DecodeKind.CHUNK_LANDED, rank, message.seq, message.pages, message.last)
        self.feed_room(record, event, now)

    def announce(self, record: DecodeRoomRecord) -> None:
        for peer in record.peers:
            self.links.send(
                peer, wire.Announce(room=record.room, grant=record.grant, **self.between(peer))
            )

    def link_if_ready(self, record: DecodeRoomRecord, now: float) -> None:
        """Issue `Linked` once every rank is up, or end the room if the ranks do not cover our
        pool.
        """
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
        """Recall the loans of a lease: send Abort, repeated until every rank acknowledges it."""
        # A rank that left earlier Aborts unanswered is asked at long intervals only. The first
        # repetition of this new Abort must not wait that long.
        for change in self.ledger.recall(lease, cause, now):
            if change.source.repeat_after_s > self.timing.repeat_after_s:
                self.repeat_from(change.source, now + self.timing.repeat_after_s)
            self.loan_changed(change, now)

    def ask_as_at_first(self, record: DecodeRoomRecord, now: float) -> None:
        """Reset a room's Resync interval to its first value.

        Called for a room that moved again after standing still, because it may lose another
        message.
        """
        record.resync_after_s = self.timing.repeat_after_s
        self.deadlines.set(Timer("stalled", record.grant), now + record.resync_after_s)

    @property
    def proof_may_come(self) -> bool:
        """True while some rank can be expected to prove the end of a loan.

        Only ranks that are up count: a rank that never answered has no pages, and a silent or
        closed one proves nothing now. A loan that a rank reported unproven does not count: it stays
        in doubt until the fence.
        """
        up = [
            peer
            for peer in self.links.peers.values()
            if peer.phase is LinkPhase.UP and self.ledger.owes(peer)
        ]
        # A queued task may recall loans in doubt again, so it counts like a loan that is awaited.
        return any(self.tasks or self.ledger.awaits(peer) for peer in up)

    def drop_if_idle(self, peer: PrefillPeer, now: float) -> None:
        """Forget a link that can no longer be used and owes no loan; the next room dials again."""
        if peer.phase <= LinkPhase.PARTING or self.ledger.owes(peer):
            return
        self.links.feed(peer, LinkKind.CLOSED, now, self.ledger)
        self.links.drop(peer)
        self.ledger.forget_source(peer)
        self.deadlines.cancel(Timer("link", peer.key))
        self.deadlines.cancel(Timer("repeat", peer.key))

    def for_each_loan(self, peer: PrefillPeer, run: str, cause: Cause | None = None) -> None:
        """Queue the task `run` over every loan of a peer."""
        self.add_task(Task(run, self.ledger.grants_of(peer), peer, cause))

    def add_task(self, task: Task) -> None:
        """Queue a task, unless it has no grants."""
        if task.grants:
            self.tasks.append(task)

    def work(self, limit: float, now: float) -> None:
        """Run queued tasks for up to `limit` grants in all."""
        while self.tasks and limit > 0:
            limit -= 1
            task = self.tasks[0]
            grant = task.grants.popleft()
            if not task.grants:
                self.tasks.popleft()
            _TASKS[task.run](self, task, grant, now)
        self.earlier.work(limit)

    @property
    def work_left(self) -> bool:
        """True while `work` has more to do."""
        return bool(self.tasks or self.earlier.tasks)

    def take_grant(self) -> GrantId:
        """Take the next grant, for pages that an earlier node lent. No room has it."""
        grant = self.next_grant
        self.next_grant = GrantId(grant + 1)
        return grant

    # --- time

    def link_due(self, peer: PrefillPeer, now: float) -> None:
        """Feed a link everything that is due at `now`, and set its next deadline."""
        while (due := self.links.expired(peer, now)) is not None:
            self.feed_link(peer, due[0], now, due[1])
        self.deadlines.set(Timer("link", peer.key), self.links.due_at_s(peer))

    def repeat_aborts(self, timer: Timer, now: float) -> None:
        """Repeat the Aborts that a peer did not acknowledge, at intervals that double up to a
        limit.
        """
        peer = self.links.peers[timer.key]
        self.for_each_loan(peer, "repeat")
        peer.repeat_after_s = self.back_off(peer.repeat_after_s)

    def repeat_from(self, peer: PrefillPeer, at_s: float) -> None:
        """Repeat unacknowledged Aborts at `at_s` or sooner, and at the first interval again."""
        peer.repeat_after_s = self.timing.repeat_after_s
        self.deadlines.advance(Timer("repeat", peer.key), at_s)

    def back_off(self, after_s: float) -> float:
        """Return the interval that follows `after_s`."""
        return min(2 * after_s, max(MAX_REPEAT_AFTER_S, self.timing.repeat_after_s))

    def between(self, peer: PrefillPeer) -> dict[str, Any]:
        """Return the two incarnations that every message of this link names (I6)."""
        return {"source": peer.key.incarnation, "target": self.identity.incarnation}


# --- what a room's table asks for


def _send_bootstrap(core: DecodeCore, record: DecodeRoomRecord, now: float) -> None:
    for peer in record.peers:
        # LEND yields no command, so `feed_loan` is not needed to act on the change.
        core.ledger.feed(record.lease, peer, LoanKind.LEND)
        core.links.send(peer, record.bootstrap(peer, core.identity.incarnation))


def _recall_loans(core: DecodeCore, record: DecodeRoomRecord, now: float) -> None:
    owed = bool(record.lease.loans)
    core.recall(record.lease, record.first_cause, now)
    # Without loans `recall` feeds no loan, so `loan_changed` does not end the draining room.
    if not owed and record.phase is DecodePhase.DRAINING:
        core.feed_room(record, DecodeEvent(DecodeKind.LOANS_ENDED), now)


def _tell_landed(core: DecodeCore, record: DecodeRoomRecord, now: float) -> None:
    core.outbox.append(RoomLanded(record.grant, record.handoff))


def _tell_failed(core: DecodeCore, record: DecodeRoomRecord, now: float) -> None:
    if record.checks:
        core.outbox.append(StopVerifying(record.grant))
    core.outbox.append(RoomFailed(record.grant, record.first_cause))


def _end(core: DecodeCore, record: DecodeRoomRecord, now: float) -> None:
    """Drop an ended room from the table of rooms; its loans stay in the ledger."""
    grant, lease = record.grant, record.lease
    del core.rooms[grant]
    if record.deadline_at_s < float("inf"):
        core.deadlines.cancel(Timer("deadline", grant))
    core.deadlines.cancel(Timer("stalled", grant))
    phase = record.state.phase
    succeeded = phase is DecodePhase.SUCCESS
    core.observer.room_ended(record.ending, now)
    if succeeded:
        core.observer.pages_moved(record.num_pages)
    elif not record.lent:
        # No page was offered, so no rank can write: the pages need no proof.
        core.outbox.append(FreePages(grant))
    elif core.ledger.room_ended(lease):
        core.outbox.append(FreePages(grant))
    else:
        core.outbox.append(QuarantinePages(grant))
    core.outbox.append(RoomEnded(grant))


_RUN: dict[RoomCommand, Callable[[DecodeCore, DecodeRoomRecord, float], None]] = {
    RoomCommand.SEND_BOOTSTRAP: _send_bootstrap,
    RoomCommand.RECALL_LOANS: _recall_loans,
    RoomCommand.TELL_LANDED: _tell_landed,
    RoomCommand.TELL_FAILED: _tell_failed,
    RoomCommand.END: _end,
}


# --- one loan of a peer at a time


def _lose(core: DecodeCore, task: Task, grant: GrantId, now: float) -> None:
    """End the room of a lost source; its loan waits for proof."""
    record = core.rooms.get(grant)
    if record is not None:
        core.feed_room(record, DecodeEvent(DecodeKind.SOURCE_LOST, cause=task.cause), now)
    assert task.peer is not None
    lease = core.ledger.find(task.peer, grant)
    if lease is not None:
        core.feed_loan(lease, task.peer, LoanKind.SOURCE_LOST, now)


def _part(core: DecodeCore, task: Task, grant: GrantId, now: float) -> None:
    """Apply prefill's Goodbye to one grant, as if RoomFailed and then AbortAck arrived for it."""
    peer = task.peer
    assert peer is not None
    record = core.rooms.get(grant)
    if record is not None:
        core.feed_room(record, DecodeEvent(DecodeKind.ROOM_FAILED, cause=task.cause), now)
    lease = core.ledger.find(peer, grant)
    if lease is not None:
        core.feed_answer(lease, peer, grant not in peer.unproven, now)


def _start(core: DecodeCore, task: Task, grant: GrantId, now: float) -> None:
    """Link the room if the rank that came up is the last one it waited for."""
    record = core.rooms.get(grant)
    if record is not None and not record.linked and record.state.phase is DecodePhase.BOOTSTRAPPING:
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
    """Repeat an Abort that is not acknowledged."""
    assert task.peer is not None
    lease = core.ledger.find(task.peer, grant)
    if lease is None or lease.loans[task.peer] not in (LoanPhase.RECALLED, LoanPhase.WITHDRAWN):
        return
    # One timer serves all loans of a peer. A lease recalled just before it expires had no time to
    # be answered, so it does not count as overdue.
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
