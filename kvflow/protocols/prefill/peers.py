"""The decodes of one prefill rank: routes into their pools, their grants, and former decodes."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any

import msgspec

from kvflow.protocols.commands import (
    CloseRoute,
    OpenRoute,
    PrefillCommand,
    SendToDecode,
    WatchProcess,
)
from kvflow.protocols.earlier import EarlierWriter
from kvflow.protocols.errors import Cause, Code, KvflowError, LayoutError
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machinery import Core, Task, Timer
from kvflow.protocols.machines.grants import GrantTable, KeptBytes
from kvflow.protocols.machines.ledger import Ledger
from kvflow.protocols.machines.peer import TABLE, PeerCommand, PeerKind, PeerPhase
from kvflow.protocols.pages.coverage import served_of
from kvflow.protocols.pages.differences import differences
from kvflow.protocols.pages.fine import in_common_pages
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.pages.spaces import Counts
from kvflow.protocols.ports import Observer, PlaneAddress
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.codec import encode, routing_id
from kvflow.protocols.wire.messages import (
    MAX_PACE_MS,
    MAX_TEXT,
    MAX_UNPROVEN,
    WIRE_VERSION,
    GrantId,
    Incarnation,
    Rank,
    RoomId,
)

WITHDRAWN = Cause(Code.CLIENT_GONE, "decode has withdrawn the room")
# The silence of a paced decode is noticed this share of its pace later, at most.
_SILENCE_GRAIN = 0.01
_NO_GRANT = GrantId(0)
_NO_CAUSE = Cause(Code.PEER_LOST)  # for peer events that end no room


class PrefillIdentity(msgspec.Struct, frozen=True):
    """The identity of a prefill rank: its incarnation, its rank, the layout of its pool, and the
    address of its data plane.
    """

    incarnation: Incarnation
    rank: Rank
    layout: PoolLayout
    address: PlaneAddress


class DecodePeer:
    """One registered decode incarnation. It is kept through silence, and forgotten when it dies or
    parts, or when another decode needs its place.
    """

    __slots__ = (
        *(
            "address",
            "fresh_from",
            "grants",
            "incarnation",
            "layout",
            "pace_s",
            "page_sizes",
            "phase",
            "received_at_s",
            "routing_id",
        ),
        *("sender_address", "unknown_below"),
    )

    def __init__(
        self,
        message: wire.Register,
        closed_grants: int,
        kept: KeptBytes,
        now: float,
        sender_address: str = "",
        seen_below: GrantId | None = None,
    ) -> None:
        """Create a peer from its first Register, which came from `sender_address` (empty if
        unknown). `seen_below` is the bound that was recorded when this decode was last forgotten,
        or None for a stranger.
        """
        self.incarnation = message.target
        self.routing_id = routing_id(message.target)
        self.layout = message.layout
        # The page sizes in which chunks for this decode are counted, by space, if the two pools
        # have pages of different sizes; otherwise empty. See `mismatch`.
        self.page_sizes: Counts = ()
        self.address = msgspec.structs.replace(message.address, owner=message.target)
        self.sender_address = sender_address
        self.phase = PeerPhase.OPENING
        self.received_at_s = now
        self.pace_s = 0.0  # `Heartbeat.pace_ms`, in seconds, of the last heartbeat to this decode
        self.fresh_from = message.fresh_from  # the highest that its Registers stated
        self.grants: GrantTable[Any] = GrantTable(closed_grants, message.fresh_from, kept)
        if seen_below is not None:
            self.grants.begin_from(seen_below)
        # A stranger has had no grants here. A decode with a recorded bound has had some, and 0 is
        # below every bound: see `has_had_grants`.
        self.unknown_below = message.fresh_from if seen_below is None else GrantId(0)

    def __repr__(self) -> str:
        return f"<DecodePeer {self.incarnation:016x}: {self.phase.name.lower()}>"

    @property
    def is_up(self) -> bool:
        return self.phase is PeerPhase.UP

    @property
    def has_had_grants(self) -> bool:
        """True if this decode may have used grants here, now or before it was last forgotten."""
        return self.grants.seen_below > self.unknown_below

    @property
    def displaceable(self) -> bool:
        """True while this decode may be forgotten: it is silent and has no open grant. Its grants
        in doubt must be remembered even then (I2).
        """
        return self.phase is PeerPhase.SILENT and self.grants.all_ended

    def mismatch(self, identity: PrefillIdentity) -> str:
        """Return the reason why pages cannot move from our pool into this peer's pool, or an empty
        string if they can. Then `page_sizes` is known too.
        """
        if self.address.backend != identity.address.backend:
            return (
                f"data planes differ: prefill {identity.address.backend}, decode "
                f"{self.address.backend}"
            )
        try:
            self.layout.check()
            ours, theirs = in_common_pages(identity.layout, self.layout)
            # This rank may have only some of the entries of decode's pool. Decode checks that all
            # ranks together have them all.
            if found := differences(ours, theirs, partly=True):
                raise LayoutError("; ".join(found))
        except KvflowError as error:
            return str(error)
        if ours is not identity.layout or theirs is not self.layout:
            self.page_sizes = tuple(space.page_size for space in theirs.spaces)
        return ""


class Crowds:
    """Registered decodes by process and by network address, each group in order of registration.

    The groups are kept, because a search over all decodes at each registration would take seconds
    of the event loop when thousands register at once.
    """

    def __init__(self) -> None:
        self._processes: dict[Hashable, dict[Incarnation, DecodePeer]] = {}
        self._addresses: dict[Hashable, dict[Incarnation, DecodePeer]] = {}

    def of_process(self, address: PlaneAddress) -> Collection[DecodePeer]:
        return self._processes.get(_process_of(address), _NOBODY).values()

    def at_address(self, sender_address: str) -> Collection[DecodePeer]:
        """Return the decodes at an address, or none for an empty one, which is not known."""
        return self._addresses.get(sender_address, _NOBODY).values()

    def add(self, peer: DecodePeer) -> None:
        for groups, key in self._groups_of(peer):
            groups.setdefault(key, {})[peer.incarnation] = peer

    def remove(self, peer: DecodePeer) -> None:
        for groups, key in self._groups_of(peer):
            group = groups[key]
            del group[peer.incarnation]
            if not group:
                del groups[key]

    def _groups_of(
        self, peer: DecodePeer
    ) -> Iterator[tuple[dict[Hashable, dict[Incarnation, DecodePeer]], Hashable]]:
        yield self._processes, _process_of(peer.address)
        if peer.sender_address:
            yield self._addresses, peer.sender_address


_NOBODY: dict[Incarnation, DecodePeer] = {}


def _process_of(address: PlaneAddress) -> Hashable:
    # The other fields of the identity do not distinguish processes, and a decode could vary them to
    # pass for another process.
    process = address.process
    return process.boot_id, process.pid_namespace, process.pid, process.start_ticks


class FormerDecodes:
    """Records of forgotten decodes. Each kind of record is bounded by `most`, and the oldest are
    dropped first. Grants in doubt are never dropped. Instead, a decode is not displaced if its
    grants in doubt would exceed the bound.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # For each decode, the bound below which no grant begins again. A message that the decode
        # sent before it was forgotten may still arrive.
        self.displaced: OrderedDict[Incarnation, GrantId] = OrderedDict()
        # The grants in doubt of forgotten decodes. Without these records, a later acknowledgement
        # would call such a grant drained, and end its loan without proof (I2).
        self.in_doubt: dict[Incarnation, tuple[GrantId, ...]] = {}
        # Decodes that parted. A message from them that still arrives is late, and begins nothing.
        self.parted: OrderedDict[Incarnation, None] = OrderedDict()

    def remember_grants(self, peer: DecodePeer) -> None:
        """Record, before a decode is forgotten, which of its grants must not begin again (I6)."""
        # A silent decode may register again, and late messages from a dead one may arrive.
        self.displaced[peer.incarnation] = peer.grants.seen_below
        if len(self.displaced) > self._most:
            self.displaced.popitem(last=False)

    def remember_doubts(self, peer: DecodePeer) -> None:
        if doubts := peer.grants.unproven():
            self.in_doubt[peer.incarnation] = doubts

    def remember_parted(self, incarnation: Incarnation) -> None:
        """Record that a decode parted, so that its late messages begin nothing."""
        self.parted[incarnation] = None
        self.displaced.pop(incarnation, None)
        self.in_doubt.pop(incarnation, None)
        if len(self.parted) > self._most:
            self.parted.popitem(last=False)

    def displace(self, among: Iterable[DecodePeer]) -> DecodePeer | None:
        """Choose a silent decode without open grants, record its grants, and return it. Returns
        None if there is no such decode, or if the grants in doubt would exceed the bound.
        """
        found: tuple[int, DecodePeer] | None = None
        for candidate in among:
            if candidate.displaceable:
                doubts = len(candidate.grants.unproven())
                # Grants in doubt must stay recorded, so the decode with the fewest is chosen. The
                # first one without any ends the search.
                if found is None or doubts < found[0]:
                    found = doubts, candidate
                if not doubts:
                    break
        if found is None:
            return None
        doubts, peer = found
        if doubts and doubts + sum(map(len, self.in_doubt.values())) > self._most:
            return None
        self.remember_grants(peer)
        self.remember_doubts(peer)
        return peer


