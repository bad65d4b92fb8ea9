"""The endpoint of one decode: rooms by grant, links by prefill rank, loans, deadlines.

It decides and does not act: it uses no asyncio, clock, socket or thread. Methods receive the time,
and `commands()` returns the work for the shell. See core.py for the machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvflow.protocols.arguments import pack_pages, pages_wanted, room_id, room_in_fine_pages
from kvflow.protocols.commands import DecodeCommand, PeerKey, RoomBegun, SendToPrefill, VerifyChunk
from kvflow.protocols.decode.core import DecodeCore
from kvflow.protocols.decode.links import DecodeIdentity, PrefillPeer
from kvflow.protocols.decode.records import ChunkCheck, DecodeRoomRecord, Prompt
from kvflow.protocols.errors import (
    Cause,
    Code,
    KvflowError,
    LostError,
    MisuseError,
    PeerError,
    room_error,
)
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machinery import TICK_WORK, RoomsEndpoint, Task, Timer, parsed
from kvflow.protocols.machines.decode_room import DecodeEvent, DecodeKind, DecodePhase
from kvflow.protocols.machines.ledger import Lease
from kvflow.protocols.machines.link import LinkKind, LinkPhase
from kvflow.protocols.machines.loan import LoanKind, LoanPhase
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.pages.spaces import Counts
from kvflow.protocols.ports import Observer
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.codec import encode
from kvflow.protocols.wire.messages import GrantId, Incarnation, ToDecode
from kvflow.protocols.wire.ranks import RankInfo, check_ranks

_MESSAGES = msgspec.msgpack.Decoder(ToDecode)


class DecodeEndpoint(RoomsEndpoint[DecodeCommand]):
    """The protocol endpoint of one decode incarnation."""

    core: DecodeCore

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

        With `verify`, a chunk counts as landed when the checksum of its pages agrees with
        prefill's. With `staged`, prefill does not write into the engine's memory, and a chunk
        counts as landed when its pages are copied there.
        """
        self.bounds = bounds or Bounds()
        self.core = DecodeCore(identity, observer, timing or Timing(), self.bounds, verify, staged)
        self.outbox = self.core.outbox
        self._leaving: Cause | None = None
        self._closed = False

    def __repr__(self) -> str:
        core = self.core
        known = f"{len(core.rooms)} rooms, {len(core.links.peers)} prefill ranks"
        return (
            f"<DecodeEndpoint {core.identity.incarnation:016x}: {known}, {len(core.ledger)} loans>"
        )

    # --- what is known

    @property
    def rooms(self) -> Mapping[GrantId, DecodeRoomRecord]:
        """Open rooms by grant, including those that are draining."""
        return self.core.rooms

    @property
    def peers(self) -> Iterable[PrefillPeer]:
        """Links to prefill ranks, including those that are closed and still owe loans."""
        return self.core.links.peers.values()

    def link_to(self, info: RankInfo) -> PrefillPeer | None:
        """Return the usable link to exactly this rank, or None."""
        peer = self.core.links.peers.get(PeerKey(Incarnation(info.incarnation), info.control))
        return peer if peer is not None and peer.info.rank == info.rank and peer.usable else None

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
        """Announce a room to the ranks that it will use, and dial those that are not linked. The
        command `Linked` follows when all ranks are linked.

        Pass `announce=False` when `lend` follows at once: if every rank is linked, the Bootstrap
        announces the room. Returns the room's grant.

        Raises: MisuseError, LostError, PeerError, CapacityError, QuarantineError, RefusedError if
        the ranks together do not cover our pool, AbortedError while shutting down. The ranks
        receive an Abort with the cause of the error, unless `room` is invalid, a rank cannot be
        dialled, or this endpoint is closed.
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
            # A rank reports its share of the pool when it links. If a rank is not linked yet,
            # `link_if_ready` makes this check later.
            else:
                why = core.links.coverage.get(peers)
                if why or (why is None and (why := core.links.check_coverage(peers))):
                    raise room_error(Cause(Code.REFUSED, why))
            core.ledger.check_quarantine()
            counts = pages_wanted(core.identity.layout, prompt.tokens, prompt.prefix_tokens)
        except KvflowError as error:
            core.recall(lease, error.cause(), now)
            raise
        record = DecodeRoomRecord(
            lease, peers, prompt, counts, deadline_at_s, now, core.timing.repeat_after_s
        )
        core.rooms[lease.grant] = record
        core.observer.rooms_opened += 1
        if deadline_at_s < float("inf"):
            core.deadlines.set(Timer("deadline", lease.grant), deadline_at_s)
        core.deadlines.set(Timer("stalled", lease.grant), now + record.resync_after_s)
        core.link_if_ready(record, now)
        if announce or not record.linked:
            core.announce(record)
        return lease.grant

    def shorten(self, grant: GrantId, prefix_tokens: int) -> Counts:
        """Change the length of the prefix that decode already has, before the room's pages are
        lent. Returns how many places of each space the room needs now.

        Raises: MisuseError after `lend`, or for a prefix that is neither a whole number of pages
        nor the whole prompt.
        """
        record = self.core.rooms[grant]
        if record.lent:
            raise MisuseError(
                f"room {record.room}: its pages have been lent, with the prefix that was known then"
            )
        counts = pages_wanted(self.core.identity.layout, record.prompt.tokens, prefix_tokens)
        record.shorten(prefix_tokens, counts)
        return counts

    def lend(self, grant: GrantId, pages: PageIndices, now: float) -> bool:
        """Offer `pages` to every rank of a room for which `Linked` was issued. Returns False if the
        room ended meanwhile. The caller then keeps the pages. The list has the places of all spaces
        in the order of the spaces.

        Raises: MisuseError before `Linked`, on a second call, or if the room needs another number
        of places in some space. LayoutError if the places are in another order. CapacityError if
        prefill's pages are smaller, and the room would have too many of them.
        """
        record = self.core.rooms.get(grant)
        if record is None:
            return False
        if record.state.phase is not DecodePhase.BOOTSTRAPPING or not record.linked:
            raise MisuseError(f"room {record.room}: pages can be lent once, after Linked")
        layout = self.core.identity.layout
        if (counts := layout.counted(pages)) != record.counts:
            raise MisuseError(
                f"room {record.room}: {layout.described(counts)} for a room of "
                f"{layout.described(record.counts)}"
            )
        if len(layout.spaces) > 1:
            layout.check_order(pages)
        if sizes := record.peers[0].page_sizes:
            prompt = record.prompt
            record.divide(room_in_fine_pages(layout, sizes, prompt.tokens, prompt.prefix_tokens))
        record.packed_pages = pack_pages(pages)
        record.lent, record.moving_at_s = True, now
        record.lease.counts = counts
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
        """Refuse a room before any page is taken for it, and send `cause` to its prefill ranks.

        Raises: MisuseError if `room` is not a room id; LostError, PeerError, CapacityError if the
        ranks cannot be dialled; AbortedError once the endpoint is closed.
        """
        self.core.recall(self._lease(room, self._peers(ranks, now), now), cause, now)

    def chunk_summed(
        self, grant: GrantId, rank: int, seq: int, checksum: bytes, now: float, *, error: str = ""
    ) -> None:
        """Record the result of a `VerifyChunk`.

        `checksum` is the checksum of the landed chunk, or any non-empty bytes if this decode does
        not verify. It is empty if the work failed; `error` then gives the reason.
        """
        record = self.core.rooms.get(grant)
        if record is None:
            return
        for check in record.checks:
            if check.rank == rank and check.message.seq == seq:
                check.found, check.error = checksum, error
        self.core.land_checked(record, now)

    # --- links

    def receive(self, key: PeerKey, frame: bytes, now: float) -> None:
        """Handle a frame from one prefill. A malformed or foreign frame is dropped (I7)."""
        core = self.core
        message = parsed(_MESSAGES, frame)
        if message is None:
            core.observer.message_dropped("malformed")
            return
        peer = core.links.peers.get(key)
        if peer is None or message.target != core.identity.incarnation:
            core.observer.message_dropped("foreign")
        # Registered is handled before the check of the source, because an answer from another
        # incarnation is how decode learns that prefill restarted.
        elif type(message) is wire.Registered:
            core.registered(peer, message, now)
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
        """Report the data plane's fence: no write from this prefill can reach our pool any more."""
        peer = self.core.links.peers.get(key)
        if peer is not None:
            text = f"prefill at {peer.info.control} died"
            self.core.feed_link(peer, LinkKind.DIED, now, Cause(Code.PEER_LOST, text))
            self.core.work(TICK_WORK, now)

    def declare_dead(self, incarnation: Incarnation, why: str, now: float) -> tuple[int, int]:
        """End the rooms and loans of a prefill that an operator declares dead.

        This is the only way to end a loan of offered pages without proof. The loans that earlier
        nodes over the same pool made to this prefill end too, and this decode never links to that
        incarnation again. If the process is in fact alive, its late writes land in pages that other
        rooms own by then. Returns how many loans end, and how many pages they keep in quarantine.

        Raises: MisuseError if the incarnation is not known here.
        """
        core = self.core
        found = [peer for peer in self.peers if peer.key.incarnation == incarnation]
        if not found and not core.earlier.of(incarnation):
            raise MisuseError(
                f"no prefill {incarnation:016x} is linked here, and none of that incarnation owes "
                "a loan"
            )
        core.observer.declared_dead += 1
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
                core.abort(lease, peer, lease.cause or cause)
            core.feed_link(peer, LinkKind.DECLARED_DEAD, now, cause)
            owed = core.ledger.owed_by(peer)
            loans, pages = loans + owed[0], pages + owed[1]
        core.work(TICK_WORK, now)
        return loans, pages

    def leave(self, now: float) -> None:
        """Abort all rooms and open no more; loans end when prefill proves that its writes ended."""
        self._leaving = Cause(Code.SHUTDOWN, "decode is shutting down")
        self.core.add_task(Task("close", self.rooms, cause=self._leaving))
        self.core.work(TICK_WORK, now)

    def part(self, now: float) -> None:
        """Send Goodbye to every prefill. On a link that is up, `tick` repeats the Goodbye until
        prefill acknowledges it.

        Call this after `leave`, when decode awaits no more proof: prefill then forgets this decode
        and answers no further question about its grants.
        """
        for peer in list(self.peers):
            if peer.phase not in (LinkPhase.PARTING, LinkPhase.GONE):
                self.core.feed_link(peer, LinkKind.LEAVE, now, self._leaving)
        self.core.work(TICK_WORK, now)

    def parting(self, now: float) -> bool:
        """Return True while a prefill that was alive recently has not acknowledged the Goodbye."""
        parting = (peer for peer in self.peers if peer.phase is LinkPhase.PARTING)
        return any(self.core.links.is_recent(peer, now) for peer in parting)

    def close(self, now: float) -> None:
        """Close every link. Rooms that wait for proof end, and their loans stay in doubt."""
        self.leave(now)
        self._closed = True
        for peer in list(self.peers):
            self.core.feed_link(peer, LinkKind.CLOSED, now, self._leaving)
        self.core.work(float("inf"), now)

    def credit_stall(self, late_s: float, now: float) -> None:
        """Extend every peer's silence limit by `late_s`, the time during which the shell stalled.

        Messages that arrived during the stall are unread, so the peers may not have been silent. To
        measure `late_s`, a shell must tick once per heartbeat interval, whether or not a tick is
        due.
        """
        for peer in self.peers:
            # A peer whose message was read after the stall needs no credit, so `received_at_s`
            # never exceeds `now`.
            peer.received_at_s = min(peer.received_at_s + late_s, now)

    # --- time

    def tick(self, now: float) -> None:
        """Act on deadlines, repetitions and silence that are due at `now`.

        A tick does a bounded amount of work. `next_tick` returns the time at which more is due.
        """
        core = self.core
        core.work(TICK_WORK, now)
        beliefs: dict[PrefillPeer, list[wire.Belief]] = {}
        for _ in range(TICK_WORK):
            timer = core.deadlines.pop_due(now)
            if timer is None:
                break
            core.expire(timer, now, beliefs)
        else:
            # This tick may handle no more timers, and under load the links' timers could wait for
            # many ticks. A prefill that receives no heartbeat sends none back, and decode would
            # consider it lost. Links that are due are therefore served regardless of the bound.
            for peer in [peer for peer in self.peers if core.links.due_at_s(peer) <= now]:
                core.link_due(peer, now)
        for peer, rooms in beliefs.items():
            resync = wire.Resync(rooms=tuple(rooms), **peer.between)
            core.outbox.append(SendToPrefill(peer.key, encode(resync)))

    # --- opening a room, step by step

    def _peers(self, ranks: Sequence[RankInfo], now: float) -> tuple[PrefillPeer, ...]:
        core = self.core
        if self._closed:
            assert self._leaving is not None
            raise room_error(self._leaving)
        self._check_ranks(ranks)
        peers = [self.link_to(info) for info in ranks]
        for number, info in enumerate(ranks):
            if peers[number] is None:
                core.make_place(peers, now)
                peers[number] = peer = core.links.dial(info, core.next_grant, now)
                core.deadlines.set(Timer("link", peer.key), core.links.due_at_s(peer))
        return tuple(filter(None, peers))

    def _check_ranks(self, ranks: Sequence[RankInfo]) -> None:
        if not ranks:
            raise LostError("no rank of that prefill is known")
        if len(ranks) > self.bounds.ranks_per_room:
            limit = self.bounds.ranks_per_room
            raise PeerError(
                f"prefill {ranks[0].control} has {len(ranks)} ranks; one room takes {limit} at most"
            )
        # Almost every room has one rank. Testing for this case here saves a call per room.
        if len(ranks) != 1 or ranks[0].world_size != 1 or ranks[0].rank:
            check_ranks(ranks)
        if len(ranks) > 1 and len({info.incarnation for info in ranks}) < len(ranks):
            raise PeerError(
                f"the registry names one incarnation for two ranks of {ranks[0].control}"
            )
        for info in ranks if self.core.links.declared_dead else ():
            if info.incarnation in self.core.links.declared_dead:
                raise LostError(
                    f"prefill {info.incarnation:016x} at {info.control} was declared dead"
                )

    def _lease(self, room: int, peers: tuple[PrefillPeer, ...], now: float) -> Lease[PrefillPeer]:
        core = self.core
        number = room_id(room)
        lease: Lease[PrefillPeer] = Lease(core.take_grant(), number)
        for peer in peers:
            peer.used_at_s = now
            if peer.pace_s and peer.phase is LinkPhase.UP and not core.ledger.owes(peer):
                core.links.wake(peer, now)
                core.deadlines.set(Timer("link", peer.key), now)
            core.ledger.open(lease, peer)
        return lease


