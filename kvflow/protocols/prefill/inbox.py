"""Handlers at prefill for the messages of decodes, and for the commands of the grant table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvflow.protocols.commands import OpenRoute, SendToDecode
from kvflow.protocols.errors import CapacityError, Cause, Code, KvflowError, MisuseError, PeerError
from kvflow.protocols.machines.grants import GrantCommand, GrantKind
from kvflow.protocols.machines.peer import PeerKind, PeerPhase
from kvflow.protocols.machines.prefill_room import PrefillEvent, PrefillKind, PrefillPhase
from kvflow.protocols.machines.rendezvous import Announcement, Side
from kvflow.protocols.pages.layout import PageIndices, unpack_pages
from kvflow.protocols.ports import PlaneAddress
from kvflow.protocols.prefill.core import WITHDRAWN, PrefillCore
from kvflow.protocols.prefill.peers import DecodePeer
from kvflow.protocols.prefill.records import PrefillRoomRecord, pinned_pages
from kvflow.protocols.prefill.tasks import Task
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.codec import encode, routing_id
from kvflow.protocols.wire.messages import WIRE_VERSION

DRAINS = "room {} is in use: writes of the last room of that id still run"


def on_register(
    core: PrefillCore, message: wire.Register, now: float, sender_address: Callable[[], str] = str
) -> None:
    """Register a decode: refuse it, or ask the shell to open a route into its pool."""
    peer = core.peers.get(message.target)
    # `make_place` below may push this decode's own entry out of the bounded memory, so it is read
    # first.
    seen_below = core.former.displaced.get(message.target)
    if message.target in core.former.parted:
        core.observer.message_dropped("stale")
    elif message.wire_version != WIRE_VERSION:
        core.answer_register(
            message.target,
            message.source,
            f"wire version {message.wire_version}, this prefill speaks {WIRE_VERSION}",
        )
    elif peer is not None:
        note_alive(core, peer, now)
        peer.fresh_from = max(peer.fresh_from, message.fresh_from)
        _end_withdrawn(core, peer, peer.grants.begin_from(message.fresh_from), now)
        core.feed_peer(peer, PeerKind.REGISTERED, now)
    # No grant of this decode was begun here, and none will be, so a Goodbye answers it for good.
    elif core.leaving is not None:
        core.say_goodbye(message.target, core.former.in_doubt.get(message.target, ()))
    elif core.unavailable_reason:
        core.answer_register(message.target, message.source, core.unavailable_reason)
    elif len(core.peers) >= core.bounds.targets and not core.make_place(core.peers.values(), now):
        core.answer_register(
            message.target, message.source, f"{core.bounds.targets} decodes are registered already"
        )
    elif len(
        siblings := _of_process(core, message)
    ) >= core.bounds.decodes_per_process and not core.make_place(siblings, now):
        refusal = (
            f"{len(siblings)} decodes of process {message.address.process.pid} are registered "
            "already"
        )
        core.answer_register(message.target, message.source, refusal)
    elif (
        (sender := sender_address())
        and len(neighbours := _at_address(core, sender)) >= core.bounds.decodes_per_address
        and not core.make_place(neighbours, now)
    ):
        limit = core.bounds.decodes_per_address
        refusal = (
            f"{len(neighbours)} decodes at {sender} are registered already, of at most {limit} for "
            "one address"
        )
        core.answer_register(message.target, message.source, refusal)
    else:
        peer = core.peers[message.target] = DecodePeer(
            message, core.bounds.closed_grants, core.kept, now, sender, seen_below
        )
        peer.grants.remember_doubts(core.former.in_doubt.pop(message.target, ()))
        core.former.displaced.pop(message.target, None)
        if refusal := peer.mismatch(core.identity):
            core.feed_peer(peer, PeerKind.ROUTE_REFUSED, now, Cause(Code.REFUSED, refusal))
        else:
            core.refused.pop(message.target, None)
            core.outbox.append(OpenRoute(peer.incarnation, peer.address, peer.layout))


def _of_process(core: PrefillCore, message: wire.Register) -> list[DecodePeer]:
    """Return the registered decodes that named the same process as this one."""

    def process_of(address: PlaneAddress) -> tuple[str, str, int, int]:
        # The other fields of the identity do not tell processes apart, and a decode could vary them
        # to pass for another process.
        process = address.process
        return process.boot_id, process.pid_namespace, process.pid, process.start_ticks

    named = process_of(message.address)
    return [peer for peer in core.peers.values() if process_of(peer.address) == named]


def _at_address(core: PrefillCore, sender_address: str) -> list[DecodePeer]:
    """Return the registered decodes whose connection comes from one network address."""
    return [peer for peer in core.peers.values() if peer.sender_address == sender_address]


def note_alive(core: PrefillCore, peer: DecodePeer, now: float) -> None:
    """Record that a peer sent a message; a silent peer is up again."""
    peer.received_at_s = now
    if peer.phase is PeerPhase.SILENT:
        core.feed_peer(peer, PeerKind.HEARD, now)


def on_goodbye(core: PrefillCore, message: wire.Goodbye, now: float) -> None:
    """Acknowledge the Goodbye of a decode, and forget the decode when its rooms end.

    Every Goodbye is acknowledged, also one from a decode that is forgotten already.
    """
    peer = core.peers.get(message.target)
    core.outbox.append(
        SendToDecode(
            routing_id(message.target), encode(wire.GoodbyeAck(**core.lives(message.target)))
        )
    )
    if peer is not None and peer.phase is not PeerPhase.GONE:
        note_alive(core, peer, now)
        _part(core, peer, now)
    elif message.target in core.former.displaced or message.target in core.former.in_doubt:
        core.former.remember_parted(message.target)


def _on_goodbye_ack(
    core: PrefillCore, peer: DecodePeer, message: wire.GoodbyeAck, now: float
) -> None:
    if peer.phase is PeerPhase.PARTING:
        _part(core, peer, now)
    else:
        core.observer.message_dropped("stale")


def _part(core: PrefillCore, peer: DecodePeer, now: float) -> None:
    core.former.remember_parted(peer.incarnation)
    cause = core.leaving or Cause(Code.SHUTDOWN, f"decode {peer.incarnation:016x} has shut down")
    core.feed_peer(peer, PeerKind.PARTED, now, cause)


def on_room_of_refused(core: PrefillCore, message: wire.Announce | wire.Abort, now: float) -> None:
    """End the engine's half of a room that a refused decode announces or aborts."""
    cause = core.refused.get(message.target)
    if cause is None:
        core.observer.message_dropped("stale")
        return
    if isinstance(message, wire.Announce):
        if core.rendezvous.has_ended(message.room, Side.ENGINE):
            # The engine's outcome is kept: if this decode is accepted later, it announces the room
            # again and then receives it.
            return
        core.end_engine_half(
            message.room, Cause(cause.code, f"prefill refused this decode: {cause.text}"), now
        )
    else:
        core.end_engine_half(message.room, message.cause, now)


