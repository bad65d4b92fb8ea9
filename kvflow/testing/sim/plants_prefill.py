"""Planted bugs of prefill's side: words said too early or not again, graves forgotten, pages let go while in use."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from kvflow import aio as threads
from kvflow.handlers import prefill, prefill_room
from kvflow.handlers.prefill import PrefillHandlers
from kvflow.handlers.prefill_room import PrefillSession
from kvflow.handlers.target import Target
from kvflow.memory.allocator import PageAllocator
from kvflow.protocols.errors import WireError
from kvflow.protocols.machines.prefill_room import PrefillCommand, PrefillEvent, PrefillKind
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import Flight, Landing
from kvflow.protocols.wire.codec import decode_to_prefill, encode, routing_id
from kvflow.protocols.wire.messages import Abort, AbortAck, Bootstrap, Message, Resync, ToPrefill
from kvflow.testing.sim.swap import swapped, swapped_item

Installed = AbstractContextManager[object]


def ack_before_drain() -> Installed:
    cancel = prefill_room._RUN[PrefillCommand.CANCEL_WRITES]

    def cancel_writes(session: PrefillSession) -> None:
        cancel(session)
        session._send_ack(True)

    return swapped_item(prefill_room._RUN, PrefillCommand.CANCEL_WRITES, cancel_writes)


def ack_popped_before_send() -> Installed:
    original = PrefillHandlers.on_abort

    async def on_abort(self: PrefillHandlers, target: Target, message: Abort) -> None:
        if message.grant not in target.closed:  # else it is over, its answer on its way: nobody can need it again
            await original(self, target, message)

    return swapped_item(prefill._HANDLERS, Abort, on_abort)


def abort_by_room() -> Installed:
    original = PrefillHandlers.on_abort

    async def on_abort(self: PrefillHandlers, target: Target, message: Abort) -> None:
        session = self.rooms.get(message.room)
        if session is not None and session.target is target:
            session.feed(PrefillEvent(PrefillKind.ABORT_RECEIVED, cause=message.cause))
        else:
            await original(self, target, message)

    return swapped_item(prefill._HANDLERS, Abort, on_abort)


def nothing_said_again() -> Installed:
    async def on_resync(self: PrefillHandlers, target: Target, message: Resync) -> None:
        """What was said was said."""

    return swapped_item(prefill._HANDLERS, Resync, on_resync)


def resurrect_on_late_metadata() -> Installed:
    original = PrefillHandlers.on_bootstrap

    async def on_bootstrap(self: PrefillHandlers, target: Target, message: Bootstrap) -> None:
        closed, target.closed = target.closed, OrderedDict()
        low_water, target.low_water = target.low_water, 0
        await original(self, target, message)
        target.closed, target.low_water = OrderedDict({**closed, **target.closed}), low_water

    return swapped_item(prefill._HANDLERS, Bootstrap, on_bootstrap)


def tombstone_unbounded() -> Installed:
    def close_grant(self: Target, grant: int, said: tuple[Message, ...]) -> None:
        self.grants.pop(grant, None)
        self.closed[grant] = said

    swaps = ExitStack()
    swaps.enter_context(swapped(Target, "close_grant", close_grant))
    swaps.enter_context(swapped(Target, "settle", lambda *_: None))
    return swaps


def grave_of_one_room() -> Installed:
    """The room is dropped from one table only."""

    def forget(self: PrefillHandlers, session: PrefillSession) -> None:
        del self.rooms[session.room]
        self._room_ended.set()

    return swapped(PrefillHandlers, "forget", forget)


def ack_for_another_life() -> Installed:
    original = PrefillHandlers._handle

    async def handle(self: PrefillHandlers, message: ToPrefill) -> None:
        if type(message) is Abort and message.source != self.incarnation:
            ack = AbortAck(message.room, message.grant, message.source, message.target, self.rank, True)
            self.socket.send(encode(ack), routing_id(message.target))
        else:
            await original(self, message)

    return swapped(PrefillHandlers, "_handle", handle)


def prompts_not_compared() -> Installed:
    def meet(self: PrefillSession) -> None:
        self.deadline_at_s = self.own_deadline_at_s
        self.feed(PrefillEvent(PrefillKind.MATCHED))

    return swapped(PrefillSession, "meet", meet)


def failed_handle_taken_for_landed() -> Installed:
    return _flights(lambda flight, write: _Hopeful(flight))


def failed_slice_retried() -> Installed:
    return _flights(_Retrying)


def source_let_go() -> Installed:
    """Source pages are not held while a write reads them."""
    swaps = ExitStack()
    swaps.enter_context(swapped(PageAllocator, "hold", lambda *_: None))
    swaps.enter_context(swapped(PageAllocator, "unhold", lambda *_: None))
    return swaps


def second_cancel_skips_the_drain() -> Installed:
    async def drained(running: asyncio.Future[Any]) -> Any:
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise
        return running.result()

    return swapped(threads, "drained", drained)


def garbage_ends_the_loop() -> Installed:
    def decode(frame: bytes) -> ToPrefill:
        try:
            return decode_to_prefill(frame)
        except WireError as error:
            raise ValueError(str(error)) from None

    return swapped(prefill, "decode_to_prefill", decode)


def _flights(wrap: Any) -> Installed:
    """Every write of a room goes through `wrap(flight, write again)`."""
    original = PrefillSession._begin_write

    def begin(self: PrefillSession, source: PageIndices, targets: PageIndices, last: bool, handoff: bytes) -> Any:
        chunk = original(self, source, targets, last, handoff)
        assert self.target is not None and self.target.route is not None
        route = self.target.route

        def write_again() -> Flight:
            self._home.plane._truth.writing = self  # type: ignore[attr-defined]
            return route.write(source, targets)

        return chunk._replace(flight=wrap(chunk.flight, write_again))

    return swapped(PrefillSession, "_begin_write", begin)


class _Hopeful:
    """An error is as good as a success."""

    error = ""

    def __init__(self, flight: Flight) -> None:
        self.flight = flight
        self.done: asyncio.Future[Landing] = asyncio.get_running_loop().create_future()
        flight.done.add_done_callback(self._ended)

    @property
    def landed_bytes(self) -> int:
        return self.flight.landed_bytes

    @property
    def total_bytes(self) -> int:
        return self.flight.total_bytes

    def cancel(self) -> None:
        self.flight.cancel()

    def _ended(self, done: asyncio.Future[Landing]) -> None:
        landing = done.result()
        self.done.set_result(Landing.LANDED if landing is Landing.UNPROVEN else landing)


class _Retrying(_Hopeful):
    """A failed write is started again, onto the same pages."""

    def __init__(self, flight: Flight, write_again: Any) -> None:
        super().__init__(flight)
        self._write_again = write_again

    def _ended(self, done: asyncio.Future[Landing]) -> None:
        if done.result() is not Landing.UNPROVEN:
            self.done.set_result(done.result())
            return
        self.flight = self._write_again()
        self.flight.done.add_done_callback(self._ended)
