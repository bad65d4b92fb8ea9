"""Endings of rooms (I4, I5, I6, I7, I12): endpoints and shells are watched from outside while a
simulation runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvflow.handlers.prefill import PrefillShell
from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.proof.sim.both_sides import (
    OVER_AT_DECODE,
    OVER_AT_PREFILL,
    BothSides,
    Record,
    Side,
    promise_of,
    promises_of,
)
from kvflow.proof.sim.loop import current_process
from kvflow.proof.sim.oracle import Key, Oracle
from kvflow.proof.sim.swap import swapped
from kvflow.protocols.commands import StartWrite
from kvflow.protocols.decode.core import DecodeCore
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.errors import Cause, KvflowError
from kvflow.protocols.machines import decode_room, prefill_room
from kvflow.protocols.machines.decode_room import DecodeEvent, DecodeRoomState
from kvflow.protocols.machines.prefill_room import PrefillEvent, PrefillPhase, PrefillRoomState
from kvflow.protocols.ports import WriteOutcome
from kvflow.protocols.prefill.core import PrefillCore
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.prefill.peers import DecodePeer
from kvflow.protocols.prefill.records import PrefillRoomRecord
from kvflow.protocols.wire.codec import routing_id
from kvflow.protocols.wire.messages import GrantId, Incarnation


class Endings(BothSides):
    """Observer of every room, whether it fails or not."""

    def __init__(self, oracle: Oracle, forgetful: bool) -> None:
        """With `forgetful`, prefills remember so few ended grants that a grant may begin below the
        low-water mark.
        """
        self._over_at_s: dict[Record, float] = {}
        super().__init__(oracle.by_incarnation, self._over_at_s, oracle.acked, forgetful)
        self.oracle, self.loop = oracle, oracle.loop
        self.count: dict[str, int] = {}
        self._handles: dict[PrefillRoomRecord, PrefillRoom] = {}
        self._told: set[DecodeRoomRecord] = set()  # rooms whose users have their answer

    def now_s(self) -> float:
        return self.loop.time()

    def later(self, delay_s: float, do: Callable[..., object], *arguments: object) -> None:
        self.loop.later(delay_s, do, *arguments)

    def broken(self, invariant: str, text: str) -> None:
        self.oracle.broken(invariant, text)

    def link_troubled_at_s(self, control: str, target: Side) -> float:
        link = control, routing_id(Incarnation(target.incarnation))
        return self.oracle.link_disturbed_at_s.get(link, -1.0)

    # --- what rooms do

    def opened_at_decode(self, target: Incarnation, record: DecodeRoomRecord) -> None:
        for key in promises_of(target, record):
            if key in self.decodes:
                self.broken("I6", f"{key} is opened again")
            self.decodes[key] = record
            self.look(key)

    def at_decode(
        self, target: Incarnation, record: DecodeRoomRecord, before: DecodeRoomState
    ) -> None:
        """Verify a step of a room's table at decode."""
        now = record.state
        if before is now:
            return
        self._one_ending(f"room {record.room} at decode", before, now, decode_room.TERMINAL)
        if before.phase not in OVER_AT_DECODE and now.phase in OVER_AT_DECODE:
            self._over_at_s[record] = self.now_s()
            self._ended("decode", now.phase.name, now.cause)
            # The shell notifies the user later in this turn of the loop, so look after it.
            self.loop.soon(self._user_told, record)
            self.over_at_decode(target, record)

    def _user_told(self, record: DecodeRoomRecord) -> None:
        if record not in self._told:
            self.broken("I4", f"room {record.room} ended at decode, its client was not told")

    def told_at_decode(self, room: DecodeRoom) -> None:
        if room.record is not None:
            self._told.add(room.record)

    def handed_out(self, room: PrefillRoom) -> None:
        """Record that the engine's half of a room is open."""
        record = room.record
        self._handles[record] = room
        self.half_at_prefill(current_incarnation(self.oracle), record)

    def at_prefill(
        self, source: Incarnation, record: PrefillRoomRecord, before: PrefillRoomState
    ) -> None:
        """Verify a step of a room's table at prefill."""
        now = record.state
        self.known_at_prefill(source, record)
        if before is now:
            return
        self._one_ending(f"room {record.room} at prefill", before, now, prefill_room.TERMINAL)
        key = promise_of(source, record)
        if before.phase not in OVER_AT_PREFILL and now.phase in OVER_AT_PREFILL:
            self._over_at_s[record] = self.now_s()
            self._ended("prefill", now.phase.name, now.cause)
            if record.prompt is not None:
                # The shell notifies the engine later in this turn of the loop, too.
                self.loop.soon(self._engine_told, record)
            self.over_at_prefill(source, record)
        if (
            key is not None
            and now.phase in prefill_room.TERMINAL
            and before.phase not in prefill_room.TERMINAL
        ):
            writes = self.oracle.writes.get(Key(*key), ())
            if any(write.outcome is None for write in writes):
                self.broken(
                    "I12", f"room {record.room} has ended at prefill while a write of it runs"
                )
            if now.phase is PrefillPhase.SUCCESS and any(
                write.outcome is not WriteOutcome.LANDED for write in writes
            ):
                self.broken(
                    "I3", f"room {record.room} succeeds at prefill over a write that has not landed"
                )

    def _engine_told(self, record: PrefillRoomRecord) -> None:
        handle = self._handles.get(record)
        if handle is None or not handle.when_done.given:
            self.broken("I4", f"room {record.room} ended at prefill, its engine was not told")

    def bound(self, source: Incarnation, record: PrefillRoomRecord) -> None:
        """Record that decode's half arrived at prefill, or was announced there."""
        key = promise_of(source, record)
        assert key is not None
        if key in self.prefills or key in self.acked:
            self.broken("I6", f"{key} opens room {record.room} at prefill, and was closed before")
        self.bound_at_prefill(key, record)
        self.look(key)

    def _one_ending(self, who: str, before: Any, now: Any, terminal: frozenset[Any]) -> None:
        if before.phase in terminal and now.phase is not before.phase:
            self.broken("I4", f"{who} ended {before.phase.name} and now is {now.phase.name}")
        if before.cause is not None and now.cause != before.cause:
            self.broken("I4", f"{who}: first {before.cause}, then {now.cause}")

    def _ended(self, role: str, phase: str, cause: Any) -> None:
        name = f"{role} {phase.lower()}" if cause is None else f"{role} {cause.code}"
        self.count[name] = self.count.get(name, 0) + 1


