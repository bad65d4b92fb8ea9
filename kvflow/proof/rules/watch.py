"""Instrumentation of every endpoint in this process. It reports to the rules what rooms do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvflow.proof.rules.rooms import Rooms
from kvflow.proof.sim.swap import Swap
from kvflow.protocols.decode.core import DecodeCore
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.errors import Cause, KvflowError
from kvflow.protocols.machines.decode_room import DecodeEvent
from kvflow.protocols.machines.prefill_room import PrefillEvent
from kvflow.protocols.ports import WriteOutcome
from kvflow.protocols.prefill.core import PrefillCore
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.prefill.records import PrefillRoomRecord
from kvflow.protocols.wire.messages import GrantId


def observed(rooms: Rooms) -> Iterator[Swap]:
    yield from _at_decode(rooms)
    yield from _at_prefill(rooms)
    for owner in (DecodeEndpoint, PrefillEndpoint):
        yield owner, "leave", _leaving(rooms, owner.leave)


def _leaving(rooms: Rooms, leave: Any) -> Any:
    def left(self: Any, now: float) -> None:
        rooms.leaves(self.core.identity.incarnation)
        leave(self, now)

    return left


def _at_decode(rooms: Rooms) -> Iterator[Swap]:
    open_room, refuse_room = DecodeEndpoint.open_room, DecodeEndpoint.refuse_room
    feed_room = DecodeCore.feed_room

    def opened(self: DecodeEndpoint, room: int, *arguments: Any, **named: Any) -> GrantId:
        rooms.asked(room, named.get("deadline_at_s", float("inf")))
        try:
            grant = open_room(self, room, *arguments, **named)
        except KvflowError as error:
            rooms.refused_at_decode(room, error.cause())
            raise
        rooms.opened_at_decode(self.core.identity.incarnation, self.rooms[grant])
        return grant

    def refused(self: DecodeEndpoint, room: int, ranks: Any, cause: Cause, now: float) -> None:
        rooms.refused_at_decode(room, cause)
        refuse_room(self, room, ranks, cause, now)

    def fed(self: DecodeCore, record: DecodeRoomRecord, event: DecodeEvent, now: float) -> None:
        # The state is a frozen value, so `before` stays as it was.
        before = record.state
        feed_room(self, record, event, now)
        rooms.at_decode(self.identity.incarnation, record, before)

    yield DecodeEndpoint, "open_room", opened
    yield DecodeEndpoint, "refuse_room", refused
    yield DecodeCore, "feed_room", fed


def _at_prefill(rooms: Rooms) -> Iterator[Swap]:
    open_room, refuse_room = PrefillEndpoint.open_room, PrefillEndpoint.refuse_room
    begin_room, queue_chunk = PrefillEndpoint.begin_room, PrefillEndpoint.queue_chunk
    write_ended = PrefillEndpoint.write_ended
    feed_room, bind = PrefillCore.feed_room, PrefillCore.bind

    def opened(
        self: PrefillEndpoint, room: int, *arguments: Any, **named: Any
    ) -> PrefillRoomRecord:
        rooms.asked(room, named.get("deadline_at_s", float("inf")))
        record = open_room(self, room, *arguments, **named)
        rooms.opened_at_prefill(self.core.identity.incarnation, record)
        return record

    def refused(self: PrefillEndpoint, room: int, cause: Cause, now: float) -> None:
        rooms.refused_at_prefill(self.core.identity.incarnation, room, cause)
        refuse_room(self, room, cause, now)

    def begun(self: PrefillEndpoint, record: PrefillRoomRecord) -> None:
        rooms.begun_at_prefill(record)
        begin_room(self, record)

    def queued(
        self: PrefillEndpoint, record: PrefillRoomRecord, *arguments: Any, **named: Any
    ) -> None:
        queue_chunk(self, record, *arguments, **named)
        rooms.sent_a_chunk(record)

    def ended(
        self: PrefillEndpoint, write: int, outcome: WriteOutcome, *arguments: Any, **named: Any
    ) -> None:
        if write in self.core.writes:
            rooms.write_ended(self.core.writes[write][0], outcome)
        write_ended(self, write, outcome, *arguments, **named)

    def fed(self: PrefillCore, record: PrefillRoomRecord, event: PrefillEvent, now: float) -> None:
        before = record.state
        feed_room(self, record, event, now)
        rooms.at_prefill(self.identity.incarnation, record, before)

    def bound(self: PrefillCore, record: PrefillRoomRecord, *arguments: Any) -> None:
        bind(self, record, *arguments)
        rooms.bound(self.identity.incarnation, record)

    yield PrefillEndpoint, "open_room", opened
    yield PrefillEndpoint, "refuse_room", refused
    yield PrefillEndpoint, "begin_room", begun
    yield PrefillEndpoint, "queue_chunk", queued
    yield PrefillEndpoint, "write_ended", ended
    yield PrefillCore, "feed_room", fed
    yield PrefillCore, "bind", bound
