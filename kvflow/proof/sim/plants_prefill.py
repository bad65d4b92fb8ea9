"""Planted bugs at prefill: messages sent too early or never, and pages released while in use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvflow import aio as threads
from kvflow.handlers import prefill as prefill_shell
from kvflow.handlers.earlier import EarlierShell
from kvflow.handlers.shell import Shell
from kvflow.memory.allocator import PageAllocator
from kvflow.proof.plant import Installed, Plant, planting
from kvflow.proof.sim.plane import PacedPlane
from kvflow.proof.sim.swap import swapped, swapped_item, swaps
from kvflow.protocols.commands import SendToDecode
from kvflow.protocols.earlier import EarlierLoans
from kvflow.protocols.errors import WireError
from kvflow.protocols.machinery import parsed
from kvflow.protocols.machines.grants import GrantPhase, GrantTable
from kvflow.protocols.machines.prefill_room import PrefillCommand, PrefillEvent, PrefillKind
from kvflow.protocols.pages.layout import PageIndices, PoolLayout
from kvflow.protocols.ports import DataPlane, Write, WriteOutcome
from kvflow.protocols.prefill import core as prefill_core
from kvflow.protocols.prefill import endpoint as prefill_endpoint
from kvflow.protocols.prefill.core import PrefillCore
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.prefill.peers import DecodePeer
from kvflow.protocols.prefill.records import PrefillRoomRecord
from kvflow.protocols.wire.codec import encode, parse_at_prefill, routing_id
from kvflow.protocols.wire.messages import Abort, AbortAck, Bootstrap, GrantId, Message, Resync
from kvflow.transports.data.fake import FakeRoute

PLANTS: list[Plant] = []
bug = planting(PLANTS)

_ENDED = (GrantPhase.CLOSED, GrantPhase.DOUBTFUL)


@bug(
    "earlier loans of a decode forgotten by prefill",
    nodes=(190, "I5"),
    unseen="it is in prefill's shell, and no node changes its role",
)
def earlier_loans_forgotten_by_prefill() -> Installed:
    """A prefill takes over no loans of the decode that had its pool before a switch of roles."""
    # Leave the pages of earlier loans withheld, without a watch on their writers.

    def take_over_nothing(
        shell: Shell, loans: EarlierLoans, plane: DataPlane, stores: Any
    ) -> EarlierShell:
        quarantine, store = stores[-1]
        empty: Any = _Empty(quarantine.layout)
        return EarlierShell(shell, loans, plane, [(empty, store)])

    return swapped(prefill_shell, "EarlierShell", take_over_nothing)


class _Empty:
    """A quarantine without loans. No node that joins it hears of any."""

    def __init__(self, layout: PoolLayout) -> None:
        self.layout = layout

    def join(self, *_: object) -> Any:
        return ()

    def leave(self, *_: object) -> None:
        """Do nothing: no node has joined."""

    def standing(self, loans: Any) -> Any:
        return loans


@bug("ack before drain", nodes=(0, "I12"), bare=(1, "I12"))
def ack_before_drain() -> Installed:
    """Prefill says drained as soon as it has cancelled its writes."""
    cancel = prefill_core._RUN[PrefillCommand.CANCEL_WRITES]

    def cancel_writes(core: PrefillCore, record: PrefillRoomRecord, now: float) -> None:
        cancel(core, record, now)
        prefill_core._send_ended(core, record, AbortAck, drained=True)

    return swapped_item(prefill_core._RUN, PrefillCommand.CANCEL_WRITES, cancel_writes)


@bug("ack popped before send", nodes=(0, "I5"), bare=(25, "I5"))
def ack_popped_before_send() -> Installed:
    """An Abort that is repeated gets no answer."""
    original = prefill_endpoint.HANDLERS[Abort]

    def on_abort(core: PrefillCore, peer: DecodePeer, message: Abort, now: float) -> None:
        # An ended grant was answered once, so the bug sees no reason to answer again.
        if peer.grants.phase(message.grant) not in _ENDED:
            original(core, peer, message, now)

    return swapped_item(prefill_endpoint.HANDLERS, Abort, on_abort)


@bug("no grant check at prefill", nodes=(42, "I4"), bare=(0, "I4"))
def abort_by_room() -> Installed:
    """An Abort ends the room of that id, whatever its grant."""
    original = prefill_endpoint.HANDLERS[Abort]

    def on_abort(core: PrefillCore, peer: DecodePeer, message: Abort, now: float) -> None:
        record = core.rooms.get(message.room)
        if record is not None and record.peer is peer:
            aborted = PrefillEvent(PrefillKind.ABORT_RECEIVED, cause=message.cause)
            core.feed_room(record, aborted, now)
        else:
            original(core, peer, message, now)

    return swapped_item(prefill_endpoint.HANDLERS, Abort, on_abort)


@bug("nothing said again", nodes=(25, "I5"), bare=(13, "I5"))
def nothing_said_again() -> Installed:
    """Prefill leaves a Resync unanswered."""

    def on_resync(core: PrefillCore, peer: DecodePeer, message: Resync, now: float) -> None:
        """Ignore the question, as if a message that was sent could not be lost."""

    return swapped_item(prefill_endpoint.HANDLERS, Resync, on_resync)


@bug("resurrect on late metadata", nodes=(5, "I6"), bare=(0, "I6"))
def resurrect_on_late_metadata() -> Installed:
    """Prefill keeps no tombstones."""
    original = prefill_endpoint.HANDLERS[Bootstrap]

    def on_bootstrap(core: PrefillCore, peer: DecodePeer, message: Bootstrap, now: float) -> None:
        grants = peer.grants
        # The low-water mark would refuse the Bootstrap as well, so lower it for this call.
        low_water, grants.low_water = grants.low_water, min(grants.low_water, message.grant)
        if grants.phase(message.grant) in _ENDED:
            grants._enter(message.grant, GrantPhase.UNKNOWN)
            grants._sent.pop(message.grant, None)
        original(core, peer, message, now)
        grants.low_water = low_water

    return swapped_item(prefill_endpoint.HANDLERS, Bootstrap, on_bootstrap)


@bug("tombstone unbounded", nodes=(0, "I5"), bare=(0, "I5"))
def tombstone_unbounded() -> Installed:
    """Every ended grant is remembered for ever."""
    original = GrantTable.end

    def end(self: GrantTable[Any], grant: GrantId, sent: tuple[Message, ...]) -> None:
        # Only this call sees the large limit, so that no other check changes.
        limit, self._limit = self._limit, 1 << 62
        original(self, grant, sent)
        self._limit = limit

    return swaps([(GrantTable, "end", end), (GrantTable, "settle", lambda *_: [])])


@bug("dropped from one table", nodes=(0, "I7"), bare=(0, "I7"))
def grave_of_one_room() -> Installed:
    """An ended room leaves its grant open."""
    original = prefill_core._RUN[PrefillCommand.END]

    def end(core: PrefillCore, record: PrefillRoomRecord, now: float) -> None:
        with swapped(GrantTable, "end", lambda *_: None):
            original(core, record, now)

    return swapped_item(prefill_core._RUN, PrefillCommand.END, end)


@bug("ack for another life", nodes=(8, "I6"), bare=(5, "I6"))
def ack_for_another_life() -> Installed:
    """Prefill acknowledges what its predecessor was asked."""
    original = PrefillEndpoint.receive

    def receive(
        self: PrefillEndpoint,
        peer_id: bytes,
        frame: bytes,
        now: float,
        sender_address: Callable[[], str] = str,
    ) -> None:
        try:
            message = parse_at_prefill(frame)
        except WireError:
            return original(self, peer_id, frame, now, sender_address)
        core = self.core
        if type(message) is not Abort or message.source == core.identity.incarnation:
            return original(self, peer_id, frame, now, sender_address)
        ack = AbortAck(
            room=message.room,
            grant=message.grant,
            source=message.source,
            target=message.target,
            rank=core.identity.rank,
            drained=True,
        )
        core.outbox.append(SendToDecode(routing_id(message.target), encode(ack)))
        return None

    return swapped(PrefillEndpoint, "receive", receive)


@bug("prompts not compared", nodes=(1, "I8"), bare=(0, "I8"))
def prompts_not_compared() -> Installed:
    """Prefill matches halves by room alone."""

    def meet(self: PrefillCore, record: PrefillRoomRecord, now: float) -> None:
        self.feed_room(record, PrefillEvent(PrefillKind.MATCHED), now)
        self.set_deadline(record)

    return swapped(PrefillCore, "meet", meet)


@bug("failed handle taken for landed", nodes=(4, "I3"), unseen="it is in the data plane")
def failed_handle_taken_for_landed() -> Installed:
    """A write in error counts as landed."""
    return _writes(lambda write, write_again: _Hopeful(write))


@bug("failed slice retried", nodes=(4, "I3"), unseen="it is in the data plane")
def failed_slice_retried() -> Installed:
    """A failed write is started again on the same pages."""
    return _writes(_Retrying)


@bug("source let go", nodes=(0, "I13"), unseen="the allocator's holds are a shell's")
def source_let_go() -> Installed:
    """Source pages are not held while a write reads them."""
    return swaps((PageAllocator, name, lambda *_: None) for name in ("hold", "unhold"))


@bug("second cancel skips the drain", nodes=(8, "I13"), unseen="there is no task to cancel")
def second_cancel_skips_the_drain() -> Installed:
    """A thread is waited for once."""

    async def run_to_end(running: asyncio.Future[Any]) -> Any:
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise
        return running.result()

    return swapped(threads, "run_to_end", run_to_end)


@bug("garbage ends the loop", nodes=(3, "I5"), unseen="there is no task that reads")
def garbage_ends_the_loop() -> Installed:
    """Prefill's reader dies of a malformed frame."""
    # A CancelledError alone would be handled like any other error, so cancel the task first.

    def parse(decoder: Any, frame: bytes) -> Any:
        if (message := parsed(decoder, frame)) is not None:
            return message
        if (reader := asyncio.current_task()) is not None:
            reader.cancel()
        raise asyncio.CancelledError

    return swapped(prefill_endpoint, "parsed", parse)


