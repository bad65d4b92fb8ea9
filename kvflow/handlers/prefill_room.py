"""A room at prefill, as the engine holds it: two halves, the chunks under way, and one ending."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

from kvflow.handlers.callbacks import call_all
from kvflow.handlers.verify import SummedFlight
from kvflow.protocols.errors import CapacityError, Cause, Code, MisuseError, room_error
from kvflow.protocols.machines.prefill_room import (
    TERMINAL,
    PrefillCommand,
    PrefillEvent,
    PrefillKind,
    PrefillPhase,
    PrefillRoom,
    step,
)
from kvflow.protocols.machines.story import Line, Story
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import Flight, Landing
from kvflow.protocols.wire.messages import MAX_HANDOFF_BYTES, AbortAck, Bootstrap, ChunkDone, Message, RoomFailed

if TYPE_CHECKING:
    from kvflow.handlers.prefill import PrefillHandlers
    from kvflow.handlers.target import Target


class _Chunk(NamedTuple):
    """One chunk handed to the data plane; its source pages are held until the flight is over."""

    flight: Flight
    source_pages: PageIndices
    seq: int
    last: bool
    handoff: bytes


class PrefillSession:
    """One room's writes and their fate. Close it, or use it as an async context manager: nothing is left behind."""

    def __init__(self, home: PrefillHandlers, room: int, phase: PrefillPhase) -> None:
        self._home = home
        self.room = room
        self.state = PrefillRoom(phase)
        self.opened_at_s = home.now()
        self.deadline_at_s = self.opened_at_s + home.timing.rendezvous_s  # for the other half; then the engine's own
        self.own_deadline_at_s = float("inf")
        self.prompt: tuple[int, bytes] | None = None  # token count and digest: the engine's half
        self.bootstrap: tuple[int, bytes] | None = None  # and decode's
        self.target: Target | None = None
        self.grant = 0
        self.prefix_tokens = 0
        self._target_pages: PageIndices | None = None
        self._placed = 0
        self._chunks: deque[_Chunk] = deque()
        self._pending: _Chunk | None = None  # between send() and START_WRITE
        self._report: _Chunk | None = None  # between a write's end and SEND_CHUNK_DONE
        self._landed_bytes = 0
        self.said: list[Message] = []  # what ends the room is said again when decode asks
        loop = asyncio.get_running_loop()
        self._matched: asyncio.Future[int] = loop.create_future()
        self._done: asyncio.Future[None] = loop.create_future()
        self._on_end: list[Callable[[], None]] = []
        self._story = Story()

    @property
    def ended(self) -> bool:
        """True as soon as nothing more may be sent; writes may still be draining."""
        return self.state.phase is PrefillPhase.DRAINING or self.state.phase in TERMINAL

    @property
    def bytes_landed(self) -> int:
        return self._landed_bytes + sum(c.flight.landed_bytes for c in self._chunks)

    @property
    def bytes_total(self) -> int:
        """Bytes of the whole room once its target is known; 0 before."""
        return 0 if self._target_pages is None else len(self._target_pages) * self._home.page_bytes

    def story(self) -> Sequence[Line]:
        return self._story.lines()

    async def matched(self) -> int:
        """Wait for decode's half. Returns the number of prompt tokens decode already has.

        Raises: KvflowError by what ended the room; its `code` is the first cause.
        """
        return await asyncio.shield(self._matched)

    def send(self, pages: PageIndices, *, last: bool = False, handoff: bytes = b"") -> None:
        """Queue one chunk: our `pages` (int32 [n]) go onto the next n target pages, and are held until the write ended.

        The last chunk carries the hand-over, which reaches decode's `landed`. Only full pages before the last chunk.
        Raises: MisuseError (before matched, after the last chunk, no page or more than decode lent, a page that is
        nobody's), TransferError (the data plane is closed): nothing was queued; the room's own error once it has ended.
        """
        if self.ended and self.state.phase is not PrefillPhase.SUCCESS:
            raise room_error(self.state.cause or Cause(Code.SHUTDOWN))
        if self._target_pages is None or self.target is None or self.state.phase < PrefillPhase.WAITING_FOR_INPUT:
            raise MisuseError(f"room {self.room}: send() before matched()")
        if self.state.last_queued:
            raise MisuseError(f"room {self.room}: send() after the last chunk")
        room_left = len(self._target_pages) - self._placed
        if len(pages) > room_left or (last and len(pages) != room_left):
            raise MisuseError(f"room {self.room}: chunk of {len(pages)} pages, {room_left} of decode's are left")
        if len(handoff) > MAX_HANDOFF_BYTES:
            raise CapacityError("bytes of hand-over", len(handoff), MAX_HANDOFF_BYTES)
        targets = self._target_pages[self._placed : self._placed + len(pages)]
        self._pending = self._begin_write(pages, targets, last, handoff)
        self._placed += len(pages)
        self.feed(PrefillEvent(PrefillKind.CHUNK_QUEUED, last=last))

    async def done(self) -> None:
        """Wait until every write has landed. Raises: KvflowError by what ended the room."""
        await asyncio.shield(self._done)

    def close(self, cause: Cause | None = None) -> None:
        """End the room, in any state, any number of times: decode is told at once, running writes are drained."""
        if self.state.phase not in TERMINAL:
            self.feed(PrefillEvent(PrefillKind.ENDED_LOCALLY, cause=cause or Cause(Code.CLIENT_GONE)))

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call back once, when nothing more may be sent; at once if that is so already."""
        if self.ended:
            callback()
        else:
            self._on_end.append(callback)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def bind(self, target: Target, message: Bootstrap, pages: PageIndices) -> None:
        """Decode's half: whose pages, under which grant."""
        self.target, self.grant, self._target_pages = target, message.grant, pages
        self.bootstrap = (message.prompt_tokens, message.prompt_digest)
        self.prefix_tokens = message.prefix_tokens

    def meet(self) -> None:
        """Both halves are here: they must mean the same prompt (I8)."""
        if self.prompt == self.bootstrap:
            self.deadline_at_s = self.own_deadline_at_s
            self.feed(PrefillEvent(PrefillKind.MATCHED))
            return
        mine, theirs = self.prompt and self.prompt[0], self.bootstrap and self.bootstrap[0]
        text = f"room {self.room}: prefill's prompt has {mine} tokens, decode's {theirs}, or their ids differ"
        self.feed(PrefillEvent(PrefillKind.MISMATCHED, cause=Cause(Code.PROMPT_MISMATCH, text)))

    def feed(self, event: PrefillEvent) -> None:
        """The one place that changes the room's state."""
        self.state, commands = step(self.state, event)
        what = "write_ended" if event.kind is None else event.kind
        self._story.tell(self._home.now(), what, self.state.phase, self._detail(event))
        for command in commands:
            _RUN[command](self)

    def _detail(self, event: PrefillEvent) -> str:
        if event.cause is not None:
            return str(event.cause)
        if event.landing is not None:
            return f"{event.landing.value}, {self.bytes_landed} of {self.bytes_total} bytes landed"
        return ""

    def _flight_ended(self, _: asyncio.Future[Landing]) -> None:
        """Report flights in the order they were queued, so that ChunkDone(last) is the last thing said."""
        while self._chunks and self._chunks[0].flight.done.done():
            chunk = self._chunks[0]
            landing = chunk.flight.done.result()
            self._landed_bytes += chunk.flight.landed_bytes
            self._home.counts.bytes_moved += chunk.flight.landed_bytes
            self._home.pages.unhold(chunk.source_pages)
            cause = None
            if landing is Landing.UNPROVEN:
                cause = Cause(Code.TRANSFER_ERROR, chunk.flight.error or "the data plane cannot say what landed")
            self._chunks.popleft()
            self._report = chunk
            self.feed(PrefillEvent(None, landing=landing, cause=cause))

    def _begin_write(self, source: PageIndices, targets: PageIndices, last: bool, handoff: bytes) -> _Chunk:
        """Before the machine hears of it: a write that was refused must not be waited for."""
        assert self.target is not None and self.target.route is not None
        self._home.pages.hold(source)
        try:
            flight = self.target.route.write(source, targets)
        except BaseException:
            self._home.pages.unhold(source)
            raise
        if self._home.checksums is not None:
            flight = SummedFlight(flight, self._home.checksums.begin(source))
        return _Chunk(flight, source, self.state.queued, last, handoff)

    def _start_write(self) -> None:
        assert self._pending is not None
        chunk, self._pending = self._pending, None
        self._chunks.append(chunk)
        chunk.flight.done.add_done_callback(self._flight_ended)

    def _send_chunk_done(self) -> None:
        c, (source, target) = self._report, self._incarnations()
        assert c is not None
        who = (self.room, self.grant, source, target, self._home.rank)
        checksum = c.flight.checksum if isinstance(c.flight, SummedFlight) else b""
        self._say(ChunkDone(*who, c.seq, len(c.source_pages), c.last, c.handoff, checksum))

    def _send_failed(self) -> None:
        source, target = self._incarnations()
        cause = self.state.cause or Cause(Code.PROTOCOL_ERROR)
        self._say(RoomFailed(self.room, self.grant, source, target, self._home.rank, cause))

    def _send_ack(self, drained: bool) -> None:
        source, target = self._incarnations()
        self._say(AbortAck(self.room, self.grant, source, target, self._home.rank, drained))

    def _say(self, message: Message) -> None:
        assert self.target is not None
        self.said.append(message)
        self.target.send(message)

    def _incarnations(self) -> tuple[int, int]:
        assert self.target is not None
        return self._home.incarnation, self.target.incarnation

    def _cancel_writes(self) -> None:
        for chunk in list(self._chunks):
            chunk.flight.cancel()

    def _tell_matched(self) -> None:
        if not self._matched.done():
            self._matched.set_result(self.prefix_tokens)

    def _tell_success(self) -> None:
        if not self._done.done():
            self._done.set_result(None)
        self._call_back()

    def _tell_ended(self) -> None:
        error = room_error(self.state.cause or Cause(Code.CLIENT_GONE))
        for future in (self._matched, self._done):
            if not future.done():
                future.set_exception(error)
                future.exception()  # the engine may never ask: then nobody is to be warned
        self._call_back()

    def _call_back(self) -> None:
        call_all(self._on_end, self._home.counts)

    def _end(self) -> None:
        self._home.forget(self)


_RUN: dict[PrefillCommand, Callable[[PrefillSession], None]] = {
    PrefillCommand.TELL_MATCHED: PrefillSession._tell_matched,
    PrefillCommand.START_WRITE: PrefillSession._start_write,
    PrefillCommand.SEND_CHUNK_DONE: PrefillSession._send_chunk_done,
    PrefillCommand.CANCEL_WRITES: PrefillSession._cancel_writes,
    PrefillCommand.SEND_FAILED: PrefillSession._send_failed,
    PrefillCommand.SEND_DRAINED: lambda s: s._send_ack(True),
    PrefillCommand.SEND_UNPROVEN: lambda s: s._send_ack(False),
    PrefillCommand.TELL_SUCCESS: PrefillSession._tell_success,
    PrefillCommand.TELL_ENDED: PrefillSession._tell_ended,
    PrefillCommand.END: PrefillSession._end,
}
