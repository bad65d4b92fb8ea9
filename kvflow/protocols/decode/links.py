"""Decode's links: a record for each known prefill rank, its link machine, and its timing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvflow.protocols.commands import (
    DecodeCommand,
    Dial,
    HangUp,
    PeerKey,
    SendToPrefill,
    StopWatch,
    WatchWriter,
)
from kvflow.protocols.errors import Cause, Code, LayoutError, LostError, PeerError
from kvflow.protocols.limits import Timing
from kvflow.protocols.machines.ledger import Ledger
from kvflow.protocols.machines.link import TABLE, LinkCommand, LinkKind, LinkPhase
from kvflow.protocols.pages.coverage import Served, uncovered
from kvflow.protocols.pages.fine import in_pages_of
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.pages.spaces import Counts
from kvflow.protocols.ports import PlaneAddress
from kvflow.protocols.wire.codec import encode
from kvflow.protocols.wire.messages import (
    MAX_SETTLED_RANGES,
    WIRE_VERSION,
    Goodbye,
    GoodbyeAck,
    GrantId,
    Heartbeat,
    Incarnation,
    Message,
    Register,
    Registered,
)
from kvflow.protocols.wire.ranks import RankInfo

_NO_GRANT = GrantId(0)
_USABLE = frozenset({LinkPhase.REGISTERING, LinkPhase.UP})


class DecodeIdentity(msgspec.Struct, frozen=True):
    """The fields that describe a decode in `Register`: its incarnation, the layout of its pool, and
    the address at which the data plane reaches the pool.
    """

    incarnation: Incarnation
    layout: PoolLayout
    address: PlaneAddress


@dataclass(slots=True, eq=False, repr=False)
class PrefillPeer:
    """One incarnation of one prefill rank, and the link to it."""

    info: RankInfo
    key: PeerKey
    received_at_s: float  # when an acceptance or a heartbeat last arrived
    fresh_from: GrantId  # the lowest grant that may still begin at this rank
    repeat_after_s: float
    between: dict[str, Any]  # both incarnations, as fields for every message to this rank (I6)
    sent_at_s: float = field(init=False)  # when Register, Heartbeat or Goodbye was last sent
    tried_at_s: float = field(init=False)  # when the link was last redialled, or fell silent
    used_at_s: float = field(init=False)  # when a room was last opened or refused on the link
    phase: LinkPhase = LinkPhase.REGISTERING
    cause: Cause | None = None  # why the link was last lost, refused or closed
    # While no room is open on this link, prefill wants a heartbeat only so often.
    pace_s: float = 0.0
    told_below: GrantId = _NO_GRANT  # `settled_below` of the last heartbeat at that pace
    asked_again: bool = False  # True if loans in doubt were recalled again during this silence
    address: PlaneAddress | None = None  # the writer's address, known once prefill accepts
    unproven: frozenset[GrantId] = frozenset()  # grants that prefill's Goodbye names
    served: tuple[Served, ...] | None = None  # the parts of our pool that this rank writes
    # The page sizes in which this rank counts its chunks, by space, if they are not ours.
    page_sizes: Counts = ()

    def __post_init__(self) -> None:
        self.sent_at_s = self.tried_at_s = self.used_at_s = self.received_at_s

    def __repr__(self) -> str:
        return (
            f"<PrefillPeer {self.info.incarnation:016x} at {self.info.control}: "
            f"{self.phase.name.lower()}>"
        )

    @property
    def usable(self) -> bool:
        """True while rooms can be opened on this link, because it is up or may come up."""
        return self.phase in _USABLE


class DecodeLinks:
    """The peers of one decode. Methods append commands to `outbox`."""

    def __init__(
        self,
        identity: DecodeIdentity,
        timing: Timing,
        outbox: list[DecodeCommand],
        ledger: Ledger[PrefillPeer],
    ) -> None:
        self._identity, self._timing, self._outbox = identity, timing, outbox
        self._ledger = ledger
        self.peers: dict[PeerKey, PrefillPeer] = {}
        self.declared_dead: set[Incarnation] = set()
        self.coverage: dict[tuple[PrefillPeer, ...], str] = {}  # results of `check_coverage`

    def check_coverage(self, peers: tuple[PrefillPeer, ...]) -> str:
        """Check that these linked ranks together send every byte of our pool exactly once (I8), and
        that they count pages in the same way. Returns the reason if not, or an empty string.
        """
        found = uncovered(self._identity.layout, [peer.served or () for peer in peers])
        if found:
            found = (
                f"what prefill {peers[0].info.control} sends is not decode's pool, each byte once: "
                f"{found}"
            )
        elif len({peer.page_sizes for peer in peers}) > 1:
            found = f"the ranks of prefill {peers[0].info.control} have pages of different sizes"
        self.coverage[peers] = found
        return found

    def dial(self, info: RankInfo, next_grant: GrantId, now: float) -> PrefillPeer:
        """Connect to a rank and register. Raises: LostError while an unusable link to this
        incarnation exists, PeerError if the incarnation is linked as another rank.
        """
        key = PeerKey(Incarnation(info.incarnation), info.control)
        known = self.peers.get(key)
        if known is not None and known.usable:
            raise PeerError(
                f"prefill at {info.control} is rank {known.info.rank}, and was asked for as "
                f"{info.rank}"
            )
        if known is not None:
            assert known.cause is not None
            raise LostError(
                f"prefill at {info.control} is {known.phase.name.lower()}: {known.cause.text}"
            )
        between = {"source": key.incarnation, "target": self._identity.incarnation}
        peer = self.peers[key] = PrefillPeer(
            info, key, now, next_grant, self._timing.repeat_after_s, between
        )
        self._outbox.append(Dial(key))
        self._register(peer, now)
        return peer

    def feed(
        self,
        peer: PrefillPeer,
        kind: LinkKind,
        now: float,
        cause: Cause | None = None,
    ) -> list[LinkCommand]:
        """Feed one event to a link, run the link's own commands, and return those that concern its
        rooms and loans. No other code changes a link's phase.
        """
        move = TABLE.moves[peer.phase, kind]
        if move is None:
            return []
        left, peer.phase = peer.phase, move.phase
        if cause is not None:
            peer.cause = cause
        theirs: list[LinkCommand] = []
        for command in move.commands:
            if command is LinkCommand.SEND_REGISTER:
                self._register(peer, now)
            elif command is LinkCommand.SEND_HEARTBEAT:
                peer.sent_at_s = now
                self._send(peer, self._heartbeat(peer))
            elif command is LinkCommand.REDIAL:
                peer.tried_at_s = now
                self._outbox += (HangUp(peer.key), Dial(peer.key))
            elif command is LinkCommand.WATCH_WRITER:
                # The watch starts when the link comes up, not when the peer falls silent. If the
                # watch observes a death, rooms end at once, and their loans end with proof.
                if peer.address is not None:
                    self._outbox.append(WatchWriter(peer.key, peer.address))
            elif command is LinkCommand.SEND_GOODBYE:
                peer.sent_at_s = now
                self._send(peer, Goodbye(**peer.between))
            elif command is LinkCommand.ACKNOWLEDGE:
                self._send(peer, GoodbyeAck(**peer.between))
            elif command is LinkCommand.HANG_UP:
                # A last heartbeat lets prefill forget grants that are settled, since this decode
                # will not ask about them again. A Goodbye has the same effect.
                if left is LinkPhase.SILENT and kind not in (LinkKind.LEAVE, LinkKind.GOODBYE):
                    self._send(peer, self._heartbeat(peer))
                self._outbox.append(HangUp(peer.key))
            else:
                theirs.append(command)
        return theirs

    def _heartbeat(self, peer: PrefillPeer) -> Heartbeat:
        settled_below = self._ledger.settled_below(peer)
        if peer.pace_s:
            peer.told_below = settled_below
        return Heartbeat(
            settled_below=settled_below,
            settled=self._ledger.settled_above(peer, MAX_SETTLED_RANGES),
            **peer.between,
        )

    def _quiet_s(self, peer: PrefillPeer) -> float:
        """Return how much longer than usual a link that is up may be silent. It is 0 while a room
        is open on it.
        """
        if (
            peer.pace_s <= self._timing.heartbeat_s
            or self._ledger.owes(peer)
            # Prefill keeps its last messages about a grant until it learns that it is settled.
            or self._ledger.settled_below(peer) != peer.told_below
        ):
            return 0.0
        return peer.pace_s - self._timing.heartbeat_s

    def _beat_due_s(self, peer: PrefillPeer) -> float:
        """Return when the next heartbeat on a link that is up is due."""
        usual_s = peer.sent_at_s + self._timing.heartbeat_s
        # One that is not answered may be lost, so it is repeated at the usual intervals.
        return usual_s if peer.received_at_s < peer.sent_at_s else usual_s + self._quiet_s(peer)

    def is_recent(self, peer: PrefillPeer, now: float) -> bool:
        """Return True if prefill was heard lately, for a link without rooms."""
        more_s = max(0.0, peer.pace_s - self._timing.heartbeat_s)
        return peer.received_at_s > now - self._timing.lost_after_s - more_s

    def wake(self, peer: PrefillPeer, now: float) -> None:
        """Begin to send heartbeats at the usual intervals, because a room is opened on the link.
        Silence counts from now on: prefill has kept quiet for as long as it had asked for.
        """
        if now - peer.received_at_s > self._timing.heartbeat_s:
            peer.received_at_s = now - self._timing.heartbeat_s

    def drop(self, peer: PrefillPeer) -> None:
        del self.peers[peer.key]
        self.coverage = {
            peers: found for peers, found in self.coverage.items() if peer not in peers
        }
        self._outbox.append(StopWatch(peer.key))

    # --- messages and time

    def registered(
        self, peer: PrefillPeer, message: Registered
    ) -> tuple[LinkKind | None, Cause | None]:
        """Return the link event for an answer, and its cause (None if prefill accepted). Both are
        None for a stale answer.
        """
        at = f"prefill at {peer.info.control}"
        if message.source != peer.key.incarnation:
            return LinkKind.REPLACED, Cause(
                Code.PEER_LOST, f"{at} restarted: another incarnation answers"
            )
        if message.refusal:
            return LinkKind.REFUSED, Cause(Code.REFUSED, f"{at} refused: {message.refusal}")
        if message.rank != peer.info.rank:
            text = f"{at} says it is rank {message.rank}, the registry says {peer.info.rank}"
            return LinkKind.REPLACED, Cause(Code.PROTOCOL_ERROR, text)
        # This answers a Register that was sent before the silence. Prefill has not received the
        # newer bound yet, and might begin a grant below it.
        if message.fresh_from < peer.fresh_from:
            return None, None
        try:
            if message.page_sizes:
                in_pages_of(self._identity.layout, message.page_sizes)
        except LayoutError as error:
            return LinkKind.REFUSED, Cause(Code.PROTOCOL_ERROR, f"{at} counts {error}")
        return LinkKind.ACCEPTED, None

    def due_at_s(self, peer: PrefillPeer) -> float:
        """Return the earliest time at which `expired` may return an event for this peer."""
        timing = self._timing
        if peer.phase is LinkPhase.REGISTERING:
            return min(
                peer.received_at_s + timing.register_s, peer.sent_at_s + timing.repeat_after_s
            )
        if peer.phase is LinkPhase.UP:
            silent_s = timing.lost_after_s + self._quiet_s(peer)
            return min(peer.received_at_s + silent_s, self._beat_due_s(peer))
        if peer.phase is LinkPhase.PARTING:
            return peer.sent_at_s + timing.repeat_after_s
        if peer.phase is LinkPhase.SILENT:
            return min(peer.tried_at_s + timing.lost_after_s, peer.sent_at_s + timing.heartbeat_s)
        return float("inf")

    def expired(self, peer: PrefillPeer, now: float) -> tuple[LinkKind, Cause | None] | None:
        """Return an event that is due at `now`, with its cause. Call this until it returns None."""
        timing, at = self._timing, f"prefill at {peer.info.control}"
        if peer.phase is LinkPhase.REGISTERING:
            if now >= peer.received_at_s + timing.register_s:
                text = f"{at} did not answer for {timing.register_s:g} s"
                return LinkKind.REGISTER_DUE, Cause(Code.PEER_LOST, text)
            repeat_s = timing.repeat_after_s
        elif peer.phase is LinkPhase.UP:
            silent_s = timing.lost_after_s + self._quiet_s(peer)
            if now >= peer.received_at_s + silent_s:
                peer.tried_at_s = now
                text = f"{at} was silent for {silent_s:g} s"
                return LinkKind.SILENCE_DUE, Cause(Code.PEER_LOST, text)
            return (LinkKind.REPEAT_DUE, None) if now >= self._beat_due_s(peer) else None
        elif peer.phase is LinkPhase.PARTING:
            repeat_s = timing.repeat_after_s
        elif peer.phase is LinkPhase.SILENT:
            if now >= peer.tried_at_s + timing.lost_after_s:
                return LinkKind.REDIAL_DUE, None
            repeat_s = timing.heartbeat_s
        else:
            return None
        return (LinkKind.REPEAT_DUE, None) if now >= peer.sent_at_s + repeat_s else None

    def _send(self, peer: PrefillPeer, message: Message) -> None:
        self._outbox.append(SendToPrefill(peer.key, encode(message)))

    def _register(self, peer: PrefillPeer, now: float) -> None:
        peer.sent_at_s = now
        identity = self._identity
        self._send(
            peer,
            Register(
                source=peer.key.incarnation,
                target=identity.incarnation,
                wire_version=WIRE_VERSION,
                layout=identity.layout,
                address=identity.address,
                fresh_from=peer.fresh_from,
            ),
        )