class PrefillPeers(Core):
    """Base class of `PrefillCore`: the decodes of one prefill rank, and the machine of each. An
    event that ends rooms queues a task, which the subclass runs.
    """

    outbox: list[PrefillCommand]
    ledger: Ledger[EarlierWriter]  # only loans of earlier nodes: prefill lends no pages

    def __init__(
        self, identity: PrefillIdentity, observer: Observer, timing: Timing, bounds: Bounds
    ) -> None:
        super().__init__(identity.layout, observer, timing, bounds)
        self.identity = identity
        self.peers: dict[Incarnation, DecodePeer] = {}
        self.crowds = Crowds()
        self._num_silent = 0  # decodes whose phase is SILENT
        self.kept = KeptBytes()
        # For each refused decode, the cause of the refusal. Rooms that the decode announced before
        # it received the refusal end with this cause.
        self.refused: OrderedDict[Incarnation, Cause] = OrderedDict()
        self.former = FormerDecodes(bounds.closed_grants)
        self.leaving: Cause | None = None
        self.stalled_s = 0.0
        self._served = served_of(identity.layout)

    @property
    def unavailable_reason(self) -> str:
        """The reason why this prefill cannot move pages now, or an empty string when it can. The
        only possible reason is a data plane that has made no progress for too long. A long queue
        is no reason.
        """
        if self.stalled_s <= self.timing.lost_after_s:
            return ""
        dead = self.stalled_s == float("inf")
        how = "has died" if dead else f"has not moved for {self.stalled_s:.0f} s"
        return f"the worker of the {self.identity.address.backend} data plane {how}"

    # --- sending

    def send(self, peer: DecodePeer, message: wire.Message) -> None:
        """Queue a message. An AbortAck leaves at once, because decode's pages wait for it."""
        self.outbox.append(
            SendToDecode(peer.routing_id, encode(message), type(message) is wire.AbortAck)
        )

    def answer_register(
        self,
        target: Incarnation,
        asked: Incarnation,
        refusal: str,
        fresh_from: GrantId = _NO_GRANT,
        page_sizes: Counts = (),
    ) -> None:
        """Accept decode `target`, or refuse it if `refusal` is not empty. `asked` is the
        incarnation to which decode addressed its message.
        """
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
            page_sizes=page_sizes,
        )
        self.outbox.append(SendToDecode(routing_id(target), encode(answer)))

    def say_goodbye(self, target: Incarnation, unproven: tuple[GrantId, ...]) -> None:
        """Send Goodbye, if it can name all unproven grants."""
        # A Goodbye proves the end of every grant that it does not name.
        if len(unproven) <= MAX_UNPROVEN:
            goodbye = wire.Goodbye(unproven=unproven, **self.lives(target))
            self.outbox.append(SendToDecode(routing_id(target), encode(goodbye)))

    def lives(self, target: Incarnation) -> dict[str, Any]:
        return {"source": self.identity.incarnation, "target": target}

    def beat(self, peer: DecodePeer, now: float) -> None:
        """Send a heartbeat. A crowd of decodes is asked to send its own less often, because to
        answer thousands each second would take half of a core.
        """
        pace_ms = 1000 * len(self.peers) // max(1, self.bounds.idle_heartbeats_per_s)
        if pace_ms <= 1000 * self.timing.heartbeat_s:
            pace_ms = 0
        pace_ms = min(pace_ms, MAX_PACE_MS)
        before_s, peer.pace_s = peer.pace_s, pace_ms / 1000
        if peer.pace_s < before_s:
            silent_s = self.timing.lost_after_s + peer.pace_s
            self.deadlines.advance(Timer("silence", peer.incarnation), now + silent_s)
        self.send(peer, wire.Heartbeat(pace_ms=pace_ms, **self.lives(peer.incarnation)))

    def silent_after_s(self, peer: DecodePeer) -> float:
        """Return how long a decode may be silent. Without rooms it may keep to the pace that it was
        asked for.
        """
        return self.timing.lost_after_s + (peer.pace_s if peer.grants.all_ended else 0.0)

    def silent_at_s(self, peer: DecodePeer) -> float:
        """Return when to look whether a decode is silent: when it may be, or a little later."""
        at_s = peer.received_at_s + self.silent_after_s(peer)
        # Of a crowd, one tick looks at many. With a tick for each, an idle prefill would wake a
        # hundred times per second for it.
        grain_s = peer.pace_s * _SILENCE_GRAIN
        # Rounding must not lead to a time before `at_s`: the tick would come again and again.
        return max(at_s, math.ceil(at_s / grain_s) * grain_s) if grain_s else at_s

    # --- what a decode sends

    def register(
        self, message: wire.Register, now: float, sender_address: Callable[[], str] = str
    ) -> None:
        """Handle Register. A new decode is refused, or the shell opens a route into its pool."""
        peer = self.peers.get(message.target)
        # `make_place` below may evict this decode's own entry from `former.displaced`, so the entry
        # is read first.
        seen_below = self.former.displaced.get(message.target)
        if message.target in self.former.parted:
            self.observer.message_dropped("stale")
        elif message.wire_version != WIRE_VERSION:
            self.answer_register(
                message.target,
                message.source,
                f"wire version {message.wire_version}, this prefill speaks {WIRE_VERSION}",
            )
        elif peer is not None:
            self.note_alive(peer, now)
            peer.fresh_from = max(peer.fresh_from, message.fresh_from)
            self.end_withdrawn(peer, peer.grants.begin_from(message.fresh_from))
            self.feed_peer(peer, PeerKind.REGISTERED, now)
        # This prefill is closing and will begin no grant of this decode, so a Goodbye is the final
        # answer.
        elif self.leaving is not None:
            self.say_goodbye(message.target, self.former.in_doubt.get(message.target, ()))
        elif refusal := self.unavailable_reason or self._no_place(message, sender_address, now):
            self.answer_register(message.target, message.source, refusal)
        else:
            peer = self.peers[message.target] = DecodePeer(
                message, self.bounds.closed_grants, self.kept, now, sender_address(), seen_below
            )
            self.crowds.add(peer)
            peer.grants.remember_doubts(self.former.in_doubt.pop(message.target, ()))
            self.former.displaced.pop(message.target, None)
            if refusal := peer.mismatch(self.identity):
                self.feed_peer(peer, PeerKind.ROUTE_REFUSED, now, Cause(Code.REFUSED, refusal))
            else:
                self.refused.pop(message.target, None)
                self.outbox.append(OpenRoute(peer.incarnation, peer.address, peer.layout))

    def _no_place(
        self, message: wire.Register, sender_address: Callable[[], str], now: float
    ) -> str:
        """Make sure that there is a place for a new decode. Returns the reason if there is none, or
        an empty string.
        """

        bounds, sender = self.bounds, sender_address()
        if len(self.peers) >= bounds.targets and not self.make_place(self.peers.values(), now):
            return (
                f"{bounds.targets} decodes are registered already; prefill's max_decodes "
                "(--max-decodes) allows no more"
            )
        siblings = self.crowds.of_process(message.address)
        if len(siblings) >= bounds.decodes_per_process and not self.make_place(siblings, now):
            pid = message.address.process.pid
            return f"{len(siblings)} decodes of process {pid} are registered already"
        neighbours = self.crowds.at_address(sender)
        if len(neighbours) >= bounds.decodes_per_address and not self.make_place(neighbours, now):
            return (
                f"{len(neighbours)} decodes at {sender} are registered already; prefill's "
                "decodes_per_address (--decodes-per-address) allows no more at one address"
            )
        return ""

    def note_alive(self, peer: DecodePeer, now: float) -> None:
        """Record that a peer sent a message. If the peer was silent, it is up again."""
        peer.received_at_s = now
        if peer.phase is PeerPhase.SILENT:
            self.feed_peer(peer, PeerKind.HEARD, now)

    def goodbye_received(self, message: wire.Goodbye, now: float) -> None:
        """Acknowledge a decode's Goodbye, even if the decode is forgotten already. A decode that is
        still known is forgotten when its rooms end.
        """
        peer = self.peers.get(message.target)
        self.outbox.append(
            SendToDecode(
                routing_id(message.target), encode(wire.GoodbyeAck(**self.lives(message.target)))
            )
        )
        if peer is not None and peer.phase is not PeerPhase.GONE:
            self.note_alive(peer, now)
            self.part(peer, now)
        elif message.target in self.former.displaced or message.target in self.former.in_doubt:
            self.former.remember_parted(message.target)

    def leave_peer(self, peer: DecodePeer, now: float) -> None:
        """Say goodbye to a decode that has not been told yet and is not gone."""
        if peer.phase in (PeerPhase.OPENING, PeerPhase.UP, PeerPhase.SILENT):
            self.feed_peer(peer, PeerKind.LEAVE, now)

    def part(self, peer: DecodePeer, now: float) -> None:
        self.former.remember_parted(peer.incarnation)
        cause = Cause(Code.SHUTDOWN, f"decode {peer.incarnation:016x} has shut down")
        self.feed_peer(peer, PeerKind.PARTED, now, cause)

    def end_withdrawn(self, peer: DecodePeer, withdrawn: list[tuple[GrantId, RoomId]]) -> None:
        """Queue a task to end announcements that decode withdrew, before their Aborts arrive."""
        self.add_task(Task("withdraw", withdrawn, peer, WITHDRAWN))

    # --- the machine of a peer

    def feed_peer(
        self, peer: DecodePeer, kind: PeerKind, now: float, cause: Cause = _NO_CAUSE
    ) -> None:
        """Feed one event to a peer, and run the commands. Rooms that the event ends receive
        `cause`. No other code changes a peer's phase.
        """
        move = TABLE.moves[peer.phase, kind]
        if move is None:
            return
        self._num_silent -= peer.phase is PeerPhase.SILENT
        peer.phase = move.phase
        self._num_silent += peer.phase is PeerPhase.SILENT
        if peer.phase is PeerPhase.UP:
            self.deadlines.set(Timer("silence", peer.incarnation), now + self.timing.lost_after_s)
        for command in move.commands:
            _RUN[command](self, peer, cause, now)
        self.forget_if_idle(peer, now)

    def forget_if_idle(self, peer: DecodePeer, now: float) -> None:
        """Forget a decode that is gone, if its rooms and announcements have ended."""
        if (
            peer.phase is PeerPhase.GONE
            and not peer.grants.rooms
            and not peer.grants.announcements.rooms
        ):
            self.feed_peer(peer, PeerKind.IDLE, now)

    def make_place(self, among: Iterable[DecodePeer], now: float) -> bool:
        """Forget one silent decode without open grants. Returns False if there is no such decode,
        or if too many grants in doubt would have to be recorded.
        """
        # The death of a process on another host may never be observed, so silent decodes would
        # otherwise fill the table.
        if not self._num_silent or (peer := self.former.displace(among)) is None:
            return False
        self.feed_peer(peer, PeerKind.DISPLACED, now)
        return True