def _writes(wrap: Any) -> Installed:
    """Make every write of a room go through `wrap(write, write_again)`."""
    original = FakeRoute.write

    def write(self: FakeRoute, source_pages: PageIndices, target_pages: PageIndices) -> Any:
        plane = self._plane
        assert isinstance(plane, PacedPlane)
        oracle = plane._oracle
        record = oracle.writing

        def write_again() -> Write:
            oracle.writing = record
            try:
                return original(self, source_pages, target_pages)
            finally:
                oracle.writing = None

        return wrap(original(self, source_pages, target_pages), write_again)

    return swapped(FakeRoute, "write", write)


class _Hopeful:
    error = ""

    def __init__(self, write: Write) -> None:
        self.write = write
        self.done: asyncio.Future[WriteOutcome] = asyncio.get_running_loop().create_future()
        write.done.add_done_callback(self._ended)

    @property
    def landed_bytes(self) -> int:
        return self.write.landed_bytes

    @property
    def total_bytes(self) -> int:
        return self.write.total_bytes

    def cancel(self) -> None:
        self.write.cancel()

    def _ended(self, done: asyncio.Future[WriteOutcome]) -> None:
        outcome = done.result()
        self.done.set_result(WriteOutcome.LANDED if outcome is WriteOutcome.UNPROVEN else outcome)


class _Retrying(_Hopeful):
    def __init__(self, write: Write, write_again: Any) -> None:
        super().__init__(write)
        self._write_again = write_again

    def _ended(self, done: asyncio.Future[WriteOutcome]) -> None:
        if done.result() is not WriteOutcome.UNPROVEN:
            self.done.set_result(done.result())
            return
        self.write = self._write_again()
        self.write.done.add_done_callback(self._ended)
