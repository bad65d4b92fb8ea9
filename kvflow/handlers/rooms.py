"""Rooms as their users hold them: pages, what is awaited of them, and the two context managers.

The endpoints decide what happens in a room, and `protocols.machines.ownership` who owns its pages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvflow.handlers.shell import Answer
from kvflow.protocols.arguments import (
    check_cause,
    check_handoff,
    own_pages,
    page_indices,
    pages_wanted,
)
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.errors import Cause, Code, MisuseError, OwnershipError
from kvflow.protocols.machinery import Line
from kvflow.protocols.machines.decode_room import TERMINAL, DecodePhase, DecodeRoomState
from kvflow.protocols.machines.ownership import (
    CLAIMED,
    SETTLED,
    Ownership,
    PageCommand,
    PageKind,
    PagePhase,
    Source,
    step,
)
from kvflow.protocols.machines.prefill_room import PrefillPhase, PrefillRoomState
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices, PoolLayout
from kvflow.protocols.ports import PageStore, Quarantine, Write
from kvflow.protocols.prefill.records import PrefillRoomRecord
from kvflow.protocols.wire.messages import GrantId, RoomId
from kvflow.telemetry.requests import CURRENT

_CLIENT_GONE = Cause(Code.CLIENT_GONE)
_INT32 = np.dtype(np.int32)


class Quarantined:
    """The owner of pages whose room ended before the last loan on them."""

    __slots__ = ("grant",)

    def __init__(self, grant: int) -> None:
        self.grant = grant

    def __repr__(self) -> str:
        return f"quarantine({self.grant})"


class RoomStores:
    """The stores of one decode: of its pool and, with staging, of the staging."""

    def __init__(
        self,
        pages: PageStore,
        layout: PoolLayout,
        quarantine: Quarantine,
        staging: PageStore | None,
        guard: Callable[[Callable[[], object], str], None],
    ) -> None:
        """`layout` and `quarantine` belong to the pool of `pages`. `guard` calls its argument, and
        logs what that raises.
        """
        self.pages, self.layout, self.quarantine = pages, layout, quarantine
        self.staging, self.guard = staging, guard
        # Places of callers' own pages that rooms hold. The store only counts holds, so it would not
        # notice two rooms over one page.
        self._own: NDArray[np.bool_] | None = None

    def hold_own(self, room: RoomId, pages: PageIndices) -> None:
        """Hold the caller's own pages for a room, until `unhold_own`.

        Raises: OwnershipError for pages that the store cannot hold, or that another room has.
        """
        if self._own is None:
            self._own = np.zeros(self.layout.num_places, dtype=np.bool_)
        if (taken := self._own[pages]).any():
            raise OwnershipError(
                f"room {room}: page {pages[taken][0]} is lent to prefill for another room, or has "
                "been until now; give it once that room is released"
            )
        try:
            self.pages.hold(pages)
        except OwnershipError as error:
            text = (
                f"room {room}: {error}; take them from node.pages, or make the node with "
                "pages=ExternalPages"
            )
            raise OwnershipError(text) from None
        self._own[pages] = True

    def unhold_own(self, pages: PageIndices) -> None:
        assert self._own is not None
        self._own[pages] = False
        self.pages.unhold(pages)


class RoomPages:
    """The pages of one room: those that its user receives, and those that prefill writes."""

    __slots__ = (
        "_grant",
        "_owner",
        "_room",
        "_settled",
        "_staging_owner",
        "_stores",
        "lent",
        "over",
        "pages",
        "state",
    )

    def __init__(self, stores: RoomStores, room: RoomId, settled: Callable[[], None]) -> None:
        """`settled` is called once, when nothing of the room can touch `pages` any more."""
        self._stores, self._room, self._settled = stores, room, settled
        self.state = Ownership(staging=None if stores.staging is None else PagePhase.NONE)
        self.pages: PageIndices = NO_PLACES
        self.lent: PageIndices = NO_PLACES  # `pages`, or as many places of the staging
        self._owner: Hashable = ("room", room)
        self._staging_owner: Hashable = self._owner
        self._grant = GrantId(0)
        self.over = False  # the room ended, and only its pages are left

    @property
    def claimed(self) -> bool:
        """True while the room must learn what becomes of its pages."""
        return self.state.target in CLAIMED or self.state.staging in CLAIMED

    def opened(self, grant: GrantId) -> None:
        """Name the owner of pages that are taken from here on."""
        self._grant = grant
        self._owner = self._staging_owner = ("grant", grant)

    def give(self, pages: PageIndices) -> None:
        """Use pages of the caller's own.

        Raises: OwnershipError for pages that the store cannot hold, that another room has, or that
        a writer of an earlier node over the pool may still write into.
        """
        self._stores.quarantine.check(pages)
        self._stores.hold_own(self._room, pages)
        self.pages = pages
        self.feed(PageKind.TAKE, Source.OWN)

    def take_staging(self, count: int) -> None:
        """Take places of the staging. Raises: CapacityError."""
        staging = self._stores.staging
        assert staging is not None
        take = staging.take_room if self._stores.layout.num_rows else staging.take
        self.lent = take(count, self._staging_owner)
        self.feed(PageKind.TAKE, Source.STAGING)

    def take(self, count: int) -> None:
        """Take `count` pages of the node's store, unless the caller gave some.

        Raises: CapacityError, OwnershipError, and whatever a store of the user's own raises.
        """
        stores, layout = self._stores, self._stores.layout
        if not self.state.own:
            take = stores.pages.take_room if layout.num_rows else stores.pages.take
            taken: Any = take(count, self._owner)
            # A store of the user's own may return any sequence of indices.
            if type(taken) is not np.ndarray or taken.dtype is not _INT32:
                what = f"room {self._room}: what {stores.pages!r} gave"
                taken = page_indices(taken, layout.num_places, what)
            self.pages = taken
            self.feed(PageKind.TAKE, Source.STORE)
        # A store of the user's own need not withhold pages that are in quarantine.
        if stores.quarantine.leases:
            stores.quarantine.check(self.pages)
        if stores.staging is None:
            self.lent = self.pages

    def feed(
        self, kind: PageKind, source: Source | None = None, keeper: Hashable | None = None
    ) -> None:
        """Feed one event and run the commands that follow.

        A store that refuses to take pages back does not keep the room from its end: the error is
        logged. Raises: OwnershipError of a store that refuses to change an owner (the state stays
        as before).
        """
        before = self.state
        self.state, commands = step(before, kind, source)
        for of, command in commands:
            if command is PageCommand.RETURN:
                self._stores.guard(
                    functools.partial(self._give_back, of),
                    f"giving back pages of room {self._room}",
                )
                continue
            try:
                self._move(of, keeper if kind is PageKind.KEEP else Quarantined(self._grant))
            except BaseException:
                self.state = before
                raise
        if self.state.target in SETTLED and before.target not in SETTLED:
            self._settled()

    def _give_back(self, source: Source) -> None:
        if source is Source.OWN:
            self._stores.unhold_own(self.pages)
        elif source is Source.STORE:
            if self.pages.size:
                self._stores.pages.give_back(self.pages, self._owner)
        else:
            assert self._stores.staging is not None
            lent, self.lent = self.lent, NO_PLACES
            self._stores.staging.give_back(lent, self._staging_owner)

    def _move(self, source: Source, owner: Hashable) -> None:
        if source is Source.STAGING:
            assert self._stores.staging is not None
            self._stores.staging.move(self.lent, self._staging_owner, owner)
            self._staging_owner = owner
        else:
            self._stores.pages.move(self.pages, self._owner, owner)
            self._owner = owner


class DecodeSide(Protocol):
    """The shell as a decode room uses it."""

    stores: RoomStores

    def offer(self, room: DecodeRoom) -> None: ...

    def close_room(self, room: DecodeRoom, cause: Cause) -> None: ...


class DecodeRoom:
    """One room at decode.

    Await it, or enter it as an async context manager: it is then open. Leaving the context closes
    it.
    """

    def __init__(self, shell: DecodeSide, room: RoomId, tokens: int, num_pages: int) -> None:
        """`num_pages` is what the room needs for a prompt of `tokens` tokens.

        The pages are taken from the node's store, unless `give` brings them.
        """
        self._shell = shell
        self.room, self.tokens, self.num_pages = room, tokens, num_pages
        self.prefix_tokens: int | None = None  # the argument of `offer`
        self.grant = GrantId(0)
        self.record: DecodeRoomRecord | None = None
        self.refused: Cause | None = None  # why it ended, where the endpoint never knew it
        self.when_begun: Answer[bool] = Answer()
        self.when_opened: Answer[None] = Answer()
        self.when_landed: Answer[bytes] = Answer()
        self.when_released: Answer[None] = Answer()
        self.holding = RoomPages(
            shell.stores, room, functools.partial(self.when_released.give, None)
        )
        self.callbacks: list[Callable[[], None]] = []  # the shell runs them when the room ended
        # Tasks that serve all requests log about this room, and take the request's id from here.
        self.request_id = CURRENT.get().request_id
        self.held_back = True  # until its pages may be taken

    def __repr__(self) -> str:
        return f"<DecodeRoom {self.room}: {self.phase.name.lower()}, {len(self.pages)} pages>"

    @property
    def pages(self) -> PageIndices:
        """The room's pages, int32 [n]; empty before they are taken. In a pool with rows the last
        one is the room's row.
        """
        return self.holding.pages

    @property
    def phase(self) -> DecodePhase:
        if self.record is not None:
            return self.record.phase
        return DecodePhase.BOOTSTRAPPING if self.refused is None else DecodePhase.FAILED

    @property
    def state(self) -> DecodeRoomState | None:
        """State of the room's machine; None before the endpoint opened the room."""
        return None if self.record is None else self.record.state

    @property
    def cause(self) -> Cause | None:
        """Cause of the room's end; None while it is open, and after a success."""
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
        """Wait until prefill has a place for the whole prompt of a room that was announced.

        Pages offered from then on wait for no other room. Returns False when the pages are offered
        sooner. Raises: as `opened`.
        """
        return await self.when_begun.get() if self.held_back or self.when_begun.given else False

    async def opened(self) -> Self:
        """Wait until every rank is registered and the pages are offered.

        Raises: LostError, RefusedError, CapacityError or AbortedError, by what kept the room from
        opening.
        """
        await self.when_opened.get()
        return self

    def give(self, pages: Sequence[int] | PageIndices) -> None:
        """Use pages of the caller's own for the room.

        The node's store holds them from here on, until nothing can touch them. Raises: MisuseError
        (another number of pages, or a second call), OwnershipError (pages that the store cannot
        hold, that another room has, or that a writer of an earlier node over the pool may still
        write into).
        """
        if self.holding.state.own or not self.held_back:
            raise MisuseError(f"room {self.room}: its pages have been given already")
        self.holding.give(own_pages(pages, self._shell.stores.layout, self.room, self.num_pages))

    def offer(
        self, pages: Sequence[int] | PageIndices | None = None, *, prefix_tokens: int | None = None
    ) -> Self:
        """Bring the pages of a room that was announced: `pages` of the caller's own, or pages of
        the node's store.

        `prefix_tokens` is what decode has of the prompt, if that is more than at the announcement.
        Await the room next. No effect on a room that ended. Raises: as `DecodeNode.room`.
        """
        if not self.ended:
            if not self.held_back:
                raise MisuseError(f"room {self.room}: its pages have been offered already")
            if pages is not None:
                if prefix_tokens is not None:
                    self.num_pages = pages_wanted(
                        self._shell.stores.layout, self.tokens, prefix_tokens
                    )
                self.give(pages)
            self.prefix_tokens = prefix_tokens
            self.held_back = False
            self.when_begun.give(False)
            self._shell.offer(self)
        return self

    async def landed(self) -> bytes:
        """Wait until every page from every rank landed, and return prefill's hand-over.

        Raises: KvflowError by what ended the room (see errors.py); its `code` is the first cause.
        """
        return await self.when_landed.get()

    async def released(self) -> None:
        """Wait until nothing touches the room's pages: every loan ended, and no checksum or copy
        runs.
        """
        await self.when_released.get()

    def keep(self, owner: Hashable) -> PageIndices:
        """Make `owner` the owner of the landed pages; closing the room then leaves them alone.

        In a pool with rows the last page is the room's row: `pool.layout.split` separates pages and
        rows. Raises: MisuseError before the pages landed, or on a second call.
        """
        if self.holding.state.target is not PagePhase.LANDED:
            raise MisuseError(f"room {self.room}: pages can be kept once, after landed()")
        self.holding.feed(PageKind.KEEP, keeper=owner)
        return self.holding.pages

    def close(self, cause: Cause | None = None) -> None:
        """End the room; valid in every state, any number of times.

        Before its pages landed this is an abort: the caller receives the error at once, and pages
        that are still lent return when their loans end. Raises: MisuseError if `cause` is no Cause.
        """
        self._shell.close_room(self, _CLIENT_GONE if cause is None else check_cause(cause))
        if self.holding.state.target is PagePhase.LANDED:
            self.holding.feed(PageKind.CLOSE)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the room ended; at once if it ended before."""
        if self.ended:
            callback()
        else:
            self.callbacks.append(callback)

    def __await__(self) -> Generator[Any, None, Self]:
        """Open the room, as entering it does.

        A caller that is cancelled here has no handle to close, so the room is closed for it.
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


