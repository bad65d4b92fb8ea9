"""The endpoint of one decode: rooms by grant, links by prefill rank, loans, deadlines.

It decides and does not act: it uses no asyncio, clock, socket or thread. Each method receives the
time as an argument, and `commands()` returns the work for the shell. Read on in inbox.py
(messages), core.py (the machines) and ../machines/ (their tables).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvflow.protocols.arguments import pages_wanted
from kvflow.protocols.commands import DecodeCommand, PeerKey
from kvflow.protocols.decode.core import DecodeCore, Task, Timer
from kvflow.protocols.decode.inbox import HANDLERS, on_registered
from kvflow.protocols.decode.links import DecodeIdentity, PrefillPeer
from kvflow.protocols.decode.records import DecodeRoomRecord, Prompt
from kvflow.protocols.earlier import EarlierLoans
from kvflow.protocols.errors import (
    CapacityError,
    Cause,
    Code,
    KvflowError,
    MisuseError,
    WireError,
    room_error,
)
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machines.decode_room import DecodeEvent, DecodeKind, DecodePhase
from kvflow.protocols.machines.ledger import Lease
from kvflow.protocols.machines.link import LinkKind, LinkPhase
from kvflow.protocols.pages.layout import PageIndices, pack_pages
from kvflow.protocols.ports import Observer
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.codec import parse_at_decode
from kvflow.protocols.wire.messages import GrantId, Incarnation
from kvflow.protocols.wire.ranks import RankInfo

# Rooms and loans handled in one tick. The bound keeps a tick to a millisecond or two, so that the
# loss of a peer with thousands of rooms does not block the event loop (I11).
TICK_WORK = 32


class DecodeEndpoint:
    """The protocol endpoint of one decode incarnation.

    After each call, run what `commands()` returns; call `tick` at `next_tick()`.
    """

    def __init__(
        self,
        identity: DecodeIdentity,
        *,
        observer: Observer,
        timing: Timing | None = None,
        bounds: Bounds | None = None,
        verify: bool = False,
        staged: bool = False,
    ) -> None:
        """Create an endpoint with no links and no rooms.

        With `verify`, a chunk lands when the checksum of its pages agrees with prefill's. With
        `staged`, it lands when its pages are copied from the memory that prefill writes to the
        memory that the engine uses.
        """
        self.bounds = bounds or Bounds()
        # Public so that shells and reports can read it; only the endpoint's methods change it.
        self.core = DecodeCore(identity, observer, timing or Timing(), self.bounds, verify, staged)
        self.outbox = self.core.outbox  # the commands that `commands` returns next
        self._leaving: Cause | None = None
        self._closed = False

    def __repr__(self) -> str:
        core = self.core
        known = (
            f"{len(core.rooms)} rooms, {len(core.links.peers)} prefill ranks, {len(core.ledger)} "
            "loans"
        )
        return f"<DecodeEndpoint {core.identity.incarnation:016x}: {known}>"

    def commands(self) -> list[DecodeCommand]:
        """Return the commands issued since the last call, in the order to run them."""
        found = self.outbox[:]
        self.outbox.clear()
        return found

    # --- what is known

    @property
    def rooms(self) -> Mapping[GrantId, DecodeRoomRecord]:
        """Open rooms by grant, including those that are draining."""
        return self.core.rooms

    @property
    def peers(self) -> Iterable[PrefillPeer]:
        """Links to prefill ranks, including those that are closed and still owe loans."""
        return self.core.links.peers.values()

    @property
    def earlier(self) -> EarlierLoans:
        """The loans of earlier nodes over the same pool."""
        return self.core.earlier

    # --- rooms

    def open_room(
        self,
        room: int,
        ranks: Sequence[RankInfo],
        prompt: Prompt,
        *,
        now: float,
        deadline_at_s: float = float("inf"),
        announce: bool = True,
    ) -> GrantId:
        """Announce a room to the ranks it will use, and dial those that are not linked; the command
        `Linked` follows when all are.

        Pass `announce=False` when `lend` follows at once: if every rank is linked, the Bootstrap
        announces the room. Returns the room's grant.

        Raises: MisuseError; LostError, PeerError, CapacityError, QuarantineError, RefusedError (the
        ranks together do not cover our pool), AbortedError while shutting down. Ranks that can be
        reached receive an Abort with the cause.
        """
        core = self.core
        peers = self._peers(ranks, now)
        lease = self._lease(room, peers, now)
        try:
            if self._leaving is not None:
                raise room_error(self._leaving)
            for peer in peers:
                if peer.phase is not LinkPhase.UP:
                    break
            # A rank reports its share of the pool when it links. If one is not linked yet,
            # `link_if_ready` makes this check later.
            else:
                why = core.links.coverage.get(peers)
                if why or (why is None and (why := core.links.check_coverage(peers))):
                    raise room_error(Cause(Code.REFUSED, why))
            core.ledger.check_quarantine()
            num_pages = pages_wanted(core.identity.layout, prompt.tokens, prompt.prefix_tokens)
        except KvflowError as error:
            core.recall(lease, error.cause(), now)
            raise
        record = DecodeRoomRecord(lease, peers, prompt, num_pages, deadline_at_s, now)
        record.resync_after_s = core.timing.repeat_after_s
        core.rooms[lease.grant] = record
        core.observer.room_opened()
        if deadline_at_s < float("inf"):
            core.deadlines.set(Timer("deadline", lease.grant), deadline_at_s)
        core.deadlines.set(Timer("stalled", lease.grant), now + record.resync_after_s)
        core.link_if_ready(record, now)
        if announce or not record.linked:
            core.announce(record)
        return lease.grant

    def shorten(self, grant: GrantId, prefix_tokens: int) -> int:
        """Replace the prefix of the prompt that need not travel, before the room's pages are lent.

        Decode's cache may have more of the prompt by now than it had at `open_room`. Returns the
        number of pages that the room needs now.

        Raises: MisuseError (after `lend`, no whole pages).
        """
        record = self.core.rooms[grant]
        if record.lent or record.state.phase is not DecodePhase.BOOTSTRAPPING:
            raise MisuseError(
                f"room {record.room}: its pages have been lent, with the prefix that was known then"
            )
        num_pages = pages_wanted(self.core.identity.layout, record.prompt.tokens, prefix_tokens)
        record.shorten(prefix_tokens, num_pages)
        return num_pages

    def lend(self, grant: GrantId, pages: PageIndices, now: float) -> bool:
        """Offer `pages` to every rank of a room for which `Linked` was issued.

        Returns False if the room ended meanwhile; the pages then stay the caller's.

        Raises: MisuseError if the room needs another number of pages, or on a second call.
        """
        record = self.core.rooms.get(grant)
        if record is None:
            return False
        if record.state.phase is not DecodePhase.BOOTSTRAPPING or not record.linked:
            raise MisuseError(f"room {record.room}: pages can be lent once, after Linked")
        if len(pages) != record.num_pages:
            raise MisuseError(
                f"room {record.room}: {len(pages)} pages for a room of {record.num_pages}"
            )
        if (layout := self.core.identity.layout).num_rows:
            layout.check_places(pages)
        record.packed_pages = pack_pages(pages)
        record.lent, record.moving_at_s = True, now
        record.lease.num_pages = len(pages)
        record.progress_at_s = now
        if record.resync_after_s > self.core.timing.repeat_after_s:
            self.core.ask_as_at_first(record, now)
        self.core.feed_room(record, DecodeEvent(DecodeKind.LENT), now)
        return True

    def close_room(self, grant: GrantId, cause: Cause, now: float) -> None:
        """End a room, with `cause` as the reason that both sides receive.

        This aborts a room that has not landed: its user is notified at once, and its pages are
        freed when its loans end. Closing a room that already ended has no effect.
        """
        record = self.core.rooms.get(grant)
        if record is not None:
            self.core.feed_room(record, DecodeEvent(DecodeKind.ENDED_LOCALLY, cause=cause), now)

    def refuse_room(self, room: int, ranks: Sequence[RankInfo], cause: Cause, now: float) -> None:
        """Send `cause` to the prefill legs of a request that decode refuses before it takes a page.

        Raises: as `open_room`, where the ranks cannot be reached.
        """
        self.core.recall(self._lease(room, self._peers(ranks, now), now), cause, now)

    def chunk_summed(
        self, grant: GrantId, rank: int, seq: int, checksum: bytes, now: float, *, error: str = ""
    ) -> None:
        """Record the result of a `VerifyChunk`.

        `checksum` is that of the landed chunk, or any bytes if this decode does not verify. It is
        empty if the work failed; `error` then gives the reason.
        """
        record = self.core.rooms.get(grant)
        if record is None:
            return
        for check in record.checks:
            if check.rank == rank and check.message.seq == seq:
                check.found, check.error = checksum, error
        # The room's machine accepts the chunks of a rank only in order, while checks may finish in
        # any order: a finished check waits for those before it.
        while record.checks and record.checks[0].found is not None and record.receiving:
            check = record.checks[0]
            if (difference := check.difference()) is not None:
                if self.core.verify:
                    self.core.observer.chunk_mismatched()
                self.close_room(grant, difference, now)
            else:
                record.checks.pop(0)
                self.core.land(record, check.rank, check.message, now)

    # --- links

    def receive(self, key: PeerKey, frame: bytes, now: float) -> None:
        """Handle a frame from one prefill; a malformed or foreign frame is counted and dropped
        (I7).
        """
        core = self.core
        try:
            message = parse_at_decode(frame)
        except WireError:
            core.observer.message_dropped("malformed")
            return
        peer = core.links.peers.get(key)
        if peer is None or message.target != core.identity.incarnation:
            core.observer.message_dropped("foreign")
        # Registered comes before the check of its source: an answer from another incarnation is how
        # decode learns that prefill restarted.
        elif type(message) is wire.Registered:
            on_registered(core, peer, message, now)
        elif (
            message.source != key.incarnation
            or getattr(message, "rank", peer.info.rank) != peer.info.rank
        ):
            core.observer.message_dropped("foreign")
        else:
            HANDLERS[type(message)](core, peer, message, now)
        if core.tasks:
            core.work(TICK_WORK, now)

    def locked_out(self, key: PeerKey, reason: str, now: float) -> None:
        """Mark the link as refused: prefill's transport does not admit this decode."""
        peer = self.core.links.peers.get(key)
        if peer is not None and peer.phase is LinkPhase.REGISTERING:
            text = f"prefill at {peer.info.control} does not let this decode in: {reason}"
            self.core.feed_link(peer, LinkKind.REFUSED, now, Cause(Code.REFUSED, text))

    def writer_died(self, key: PeerKey, now: float) -> None:
        """Report the data plane's fence: no write of this prefill can reach our pool any more."""
        peer = self.core.links.peers.get(key)
        if peer is not None:
            text = f"prefill at {peer.info.control} died"
            self.core.feed_link(peer, LinkKind.DIED, now, Cause(Code.PEER_LOST, text))
            self.core.work(TICK_WORK, now)

    def declare_dead(self, incarnation: Incarnation, why: str, now: float) -> tuple[int, int]:
        """End the rooms and loans of a prefill that an operator declares dead.

        This is the only way to end a loan without proof. Loans to earlier nodes over the same pool
        end too, and this decode never links to that incarnation again. If the process is in fact
        alive, its late writes land in pages that other rooms own by then. Returns the number of
        loans that end, and of pages that leave quarantine.

        Raises: MisuseError if the incarnation is not known here.
        """
        core = self.core
        found = [peer for peer in self.peers if peer.key.incarnation == incarnation]
        if not found and not core.earlier.of(incarnation):
            raise MisuseError(
                f"no prefill {incarnation:016x} is linked here, and none of that incarnation owes "
                "a loan"
            )
        core.observer.peer_declared_dead()
        core.links.declared_dead.add(incarnation)
        loans, pages = core.earlier.declare_dead(incarnation)
        for peer in found:
            cause = Cause(
                Code.PEER_LOST, f"prefill at {peer.info.control} was declared dead: {why}"
            )
            # The operator may be wrong: if the process is alive, these Aborts stop its writes.
            for grant in core.ledger.grants_of(peer):
                lease = core.ledger.find(peer, grant)
                assert lease is not None
                abort = wire.Abort(
                    room=lease.room, grant=grant, cause=lease.cause or cause, **core.between(peer)
                )
                core.links.send(peer, abort)
            core.feed_link(peer, LinkKind.DECLARED_DEAD, now, cause)
            owed = core.ledger.owed_by(peer)
            loans, pages = loans + owed[0], pages + owed[1]
        core.work(TICK_WORK, now)
        return loans, pages

    def leave(self, now: float) -> None:
        """Abort all rooms and open no more; loans end when prefills prove it."""
        self._leaving = Cause(Code.SHUTDOWN, "decode is shutting down")
        self.core.add_task(Task("close", self.rooms, None, self._leaving))
        self.core.work(TICK_WORK, now)

    def part(self, now: float) -> None:
        """Send Goodbye to every prefill, repeated until it is acknowledged.

        Call this after `leave`, when no proof is awaited any more: prefill then forgets this decode
        and answers no further question about its grants.
        """
        for peer in list(self.peers):
            if peer.phase not in (LinkPhase.PARTING, LinkPhase.GONE):
                self.core.feed_link(peer, LinkKind.LEAVE, now, self._leaving)
        self.core.work(TICK_WORK, now)

    def unparted(self, now: float) -> list[PrefillPeer]:
        """Return the prefills that sent something recently but did not acknowledge the goodbye."""
        return [
            peer
            for peer in self.peers
            if peer.phase is LinkPhase.PARTING
            and now < peer.received_at_s + self.core.timing.lost_after_s
        ]

    def close(self, now: float) -> None:
        """Close every link.

        Rooms that still wait for proof end; their loans stay in the ledger, in doubt.
        """
        self.leave(now)
        self._closed = True
        for peer in list(self.peers):
            self.core.feed_link(peer, LinkKind.CLOSED, now, self._leaving)
        self.core.work(float("inf"), now)

    def credit_stall(self, late_s: float, now: float) -> None:
        """Extend every peer's silence limit by the time that the shell stood still.

        Messages that arrived meanwhile are unread, so the silence is not the peers'. To measure
        `late_s`, a shell must tick once per heartbeat interval, whether or not a tick is due.
        """
        for peer in self.peers:
            # A peer whose message was read after the stall needs no credit: its time is capped at
            # the present.
            peer.received_at_s = min(peer.received_at_s + late_s, now)

    # --- time

    def next_tick(self) -> float:
        """Return the earliest time at which `tick` may have work; infinity without a deadline."""
        # Shells call this after every batch of commands, so the expression of `work_left` is
        # repeated here to save a call.
        core = self.core
        return float("-inf") if core.tasks or core.earlier.tasks else core.deadlines.not_before_s

    def tick(self, now: float) -> None:
        """Act on deadlines, repetitions and silence that are due at `now`.

        A tick does a bounded amount of work; `next_tick` returns when more is due.
        """
        core = self.core
        core.work(TICK_WORK, now)
        beliefs: dict[PrefillPeer, list[wire.Belief]] = {}
        for _ in range(TICK_WORK):
            timer = core.deadlines.pop_due(now)
            if timer is None:
                break
            self._expire(timer, now, beliefs)
        else:
            # The tick's work is used up, and under load the links' timers could wait for many
            # ticks. A prefill that receives no heartbeat meanwhile would not answer and be taken
            # for lost, so links that are due are served regardless of the bound.
            for peer in [peer for peer in self.peers if core.links.due_at_s(peer) <= now]:
                core.link_due(peer, now)
        for peer, rooms in beliefs.items():
            core.links.send(peer, wire.Resync(rooms=tuple(rooms), **core.between(peer)))

    def _expire(
        self, timer: Timer, now: float, beliefs: dict[PrefillPeer, list[wire.Belief]]
    ) -> None:
        core = self.core
        if timer.kind == "link":
            core.link_due(core.links.peers[timer.key], now)
        elif timer.kind == "repeat":
            core.repeat_aborts(timer, now)
        else:
            self._room_due(timer, core.rooms[timer.key], now, beliefs)

    def _room_due(
        self,
        timer: Timer,
        record: DecodeRoomRecord,
        now: float,
        beliefs: dict[PrefillPeer, list[wire.Belief]],
    ) -> None:
        if record.state.phase is DecodePhase.DRAINING:
            # The user has its error, and the ledger's own timer repeats the Aborts.
            return
        if timer.kind == "deadline":
            # The deadline counts from the arrival of the request, slightly before `opened_at_s`:
            # the difference is negative for a deadline of 0 s.
            given_s = max(0.0, round(record.deadline_at_s - record.opened_at_s, 2))
            text = f"room {record.room}: deadline of {given_s:g} s has passed"
            self.close_room(record.grant, Cause(Code.DEADLINE, text), now)
        elif (due_at_s := record.progress_at_s + record.resync_after_s) > now:
            self.core.deadlines.set(timer, due_at_s)
        else:
            self._ask_about(record, now, beliefs)

    def _ask_about(
        self, record: DecodeRoomRecord, now: float, beliefs: dict[PrefillPeer, list[wire.Belief]]
    ) -> None:
        """Ask prefill about a room that stands still, because a message may be lost.

        The interval doubles each time, up to a limit.
        """
        core = self.core
        record.resync_after_s = core.back_off(record.resync_after_s)
        core.deadlines.set(Timer("stalled", record.grant), now + record.resync_after_s)
        if record.phase is DecodePhase.BOOTSTRAPPING:
            core.announce(record)
            return
        for rank, peer in enumerate(record.peers):
            if peer.phase is LinkPhase.UP and peer in record.lease.loans:
                belief = wire.Belief(record.room, record.grant, record.next_seq(rank))
                beliefs.setdefault(peer, []).append(belief)

    # --- opening a room, step by step

    def _peers(self, ranks: Sequence[RankInfo], now: float) -> tuple[PrefillPeer, ...]:
        """Return the link to every rank, and dial those that do not have one.

        Raises: LostError, PeerError, CapacityError; AbortedError once the endpoint is closed.
        """
        core = self.core
        if self._closed:
            assert self._leaving is not None
            raise room_error(self._leaving)
        core.links.check(ranks)
        peers = []
        for info in ranks:
            peer = core.links.find(info)
            if peer is None:
                self._make_place(now)
                peer = core.links.dial(info, core.next_grant, now)
                core.deadlines.set(Timer("link", peer.key), core.links.due_at_s(peer))
            peers.append(peer)
        return tuple(peers)

    def _make_place(self, now: float) -> None:
        """Close the least recently used link if the limit of open links is reached.

        Idle links go first, then silent ones, whose loans then wait for the fence or an operator.
        Raises: CapacityError if every link is in use.
        """
        core = self.core
        # A closed link stays in the table while it owes loans, but it holds no connection.
        open_ = [peer for peer in self.peers if peer.phase is not LinkPhase.GONE]
        if len(open_) < self.bounds.links:
            return
        idle = [peer for peer in open_ if not core.ledger.owes(peer)]
        idle = idle or [peer for peer in open_ if peer.phase is LinkPhase.SILENT]
        if not idle:
            raise CapacityError("links to prefill ranks", len(open_) + 1, self.bounds.links)
        core.feed_link(min(idle, key=lambda peer: peer.used_at_s), LinkKind.CLOSED, now)

    def _lease(self, room: int, peers: tuple[PrefillPeer, ...], now: float) -> Lease[PrefillPeer]:
        """Create the lease of a new room under the next grant, with an announced loan per rank.

        Raises: MisuseError if `room` is not a room id.
        """
        core = self.core
        lease: Lease[PrefillPeer] = Lease(core.next_grant, wire.room_id(room))
        core.next_grant = GrantId(core.next_grant + 1)
        for peer in peers:
            peer.used_at_s = now
            core.ledger.open(lease, peer)
        return lease