# --- what a peer's table asks for


def _accept(core: PrefillPeers, peer: DecodePeer, cause: Cause, now: float) -> None:
    core.answer_register(
        peer.incarnation,
        core.identity.incarnation,
        core.unavailable_reason,
        peer.fresh_from,
        peer.page_sizes,
    )


def _refuse(core: PrefillPeers, peer: DecodePeer, cause: Cause, now: float) -> None:
    core.answer_register(peer.incarnation, core.identity.incarnation, cause.text)
    core.former.remember_doubts(peer)
    core.refused[peer.incarnation] = cause
    if len(core.refused) > core.bounds.targets:
        core.refused.popitem(last=False)


def _beat(core: PrefillPeers, peer: DecodePeer, cause: Cause, now: float) -> None:
    core.beat(peer, now)


def _watch(core: PrefillPeers, peer: DecodePeer, cause: Cause, now: float) -> None:
    core.outbox.append(WatchProcess(peer.incarnation, peer.address))


def _lose_rooms(core: PrefillPeers, peer: DecodePeer, cause: Cause, now: float) -> None:
    core.add_task(Task("void", peer.grants.announcements.rooms.items(), peer, cause))
    core.add_task(Task("lose", peer.grants.rooms.values(), peer, cause))


def _close_route(core: PrefillPeers, peer: DecodePeer, cause: Cause, now: float) -> None:
    core.outbox.append(CloseRoute(peer.incarnation))