def _on_grant(kind: GrantKind) -> Callable[[PrefillCore, DecodePeer, Any, float], None]:
    """Return a handler that feeds `kind` to the message's grant and runs the commands."""

    def handle(core: PrefillCore, peer: DecodePeer, message: Any, now: float) -> None:
        for command in peer.grants.feed(message.grant, kind):
            _RUN[command](core, peer, message, now)

    return handle


def _on_resync(core: PrefillCore, peer: DecodePeer, message: wire.Resync, now: float) -> None:
    """Repeat the messages that decode missed, and name the grants that are unknown here."""
    unknown: list[wire.Belief] = []
    # A message may name a grant many times; one answer to each bounds the work.
    for belief in {belief.grant: belief for belief in message.rooms}.values():
        record = peer.grants.rooms.get(belief.grant)
        # A room without a Bootstrap is only announced: its grant is reported as unknown, so that
        # decode sends the Bootstrap.
        offered = record is None or record.bootstrap is not None
        for command in peer.grants.feed(belief.grant, GrantKind.ASK):
            if command is GrantCommand.RESEND and offered:
                resend(core, peer, belief.grant, belief.next_seq)
            else:
                unknown.append(belief)
    if unknown:
        core.send(peer, wire.Resync(rooms=tuple(unknown), **core.lives(peer.incarnation)))