class PrefillSide(Protocol):
    """The shell as a prefill room uses it."""

    def begin_room(self, room: PrefillRoom) -> None: ...

    def send_chunk(
        self, room: PrefillRoom, pages: PageIndices, last: bool, handoff: bytes
    ) -> None: ...

    def close_prefill_room(self, room: PrefillRoom, cause: Cause) -> None: ...

    @property
    def num_pages(self) -> int: ...

    def room_bytes(self, count: int) -> int: ...


class PrefillRoom:
    """One room at prefill: its writes and their outcome.

    Close it, or use it as an async context manager.
    """

    def __init__(self, shell: PrefillSide, record: PrefillRoomRecord) -> None:
        self._shell, self.record = shell, record
        # Tasks that serve all requests log about this room, and take the request's id from here.
        self.request_id = CURRENT.get().request_id
        self.writes: dict[int, Write] = {}
        self.landed_before = 0  # bytes that ended writes moved
        # `readers` counts checksums that took too long, whose threads may still read the room's
        # pages.
        self.over, self.readers = False, 0
        self.when_matched: Answer[int] = Answer()
        self.when_done: Answer[None] = Answer()
        self.when_released: Answer[None] = Answer()
        self.callbacks: list[Callable[[], None]] = []  # the shell runs them when the room ended

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
        """Cause of the room's end; None while it is open, and after a success."""
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
        """Prompt tokens that decode already has; known once the room is matched."""
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
        """Report that the engine has a place for the whole prompt, or is sure to get one whatever
        other rooms do.

        A decode that waits for it is notified. May be called any number of times.
        """
        self._shell.begin_room(self)

    async def matched(self) -> int:
        """Wait for decode's half, and return the number of prompt tokens that decode already has.

        Raises: KvflowError by what ended the room; its `code` is the first cause.
        """
        return await self.when_matched.get()

    def send(
        self, pages: Sequence[int] | PageIndices, *, last: bool = False, handoff: bytes = b""
    ) -> None:
        """Queue one chunk: our `pages` (list or int32 [n]) go onto the next n target pages.

        The pages are held until the write ends. The room never ends inside this call, even where n
        is 0 or the data plane refuses the write. The last chunk carries the hand-over, which
        decode's `landed` returns. Chunks before the last have full pages only. In a pool with rows
        the last entry of the last chunk is the request's row: row r has the index `num_pages + r`
        (`pool.layout.numbered`).

        Raises: MisuseError (before matched, after the last chunk, more pages than decode lent, a
        page that is outside the pool, has no owner or is in quarantine, a hand-over before the last
        chunk): nothing was queued; the room's own error once it ended.
        """
        shell = self._shell
        indices = page_indices(pages, shell.num_pages, f"room {self.record.room}")
        if type(handoff) is not bytes:
            check_handoff(handoff)
        shell.send_chunk(self, indices, bool(last), handoff)

    async def done(self) -> None:
        """Wait until every write landed. Raises: KvflowError by what ended the room."""
        await self.when_done.get()

    async def released(self) -> None:
        """Wait until the room is over and nothing reads its pages: no write of it runs, whether it
        succeeded or not, and no checksum.
        """
        await self.when_released.get()

    def close(self, cause: Cause | None = None) -> None:
        """End the room; valid in every state, any number of times.

        Decode is notified at once, and running writes are drained. Raises: MisuseError if `cause`
        is no Cause.
        """
        self._shell.close_prefill_room(self, _CLIENT_GONE if cause is None else check_cause(cause))

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when nothing more may be sent; at once if that is so already."""
        if self.ended:
            callback()
        else:
            self.callbacks.append(callback)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
