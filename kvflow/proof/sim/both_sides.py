"""Both sides of a room know of a failure in time, and no peer is given up for nothing (I4): what
every simulator asks.

It looks at rooms of both sides by the promise they were opened under; each simulator tells it what
its rooms do, and when something has happened to a node or a link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from kvflow.proof.sim.times import HEAR_S, PATIENCE_S, RECOVER_S
from kvflow.protocols.decode.core import MAX_REPEAT_AFTER_S
from kvflow.protocols.decode.links import PrefillPeer
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machines import decode_room, prefill_room
from kvflow.protocols.machines.decode_room import DecodePhase
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.protocols.prefill.records import PrefillRoomRecord

Promise = tuple[int, int, int]
"""Source and target incarnation, grant: who may write, into whose pages."""

Record = DecodeRoomRecord | PrefillRoomRecord
OVER_AT_DECODE = decode_room.TERMINAL | {DecodePhase.DRAINING}
OVER_AT_PREFILL = prefill_room.TERMINAL | {PrefillPhase.DRAINING}
_A_MOMENT_S = 1e-6


class Side(Protocol):
    """A node, as far as its fate is concerned."""

    @property
    def incarnation(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    @property
    def up(self) -> bool:
        """Alive, and not standing still."""

    @property
    def displaced(self) -> bool:
        """Alive, but its address belongs to another process now."""

    @property
    def troubled_at_s(self) -> float:
        """When it was last cut off or halted."""

    @property
    def stalled_until_s(self) -> float:
        """Its data plane moves nothing till then."""


class BothSides:
    """Every room of one run. What a simulator differs in stands first."""

    announced_within_s = 0.0  # of its opening, a room that waits for staging is announced

    def __init__(
        self,
        sides: Mapping[int, Side],
        over_at_s: Mapping[Record, float],
        acked: AbstractSet[Promise],
        forgetful: bool,
    ) -> None:
        """`sides` by incarnation; `over_at_s`: when a record's user was told its ending, and
        `acked`: what prefill has closed, both kept by the simulator; `forgetful`: prefills remember
        so few ended grants that some may begin below the low-water mark."""
        self.sides, self.over_at_s, self.acked, self.forgetful = sides, over_at_s, acked, forgetful
        self.decodes: dict[Promise, DecodeRoomRecord] = {}
        self.prefills: dict[Promise, PrefillRoomRecord] = {}
        # (incarnation, room): the engine's latest.
        self._halves: dict[tuple[int, int], PrefillRoomRecord] = {}
        # And all of them.
        self._legs: dict[tuple[int, int], list[PrefillRoomRecord]] = defaultdict(list)
        # By room: of requests that decode made no room of.
        self._refusals: dict[int, set[Cause]] = defaultdict(set)
        # (incarnation, room): and prefill.
        self._turned_away: dict[tuple[int, int], set[Cause]] = defaultdict(set)

    def now_s(self) -> float:
        raise NotImplementedError

    def later(self, delay_s: float, do: Callable[..., object], *arguments: object) -> None:
        raise NotImplementedError

    def broken(self, invariant: str, text: str) -> None:
        raise NotImplementedError

    def link_troubled_at_s(self, control: str, target: Side) -> float:
        """When something last happened to the link between the two."""
        raise NotImplementedError

    def unplaced(self, source: Side, target: Side) -> bool:
        """Prefill has given up that decode, which finds it out by silence."""
        return False

    # --- what rooms do

    def half_at_prefill(self, source: int, record: PrefillRoomRecord) -> None:
        """The engine's half of a room."""
        self._halves[source, record.room] = record
        self._legs[source, record.room].append(record)

    def engine_half(self, source: int, room: int) -> PrefillRoomRecord | None:
        return self._halves.get((source, room))

    def bound_at_prefill(self, key: Promise, record: PrefillRoomRecord) -> None:
        """Decode's half has come to prefill, or is announced."""
        self.prefills[key] = record
        self.known_at_prefill(key[0], record)

    def known_at_prefill(self, source: int, record: PrefillRoomRecord) -> None:
        if record.prompt is not None:
            self._halves[source, record.room] = record

    def refused_at_decode(self, room: int, cause: Cause) -> None:
        """Decode made no room of a request, and told its legs so."""
        self._refusals[room].add(cause)

    def refused_at_prefill(self, source: int, room: int, cause: Cause) -> None:
        """Prefill made no room of a request, and keeps that for the decode that comes."""
        self._turned_away[source, room].add(cause)

    def over_at_decode(self, target: int, record: DecodeRoomRecord) -> None:
        halves = [self.engine_half(peer.key.incarnation, record.room) for peer in record.peers]
        self._not_for_nothing(
            record, [half for half in halves if half is not None], record.peers, target
        )
        for key in promises_of(target, record):
            self.look(key)

    def over_at_prefill(self, source: int, record: PrefillRoomRecord) -> None:
        key = promise_of(source, record)
        if key is not None:
            self.look(key)
            decode = self.decodes[key]
            self._not_for_nothing(record, [decode], [_peer(decode, source)], key[1])

    def _not_for_nothing(
        self, record: Record, others: Sequence[Record], peers: Sequence[PrefillPeer], target: int
    ) -> None:
        """A peer is given up when something has happened between the two, or when one of `others`
        gave up its own.
        """
        cause, side = record.state.cause, self.sides[target]
        if (
            cause is None
            or cause.code is not Code.PEER_LOST
            or any(other.state.cause == cause for other in others)
        ):
            return
        for peer in peers:
            source = self.sides[peer.key.incarnation]
            quiet_s = self.now_s() - self._troubled_at_s(source, side, peer.key.control)
            if not _both_live(source, side) or quiet_s <= PATIENCE_S:
                return
        where = "decode" if isinstance(record, DecodeRoomRecord) else "prefill"
        self.broken("I4", f"room {record.room} at {where}: {cause}; nothing has happened to it")

    # --- partings

    def has_left(self, source: Side, control: str, linked: Iterable[Side]) -> None:
        """A prefill has closed in order, and decodes take it for one that serves them: none of
        these could be reached, or it has not said goodbye and what they have lent it stays on loan
        for nothing (I5)."""
        for target in linked:
            quiet_s = self.now_s() - self._last_trouble_s(source, target, control)
            if target.up and quiet_s > PATIENCE_S and not self.unplaced(source, target):
                who = f"prefill {source.incarnation:x} has left"
                self.broken("I5", f"{who}, decode {target.incarnation:x} has not heard its goodbye")

    # --- both sides of a failure

    def look(self, key: Promise) -> None:
        self.later(HEAR_S + _A_MOMENT_S, self._both_know, key, self.now_s())

    def _both_know(self, key: Promise, since_s: float) -> None:
        """A room that has failed on one side has ended on the other, or the link between them was
        not up.
        """
        source, target = self.sides[key[0]], self.sides[key[1]]
        decode, prefill = self.decodes.get(key), self.prefills.get(key)
        if decode is None or not _both_live(source, target):
            return
        peer = _peer(decode, key[0])
        linked = peer.phase is LinkPhase.UP
        if prefill is None:
            prefill = self.engine_half(key[0], decode.room)
            if prefill is None or prefill.peer is not None:
                return
            if prefill.prompt != (decode.prompt.tokens, decode.prompt.digest):
                return
            if not linked or peer.fresh_from > key[2] or (self.forgetful and key in self.acked):
                # Nothing from before the link was lost is told on: the engine's half waits for its
                # rendezvous.
                return
            over_at_s = self.over_at_s.get(prefill, decode.opened_at_s)
            if self.forgetful and over_at_s < decode.opened_at_s + self.announced_within_s:
                return  # its end was forgotten before decode's half came
            if decode.phase is DecodePhase.BOOTSTRAPPING and over_at_s < self._troubled_at_s(
                source, target, peer.key.control
            ):
                # Its end is kept for a while only: the announcement that was lost may have come too
                # late.
                return
        failed_here, failed_there = decode.state.cause is not None, prefill.state.cause is not None
        if not (failed_here or failed_there):
            return
        if decode.phase in OVER_AT_DECODE and prefill.phase in OVER_AT_PREFILL:
            return
        over_at_s = self.over_at_s.get(decode if failed_here else prefill, 0.0)
        if over_at_s > since_s:
            return  # just now: it is looked at again
        troubled_at_s, known_by_s = self._troubled_at_s(source, target, peer.key.control), 0.0
        if linked and self.unplaced(source, target):
            troubled_at_s = self.now_s()
        if troubled_at_s >= since_s:
            known_by_s = troubled_at_s + _recovers_s(decode, troubled_at_s)
        if not linked:  # what decode has hung up on, prefill finds silent
            known_by_s = max(known_by_s, max(over_at_s, troubled_at_s) + PATIENCE_S)
        if (wait_s := known_by_s - self.now_s()) > 0:
            self.later(wait_s + _A_MOMENT_S, self._both_know, key, max(troubled_at_s, since_s))
            return
        if prefill.peer is None and self._mixed_up(key, decode, prefill):
            return
        where, other = ("decode", prefill.phase) if failed_here else ("prefill", decode.phase)
        self.broken(
            "I4", f"room {decode.room} has failed at {where}, the other side is still {other.name}"
        )

    def _mixed_up(self, key: Promise, decode: DecodeRoomRecord, half: PrefillRoomRecord) -> bool:
        """A room id was used again at once: the engine's half has met the end of another room of
        that id, another half has met one that may have been meant for it, or the id was another
        room's at prefill when it ended here."""
        cause, over_at_s = decode.state.cause, self.over_at_s
        rooms = [room for room in self.decodes.values() if room.room == decode.room]
        others = [room for room in rooms if room is not decode]
        if cause is not None and cause.code is Code.ROOM_IN_USE and others:
            return True
        if cause in self._turned_away[key[0], decode.room]:
            return True
        causes = {room.state.cause for room in rooms} - {None} | self._refusals[decode.room]
        if half.state.cause in causes - {cause}:
            return True
        earlier = [leg for leg in self._legs[key[0], decode.room] if leg is not half]
        if any(leg.state.cause in causes for leg in earlier):
            return True
        if any(
            leg.peer is None and leg in over_at_s and over_at_s[leg] <= over_at_s.get(decode, 0.0)
            for leg in earlier
        ):
            return True  # that one's end was kept for a decode, which this one has been
        if half in over_at_s and any(
            at in self.acked
            for at, room in self.decodes.items()
            if at[0] == key[0] and room in others
        ):
            return True  # this one's end was, and that decode has had it
        ends = [over_at_s[room] for room in others if room in over_at_s]
        if half in over_at_s and any(end_s <= over_at_s[half] for end_s in ends):
            return True
        if decode not in over_at_s:
            return False
        ended_at_s = over_at_s[decode]
        bound = [
            room
            for at, room in self.prefills.items()
            if at[0] == key[0] and room.room == decode.room
        ]
        return any(over_at_s.get(room, ended_at_s) >= ended_at_s for room in bound)

    def _troubled_at_s(self, source: Side, target: Side, control: str) -> float:
        """When something last happened to the link between the two, or to one of them."""
        now = self.now_s()
        if not source.up or not target.up or source.stalled_until_s > now:
            return now
        return self._last_trouble_s(source, target, control)

    def _last_trouble_s(self, source: Side, target: Side, control: str) -> float:
        return max(
            self.link_troubled_at_s(control, target),
            source.troubled_at_s,
            target.troubled_at_s,
            source.stalled_until_s,
        )


def promises_of(target: int, record: DecodeRoomRecord) -> list[Promise]:
    return [(peer.key.incarnation, target, record.grant) for peer in record.peers]


def is_linked(peers: Iterable[PrefillPeer], source: int) -> bool:
    """A decode with these peers takes that prefill for one that serves it."""
    return any(peer.key.incarnation == source and peer.phase is LinkPhase.UP for peer in peers)


def promise_of(source: int, record: PrefillRoomRecord) -> Promise | None:
    """None while decode's half has not come."""
    return None if record.peer is None else (source, record.peer.incarnation, record.grant)


def _recovers_s(decode: DecodeRoomRecord, troubled_at_s: float) -> float:
    """How long after the last trouble both sides know: who asks has asked less and less often
    meanwhile.
    """
    return RECOVER_S + min(max(0.0, troubled_at_s - decode.opened_at_s), MAX_REPEAT_AFTER_S)


def _both_live(*sides: Side) -> bool:
    return all(side.alive and not side.displaced for side in sides)


def _peer(record: DecodeRoomRecord, source: int) -> PrefillPeer:
    return next(peer for peer in record.peers if peer.key.incarnation == source)
