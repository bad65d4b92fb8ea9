"""Rules for the two sides of a room (I4): both learn of a failure in time, and a node gives up on a
peer only for a reason.

The promise under which a room was opened identifies its two halves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from kvflow.proof.rules.judge import Judge, Promise, Side
from kvflow.proof.rules.transfers import Transfers
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

Record = DecodeRoomRecord | PrefillRoomRecord
OVER_AT_DECODE = decode_room.TERMINAL | {DecodePhase.DRAINING}
OVER_AT_PREFILL = prefill_room.TERMINAL | {PrefillPhase.DRAINING}
_A_MOMENT_S = 1e-6


class BothSides:
    """All rooms of one run, and the times at which nodes and links were in trouble."""

    # A room that waits for staging is announced within this time after it opens.
    announced_within_s = 0.0
    # True if a prefill may have to forget ended grants or ended halves during the run.
    forgetful = False

    def __init__(self, judge: Judge, transfers: Transfers) -> None:
        self.judge, self.transfers, self.acked = judge, transfers, transfers.acked
        self.now_s, self.later, self.broken = judge.now_s, judge.later, judge.broken
        self.sides: Mapping[int, Side] = {}  # by incarnation; maintained by the driver
        # Time of a link's last disturbance, by prefill's address and decode's incarnation.
        self.trouble: dict[tuple[str, int], float] = {}
        # Time at which each half of a room ended or began to drain. Its user is notified then.
        self.over_at_s: dict[Record, float] = {}
        self.decodes: dict[Promise, DecodeRoomRecord] = {}
        self.prefills: dict[Promise, PrefillRoomRecord] = {}
        # Latest half that the engine opened, by (incarnation, room).
        self._halves: dict[tuple[int, int], PrefillRoomRecord] = {}
        # All halves that the engine opened, by (incarnation, room).
        self._legs: dict[tuple[int, int], list[PrefillRoomRecord]] = defaultdict(list)
        # Causes with which decode refused requests, by room.
        self._refusals: dict[int, set[Cause]] = defaultdict(set)
        # Causes with which prefill refused requests, by (incarnation, room).
        self._turned_away: dict[tuple[int, int], set[Cause]] = defaultdict(set)

    def disturbed(self, control: str, target: int) -> None:
        self.trouble[control, target] = self.now_s()

    # --- what rooms do

    def engine_half(self, source: int, room: int) -> PrefillRoomRecord | None:
        return self._halves.get((source, room))

    def known_at_prefill(self, source: int, record: PrefillRoomRecord) -> None:
        # Decode may announce a room before the engine opens its half. Such a record has no prompt.
        if record.prompt is not None:
            self._halves[source, record.room] = record

    def refused_at_decode(self, room: int, cause: Cause) -> None:
        self._refusals[room].add(cause)

    def refused_at_prefill(self, source: int, room: int, cause: Cause) -> None:
        """Record the cause of a refusal. Prefill keeps it until decode announces the room."""
        self._turned_away[source, room].add(cause)

    def over_at_decode(self, target: int, record: DecodeRoomRecord) -> None:
        halves = [self.engine_half(peer.key.incarnation, record.room) for peer in record.peers]
        opened = [half for half in halves if half is not None]
        self._not_for_nothing(record, opened, record.peers, target)
        for key in promises_of(target, record):
            self.look(key)

    def over_at_prefill(self, source: int, record: PrefillRoomRecord) -> None:
        key = promise_of(source, record)
        if key is not None:
            self.look(key)
            if (decode := self.decodes.get(key)) is not None:
                self._not_for_nothing(record, [decode], [_peer(decode, source)], key[1])

    def _not_for_nothing(
        self, record: Record, others: Sequence[Record], peers: Sequence[PrefillPeer], target: int
    ) -> None:
        """Verify that there was a reason if a room ended with PEER_LOST.

        One of `peers`, the node `target` or a link between them must have been dead or in trouble,
        or one of `others` must have ended with the same cause.
        """
        cause, side = record.state.cause, self.sides[target]
        if cause is None or cause.code is not Code.PEER_LOST:
            return
        if any(other.state.cause == cause for other in others):
            return
        for peer in peers:
            source = self.sides[peer.key.incarnation]
            # A room fails if any of its peers is lost, so trouble with one of them is enough.
            quiet_s = self.now_s() - self._troubled_at_s(source, side, peer.key.control)
            if not _both_live(source, side) or quiet_s <= PATIENCE_S:
                return
        where = "decode" if isinstance(record, DecodeRoomRecord) else "prefill"
        self.broken("I4", f"room {record.room} at {where}: {cause}; nothing has happened to it")

    # --- partings

    def has_left(self, source: Side, control: str, linked: Iterable[Side]) -> None:
        """Verify that each decode in `linked` had a reason to miss the goodbye of prefill `source`.

        Without the goodbye, the loans of that decode stay open (I5).
        """
        for target in linked:
            quiet_s = self.now_s() - self._last_trouble_s(source, target, control)
            if target.up and quiet_s > PATIENCE_S and source.reaches(target.incarnation):
                who = f"prefill {source.incarnation:x} has left"
                self.broken("I5", f"{who}, decode {target.incarnation:x} has not heard its goodbye")

    # --- both sides of a failure

    def look(self, key: Promise) -> None:
        self.later(HEAR_S + _A_MOMENT_S, self._both_know, key, self.now_s())

    def _both_know(self, key: Promise, since_s: float) -> None:
        """Verify that a failed room ended on both sides, unless their link was down."""
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
                # Prefill reports nothing from before the loss of the link, so its half still waits.
                return
            over_at_s = self.over_at_s.get(prefill, decode.opened_at_s)
            if self.forgetful and over_at_s < decode.opened_at_s + self.announced_within_s:
                # Prefill may have forgotten the end of its half before decode's half arrived.
                return
            troubled_at_s = self._troubled_at_s(source, target, peer.key.control)
            if decode.phase is DecodePhase.BOOTSTRAPPING and over_at_s < troubled_at_s:
                # A repeated announcement may come after prefill forgot the end of the half.
                return
        failed_here, failed_there = decode.state.cause is not None, prefill.state.cause is not None
        if not (failed_here or failed_there):
            return
        if decode.phase in OVER_AT_DECODE and prefill.phase in OVER_AT_PREFILL:
            return
        over_at_s = self.over_at_s.get(decode if failed_here else prefill, 0.0)
        if over_at_s > since_s:
            # The room ended after this check was scheduled, and its end scheduled another check.
            return
        troubled_at_s, known_by_s = self._troubled_at_s(source, target, peer.key.control), 0.0
        if linked and not source.reaches(target.incarnation):
            troubled_at_s = self.now_s()
        if troubled_at_s >= since_s:
            known_by_s = troubled_at_s + _recovers_s(decode, troubled_at_s)
        # Decode gave up on the link. Prefill notices that only by silence.
        if not linked:
            known_by_s = max(known_by_s, max(over_at_s, troubled_at_s) + PATIENCE_S)
        if (wait_s := known_by_s - self.now_s()) > 0:
            self.later(wait_s + _A_MOMENT_S, self._both_know, key, max(troubled_at_s, since_s))
            return
        if prefill.peer is None and self._mixed_up(key, decode, prefill):
            return
        where, other = ("decode", prefill.phase) if failed_here else ("prefill", decode.phase)
        text = f"room {decode.room} has failed at {where}, the other side is still {other.name}"
        self.broken("I4", text)

    def _mixed_up(self, key: Promise, decode: DecodeRoomRecord, half: PrefillRoomRecord) -> bool:
        """Return True if a room id was used again so soon that a half met the wrong counterpart.

        The engine's half may have met the end of another room with that id. Another half may have
        met the end that was meant for this one. Or the id belonged to another room at prefill when
        this room ended at decode.
        """
        cause, over_at_s = decode.state.cause, self.over_at_s
        rooms = [room for room in self.decodes.values() if room.room == decode.room]
        others = [room for room in rooms if room is not decode]
        if cause is not None and cause.code is Code.ROOM_IN_USE and others:
            return True
        if cause in self._turned_away[key[0], decode.room]:
            return True
        if any(decode.opened_at_s < room.opened_at_s < half.opened_at_s for room in others):
            # A later room with that id made prefill forget the end that it kept for the half.
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
            # Prefill kept the end of an earlier half for decode, and this room received it.
            return True
        if half in over_at_s and any(
            at in self.acked
            for at, room in self.decodes.items()
            if at[0] == key[0] and room in others
        ):
            # Prefill also kept the end of this half, and another room at decode received it.
            return True
        ends = [over_at_s[room] for room in others if room in over_at_s]
        if half in over_at_s and any(end_s <= over_at_s[half] for end_s in ends):
            return True
        if decode not in over_at_s:
            return False
        ended_at_s = over_at_s[decode]
        rooms_there = [room for at, room in self.prefills.items() if at[0] == key[0]]
        bound = [room for room in rooms_there if room.room == decode.room]
        return any(over_at_s.get(room, ended_at_s) >= ended_at_s for room in bound)

    def _troubled_at_s(self, source: Side, target: Side, control: str) -> float:
        now = self.now_s()
        if not source.up or not target.up or source.stalled_until_s > now:
            return now
        return self._last_trouble_s(source, target, control)

    def _last_trouble_s(self, source: Side, target: Side, control: str) -> float:
        return max(
            self.trouble.get((control, target.incarnation), -1.0),
            source.troubled_at_s,
            target.troubled_at_s,
            source.stalled_until_s,
        )


def promises_of(target: int, record: DecodeRoomRecord) -> list[Promise]:
    return [(peer.key.incarnation, target, record.grant) for peer in record.peers]


def is_linked(peers: Iterable[PrefillPeer], source: int) -> bool:
    return any(peer.key.incarnation == source and peer.phase is LinkPhase.UP for peer in peers)


def promise_of(source: int, record: PrefillRoomRecord) -> Promise | None:
    """Return the promise of a room at prefill, or None before decode's half arrives."""
    return None if record.peer is None else (source, record.peer.incarnation, record.grant)


def _recovers_s(decode: DecodeRoomRecord, troubled_at_s: float) -> float:
    """Return how long after the last trouble both sides may take to learn of a failure.

    The time grows with the room's age, because decode repeats its questions less and less often.
    """
    return RECOVER_S + min(max(0.0, troubled_at_s - decode.opened_at_s), MAX_REPEAT_AFTER_S)


def _both_live(*sides: Side) -> bool:
    return all(side.alive and not side.displaced for side in sides)


def _peer(record: DecodeRoomRecord, source: int) -> PrefillPeer:
    return next(peer for peer in record.peers if peer.key.incarnation == source)
