"""Instrumentation of the shells of whole nodes: notices to users, and the room of each write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from kvflow.handlers.decode import DecodeShell
from kvflow.handlers.prefill import PrefillShell
from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.proof.rules.watch import observed
from kvflow.proof.sim.loop import current_process
from kvflow.proof.sim.oracle import Oracle
from kvflow.proof.sim.swap import Swap, swaps
from kvflow.protocols import commands as c
from kvflow.protocols.errors import Cause, KvflowError


def nodes_observed(oracle: Oracle) -> AbstractContextManager[None]:
    return swaps((*observed(oracle.rooms), *_at_decode(oracle), *_at_prefill(oracle)))


def _at_decode(oracle: Oracle) -> Iterator[Swap]:
    rooms = oracle.rooms
    begin, end_room = DecodeShell._begun, DecodeShell._ended_room
    land, fail = DecodeShell._landed, DecodeShell._fail

    def told(room: DecodeRoom, cause: Cause | None) -> None:
        # A room that was refused before it opened has no record, and no peer knows of it.
        if (record := room.record) is None:
            return
        # A shell that cannot take pages notifies the user, and the endpoint then repeats the cause.
        if record not in rooms.told or rooms.told[record] != cause:
            seen = oracle.by_process[current_process()]
            rooms.told_at_decode(seen.incarnation, record, cause)

    def landed(self: DecodeShell, command: c.RoomLanded) -> None:
        room = self.rooms[command.grant]
        # With staging, landing returns the lent places, so read them first.
        lent = room.holding.lent
        land(self, command)
        told(room, None)
        oracle.landed(room, lent.tolist(), command.handoff)

    def failed(self: DecodeShell, room: DecodeRoom, error: KvflowError | Cause) -> None:
        fail(self, room, error)
        told(room, error if isinstance(error, Cause) else error.cause())

    def begun(self: DecodeShell, command: c.RoomBegun) -> None:
        begin(self, command)
        record = self.rooms[command.grant].record
        assert record is not None
        rooms.told_begun(self.endpoint.core.identity.incarnation, record)

    def ended(self: DecodeShell, command: c.RoomEnded) -> None:
        record = self.rooms[command.grant].record
        end_room(self, command)
        assert record is not None
        rooms.ended_at_decode(record, in_table=command.grant in self.endpoint.rooms)

    yield DecodeShell, "_landed", landed
    yield DecodeShell, "_fail", failed
    yield DecodeShell, "_begun", begun
    yield DecodeShell, "_ended_room", ended


def _at_prefill(oracle: Oracle) -> Iterator[Swap]:
    rooms = oracle.rooms
    send, start = PrefillRoom.send, PrefillShell._start_write
    match, done, stop = PrefillShell._matched, PrefillShell._done, PrefillShell._stopped
    release, close_route = PrefillShell._released, PrefillShell._close_route

    def sent(self: PrefillRoom, *arguments: Any, **named: Any) -> None:
        send(self, *arguments, **named)
        rooms.sent_a_chunk(self.record)

    def writing(self: PrefillShell, command: c.StartWrite) -> None:
        # The data plane does not know grants, so the oracle takes the grant from this room.
        oracle.writing = self.endpoint.core.writes[command.write][0]
        try:
            start(self, command)
        finally:
            oracle.writing = None

    def matched(self: PrefillShell, command: c.RoomMatched) -> None:
        match(self, command)
        rooms.matched(_source(self), self.rooms[command.serial].record)

    def told(self: PrefillShell, serial: int, cause: Cause | None) -> None:
        room = self.rooms[serial]
        if room.when_done.given:
            rooms.told_at_prefill(_source(self), room.record, cause)

    def succeeded(self: PrefillShell, command: c.RoomDone) -> None:
        done(self, command)
        told(self, command.serial, None)

    def stopped(self: PrefillShell, command: c.RoomStopped) -> None:
        stop(self, command)
        told(self, command.serial, command.cause)

    def released(self: PrefillShell, command: c.RoomReleased) -> None:
        release(self, command)
        source = _source(self)
        room = rooms.record_of(source, command.serial)
        in_table = self.endpoint.rooms.get(room.room) is room
        rooms.released(source, command.serial, in_table=in_table)

    def closed(self: PrefillShell, command: c.CloseRoute) -> None:
        oracle.transfers.route_closed(oracle.by_incarnation[_source(self)], command.peer)
        close_route(self, command)

    yield PrefillRoom, "send", sent
    yield PrefillShell, "_start_write", writing
    yield PrefillShell, "_matched", matched
    yield PrefillShell, "_done", succeeded
    yield PrefillShell, "_stopped", stopped
    yield PrefillShell, "_released", released
    yield PrefillShell, "_close_route", closed


def _source(shell: PrefillShell) -> int:
    return shell.endpoint.core.identity.incarnation