def _on_heartbeat(core: PrefillCore, peer: DecodePeer, message: wire.Heartbeat, now: float) -> None:
    withdrawn = peer.grants.settle(message.settled_below, message.settled)
    if withdrawn is None:
        # It settles grants that this decode never sent here, so it cannot be genuine.
        core.observer.message_dropped("foreign")
        return
    _end_withdrawn(core, peer, withdrawn, now)
    # Without an answer decode takes this prefill for silent and ends its rooms. That is intended
    # while the data plane stands still.
    if not core.unavailable_reason:
        core.send(peer, wire.Heartbeat(**core.lives(peer.incarnation)))


def _end_withdrawn(
    core: PrefillCore,
    peer: DecodePeer,
    withdrawn: list[tuple[wire.GrantId, wire.RoomId]],
    now: float,
) -> None:
    """Queue the end of announcements that ended at decode, and whose Abort did not arrive yet."""
    core.add_task(Task("withdraw", withdrawn, WITHDRAWN, peer))


HANDLERS: dict[type, Callable[[PrefillCore, DecodePeer, Any, float], None]] = {
    wire.Announce: _on_grant(GrantKind.ANNOUNCE),
    wire.Bootstrap: _on_grant(GrantKind.BOOTSTRAP),
    wire.Abort: _on_grant(GrantKind.ABORT),
    wire.Resync: _on_resync,
    wire.Heartbeat: _on_heartbeat,
    wire.GoodbyeAck: _on_goodbye_ack,
}


# --- what a grant's table asks for


def _expect(core: PrefillCore, peer: DecodePeer, message: wire.Announce, now: float) -> None:
    """Keep the announcement of a room, join it with the engine's half, or refuse it.

    The engine's half of an announced room waits as long as this decode lives.
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
    """Admit decode's half of a room, or refuse it at once."""
    if message.grant in peer.grants.announcements.rooms:
        core.forget_announcement(peer, message.grant)
    if _refuse_pinned(core, peer, message, now):
        return
    record = core.rooms.get(message.room)
    try:
        pages = _offered(core, peer, message)
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
    core.offer(record, message, pages, now)


def _refuse_pinned(
    core: PrefillCore, peer: DecodePeer, message: wire.Announce | wire.Bootstrap, now: float
) -> bool:
    """Refuse a room of a decode whose earlier writes hold too many of our pages.

    Both halves receive the cause. Returns True if the room is refused.
    """
    if core.bounds.pinned_share == 1:
        return False
    # Writes that were cancelled a moment ago do not count: on a healthy route they end within
    # milliseconds.
    limit = core.bounds.pinned_limit(core.identity.layout.num_pages)
    pinned = pinned_pages(core.writes.values(), peer, now - core.timing.repeat_after_s)
    if pinned <= limit:
        return False
    cause = CapacityError(
        "pages held by writes to this decode that do not end", pinned, limit
    ).cause()
    core.refuse_grant(peer, message.room, message.grant, cause)
    # If the room is announced by another decode, the engine's half waits for that one.
    if message.room not in core.rendezvous.announced:
        core.end_engine_half(message.room, cause, now)
    return True


def _unwelcome(
    core: PrefillCore, message: wire.Bootstrap, record: PrefillRoomRecord | None, now: float
) -> Cause | None:
    """Return why no room can begin with this offer, or None if one can. Raises: CapacityError."""
    if core.leaving is not None:
        return core.leaving
    if message.room in core.rendezvous.announced and core.announced(message.room, now) is not None:
        return _in_use(core, message, record, now)
    if record is not None:
        return (
            None if record.phase is PrefillPhase.EXPECTED else _in_use(core, message, record, now)
        )
    if cause := core.rendezvous.take(message.room, Side.DECODE):
        return cause
    if len(core.rooms) >= core.bounds.rooms:
        raise CapacityError("rooms at prefill", len(core.rooms) + 1, core.bounds.rooms)
    return None


def _offered(core: PrefillCore, peer: DecodePeer, message: wire.Bootstrap) -> PageIndices:
    """Return the pages of an offer. Raises: KvflowError if they do not fit the prompt or pool."""
    layout, prefix = core.identity.layout, message.prefix_tokens
    if prefix > message.prompt_tokens or (
        prefix % layout.page_size and prefix != message.prompt_tokens
    ):
        raise PeerError(
            f"prefix of {prefix} tokens for a prompt of {message.prompt_tokens}, "
            f"{layout.page_size} a page"
        )
    pages = unpack_pages(message.pages, peer.layout.num_places)
    wanted = layout.places_for(message.prompt_tokens, prefix)
    if len(pages) != wanted or not message.prompt_tokens:
        raise MisuseError(f"{len(pages)} pages lent, {message.prompt_tokens} tokens need {wanted}")
    if peer.layout.num_rows:
        peer.layout.check_places(pages)
    return pages


