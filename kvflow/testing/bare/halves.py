"""Both halves of a room know of a failure in time (I4), and no peer is given up for nothing."""

from __future__ import annotations

from collections.abc import Mapping

from kvflow.protocols.decode_core import MAX_REPEAT_AFTER_S
from kvflow.protocols.decode_links import PrefillPeer
from kvflow.protocols.decode_rooms import DecodeRoomRecord
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machines import decode_room, prefill_room
from kvflow.protocols.machines.decode_room import DecodePhase
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.protocols.prefill_rooms import PrefillRoomRecord
from kvflow.testing.bare.holds import Key, Leg, Room, Who, key_of
from kvflow.testing.bare.oracle import Halves, Oracle, Record
from kvflow.testing.sim.times import HEAR_S, PATIENCE_S, RECOVER_S

_OVER_AT_DECODE = decode_room.TERMINAL | {DecodePhase.DRAINING}
_OVER_AT_PREFILL = prefill_room.TERMINAL | {PrefillPhase.DRAINING}
_A_MOMENT_S = 1e-6


class WatchedHalves(Halves):
    """Every room of one run, by the promise it was opened under. Looks only where something has failed."""

    def __init__(
        self, oracle: Oracle, nodes: Mapping[int, Who], trouble: Mapping[tuple[str, int], float], forgetful: bool
    ) -> None:
        """`nodes` by incarnation; `trouble`: when something last happened to a link (control, decode's incarnation);
        `forgetful`: prefills remember so few ended grants that some may begin below the low-water mark."""
        self.oracle, self.clock = oracle, oracle.clock
        self._nodes, self._trouble_at_s, self._forgetful = nodes, trouble, forgetful
        self._prefills: dict[Key, PrefillRoomRecord] = {}
        self._halves: dict[tuple[int, int], PrefillRoomRecord] = {}  # (incarnation, room): the engine's latest
        self._legs: dict[tuple[int, int], list[PrefillRoomRecord]] = {}  # and all of them

    # --- what rooms do

    def opened_at_decode(self, room: Room) -> None:
        for key in room.keys:
            half = self._halves.get((key[0], room.record.room))
            if half is not None and half.state.cause is not None:
                self._look(key)

    def opened_at_prefill(self, node: Who, leg: Leg) -> None:
        self._halves[node.incarnation, leg.record.room] = leg.record
        self._legs.setdefault((node.incarnation, leg.record.room), []).append(leg.record)

    def bound(self, node: Who, record: PrefillRoomRecord) -> None:
        key = key_of(node, record)
        self._prefills[key] = record
        if record.prompt is not None:
            self._halves[node.incarnation, record.room] = record
        if self.oracle.rooms[key].record.state.cause is not None:
            self._look(key)

    def failed(self, node: Who, record: Record, cause: Cause | None) -> None:
        if isinstance(record, DecodeRoomRecord):
            keys: list[Key] = [(peer.key.incarnation, node.incarnation, record.grant) for peer in record.peers]
            found = [self._halves.get((key[0], record.room)) for key in keys]
            self._not_for_nothing(node, record, [half for half in found if half is not None], record.peers, node)
            for key in keys:
                self._look(key)
        elif record.peer is not None:
            key = key_of(node, record)
            self._look(key)
            decode = self.oracle.rooms[key]
            peers = tuple(peer for peer in decode.record.peers if peer.key.incarnation == node.incarnation)
            self._not_for_nothing(node, record, [decode.record], peers, decode.node)

    def _not_for_nothing(
        self,
        node: Who,
        record: Record,
        others: list[Record] | list[DecodeRoomRecord] | list[PrefillRoomRecord],
        peers: tuple[PrefillPeer, ...],
        target: Who,
    ) -> None:
        """A peer is given up when something has happened between the two, or when one of `others` gave up its own."""
        cause = record.state.cause
        if cause is None or cause.code is not Code.PEER_LOST or any(other.state.cause == cause for other in others):
            return
        sources = self._nodes
        for peer in peers:
            source = sources[peer.key.incarnation]
            quiet_s = self.clock.now - self._trouble(source, target, peer.key.control)
            if not self._both_live(source, target) or quiet_s <= PATIENCE_S:
                return
        self.oracle.broken("I4", f"room {record.room} at {node.name}: {cause}; nothing has happened to it")

    # --- both sides of a failure

    def _look(self, key: Key) -> None:
        self.clock.later(HEAR_S + _A_MOMENT_S, None, self._both_know, key, self.clock.now)

    def _both_know(self, key: Key, since_s: float) -> None:
        """A room that has failed on one side has ended on the other, or the link between them was not up."""
        source, target = self._nodes[key[0]], self._nodes[key[1]]
        found = self.oracle.rooms.get(key)
        if found is None or not self._both_live(source, target):
            return
        decode, prefill = found.record, self._prefills.get(key)
        peer = next(peer for peer in decode.peers if peer.key.incarnation == key[0])
        linked = peer.phase is LinkPhase.UP
        if prefill is None:
            prefill = self._halves.get((key[0], decode.room))
            if prefill is None or prefill.peer is not None:
                return
            if prefill.prompt != (decode.prompt.tokens, decode.prompt.digest):
                return
            if not linked or peer.fresh_from > key[2] or (self._forgetful and key in self.oracle.acked):
                return  # nothing from before the link was lost is told on: the engine's half waits for its rendezvous
            if self._forgetful and self.oracle.over_at_s.get(prefill, decode.opened_at_s) < decode.opened_at_s:
                return  # its end was forgotten before decode's half came
        failed_here, failed_there = decode.state.cause is not None, prefill.state.cause is not None
        if not (failed_here or failed_there):
            return
        if decode.phase in _OVER_AT_DECODE and prefill.phase in _OVER_AT_PREFILL:
            return
        over_at_s = self.oracle.over_at_s.get(decode if failed_here else prefill, 0.0)
        if over_at_s > since_s:
            return  # just now: it is looked at again
        trouble_s, known_by_s = self._trouble(source, target, peer.key.control), 0.0
        if linked and key[1] not in source.routes:
            trouble_s = self.clock.now  # it has lost its place at prefill, and finds that out by silence
        if trouble_s >= since_s:
            known_by_s = trouble_s + self._recovers_s(decode, trouble_s)
        if not linked:  # what decode has hung up on, prefill finds silent
            known_by_s = max(known_by_s, max(over_at_s, trouble_s) + PATIENCE_S)
        if (wait_s := known_by_s - self.clock.now) > 0:
            self.clock.later(wait_s + _A_MOMENT_S, None, self._both_know, key, max(trouble_s, since_s))
            return
        if prefill.peer is None and self._mixed_up(key, decode, prefill):
            return
        where, other = ("decode", prefill.phase) if failed_here else ("prefill", decode.phase)
        self.oracle.broken("I4", f"room {decode.room} has failed at {where}, the other side is still {other.name}")

    def _recovers_s(self, decode: DecodeRoomRecord, trouble_s: float) -> float:
        """How long after the last trouble both sides know: who asks has asked less and less often meanwhile."""
        return RECOVER_S + min(max(0.0, trouble_s - decode.opened_at_s), MAX_REPEAT_AFTER_S)

    def _mixed_up(self, key: Key, decode: DecodeRoomRecord, half: PrefillRoomRecord) -> bool:
        """A room id was used again at once: the engine's half has met the end of another room of that id, another half
        has met one that may have been meant for it, or the id was another room's at prefill when it ended here."""
        cause, legs = decode.state.cause, self._legs.get((key[0], decode.room), [])
        rooms = [room.record for room in self.oracle.rooms.values() if room.record.room == decode.room]
        if cause is not None and cause.code is Code.ROOM_IN_USE and any(other is not decode for other in rooms):
            return True
        causes = {other.state.cause for other in rooms} - {None}
        if half.state.cause in causes - {cause}:
            return True
        if any(leg.state.cause in causes for leg in legs if leg is not half):
            return True
        over_at_s = self.oracle.over_at_s
        before = [other for other in rooms if other is not decode and other in over_at_s]
        if half in over_at_s and any(over_at_s[other] <= over_at_s[half] for other in before):
            return True
        if decode not in over_at_s:
            return False
        ended_at_s = over_at_s[decode]
        bound = [other for at, other in self._prefills.items() if at[0] == key[0] and other.room == decode.room]
        return any(over_at_s.get(other, ended_at_s) >= ended_at_s for other in bound)

    @staticmethod
    def _both_live(*sides: Who) -> bool:
        return all(side.alive and not side.displaced for side in sides)

    def _trouble(self, source: Who, target: Who, control: str) -> float:
        """When something last happened to the link between the two, or to one of them."""
        now = self.clock.now
        if not source.up or not target.up or source.stalled_until_s > now:
            return now
        return max(
            self._trouble_at_s.get((control, target.incarnation), -1.0),
            source.troubled_at_s,
            target.troubled_at_s,
            source.stalled_until_s,
        )
