"""Planted bugs of decode's side: pages that return too early, messages that are taken for proof,
rooms mixed up.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Any

from kvflow.handlers.decode import DecodeShell
from kvflow.handlers.earlier import EarlierShell
from kvflow.handlers.rooms import DecodeRoom
from kvflow.memory.quarantine import PoolQuarantine
from kvflow.proof.sim.loop import Process, current_process
from kvflow.proof.sim.swap import swapped, swapped_cells, swapped_item
from kvflow.protocols.commands import QuarantinePages, WatchEarlierWriter
from kvflow.protocols.decode import inbox as decode_inbox
from kvflow.protocols.decode.core import DecodeCore
from kvflow.protocols.decode.links import PrefillPeer
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.earlier import EarlierLoans
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machines import decode_room
from kvflow.protocols.machines.decode_room import (
    DecodeEvent,
    DecodeKind,
    DecodePhase,
    DecodeRoomState,
)
from kvflow.protocols.machines.link import TABLE as LINK_TABLE
from kvflow.protocols.machines.link import LinkCommand, LinkKind, LinkPhase
from kvflow.protocols.machines.loan import LoanKind
from kvflow.protocols.machines.tables import Move
from kvflow.protocols.wire.messages import AbortAck, ChunkDone, Heartbeat, RoomFailed

Installed = AbstractContextManager[object]
TIMER_S = 0.3


def free_on_timer() -> Installed:
    original = DecodeShell._quarantine

    def quarantine(shell: DecodeShell, command: QuarantinePages) -> None:
        original(shell, command)
        asyncio.get_running_loop().call_later(TIMER_S, _give_up, shell, command)

    return swapped(DecodeShell, "_quarantine", quarantine)


def _give_up(shell: DecodeShell, command: QuarantinePages) -> None:
    """Take every loan of these pages for ended."""
    room = shell.rooms.get(command.grant)
    if room is not None and room.record is not None:
        lease = room.record.lease
        for peer in list(lease.loans):
            shell.endpoint.core.feed_loan(lease, peer, LoanKind.DRAINED, shell.now())
        shell.run()


def abort_never_retried() -> Installed:
    return swapped(DecodeCore, "repeat_aborts", lambda *_: None)


def no_grant_check() -> Installed:
    def room_of(
        core: DecodeCore, peer: PrefillPeer, message: ChunkDone | RoomFailed
    ) -> DecodeRoomRecord | None:
        # The first room with that number stands in for the one that the grant names.
        return next(
            (r for r in core.rooms.values() if r.room == message.room and peer in r.peers), None
        )

    return swapped(decode_inbox, "_room_of", room_of)


def success_before_all_ranks() -> Installed:
    original = decode_room._count_chunk

    def count_chunk(
        room: DecodeRoomState, event: DecodeEvent
    ) -> tuple[DecodeRoomState, DecodeKind, DecodeEvent]:
        room, kind, event = original(room, event)
        return (
            room,
            DecodeKind.ALL_LANDED if event.last and kind is DecodeKind.CHUNK_LANDED else kind,
            event,
        )

    return swapped(decode_room, "_count_chunk", count_chunk)


def double_close() -> Installed:
    def close(self: DecodeRoom, cause: Cause | None = None) -> None:
        self._shell.close_room(self, cause or Cause(Code.CLIENT_GONE))
        if self.phase is DecodePhase.SUCCESS:
            self._shell.pages.give_back(self.pages, self.owner)

    return swapped(DecodeRoom, "close", close)


def restart_taken_for_death() -> Installed:
    # A new incarnation at an address is handled as a death that the machine observed.
    dead = LINK_TABLE.cell(LinkPhase.UP, LinkKind.DIED)
    return swapped_cells(
        LINK_TABLE, {(phase, LinkKind.REPLACED): dead for phase in (LinkPhase.UP, LinkPhase.SILENT)}
    )


def silence_taken_for_proof() -> Installed:
    silent = Move(
        LinkPhase.SILENT, (LinkCommand.LOSE_ROOMS, LinkCommand.END_LOANS, LinkCommand.SEND_REGISTER)
    )
    return swapped_cells(LINK_TABLE, {(LinkPhase.UP, LinkKind.SILENCE_DUE): silent})


def doubt_taken_for_proof() -> Installed:
    def on_abort_ack(core: DecodeCore, peer: PrefillPeer, message: AbortAck, now: float) -> None:
        lease = core.ledger.find(peer, message.grant)
        if lease is not None:
            core.feed_loan(lease, peer, LoanKind.DRAINED, now)

    return swapped_item(decode_inbox.HANDLERS, AbortAck, on_abort_ack)


def heartbeat_counts_queueing() -> Installed:
    def on_heartbeat(core: DecodeCore, peer: PrefillPeer, message: Heartbeat, now: float) -> None:
        """Ignore heartbeats, so that a busy prefill which sends no message about our rooms counts
        as dead.
        """

    return swapped_item(decode_inbox.HANDLERS, Heartbeat, on_heartbeat)


def handoff_slot_shared() -> Installed:
    # One slot per process, so that only rooms of one decode mix up their hand-overs.
    slots: dict[Process | None, bytes] = {}

    def write(record: DecodeRoomRecord, value: bytes) -> None:
        if value:
            slots[current_process()] = value

    def read(record: DecodeRoomRecord) -> Any:
        return slots.get(current_process(), b"")

    return swapped(DecodeRoomRecord, "handoff", property(read, write))


def earlier_loans_forgotten() -> Installed:
    return swapped(PoolQuarantine, "keep_out_of", lambda *_, **__: None)


def earlier_writer_unwatched() -> Installed:
    return swapped(EarlierLoans, "writer_died", lambda *_: None)


def close_taken_for_proof() -> Installed:
    """Take the end of the earlier node for the end of its writers."""
    original = EarlierShell._watch_writer

    def watch_writer(shell: EarlierShell, command: WatchEarlierWriter) -> None:
        original(shell, command)
        shell._loans.writer_died(command.writer)

    return swapped(EarlierShell, "_watch_writer", watch_writer)
