"""Planted bugs of decode's side: pages given back too early, words believed that prove nothing, rooms mixed up."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Any

from kvflow.handlers import decode
from kvflow.handlers.decode import DecodeHandlers
from kvflow.handlers.decode_room import DecodeSession
from kvflow.handlers.link import Link
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machines import decode_room
from kvflow.protocols.machines.decode_room import DecodeEvent, DecodeKind, DecodePhase, DecodeRoom
from kvflow.protocols.machines.ledger import Grant, Ledger
from kvflow.protocols.machines.loan import LoanKey, LoanKind
from kvflow.protocols.wire.messages import AbortAck, ChunkDone, Heartbeat, Registered, RoomFailed
from kvflow.testing.sim.swap import swapped, swapped_item

Installed = AbstractContextManager[object]
TIMER_S = 0.3


def free_on_timer() -> Installed:
    original = Ledger.room_ended

    def room_ended(ledger: Ledger, grant: Grant) -> None:
        original(ledger, grant)

        def give_up() -> None:
            for loan in list(grant.loans):
                ledger.feed(LoanKey(loan.link.source, loan.link.rank, grant.number), LoanKind.FENCED)

        if grant.loans:
            asyncio.get_running_loop().call_later(TIMER_S, give_up)

    return swapped(Ledger, "room_ended", room_ended)


def abort_never_retried() -> Installed:
    return swapped(Ledger, "repeat", lambda *_: None)


def no_grant_check() -> Installed:
    def room_of(self: DecodeHandlers, link: Link, message: ChunkDone | RoomFailed) -> DecodeSession | None:
        return next((s for s in self.rooms.values() if s.room == message.room and link in s.links), None)

    return swapped(DecodeHandlers, "_room_of", room_of)


def success_before_all_ranks() -> Installed:
    original = decode_room._count_chunk

    def count_chunk(room: DecodeRoom, event: DecodeEvent) -> tuple[DecodeRoom, DecodeKind, DecodeEvent]:
        room, kind, event = original(room, event)
        return room, DecodeKind.ALL_LANDED if event.last and kind is DecodeKind.CHUNK_LANDED else kind, event

    return swapped(decode_room, "_count_chunk", count_chunk)


def double_close() -> Installed:
    def close(self: DecodeSession, cause: Cause | None = None) -> None:
        self.feed(DecodeEvent(DecodeKind.ENDED_LOCALLY, cause=cause or Cause(Code.CLIENT_GONE)))
        if self.state.phase is DecodePhase.SUCCESS:
            self._home.ledger.room_ended(self.grant)

    return swapped(DecodeSession, "close", close)


def restart_taken_for_death() -> Installed:
    original = Link.on_registered

    def on_registered(self: Link, message: Registered) -> None:
        original(self, message)
        if message.source != self.source:
            self._home.ledger.feed_link(self, LoanKind.FENCED)

    return swapped(Link, "on_registered", on_registered)


def silence_taken_for_proof() -> Installed:
    original = DecodeHandlers.source_lost

    def source_lost(self: DecodeHandlers, link: Link, cause: Cause) -> None:
        original(self, link, cause)
        self.ledger.feed_link(link, LoanKind.FENCED)

    return swapped(DecodeHandlers, "source_lost", source_lost)


def doubt_taken_for_proof() -> Installed:
    async def on_abort_ack(self: DecodeHandlers, link: Link, message: AbortAck) -> None:
        link.heard()
        self.ledger.feed(LoanKey(link.source, link.rank, message.grant), LoanKind.DRAINED)

    return swapped_item(decode._HANDLERS, AbortAck, on_abort_ack)


def heartbeat_counts_queueing() -> Installed:
    async def on_heartbeat(self: DecodeHandlers, link: Link, message: Heartbeat) -> None:
        """A prefill that has much to do and nothing to say of our rooms is taken for dead."""

    return swapped_item(decode._HANDLERS, Heartbeat, on_heartbeat)


def handoff_slot_shared() -> Installed:
    def write(session: DecodeSession, value: bytes) -> None:
        if value:
            session._home.slot = value  # type: ignore[attr-defined]

    def read(session: DecodeSession) -> Any:
        return getattr(session._home, "slot", b"")

    return swapped(DecodeSession, "_handoff", property(read, write))