@contextmanager
def observed(endings: Endings) -> Iterator[None]:
    """Make every endpoint and shell in this process report to `endings`."""
    with ExitStack() as swaps:
        for owner, name, replacement in (*_at_decode(endings), *_at_prefill(endings)):
            swaps.enter_context(swapped(owner, name, replacement))
        start = PrefillShell._start_write

        def writing(shell: PrefillShell, command: StartWrite) -> None:
            # The data plane does not know grants, so the oracle takes the grant from this room.
            endings.oracle.writing = shell.endpoint.core.writes[command.write][0]
            try:
                start(shell, command)
            finally:
                endings.oracle.writing = None

        swaps.enter_context(swapped(PrefillShell, "_start_write", writing))
        yield


Swap = tuple[type, str, object]


def _at_decode(endings: Endings) -> Iterator[Swap]:
    open_room, refuse_room, feed_room = (
        DecodeEndpoint.open_room,
        DecodeEndpoint.refuse_room,
        DecodeCore.feed_room,
    )
    tell_landed, tell_failed = DecodeRoom.tell_landed, DecodeRoom.tell_failed

    def opened(self: DecodeEndpoint, room: int, *arguments: Any, **named: Any) -> GrantId:
        try:
            grant = open_room(self, room, *arguments, **named)
        except KvflowError as error:
            endings.refused_at_decode(room, error.cause())
            raise
        endings.opened_at_decode(self.core.identity.incarnation, self.rooms[grant])
        return grant

    def refused(self: DecodeEndpoint, room: int, ranks: Any, cause: Cause, now: float) -> None:
        endings.refused_at_decode(room, cause)
        refuse_room(self, room, ranks, cause, now)

    def fed(self: DecodeCore, record: DecodeRoomRecord, event: DecodeEvent, now: float) -> None:
        before = record.state
        # The state is a frozen value, so `before` stays as it was.
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
    yield DecodeEndpoint, "refuse_room", refused
    yield DecodeCore, "feed_room", fed
    yield DecodeRoom, "tell_landed", landed
    yield DecodeRoom, "tell_failed", failed


def _at_prefill(endings: Endings) -> Iterator[Swap]:
    open_room, feed_room, bind = PrefillShell.open, PrefillCore.feed_room, PrefillCore.bind
    refuse_room, send = PrefillEndpoint.refuse_room, PrefillRoom.send

    def sent(self: PrefillRoom, *arguments: Any, **named: Any) -> None:
        send(self, *arguments, **named)
        if self.ended:
            endings.broken("I4", f"room {self.room} ends inside of its engine's own send()")

    def opened(self: PrefillShell, *arguments: Any, **named: Any) -> PrefillRoom:
        room = open_room(self, *arguments, **named)
        endings.handed_out(room)
        return room

    def fed(self: PrefillCore, record: PrefillRoomRecord, event: PrefillEvent, now: float) -> None:
        before = record.state
        feed_room(self, record, event, now)
        endings.at_prefill(self.identity.incarnation, record, before)

    def bound(
        self: PrefillCore, record: PrefillRoomRecord, peer: DecodePeer, grant: GrantId
    ) -> None:
        bind(self, record, peer, grant)
        endings.bound(self.identity.incarnation, record)

    def refused(self: PrefillEndpoint, room: int, cause: Cause, now: float) -> None:
        endings.refused_at_prefill(self.core.identity.incarnation, room, cause)
        refuse_room(self, room, cause, now)

    yield PrefillRoom, "send", sent
    yield PrefillShell, "open", opened
    yield PrefillEndpoint, "refuse_room", refused
    yield PrefillCore, "feed_room", fed
    yield PrefillCore, "bind", bound


def current_incarnation(oracle: Oracle) -> int:
    return oracle.by_process[current_process()].incarnation