# --- messages of prefills


def _on_heartbeat(core: DecodeCore, peer: PrefillPeer, message: wire.Heartbeat, now: float) -> None:
    peer.received_at_s, peer.pace_s = now, message.pace_ms / 1000
    core.feed_link(peer, LinkKind.HEARD, now)


def _on_begun(core: DecodeCore, peer: PrefillPeer, message: wire.Begun, now: float) -> None:
    """Issue `RoomBegun` once every rank of the room sends Begun. After pages are lent, the
    command is not issued, because the room's user no longer waits for it.
    """
    record = _room_of(core, peer, message)
    if record is None or record.phase is not DecodePhase.BOOTSTRAPPING:
        return
    everyone = (1 << len(record.peers)) - 1
    begun = record.begun | 1 << record.peers.index(peer)
    if begun == everyone != record.begun:
        core.outbox.append(RoomBegun(record.grant))
    record.begun = begun


def _on_chunk_done(
    core: DecodeCore, peer: PrefillPeer, message: wire.ChunkDone, now: float
) -> None:
    record = _room_of(core, peer, message)
    if record is None:
        return
    rank, lease = record.peers.index(peer), record.lease
    phase, is_next = lease.loans.get(peer), message.seq == record.next_seq[rank]
    if not is_next or phase is not LoanPhase.LENT:
        # The chunk is a repetition, or follows a lost chunk that Resync will bring, or its loan is
        # no longer lent. The last chunk of a recalled loan cannot help the room, but it proves that
        # every write landed.
        if is_next and phase is LoanPhase.RECALLED and message.last:
            core.feed_loan(lease, peer, LoanKind.LANDED, now)
        else:
            core.observer.message_dropped("stale")
        return
    record.next_seq[rank] += 1
    record.progress_at_s = now
    if record.resync_after_s > core.timing.repeat_after_s:
        core.ask_as_at_first(record, now)
    if core.verify or core.staged:
        spans = record.spans_of(rank, message.pages)
        record.checks.append(ChunkCheck(rank, message, core.verify, fits=spans is not None))
        if spans is not None:
            core.outbox.append(
                VerifyChunk(record.grant, rank, message.seq, spans, peer.served or (), record.fine)
            )
    # The loan ends before the checksum is known: the writes are over even if the bytes differ.
    if message.last:
        core.feed_loan(lease, peer, LoanKind.LANDED, now)
    if core.verify or core.staged:
        core.land_checked(record, now)
    else:
        core.land(record, rank, message, now)


