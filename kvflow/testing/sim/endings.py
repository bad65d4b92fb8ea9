"""How rooms end (I4, I5, I6, I7, I12): endpoints and shells are watched from outside while a simulation runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from kvflow.handlers.prefill import PrefillShell
from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.protocols.commands import StartWrite
from kvflow.protocols.decode import DecodeEndpoint
from kvflow.protocols.decode_core import MAX_REPEAT_AFTER_S, DecodeCore
from kvflow.protocols.decode_links import PrefillPeer
from kvflow.protocols.decode_rooms import DecodeRoomRecord
from kvflow.protocols.errors import Code
from kvflow.protocols.machines import decode_room, prefill_room
from kvflow.protocols.machines.decode_room import DecodeEvent, DecodePhase, DecodeRoomState
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.machines.prefill_room import PrefillEvent, PrefillPhase, PrefillRoomState
from kvflow.protocols.ports import WriteOutcome
from kvflow.protocols.prefill_core import PrefillCore
from kvflow.protocols.prefill_peers import DecodePeer
from kvflow.protocols.prefill_rooms import PrefillRoomRecord
from kvflow.protocols.wire.codec import routing_id
from kvflow.protocols.wire.messages import GrantId, Incarnation
from kvflow.testing.sim.loop import current_process
from kvflow.testing.sim.oracle import Key, Oracle, Seen
from kvflow.testing.sim.swap import swapped
from kvflow.testing.sim.times import HEAR_S, PATIENCE_S, RECOVER_S

Record = DecodeRoomRecord | PrefillRoomRecord
_OVER_AT_DECODE = decode_room.TERMINAL | {DecodePhase.DRAINING}
_OVER_AT_PREFILL = prefill_room.TERMINAL | {PrefillPhase.DRAINING}


class Endings:
    """Every room of one run, by the promise it was opened under."""

    def __init__(self, oracle: Oracle, forgetful: bool) -> None:
        """`forgetful`: prefills remember so few ended grants that some may begin below the low-water mark."""
        self.oracle, self.forgetful = oracle, forgetful
        self.loop = oracle.loop
        self.count: dict[str, int] = {}
        self._decodes: dict[Key, DecodeRoomRecord] = {}
        self._prefills: dict[Key, PrefillRoomRecord] = {}
        self._over_at_s: dict[Record, float] = {}
        self._halves: dict[tuple[int, int], PrefillRoomRecord] = {}  # (incarnation, room): the engine's latest
        self._legs: dict[tuple[int, int], list[PrefillRoomRecord]] = defaultdict(list)  # and all of them
        self._handles: dict[PrefillRoomRecord, PrefillRoom] = {}
        self._told: set[DecodeRoomRecord] = set()  # whose users have their answer

    # --- what rooms do

    def opened_at_decode(self, target: Incarnation, record: DecodeRoomRecord) -> None:
        for key in _keys_of(target, record):
            if key in self._decodes:
                self.oracle.broken("I6", f"{key} is opened again")
            self._decodes[key] = record
            self._look(key)

    def at_decode(self, target: Incarnation, record: DecodeRoomRecord, before: DecodeRoomState) -> None:
        now, node = record.state, self.oracle.by_incarnation[target]
        if before is now:
            return
        self._one_ending(f"room {record.room} at decode", before, now, decode_room.TERMINAL)
        if before.phase not in _OVER_AT_DECODE and now.phase in _OVER_AT_DECODE:
            self._over_at_s[record] = self.loop.time()
            self._ended("decode", now.phase.name, now.cause)
            found = [self._halves.get((peer.key.incarnation, record.room)) for peer in record.peers]
            self._not_for_nothing(record, [half for half in found if half is not None], record.peers, node)
            self.loop.soon(self._user_told, record)
            for key in _keys_of(target, record):
                self._look(key)

    def _user_told(self, record: DecodeRoomRecord) -> None:
        if record not in self._told:
            self.oracle.broken("I4", f"room {record.room} ended at decode, its client was not told")

    def told_at_decode(self, room: DecodeRoom) -> None:
        if room.record is not None:
            self._told.add(room.record)

    def handed_out(self, room: PrefillRoom) -> None:
        """The engine's half of a room is there."""
        record = room.record
        self._handles[record] = room
        where = current_incarnation(self.oracle), record.room
        self._halves[where] = record
        self._legs[where].append(record)

    def at_prefill(self, source: Incarnation, record: PrefillRoomRecord, before: PrefillRoomState) -> None:
        now = record.state
        if record.prompt is not None:
            self._halves[source, record.room] = record
        if before is now:
            return
        self._one_ending(f"room {record.room} at prefill", before, now, prefill_room.TERMINAL)
        key = _key_of(source, record)
        if before.phase not in _OVER_AT_PREFILL and now.phase in _OVER_AT_PREFILL:
            self._over_at_s[record] = self.loop.time()
            self._ended("prefill", now.phase.name, now.cause)
            if record.prompt is not None:
                self.loop.soon(self._engine_told, record)
            if key is not None:
                self._look(key)
                decode, target = self._decodes[key], self.oracle.by_incarnation[key.target]
                peers = [peer for peer in decode.peers if peer.key.incarnation == source]
                self._not_for_nothing(record, [decode], peers, target)
        if key is not None and now.phase in prefill_room.TERMINAL and before.phase not in prefill_room.TERMINAL:
            writes = self.oracle.writes.get(key, ())
            if any(write.outcome is None for write in writes):
                self.oracle.broken("I12", f"room {record.room} has ended at prefill while a write of it runs")
            if now.phase is PrefillPhase.SUCCESS and any(write.outcome is not WriteOutcome.LANDED for write in writes):
                self.oracle.broken("I3", f"room {record.room} succeeds at prefill over a write that has not landed")

    def _engine_told(self, record: PrefillRoomRecord) -> None:
        handle = self._handles.get(record)
        if handle is None or not handle.when_done.given:
            self.oracle.broken("I4", f"room {record.room} ended at prefill, its engine was not told")

    def bound(self, source: Incarnation, record: PrefillRoomRecord) -> None:
        """Decode's half has come to prefill, or is announced."""
        key = _key_of(source, record)
        assert key is not None
        if key in self._prefills or key in self.oracle.acked:
            self.oracle.broken("I6", f"{key} opens room {record.room} at prefill, and was closed before")
        self._prefills[key] = record
        self._look(key)

    def _not_for_nothing(
        self, record: Record, others: Sequence[Record], peers: Sequence[PrefillPeer], target: Seen
    ) -> None:
        """A peer is given up when something has happened between the two, or when one of `others` gave up its own."""
        cause = record.state.cause
        if cause is None or cause.code is not Code.PEER_LOST or any(other.state.cause == cause for other in others):
            return
        sources = self.oracle.by_incarnation
        if all(self._fine(sources[peer.key.incarnation], target, peer.key.control) for peer in peers):
            side = "decode" if isinstance(record, DecodeRoomRecord) else "prefill"
            self.oracle.broken("I4", f"room {record.room} at {side}: {cause}; nothing has happened to it")

    def _one_ending(self, who: str, before: Any, now: Any, terminal: frozenset[Any]) -> None:
        if before.phase in terminal and now.phase is not before.phase:
            self.oracle.broken("I4", f"{who} ended {before.phase.name} and now is {now.phase.name}")
        if before.cause is not None and now.cause != before.cause:
            self.oracle.broken("I4", f"{who}: first {before.cause}, then {now.cause}")

    def _ended(self, role: str, phase: str, cause: object) -> None:
        name = f"{role} {phase.lower()}" if cause is None else f"{role} {cause.code}"  # type: ignore[attr-defined]
        self.count[name] = self.count.get(name, 0) + 1

    # --- both sides of a failure

    def _look(self, key: Key) -> None:
        self.loop.later(HEAR_S + 1e-6, self._both_know, key, self.loop.time())

    def _both_know(self, key: Key, since_s: float) -> None:
        """A room that has failed on one side has ended on the other, or the link between them was not up."""
        source, target = (self.oracle.by_incarnation[inc] for inc in (key.source, key.target))
        decode, prefill = self._decodes.get(key), self._prefills.get(key)
        if decode is None or not self._both_live(source, target):
            return
        peer = _peer(decode, key.source)
        linked = peer.phase is LinkPhase.UP
        if prefill is None:
            prefill = self._halves.get((key.source, decode.room))
            if prefill is None or prefill.peer is not None:
                return
            if prefill.prompt != (decode.prompt.tokens, decode.prompt.digest):
                return
            if not linked or peer.fresh_from > key.grant or (self.forgetful and key in self.oracle.acked):
                return  # nothing from before the link was lost is told on: the engine's half waits for its rendezvous
            if self.forgetful and self._over_at_s.get(prefill, decode.opened_at_s) < decode.opened_at_s:
                return  # its end was forgotten before decode's half came
        failed_here, failed_there = decode.state.cause is not None, prefill.state.cause is not None
        if not (failed_here or failed_there):
            return
        if decode.phase in _OVER_AT_DECODE and prefill.phase in _OVER_AT_PREFILL:
            return
        over_at_s = self._over_at_s.get(decode if failed_here else prefill, 0.0)
        if over_at_s > since_s:
            return  # just now: it is looked at again
        trouble_s, known_by_s = self._trouble(source, target, peer.key.control), 0.0
        if trouble_s >= since_s:
            known_by_s = trouble_s + self._recovers_s(decode, trouble_s)
        if not linked:  # what decode has hung up on, prefill finds silent
            known_by_s = max(known_by_s, max(over_at_s, trouble_s) + PATIENCE_S)
        if (wait_s := known_by_s - self.loop.time()) > 0:
            self.loop.later(wait_s + 1e-6, self._both_know, key, max(trouble_s, since_s))
            return
        if prefill.peer is None and self._mixed_up(key, decode, prefill):
            return
        where, other = ("decode", prefill.phase) if failed_here else ("prefill", decode.phase)
        self.oracle.broken("I4", f"room {decode.room} has failed at {where}, the other side is still {other.name}")

    def _recovers_s(self, decode: DecodeRoomRecord, trouble_s: float) -> float:
        """How long after the last disturbance both sides know: who asks has asked less and less often meanwhile."""
        return RECOVER_S + min(max(0.0, trouble_s - decode.opened_at_s), MAX_REPEAT_AFTER_S)

    def _mixed_up(self, key: Key, decode: DecodeRoomRecord, half: PrefillRoomRecord) -> bool:
        """A room id was used again at once: the engine's half has met the end of another room of that id, another half
        has met one that may have been meant for it, or the id was another room's at prefill when it ended here."""
        cause, rooms = decode.state.cause, [other for other in self._decodes.values() if other.room == decode.room]
        if cause is not None and cause.code is Code.ROOM_IN_USE and any(other is not decode for other in rooms):
            return True
        causes = {other.state.cause for other in rooms} - {None}
        if half.state.cause in causes - {cause}:
            return True
        if any(leg.state.cause in causes for leg in self._legs[key.source, decode.room] if leg is not half):
            return True
        if decode not in self._over_at_s:
            return False
        over_at_s, ended_at_s = self._over_at_s, self._over_at_s[decode]
        bound = [other for at, other in self._prefills.items() if at.source == key.source and other.room == decode.room]
        return any(over_at_s.get(other, ended_at_s) >= ended_at_s for other in bound)

    def _fine(self, source: Seen, target: Seen, control: str) -> bool:
        """Both live and nothing has happened to the link between them for longer than patience lasts."""
        quiet_s = self.loop.time() - self._trouble(source, target, control)
        return self._both_live(source, target) and quiet_s > PATIENCE_S

    def _both_live(self, *sides: Seen) -> bool:
        return not any(side.ended or side.displaced for side in sides)

    def _trouble(self, source: Seen, target: Seen, control: str) -> float:
        """When something last happened to the link between the two, or to one of them."""
        now = self.loop.time()
        if source.process.parked is not None or target.process.parked is not None or source.stalled_until_s > now:
            return now
        return max(
            self.oracle.link_disturbed_at_s.get((control, routing_id(Incarnation(target.incarnation))), -1.0),
            source.disturbed_at_s,
            target.disturbed_at_s,
            source.stalled_until_s,
        )


