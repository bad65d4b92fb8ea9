"""Planted bugs at decode: pages freed too early, messages mistaken for proof, rooms mixed up."""

from __future__ import annotations

import asyncio
from typing import Any

from kvflow.handlers.decode import DecodeShell
from kvflow.handlers.earlier import EarlierShell
from kvflow.handlers.rooms import DecodeRoom
from kvflow.memory.quarantine import PoolQuarantine
from kvflow.proof.plant import Installed, Plant, planting
from kvflow.proof.sim.loop import Process, current_process
from kvflow.proof.sim.swap import swapped, swapped_item
from kvflow.protocols.commands import QuarantinePages, WatchEarlierWriter
from kvflow.protocols.decode import endpoint as decode_endpoint
from kvflow.protocols.decode.core import DecodeCore
from kvflow.protocols.decode.links import PrefillPeer
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.earlier import EarlierLoans
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machines.decode_room import DecodePhase
from kvflow.protocols.machines.loan import LoanKind
from kvflow.protocols.machines.ownership import Source
from kvflow.protocols.wire.messages import AbortAck, ChunkDone, Heartbeat, RoomFailed

PLANTS: list[Plant] = []
bug = planting(PLANTS)

TIMER_S = 0.3


@bug("free on timer", nodes=(4, "I2"), unseen="it is in decode's shell")
def free_on_timer() -> Installed:
    """Decode takes lent pages back after a while, proof or not."""
    original = DecodeShell._quarantine

    def quarantine(shell: DecodeShell, command: QuarantinePages) -> None:
        original(shell, command)
        asyncio.get_running_loop().call_later(TIMER_S, _give_up, shell, command)

    return swapped(DecodeShell, "_quarantine", quarantine)


def _give_up(shell: DecodeShell, command: QuarantinePages) -> None:
    room = shell.rooms.get(command.grant)
    if room is not None and room.record is not None:
        lease = room.record.lease
        for peer in list(lease.loans):
            shell.endpoint.core.feed_loan(lease, peer, LoanKind.DRAINED, shell.now())
        shell.run()


@bug("abort never retried", nodes=(13, "I4"), bare=(13, "I4"))
def abort_never_retried() -> Installed:
    """A lost Abort or AbortAck is lost for good."""
    return swapped(DecodeCore, "repeat_aborts", lambda *_: None)


@bug("no grant check", nodes=(94, "I4"), bare=(50, "I4"))
def no_grant_check() -> Installed:
    """Decode takes words for a room whatever grant they name."""

    def room_of(
        core: DecodeCore, peer: PrefillPeer, message: ChunkDone | RoomFailed
    ) -> DecodeRoomRecord | None:
        # The first room with that number stands in for the one that the grant names.
        return next(
            (r for r in core.rooms.values() if r.room == message.room and peer in r.peers), None
        )

    return swapped(decode_endpoint, "_room_of", room_of)


@bug("double close", nodes=(0, "I1"), unseen="it is in the room that users hold")
def double_close() -> Installed:
    """Closing a room a second time gives its pages back again."""

    def close(self: DecodeRoom, cause: Cause | None = None) -> None:
        self._shell.close_room(self, cause or Cause(Code.CLIENT_GONE))
        if self.phase is DecodePhase.SUCCESS:
            self.holding._give_back(Source.STORE)

    return swapped(DecodeRoom, "close", close)


@bug("doubt taken for proof", nodes=(4, "I2"), bare=(4, "I2"))
def doubt_taken_for_proof() -> Installed:
    """AbortAck(unproven) ends a loan."""

    def on_abort_ack(core: DecodeCore, peer: PrefillPeer, message: AbortAck, now: float) -> None:
        lease = core.ledger.find(peer, message.grant)
        if lease is not None:
            core.feed_loan(lease, peer, LoanKind.DRAINED, now)

    return swapped_item(decode_endpoint.HANDLERS, AbortAck, on_abort_ack)


@bug("heartbeat counts queueing", nodes=(1, "I4"), bare=(86, "I7"))
def heartbeat_counts_queueing() -> Installed:
    """A prefill that says nothing of rooms is dead."""

    def on_heartbeat(core: DecodeCore, peer: PrefillPeer, message: Heartbeat, now: float) -> None:
        """Ignore heartbeats, so that a busy prefill which sends no message about our rooms counts
        as dead.
        """

    return swapped_item(decode_endpoint.HANDLERS, Heartbeat, on_heartbeat)


@bug("handoff slot shared", nodes=(0, "I9"), bare=(0, "I9"))
def handoff_slot_shared() -> Installed:
    """Handoffs of all rooms go through one slot."""
    # One slot per process, so that only rooms of one decode mix up their handoffs.
    slots: dict[Process | None, bytes] = {}

    def write(record: DecodeRoomRecord, value: bytes) -> None:
        if value:
            slots[current_process()] = value

    def read(record: DecodeRoomRecord) -> Any:
        return slots.get(current_process(), b"")

    return swapped(DecodeRoomRecord, "handoff", property(read, write))


@bug("earlier loans forgotten", nodes=(63, "I1"), unseen="stores are a shell's")
def earlier_loans_forgotten() -> Installed:
    """The next node over a pool hands out what an earlier one lent, from another store."""
    return swapped(PoolQuarantine, "keep_out_of", lambda *_, **__: None)


@bug("earlier writer unwatched", nodes=(63, "I5"), bare=(34, "I5"))
def earlier_writer_unwatched() -> Installed:
    """The death of an earlier node's writer is not seen."""
    return swapped(EarlierLoans, "writer_died", lambda *_: None)


@bug("close taken for proof", nodes=(63, "I2"), unseen="it is in the shell's watches")
def close_taken_for_proof() -> Installed:
    """An earlier node's loans end when the next one starts."""
    # Treat the end of the earlier node as the death of its writers.
    original = EarlierShell._watch_writer

    def watch_writer(shell: EarlierShell, command: WatchEarlierWriter) -> None:
        original(shell, command)
        shell._loans.writer_died(command.writer)

    return swapped(EarlierShell, "_watch_writer", watch_writer)