def _on_room_failed(
    core: DecodeCore, peer: PrefillPeer, message: wire.RoomFailed, now: float
) -> None:
    if record := _room_of(core, peer, message):
        core.feed_room(record, DecodeEvent(DecodeKind.ROOM_FAILED, cause=message.cause), now)


def _on_abort_ack(core: DecodeCore, peer: PrefillPeer, message: wire.AbortAck, now: float) -> None:
    lease = core.ledger.find(peer, message.grant)
    if lease is None or lease.room != message.room:
        core.observer.message_dropped("stale")
        return
    core.feed_answer(lease, peer, message.drained, now)


def _on_resync(core: DecodeCore, peer: PrefillPeer, message: wire.Resync, now: float) -> None:
    """Send Bootstrap again for grants that prefill does not know, or end their rooms. Either the
    Bootstrap was lost, or prefill ended the grant and forgot it.
    """
    # A message may name a grant many times. Answering each grant once bounds the work.
    for belief in {belief.grant: belief for belief in message.rooms}.values():
        record = core.rooms.get(belief.grant)
        if record is None or peer not in record.lease.loans or not record.receiving:
            # The question needs no answer: the loan ended, so prefill may forget the grant, or the
            # room receives no chunks.
            continue
        # `next_seq` is the value from decode's own Resync. If it is not 0, chunks of this grant
        # landed, and prefill forgot the grant afterwards. Another Bootstrap would repeat the
        # writes of these chunks.
        if belief.next_seq:
            cause = Cause(Code.STALE_GRANT, f"room {record.room}: prefill remembers nothing of it")
            core.feed_room(record, DecodeEvent(DecodeKind.ENDED_LOCALLY, cause=cause), now)
        # No chunk from this rank has landed, but chunks from other ranks may have.
        elif record.next_seq[record.peers.index(peer)] == 0:
            core.lend(record, peer)


