"""The rooms as their users hold them: futures, pages and the two context managers.

What happens, endpoints decide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

from kvflow.handlers.verify import ChunkVerifier
from kvflow.protocols.arguments import (
    NO_PAGES,
    check_cause,
    check_handoff,
    own_pages,
    page_indices,
    pages_wanted,
)
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.errors import Cause, Code, KvflowError, MisuseError
from kvflow.protocols.machines.decode_room import TERMINAL, DecodePhase, DecodeRoomState
from kvflow.protocols.machines.prefill_room import PrefillPhase, PrefillRoomState
from kvflow.protocols.machines.story import Line
from kvflow.protocols.pages.layout import PageIndices, PoolLayout
from kvflow.protocols.ports import PageStore, Quarantine, Write
from kvflow.protocols.prefill.records import PrefillRoomRecord
from kvflow.protocols.wire.messages import GrantId, RoomId
from kvflow.telemetry.requests import CURRENT

T = TypeVar("T")
_CLIENT_GONE = Cause(Code.CLIENT_GONE)


class Answer(Generic[T]):
    """What a room's users wait for: a result or an error, given once.

    A user that is cancelled cancels no other's wait.

    Not a future of its own: most answers are there before they are asked for, or are never asked
    for.
    """

    __slots__ = ("_error", "_result", "_waiting", "given")

    def __init__(self) -> None:
        self.given = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._waiting: tuple[asyncio.Future[None], ...] = ()

    async def get(self) -> T:
        """Wait for it. Raises: the error."""
        if not self.given:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting += (waiter,)
            try:
                await waiter
            except asyncio.CancelledError:
                self._waiting = tuple(other for other in self._waiting if other is not waiter)
                raise
        if self._error is not None:
            raise self._error.with_traceback(None)
        result: T = self._result
        return result

    def give(self, result: T | None, error: BaseException | None = None) -> None:
        """No effect when it has been given already."""
        if self.given:
            return
        self.given, self._result, self._error = True, result, error
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting = ()


class DecodeSide(Protocol):
    """What a room asks of the shell it was opened by."""

    pages: PageStore
    quarantine: Quarantine  # of the pool of `pages`

    @property
    def layout(self) -> PoolLayout: ...

    def hold_own(self, room: RoomId, pages: PageIndices) -> None:
        """Hold pages of the caller's own for a room, until `unhold_own`. Raises: OwnershipError."""

    def unhold_own(self, pages: PageIndices) -> None: ...

    def offer(self, room: DecodeRoom) -> None: ...

    def close_room(self, room: DecodeRoom, cause: Cause) -> None: ...