def _forget(core: PrefillPeers, peer: DecodePeer, cause: Cause, now: float) -> None:
    # A stranger without grants leaves no record. A decode that parted is recorded already, and none
    # of its grants begins again.
    if peer.has_had_grants and peer.incarnation not in core.former.parted:
        core.former.remember_grants(peer)
    core.deadlines.cancel(Timer("silence", peer.incarnation))
    core.deadlines.cancel(Timer("goodbye", peer.incarnation))
    peer.grants.forget()
    core.crowds.remove(peer)
    del core.peers[peer.incarnation]


def _part(core: PrefillPeers, peer: DecodePeer, cause: Cause, now: float) -> None:
    core.say_goodbye(peer.incarnation, peer.grants.unproven())
    core.deadlines.set(Timer("goodbye", peer.incarnation), now + core.timing.repeat_after_s)


_RUN: dict[PeerCommand, Callable[[PrefillPeers, DecodePeer, Cause, float], None]] = {
    PeerCommand.SEND_ACCEPTED: _accept,
    PeerCommand.SEND_REFUSED: _refuse,
    PeerCommand.SEND_HEARTBEAT: _beat,
    PeerCommand.WATCH_PROCESS: _watch,
    PeerCommand.LOSE_ROOMS: _lose_rooms,
    PeerCommand.CLOSE_ROUTE: _close_route,
    PeerCommand.FORGET: _forget,
    PeerCommand.SEND_GOODBYE: _part,
}
