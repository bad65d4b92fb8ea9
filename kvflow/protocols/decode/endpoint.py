"""Everything one decode incarnation decides: rooms by grant, links by prefill rank, loans,
deadlines.

Synchronous: no asyncio, no clock, no socket, no thread. Time is an argument; what is to be done
comes out of `commands()`. Read on in decode_inbox.py (messages), decode_core.py (the machines) and
machines/ (their tables).
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

# Rooms and loans one tick deals with: a millisecond or two; the rest follows in the next.
TICK_WORK = 32


class DecodeEndpoint:
    """One decode incarnation.

    Call a method, then run what `commands()` returns; call `tick` at `next_tick()`.
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
        """With `verify` a chunk lands when the checksum of what is there agrees with prefill's;
        where pages are `staged`, when they have been brought from where prefill writes them to
        where they are used."""
        self.bounds = bounds or Bounds()
        # To be read.
        self.core = DecodeCore(identity, observer, timing or Timing(), self.bounds, verify, staged)
        self.outbox = self.core.outbox  # what `commands` returns next
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
        """Everything to be done since the last call, in order."""
        found = self.outbox[:]
        self.outbox.clear()
        return found

    # --- what is known

    @property
    def rooms(self) -> Mapping[GrantId, DecodeRoomRecord]:
        """Open rooms, those that drain included."""
        return self.core.rooms

    @property
    def peers(self) -> Iterable[PrefillPeer]:
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
        """Announce a room to the ranks it will use, dialling those that are not linked; `Linked`
        follows when all are.

        `announce=False`: its pages follow at once where every rank is linked, so that the offer
        announces it. Raises: MisuseError; LostError, PeerError, CapacityError, QuarantineError,
        RefusedError (the ranks do not have our pool together), AbortedError while shutting down:
        then the legs of every prefill that can be reached are told.
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
            else:  # all are linked; of others it is found out when they are
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
        """The first `prefix_tokens` of the prompt of a room that is not lent yet need not travel:
        decode has them, as `open_room` may have been told otherwise. Returns how many pages it
        needs now.

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
        """The pages of a room that is `Linked`: offer them to every rank.

        False when the room has ended meanwhile, and the pages are the caller's again.

        Raises: MisuseError for other pages than the room needs, or a second time.
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
        """End a room.

        Before it landed this is an abort: its user is told at once, and its pages are free when its
        loans have ended. No effect on a room that has ended."""
        record = self.core.rooms.get(grant)
        if record is not None:
            self.core.feed_room(record, DecodeEvent(DecodeKind.ENDED_LOCALLY, cause=cause), now)

    def refuse_room(self, room: int, ranks: Sequence[RankInfo], cause: Cause, now: float) -> None:
        """A request that is refused here before any page is taken: its prefill legs are told why.

        Raises: as `open_room`, where the ranks cannot be reached.
        """
        self.core.recall(self._lease(room, self._peers(ranks, now), now), cause, now)

    def chunk_summed(
        self, grant: GrantId, rank: int, seq: int, checksum: bytes, now: float, *, error: str = ""
    ) -> None:
        """What `VerifyChunk` has found: the checksum of a landed chunk, or any word where none is
        compared; empty when it could not be done, and `error` says why."""
        record = self.core.rooms.get(grant)
        if record is None:
            return
        for check in record.checks:
            if check.rank == rank and check.message.seq == seq:
                check.found, check.error = checksum, error
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
        """A frame from one prefill; bad and foreign ones are counted and change nothing (I7)."""
        core = self.core
        try:
            message = parse_at_decode(frame)
        except WireError:
            core.observer.message_dropped("malformed")
            return
        peer = core.links.peers.get(key)
        if peer is None or message.target != core.identity.incarnation:
            core.observer.message_dropped("foreign")
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
        """The transport says why prefill does not let this decode in."""
        peer = self.core.links.peers.get(key)
        if peer is not None and peer.phase is LinkPhase.REGISTERING:
            text = f"prefill at {peer.info.control} does not let this decode in: {reason}"
            self.core.feed_link(peer, LinkKind.REFUSED, now, Cause(Code.REFUSED, text))

    def writer_died(self, key: PeerKey, now: float) -> None:
        """The data plane's fence: no write of this prefill can reach our pool any more."""
        peer = self.core.links.peers.get(key)
        if peer is not None:
            text = f"prefill at {peer.info.control} died"
            self.core.feed_link(peer, LinkKind.DIED, now, Cause(Code.PEER_LOST, text))
            self.core.work(TICK_WORK, now)

    def declare_dead(self, incarnation: Incarnation, why: str, now: float) -> tuple[int, int]:
        """An operator's word that a prefill writes no more: the only end of a loan without proof.

        Its rooms and loans end, those of earlier nodes among them, and it is never linked again. If
        the word is wrong, what that process still writes lands in pages that belong to others by
        then. Returns how many loans end, and how many pages leave quarantine. Raises: MisuseError
        when it is not known here.
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
            for grant in core.ledger.grants_of(peer):  # should it live, it is told to stop
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
        """Open no room from here on, and abort all; loans end when prefills prove it."""
        self._leaving = Cause(Code.SHUTDOWN, "decode is shutting down")
        self.core.add_task(Task("close", self.rooms, None, self._leaving))
        self.core.work(TICK_WORK, now)

    def part(self, now: float) -> None:
        """Say goodbye to every prefill, until it acknowledges that: call it after `leave`, when no
        proof is awaited any more. Prefill then forgets this decode; it is asked nothing
        afterwards."""
        for peer in list(self.peers):
            if peer.phase not in (LinkPhase.PARTING, LinkPhase.GONE):
                self.core.feed_link(peer, LinkKind.LEAVE, now, self._leaving)
        self.core.work(TICK_WORK, now)

    def unparted(self, now: float) -> list[PrefillPeer]:
        """Prefills that have been heard of lately, and have not acknowledged the goodbye yet."""
        return [
            peer
            for peer in self.peers
            if peer.phase is LinkPhase.PARTING
            and now < peer.received_at_s + self.core.timing.lost_after_s
        ]

    def close(self, now: float) -> None:
        """Hang up everywhere.

        Rooms that still wait for proof end; their loans stay in the ledger, unproven.
        """
        self.leave(now)
        self._closed = True
        for peer in list(self.peers):
            self.core.feed_link(peer, LinkKind.CLOSED, now, self._leaving)
        self.core.work(float("inf"), now)

    def credit_stall(self, late_s: float, now: float) -> None:
        """The shell stood still for this long: what peers sent meanwhile is unread, so their
        silence does not count. To know how long it was, tick once a heartbeat, due or not."""
        for peer in self.peers:
            # What was read since counts as it is.
            peer.received_at_s = min(peer.received_at_s + late_s, now)

    # --- time

    def next_tick(self) -> float:
        """When `tick` may next be worth calling; infinity while nothing is due."""
        # What `work_left` says, without a call: this is asked whenever a shell has run commands.
        core = self.core
        return float("-inf") if core.tasks or core.earlier.tasks else core.deadlines.not_before_s

    def tick(self, now: float) -> None:
        """Deadlines, repetition, silence.

        A tick does a bounded amount of work; `next_tick` says when more is due.
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
            # It may be long until the links' turn comes, and a prefill that is not asked has no
            # chance to answer.
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
            return  # its loans are recalled and asked for by themselves
        if timer.kind == "deadline":
            # Counted from a moment before the room was opened: a deadline of 0 s would be slightly
            # below it.
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
        """Nothing has come for a while: a message may have been lost.

        Ask less often the longer it lasts.
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
        """A link to every rank, dialled where there is none.

        Raises: LostError, PeerError, CapacityError; AbortedError once it is closed."""
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
        """Where there are too many, hang up the link that has been idle for longest; where none is
        idle, one that is lost: its loans wait for the fence then, and for an operator. Links that
        are hung up do not count. Raises: CapacityError."""
        core = self.core
        open_ = [peer for peer in self.peers if peer.phase is not LinkPhase.GONE]
        if len(open_) < self.bounds.links:
            return
        idle = [peer for peer in open_ if not core.ledger.owes(peer)]
        idle = idle or [peer for peer in open_ if peer.phase is LinkPhase.SILENT]
        if not idle:
            raise CapacityError("links to prefill ranks", len(open_) + 1, self.bounds.links)
        core.feed_link(min(idle, key=lambda peer: peer.used_at_s), LinkKind.CLOSED, now)

    def _lease(self, room: int, peers: tuple[PrefillPeer, ...], now: float) -> Lease[PrefillPeer]:
        """The next grant; no rank knows of it yet.

        Raises: MisuseError for what is not a room id.
        """
        core = self.core
        lease: Lease[PrefillPeer] = Lease(core.next_grant, wire.room_id(room))
        core.next_grant = GrantId(core.next_grant + 1)
        for peer in peers:
            peer.used_at_s = now
            core.ledger.open(lease, peer)
        return lease
