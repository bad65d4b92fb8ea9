"""Handlers at decode, one for each message that a prefill sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvflow.protocols.commands import PeerKey, RoomBegun, VerifyChunk
from kvflow.protocols.decode.core import DecodeCore
from kvflow.protocols.decode.links import PrefillPeer
from kvflow.protocols.decode.records import ChunkCheck, DecodeRoomRecord
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machines.decode_room import DecodeEvent, DecodeKind, DecodePhase
from kvflow.protocols.machines.link import LinkKind
from kvflow.protocols.machines.loan import LoanKind, LoanPhase
from kvflow.protocols.wire import messages as wire


def on_registered(
    core: DecodeCore, peer: PrefillPeer, message: wire.Registered, now: float
) -> None:
    """Accept, refuse or replace the link whose Register this message answers."""
    # Two incarnations may share an address, one of them gone. `asked` names the incarnation that
    # decode addressed, so the answer belongs to that link and not to the sender's.
    key = PeerKey(message.asked or peer.key.incarnation, peer.key.control)
    asked = core.links.peers.get(key)
    if asked is None:
        core.observer.message_dropped("stale")
        return
    kind, cause = core.links.registered(asked, message)
    if kind is None:
        core.observer.message_dropped("stale")
        return
    if kind is LinkKind.ACCEPTED:
        asked.received_at_s = now
        asked.address = asked.address or message.address
        asked.served = message.served if asked.served is None else asked.served
        core.ledger.note_known(asked, asked.fresh_from)
    core.feed_link(asked, kind, now, cause)


def _on_heartbeat(core: DecodeCore, peer: PrefillPeer, message: wire.Heartbeat, now: float) -> None:
    peer.received_at_s = now
    core.feed_link(peer, LinkKind.HEARD, now)


def _on_begun(core: DecodeCore, peer: PrefillPeer, message: wire.Begun, now: float) -> None:
    """Issue `RoomBegun` once, when the last rank of the room begins.

    Once pages are lent the message has no effect: the room's user no longer waits for it.
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
    """Land an in-order chunk; if transfers are verified or staged, request that work first."""
    record = _room_of(core, peer, message)
    if record is None:
        return
    rank, lease = record.peers.index(peer), record.lease
    phase, is_next = lease.loans.get(peer), message.seq == record.next_seq(rank)
    if not is_next or phase is not LoanPhase.LENT:
        # The chunk is a repetition, or follows a lost one that Resync will bring, or its loan is
        # no longer lent. The last chunk of a recalled loan cannot help the room, but it proves that
        # every write landed.
        if is_next and phase is LoanPhase.RECALLED and message.last:
            core.feed_loan(lease, peer, LoanKind.LANDED, now)
        else:
            core.observer.message_dropped("stale")
        return
    record.progress_at_s = now
    if record.resync_after_s > core.timing.repeat_after_s:
        core.ask_as_at_first(record, now)
    if core.verify or core.staged:
        first = record.first_page(rank)
        record.checks.append(ChunkCheck(rank, message, core.verify))
        core.outbox.append(
            VerifyChunk(record.grant, rank, message.seq, first, message.pages, peer.served or ())
        )
    # The loan ends before the checksum is known: the writes are over even if the bytes differ.
    if message.last:
        core.feed_loan(lease, peer, LoanKind.LANDED, now)
    if not (core.verify or core.staged):
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
    """Send Bootstrap again for grants that prefill does not know, or end their rooms.

    Such a Bootstrap was lost, or prefill ended the grant so long ago that it forgot it.
    """
    # A message may name a grant many times; one answer to each bounds the work.
    for belief in {belief.grant: belief for belief in message.rooms}.values():
        record = core.rooms.get(belief.grant)
        if record is None or peer not in record.lease.loans or not record.receiving:
            # A rank whose loan ended may forget the grant.
            continue
        # `next_seq` is the value that decode asked with. If it is not 0, chunks of this grant
        # landed, and prefill forgot it since: sending Bootstrap again would repeat their writes.
        if belief.next_seq:
            cause = Cause(Code.STALE_GRANT, f"room {record.room}: prefill remembers nothing of it")
            core.feed_room(record, DecodeEvent(DecodeKind.ENDED_LOCALLY, cause=cause), now)
        # This rank landed no chunk; other ranks of the room may have.
        elif record.next_seq(record.peers.index(peer)) == 0:
            core.links.send(peer, record.bootstrap(peer, core.identity.incarnation))


def _on_goodbye(core: DecodeCore, peer: PrefillPeer, message: wire.Goodbye, now: float) -> None:
    """End the link to a prefill that closed.

    Its Goodbye proves that every write for this decode landed, except under the grants it names
    (I2, I6).
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
    """Return the open room that a message is about; count the message as stale if there is none."""
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
