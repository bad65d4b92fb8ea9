"""Watch that both halves of a room learn of a failure in time (I4), and that a peer is given up
only for a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvflow.proof.bare.holds import Leg, Room, Who, key_of
from kvflow.proof.bare.oracle import Halves, Oracle
from kvflow.proof.sim.both_sides import BothSides, Promise, Record, Side
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.errors import Cause
from kvflow.protocols.prefill.records import PrefillRoomRecord


class WatchedHalves(BothSides, Halves):
    """Halves of rooms, examined when one of them fails."""

    def __init__(
        self,
        oracle: Oracle,
        nodes: Mapping[int, Who],
        trouble: Mapping[tuple[str, int], float],
        forgetful: bool,
    ) -> None:
        """Watch the rooms of `nodes`, which are by incarnation.

        `trouble` has the time of the last disturbance of each link, by control address and decode's
        incarnation. With `forgetful`, prefills remember so few ended grants that a grant may begin
        below the low-water mark.
        """
        BothSides.__init__(self, nodes, oracle.over_at_s, oracle.acked, forgetful)
        self.oracle, self._nodes, self._trouble = oracle, nodes, trouble

    def now_s(self) -> float:
        return self.oracle.clock.now

    def later(self, delay_s: float, do: Callable[..., object], *arguments: object) -> None:
        self.oracle.clock.later(delay_s, None, do, *arguments)

    def broken(self, invariant: str, text: str) -> None:
        self.oracle.broken(invariant, text)

    def link_troubled_at_s(self, control: str, target: Side) -> float:
        return self._trouble.get((control, target.incarnation), -1.0)

    def unplaced(self, source: Side, target: Side) -> bool:
        return target.incarnation not in self._nodes[source.incarnation].routes

    # --- what rooms do

    def opened_at_decode(self, room: Room) -> None:
        for key in room.keys:
            # The engine's half may have failed before decode opened the room.
            self.decodes[key] = room.record
            half = self.engine_half(key[0], room.record.room)
            if half is not None and half.state.cause is not None:
                self.look(key)

    def opened_at_prefill(self, node: Who, leg: Leg) -> None:
        self.half_at_prefill(node.incarnation, leg.record)

    def bound(self, node: Who, record: PrefillRoomRecord) -> None:
        key: Promise = key_of(node, record)
        self.bound_at_prefill(key, record)
        # Decode's half may have failed while its Bootstrap travelled.
        if self.decodes[key].state.cause is not None:
            self.look(key)

    def failed(self, node: Who, record: Record, cause: Cause | None) -> None:
        if isinstance(record, DecodeRoomRecord):
            self.over_at_decode(node.incarnation, record)
        else:
            self.over_at_prefill(node.incarnation, record)