def _on_goodbye(core: DecodeCore, peer: PrefillPeer, message: wire.Goodbye, now: float) -> None:
    """End the link to a prefill that closed. Its Goodbye proves that every write for this decode
    landed, except under the grants it names (I2, I6).
    """
    peer.unproven, peer.asked_again = frozenset(message.unproven), False
    cause = Cause(Code.SHUTDOWN, f"prefill at {peer.info.control} has shut down")
    core.feed_link(peer, LinkKind.GOODBYE, now, cause)


def _on_goodbye_ack(
    core: DecodeCore, peer: PrefillPeer, message: wire.GoodbyeAck, now: float
) -> None:
    core.feed_link(peer, LinkKind.ACKNOWLEDGED, now)


def _room_of(
    core: DecodeCore, peer: PrefillPeer, message: wire.Begun | wire.ChunkDone | wire.RoomFailed
) -> DecodeRoomRecord | None:
    record = core.rooms.get(message.grant)
    if record is None or record.room != message.room or peer not in record.peers:
        core.observer.message_dropped("stale")
        return None
    return record


HANDLERS: dict[type, Callable[[DecodeCore, PrefillPeer, Any, float], None]] = {
    wire.Heartbeat: _on_heartbeat,
    wire.Begun: _on_begun,
    wire.ChunkDone: _on_chunk_done,
    wire.RoomFailed: _on_room_failed,
    wire.AbortAck: _on_abort_ack,
    wire.Resync: _on_resync,
    wire.Goodbye: _on_goodbye,
    wire.GoodbyeAck: _on_goodbye_ack,
}