def _in_use(
    core: PrefillCore,
    message: wire.Announce | wire.Bootstrap,
    record: PrefillRoomRecord | None,
    now: float,
) -> Cause:
    """Return the cause for a decode whose room is in use."""
    if record is None or not record.ended:
        return Cause(Code.ROOM_IN_USE, f"room {message.room} has a decode already")
    cause = Cause(Code.ROOM_IN_USE, DRAINS.format(message.room))
    # The engine's half of the refused room did not arrive yet; it receives the same cause then.
    core.record_outcome(message.room, Side.DECODE, cause, now)
    return cause


def _tell_room(
    core: PrefillCore,
    peer: DecodePeer,
    message: wire.Announce | wire.Bootstrap | wire.Abort,
    now: float,
) -> None:
    """Pass a message to the room that answers for its grant: an Abort, a repeated announcement, or
    the pages of an announced room.
    """
    record = peer.grants.rooms[message.grant]
    if isinstance(message, wire.Announce):
        core.tell_begun(record)
    elif isinstance(message, wire.Abort):
        core.feed_room(record, PrefillEvent(PrefillKind.ABORT_RECEIVED, cause=message.cause), now)
    elif record.bootstrap is None and record.room == message.room:
        try:
            pages = _offered(core, peer, message)
        except KvflowError as error:
            core.feed_room(record, PrefillEvent(PrefillKind.MISMATCHED, cause=error.cause()), now)
        else:
            core.offer(record, message, pages, now)


def resend(core: PrefillCore, peer: DecodePeer, grant: wire.GrantId, next_seq: int) -> None:
    """Send the messages about one grant again, without the chunks below `next_seq`."""
    record = peer.grants.rooms.get(grant)
    for message in peer.grants.last_messages(grant) if record is None else record.sent:
        if type(message) is not wire.ChunkDone or message.seq >= next_seq:
            core.send(peer, message)


def _resend_all(
    core: PrefillCore, peer: DecodePeer, message: wire.Announce | wire.Bootstrap, now: float
) -> None:
    resend(core, peer, message.grant, 0)


def _refuse_stale(
    core: PrefillCore, peer: DecodePeer, message: wire.Announce | wire.Bootstrap, now: float
) -> None:
    text = f"grant {message.grant} is below {peer.grants.low_water}: it has ended"
    header = core.header(message.room, message.grant, peer)
    core.send(peer, wire.RoomFailed(cause=Cause(Code.STALE_GRANT, text), **header))
    core.send(peer, wire.AbortAck(drained=peer.grants.is_drained(message.grant), **header))


def _end_other_half(core: PrefillCore, peer: DecodePeer, message: wire.Abort, now: float) -> None:
    """End a grant that decode aborts and that has no room here, and the engine's half with it.

    Decode offered no pages, or its Bootstrap was lost.
    """
    core.forget_announcement(peer, message.grant)
    peer.grants.end(message.grant, ())
    # If another decode announced the room since, the engine's half waits for that one.
    if message.room not in core.rendezvous.announced:
        core.end_engine_half(message.room, message.cause, now)


def _acknowledge(core: PrefillCore, peer: DecodePeer, message: wire.Abort, now: float) -> None:
    drained = peer.grants.is_drained(message.grant)
    core.send(
        peer, wire.AbortAck(drained=drained, **core.header(message.room, message.grant, peer))
    )


_RUN: dict[GrantCommand, Callable[[PrefillCore, DecodePeer, Any, float], None]] = {
    GrantCommand.EXPECT: _expect,
    GrantCommand.ADMIT: _admit,
    GrantCommand.TELL_ROOM: _tell_room,
    GrantCommand.RESEND: _resend_all,
    GrantCommand.REFUSE_STALE: _refuse_stale,
    GrantCommand.END_OTHER_HALF: _end_other_half,
    GrantCommand.ACKNOWLEDGE: _acknowledge,
}