@contextmanager
def observed(endings: Endings) -> Iterator[None]:
    """Every endpoint and shell in this process reports to `endings`."""
    with ExitStack() as swaps:
        for owner, name, replacement in (*_at_decode(endings), *_at_prefill(endings)):
            swaps.enter_context(swapped(owner, name, replacement))
        start = PrefillShell._start_write

        def writing(shell: PrefillShell, command: StartWrite) -> None:
            endings.oracle.writing = shell.endpoint.core.writes[command.write][0]
            try:
                start(shell, command)
            finally:
                endings.oracle.writing = None

        swaps.enter_context(swapped(PrefillShell, "_start_write", writing))
        yield


Swap = tuple[type, str, object]


def _at_decode(endings: Endings) -> Iterator[Swap]:
    open_room, feed_room = DecodeEndpoint.open_room, DecodeCore.feed_room
    tell_landed, tell_failed = DecodeRoom.tell_landed, DecodeRoom.tell_failed

    def opened(self: DecodeEndpoint, *arguments: Any, **named: Any) -> GrantId:
        grant = open_room(self, *arguments, **named)
        endings.opened_at_decode(self.core.identity.incarnation, self.rooms[grant])
        return grant

    def fed(self: DecodeCore, record: DecodeRoomRecord, event: DecodeEvent, now: float) -> None:
        before = record.state
        feed_room(self, record, event, now)
        endings.at_decode(self.identity.incarnation, record, before)

    def landed(self: DecodeRoom, handoff: bytes) -> None:
        tell_landed(self, handoff)
        endings.told_at_decode(self)
        endings.oracle.landed(self, handoff)

    def failed(self: DecodeRoom, error: Any) -> None:
        tell_failed(self, error)
        endings.told_at_decode(self)

    yield DecodeEndpoint, "open_room", opened
    yield DecodeCore, "feed_room", fed
    yield DecodeRoom, "tell_landed", landed
    yield DecodeRoom, "tell_failed", failed