class DecodeRoom:
    """One room at decode.

    Await it, or use it as an async context manager: then it is open, and at the end nothing of it
    is left behind."""

    def __init__(self, shell: DecodeSide, room: RoomId, tokens: int, num_pages: int) -> None:
        """`num_pages`: what it will need for a prompt of `tokens`.

        They are taken from the node's store unless `give` brings them."""
        self._shell = shell
        self.room, self.tokens, self.num_pages = room, tokens, num_pages
        self.own_pages: PageIndices | None = None
        self.prefix_tokens: int | None = None  # as `offer` was told
        self.grant = GrantId(0)
        self.record: DecodeRoomRecord | None = None
        self.pages: PageIndices = NO_PAGES
        # What prefill writes: its pages, or as many of the staging's.
        self.lent: PageIndices = NO_PAGES
        self.owner: Hashable = ("room", room)
        self.verifier: ChunkVerifier | None = None
        self.opening: asyncio.Task[None] | None = None
        self.refused: Cause | None = None  # it ended before the endpoint knew of it
        self.when_begun: Answer[bool] = Answer()
        self.when_opened: Answer[None] = Answer()
        self.when_landed: Answer[bytes] = Answer()
        self.when_released: Answer[None] = Answer()
        self.callbacks: list[Callable[[], None]] = []  # run by the shell when it has ended
        # For log lines that other tasks write about this room.
        self.request_id = CURRENT.get().request_id
        self._kept = False
        self.held_back = True  # until its pages may be taken
        self.linked = self.over = self.free = False  # set by the shell

    def __repr__(self) -> str:
        return f"<DecodeRoom {self.room}: {self.phase.name.lower()}, {len(self.pages)} pages>"

    @property
    def phase(self) -> DecodePhase:
        if self.record is not None:
            return self.record.phase
        return DecodePhase.BOOTSTRAPPING if self.refused is None else DecodePhase.FAILED

    @property
    def state(self) -> DecodeRoomState | None:
        """None while the ranks of its prefill are being asked for."""
        return None if self.record is None else self.record.state

    @property
    def cause(self) -> Cause | None:
        """Why it ended; None while it has not, or when it succeeded."""
        return self.refused if self.record is None else self.record.state.cause

    @property
    def ended(self) -> bool:
        return self.phase in TERMINAL

    @property
    def opened_at_s(self) -> float:
        return 0.0 if self.record is None else self.record.opened_at_s

    def story(self) -> Sequence[Line]:
        return () if self.record is None else self.record.story.lines()

    async def begun(self) -> bool:
        """Of a room that was announced: wait until prefill has a place for the whole prompt, so
        that pages offered from here on wait for no other room. False when they are offered sooner.
        Raises: as `opened`."""
        return await self.when_begun.get() if self.held_back or self.when_begun.given else False

    async def opened(self) -> Self:
        """Wait until every rank is registered and the pages are offered.

        Raises: LostError, RefusedError, CapacityError, AbortedError: by what kept it from opening.
        """
        await self.when_opened.get()
        return self

    def give(self, pages: Sequence[int] | PageIndices) -> None:
        """Pages of the caller's own, held in the node's store from here on until nothing can touch
        them.

        Raises: MisuseError (another number of pages, or a second time), OwnershipError (pages the
        store cannot hold, that another room has, or that a writer of an earlier node over the pool
        may still write into).
        """
        if self.own_pages is not None or not self.held_back:
            raise MisuseError(f"room {self.room}: its pages have been given already")
        mine = own_pages(pages, self._shell.layout, self.room, self.num_pages)
        self._shell.quarantine.check(mine)
        self._shell.hold_own(self.room, mine)
        self.own_pages = self.pages = mine

    def offer(
        self, pages: Sequence[int] | PageIndices | None = None, *, prefix_tokens: int | None = None
    ) -> Self:
        """Of a room that was only announced: its pages are there now, `pages` of the caller's own
        or those of the node's store. `prefix_tokens`: what decode has of the prompt, if that is
        more than when it was announced. No effect on a room that has ended. Await the room next.
        Raises: as `DecodeNode.room`."""
        if not self.ended:
            if not self.held_back:
                raise MisuseError(f"room {self.room}: its pages have been offered already")
            if pages is not None:
                if prefix_tokens is not None:
                    self.num_pages = pages_wanted(self._shell.layout, self.tokens, prefix_tokens)
                self.give(pages)
            self.prefix_tokens = prefix_tokens
            self.held_back = False
            self.when_begun.give(False)
            self._shell.offer(self)
        return self

    async def landed(self) -> bytes:
        """Wait for every page from every rank. Returns prefill's hand-over.

        Raises: KvflowError by what ended the room (see errors.py); its `code` is the first cause.
        """
        return await self.when_landed.get()

    async def released(self) -> None:
        """Wait until nothing touches the room's pages any more: every loan has ended, and no
        checksum runs.
        """
        await self.when_released.get()

    def keep(self, owner: Hashable) -> PageIndices:
        """Take the landed pages over: they are `owner`'s now, and closing the room leaves them
        alone.

        Of a pool with rows the last is the room's row: `pool.layout.split` tells pages and rows
        apart. Raises: MisuseError before they have landed, or a second time.
        """
        if self.phase is not DecodePhase.SUCCESS or self._kept:
            raise MisuseError(f"room {self.room}: pages can be kept once, after landed()")
        if self.own_pages is None:
            self._shell.pages.move(self.pages, self.owner, owner)
        self._kept = True
        return self.pages

    def close(self, cause: Cause | None = None) -> None:
        """End the room, in any state, any number of times.

        Before it landed this is an abort: the caller is told at once, and pages that are still lent
        come home when their loans end. Raises: MisuseError for what is no Cause."""
        self._shell.close_room(self, _CLIENT_GONE if cause is None else check_cause(cause))
        if not self._kept and self.phase is DecodePhase.SUCCESS:
            self._kept = True
            if self.own_pages is None:
                self._shell.pages.give_back(self.pages, self.owner)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call back once, when the room has ended; at once if it has."""
        if self.ended:
            callback()
        else:
            self.callbacks.append(callback)

    def __await__(self) -> Generator[Any, None, Self]:
        """As entering it: a caller that is cancelled here has no handle to close, so the room is
        closed.
        """
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        try:
            await self.when_opened.get()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    # --- called by the shell

    def tell_landed(self, handoff: bytes) -> None:
        self.when_landed.give(handoff)

    def tell_failed(self, error: KvflowError) -> None:
        if self.held_back:
            self.when_begun.give(None, error)
        self.when_opened.give(None, error)
        self.when_landed.give(None, error)

    def pages_freed(self) -> None:
        """Nothing can write into them; a checksum may still read them."""
        self.free = True
        self.idle()

    def idle(self) -> None:
        if (
            self.free
            and not self.when_released.given
            and (self.verifier is None or not self.verifier.running)
        ):
            try:
                if self.own_pages is not None:
                    self._shell.unhold_own(self.own_pages)
            finally:
                self.when_released.give(None)


class PrefillSide(Protocol):
    """What a room asks of the shell it was opened by."""

    def begin_room(self, room: PrefillRoom) -> None: ...

    def send_chunk(
        self, room: PrefillRoom, pages: PageIndices, last: bool, handoff: bytes
    ) -> None: ...

    def close_prefill_room(self, room: PrefillRoom, cause: Cause) -> None: ...

    @property
    def num_pages(self) -> int: ...

    def room_bytes(self, count: int) -> int: ...


class PrefillRoom:
    """One room at prefill: its writes and their fate.

    Close it, or use it as an async context manager.
    """

    def __init__(self, shell: PrefillSide, record: PrefillRoomRecord) -> None:
        self._shell, self.record = shell, record
        # For log lines that other tasks write about this room.
        self.request_id = CURRENT.get().request_id
        self.writes: dict[int, Write] = {}
        self.landed_before = 0  # bytes of writes that have ended
        # Checksums that were given up, and whose threads may read its pages yet.
        self.over, self.readers = False, 0
        self.when_matched: Answer[int] = Answer()
        self.when_done: Answer[None] = Answer()
        self.when_released: Answer[None] = Answer()
        self.callbacks: list[Callable[[], None]] = []  # run by the shell when it has ended

    def __repr__(self) -> str:
        return (
            f"<PrefillRoom {self.room}: {self.phase.name.lower()}, {self.bytes_landed} of "
            f"{self.bytes_total} bytes>"
        )

    @property
    def room(self) -> RoomId:
        return self.record.room

    @property
    def state(self) -> PrefillRoomState:
        return self.record.state

    @property
    def phase(self) -> PrefillPhase:
        return self.record.state.phase

    @property
    def cause(self) -> Cause | None:
        """Why it ended; None while it has not, or when it succeeded."""
        return self.record.state.cause

    @property
    def ended(self) -> bool:
        """True as soon as nothing more may be sent; writes may still be draining."""
        return self.record.ended

    @property
    def opened_at_s(self) -> float:
        return self.record.opened_at_s

    @property
    def prefix_tokens(self) -> int:
        """Prompt tokens that decode has already; known once matched."""
        return self.record.prefix_tokens

    @property
    def bytes_landed(self) -> int:
        return self.landed_before + sum(write.landed_bytes for write in self.writes.values())

    @property
    def bytes_total(self) -> int:
        """Bytes of the whole room once its target is known; 0 before."""
        return self._shell.room_bytes(len(self.record.target_pages))

    def story(self) -> Sequence[Line]:
        return self.record.story.lines()

    def begin(self) -> None:
        """The engine has a place for the whole prompt, or is sure to get it whatever other rooms
        do: a decode that waits for that is told. Any number of times."""
        self._shell.begin_room(self)

    async def matched(self) -> int:
        """Wait for decode's half. Returns the number of prompt tokens decode already has.

        Raises: KvflowError by what ended the room; its `code` is the first cause.
        """
        return await self.when_matched.get()

    def send(
        self, pages: Sequence[int] | PageIndices, *, last: bool = False, handoff: bytes = b""
    ) -> None:
        """Queue one chunk: our `pages` (list or int32 [n]) go onto the next n target pages, and are
        held until the write has ended. The room never ends inside of this call, also where n is 0
        or the data plane refuses the write.

        The last chunk carries the hand-over, which reaches decode's `landed`. Only full pages
        before the last chunk. Of a pool with rows its last entry is the request's row: row r is
        `num_pages + r` (`pool.layout.numbered`). Raises: MisuseError (before matched, after the
        last chunk, more pages than decode lent, a page outside the pool, that has no owner or is in
        quarantine, a hand-over before the last chunk): nothing was queued; the room's own error
        once it has ended.
        """
        shell = self._shell
        indices = page_indices(pages, shell.num_pages, f"room {self.record.room}")
        if type(handoff) is not bytes:
            check_handoff(handoff)
        shell.send_chunk(self, indices, bool(last), handoff)

    async def done(self) -> None:
        """Wait until every write has landed. Raises: KvflowError by what ended the room."""
        await self.when_done.get()

    async def released(self) -> None:
        """Wait until the room is over and nothing reads its pages any more: no write of it runs, in
        success or not, and no checksum."""
        await self.when_released.get()

    def close(self, cause: Cause | None = None) -> None:
        """End the room, in any state, any number of times: decode is told at once, running writes
        are drained. Raises: MisuseError for what is no Cause."""
        self._shell.close_prefill_room(self, _CLIENT_GONE if cause is None else check_cause(cause))

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call back once, when nothing more may be sent; at once if that is so already."""
        if self.ended:
            callback()
        else:
            self.callbacks.append(callback)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    # --- called by the shell

    def tell_stopped(self, error: KvflowError) -> None:
        self.when_matched.give(None, error)
        self.when_done.give(None, error)