def _at_prefill(endings: Endings) -> Iterator[Swap]:
    open_room, feed_room, bind = PrefillShell.open, PrefillCore.feed_room, PrefillCore.bind

    def opened(self: PrefillShell, *arguments: Any, **named: Any) -> PrefillRoom:
        room = open_room(self, *arguments, **named)
        endings.handed_out(room)
        return room

    def fed(self: PrefillCore, record: PrefillRoomRecord, event: PrefillEvent, now: float) -> None:
        before = record.state
        feed_room(self, record, event, now)
        endings.at_prefill(self.identity.incarnation, record, before)

    def bound(self: PrefillCore, record: PrefillRoomRecord, peer: DecodePeer, grant: GrantId) -> None:
        bind(self, record, peer, grant)
        endings.bound(self.identity.incarnation, record)

    yield PrefillShell, "open", opened
    yield PrefillCore, "feed_room", fed
    yield PrefillCore, "bind", bound


def current_incarnation(oracle: Oracle) -> int:
    return oracle.by_process[current_process()].incarnation


def _keys_of(target: Incarnation, record: DecodeRoomRecord) -> list[Key]:
    return [Key(peer.key.incarnation, target, record.grant) for peer in record.peers]


def _key_of(source: Incarnation, record: PrefillRoomRecord) -> Key | None:
    return None if record.peer is None else Key(source, record.peer.incarnation, record.grant)


def _peer(record: DecodeRoomRecord, source: int) -> PrefillPeer:
    return next(peer for peer in record.peers if peer.key.incarnation == source)
