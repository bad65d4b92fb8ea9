"""The room handles that users of a node hold, `DecodeRoom` and `PrefillRoom`, and a room's pages.

The endpoints decide what happens in a room. `protocols.machines.ownership` decides who owns its
pages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvflow.aio import ENDS_PROCESS
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
    SETTLED,
    Commands,
    Ownership,
    PageCommand,
    PageKind,
    PagePhase,
    Source,
    step,
)
from kvflow.protocols.machines.prefill_room import PrefillPhase, PrefillRoomState
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices, PoolLayout
from kvflow.protocols.pages.spaces import Counts
from kvflow.protocols.ports import PageStore, Quarantine, Write
from kvflow.protocols.prefill.records import PrefillRoomRecord
from kvflow.protocols.wire.messages import GrantId, RoomId
from kvflow.telemetry.requests import CURRENT

_CLIENT_GONE = Cause(Code.CLIENT_GONE)
_INT32 = np.dtype(np.int32)


class Quarantined:
    """The owner of a room's pages if the room ended before its last loan did."""

    __slots__ = ("grant",)

    def __init__(self, grant: int) -> None:
        self.grant = grant

    def __repr__(self) -> str:
        return f"quarantine({self.grant})"


class RoomStores:
    """The page stores of one decode: the pool's store and, with staging, the staging store."""

    def __init__(
        self,
        pages: PageStore,
        layout: PoolLayout,
        quarantine: Quarantine,
        staging: PageStore | None,
        failed: Callable[[str], None],
    ) -> None:
        """`layout` and `quarantine` belong to the pool of `pages`. `failed` is `Shell.failed`."""
        self.pages, self.layout, self.quarantine = pages, layout, quarantine
        self.staging, self.failed = staging, failed
        # The pages of every room take the same few steps, except while threads use them.
        self.steps: dict[tuple[Ownership, PageKind, Source | None], tuple[Ownership, Commands]] = {}
        # True for each of the caller's own pages that a room uses. The store's holds alone would
        # let two rooms use one page.
        self._own: NDArray[np.bool_] | None = None

    def hold_own(self, room: RoomId, pages: PageIndices) -> None:
        """Hold the caller's own pages for a room, until `unhold_own`. Raises: OwnershipError."""
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
    """The pages of one room: those that its user receives, and those that prefill writes into."""

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

    def __init__(self, stores: RoomStores, room: RoomId, settled: Answer[None]) -> None:
        """`settled` is given once no writer, checksum or copy can touch `pages` any more."""
        self._stores, self._room, self._settled = stores, room, settled
        self.state = Ownership(staging=None if stores.staging is None else PagePhase.NONE)
        self.pages: PageIndices = NO_PLACES
        # Prefill writes into these: `pages` or, with staging, an equal number of staging places.
        self.lent: PageIndices = NO_PLACES
        self._owner: Hashable = ("room", room)
        self._staging_owner: Hashable = self._owner
        self._grant = GrantId(0)
        self.over = False  # True once the room ends

    @property
    def layout(self) -> PoolLayout:
        """The layout of the pool whose pages the user receives."""
        return self._stores.layout

    def opened(self, grant: GrantId) -> None:
        """Make `grant` the owner of the pages that the room takes from now on."""
        self._grant = grant
        self._owner = self._staging_owner = ("grant", grant)

    def give(self, pages: PageIndices) -> None:
        """Use the caller's own pages. Raises: OwnershipError; see `DecodeRoom.give`."""
        self._stores.quarantine.check(pages)
        self._stores.hold_own(self._room, pages)
        self.pages = pages
        self.feed(PageKind.TAKE, Source.OWN)

    def take_staging(self, counts: Counts) -> None:
        """Take `counts` staging places. Raises: CapacityError."""
        staging = self._stores.staging
        assert staging is not None
        self.lent = staging.take_room(counts, self._staging_owner)
        self.feed(PageKind.TAKE, Source.STAGING)

    def take(self, counts: Counts) -> None:
        """Take `counts` places from the node's store, unless the caller gave pages.

        Raises: CapacityError, OwnershipError, and any error of a custom store.
        """
        stores, layout = self._stores, self._stores.layout
        if not self.state.own:
            taken: Any = stores.pages.take_room(counts, self._owner)
            # A custom store may return any sequence of indices.
            if type(taken) is not np.ndarray or taken.dtype is not _INT32:
                what = f"room {self._room}: what {stores.pages!r} gave"
                taken = page_indices(taken, layout.num_places, what)
            self.pages = taken
            self.feed(PageKind.TAKE, Source.STORE)
            # Without staging, these are the pages that are lent, and the endpoint checks them.
            if stores.staging is not None:
                self._check_taken(counts)
        # A custom store may hand out pages that are in quarantine.
        if stores.quarantine.leases:
            stores.quarantine.check(self.pages)
        if stores.staging is None:
            self.lent = self.pages

    def _check_taken(self, counts: Counts) -> None:
        layout = self._stores.layout
        if (found := layout.counted(self.pages)) != counts:
            raise MisuseError(
                f"room {self._room}: {layout.described(found)} for a room of "
                f"{layout.described(counts)}"
            )
        layout.check_order(self.pages)

    def feed(
        self, kind: PageKind, source: Source | None = None, keeper: Hashable | None = None
    ) -> None:
        """Feed one event to the machine, and run the resulting commands.

        If a store refuses to take pages back, the error is logged, and the room ends anyway.
        Raises: OwnershipError if a store refuses to change an owner (the state does not change).
        """
        before = self.state
        event, steps = (before, kind, source), self._stores.steps
        if (found := steps.get(event)) is None:
            found = step(*event)
            if not before.uses:
                steps[event] = found
        after, commands = found
        self.state = after
        for of, command in commands:
            if command is PageCommand.RETURN:
                try:
                    self._give_back(of)
                except ENDS_PROCESS:
                    raise
                except BaseException:  # noqa: BLE001 - the room ends all the same
                    self._stores.failed(f"giving back pages of room {self._room}")
                continue
            try:
                self._move(of, keeper if kind is PageKind.KEEP else Quarantined(self._grant))
            except BaseException:
                self.state = before
                raise
        if after.target in SETTLED and before.target not in SETTLED:
            self._settled.give(None)

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
    """The methods of a shell that a decode room uses."""

    stores: RoomStores

    def offer(self, room: DecodeRoom) -> None: ...

    def close_room(self, room: DecodeRoom, cause: Cause) -> None: ...


class DecodeRoom:
    """One room at decode.

    Awaiting the room, or entering it as an async context manager, waits until it is open. Leaving
    the context closes it.
    """

    def __init__(self, shell: DecodeSide, room: RoomId, tokens: int, counts: Counts) -> None:
        """`counts` is the number of places of each space for a prompt of `tokens` tokens.

        The room takes them from the node's store, unless the caller supplies them with `give`.
        """
        self._shell = shell
        self.room, self.tokens, self.counts = room, tokens, counts
        self.prefix_tokens: int | None = None
        self.grant = GrantId(0)
        self.record: DecodeRoomRecord | None = None
        # The reason why the room never reached the endpoint.
        self.refused: Cause | None = None
        self.when_begun: Answer[bool] = Answer()
        self.when_opened: Answer[None] = Answer()
        self.when_landed: Answer[bytes] = Answer()
        self.when_released: Answer[None] = Answer()
        self.holding = RoomPages(shell.stores, room, self.when_released)
        self.callbacks: list[Callable[[], None]] = []  # the shell runs them when the room ends
        # Tasks that serve all requests log about this room, and read the request's id here.
        self.request_id = CURRENT.get().request_id
        # While this is True, the shell takes no pages for the room.
        self.held_back = True

    def __repr__(self) -> str:
        return f"<DecodeRoom {self.room}: {self.phase.name.lower()}, {len(self.pages)} pages>"

    @property
    def num_pages(self) -> int:
        """Number of places that the room needs, of all spaces together."""
        return sum(self.counts)

    @property
    def pages(self) -> PageIndices:
        """Places of the room, int32 [n]; empty before they are taken. In a pool of several spaces,
        `pool.layout.split` separates them.
        """
        return self.holding.pages

    @property
    def phase(self) -> DecodePhase:
        if self.record is not None:
            return self.record.phase
        return DecodePhase.BOOTSTRAPPING if self.refused is None else DecodePhase.FAILED

    @property
    def state(self) -> DecodeRoomState | None:
        """State of the room's machine; None until the endpoint opens the room."""
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
        """Wait until prefill has a place for the whole prompt of an announced room.

        If decode offers the pages after that, prefill waits for no other room before it writes.
        Returns True, or False if the pages are offered sooner. Raises: the errors of `opened`.
        """
        return await self.when_begun.get() if self.held_back or self.when_begun.given else False

    async def opened(self) -> Self:
        """Wait until every rank is registered and the pages are lent.

        Raises: LostError, RefusedError, CapacityError or AbortedError, depending on why the room
        did not open.
        """
        await self.when_opened.get()
        return self

    def give(self, pages: Sequence[int] | PageIndices) -> None:
        """Use the caller's own pages for the room.

        The node's store holds them until no loan, checksum or copy can touch them. Raises:
        MisuseError (wrong number of places in some space, or a second call), LayoutError (places
        that are not in the order of the spaces), OwnershipError (pages that the store cannot hold,
        that another room uses, or that a writer of an earlier node over the pool may still write
        into).
        """
        if self.holding.state.own or not self.held_back:
            raise MisuseError(f"room {self.room}: its pages have been given already")
        self.holding.give(own_pages(pages, self._shell.stores.layout, self.room, self.counts))

    def offer(
        self, pages: Sequence[int] | PageIndices | None = None, *, prefix_tokens: int | None = None
    ) -> Self:
        """Lend pages for an announced room: the caller's own `pages`, or pages from the node's
        store.

        Pass `prefix_tokens`, the number of prompt tokens that decode already has, if it has grown
        since the announcement. Await the room next. Has no effect on a room that ended. Raises:
        the errors of `DecodeNode.room`.
        """
        if not self.ended:
            if not self.held_back:
                raise MisuseError(f"room {self.room}: its pages have been offered already")
            if pages is not None:
                if prefix_tokens is not None:
                    self.counts = pages_wanted(
                        self._shell.stores.layout, self.tokens, prefix_tokens
                    )
                self.give(pages)
            self.prefix_tokens = prefix_tokens
            self.held_back = False
            self.when_begun.give(False)
            self._shell.offer(self)
        return self

    async def landed(self) -> bytes:
        """Wait until every page from every rank lands, and return prefill's handoff.

        Raises: the KvflowError that ended the room (see errors.py). Its `code` states the first
        cause.
        """
        return await self.when_landed.get()

    async def released(self) -> None:
        """Wait until no writer, checksum or copy can touch the room's pages any more."""
        await self.when_released.get()

    def keep(self, owner: Hashable) -> PageIndices:
        """Make `owner` the owner of the landed pages, and return them. Closing the room then does
        not free them.

        In a pool of several spaces, `pool.layout.split` separates their places. Raises: MisuseError
        before the pages landed, or on a second call.
        """
        if self.holding.state.target is not PagePhase.LANDED:
            raise MisuseError(f"room {self.room}: pages can be kept once, after landed()")
        self.holding.feed(PageKind.KEEP, keeper=owner)
        return self.holding.pages

    def close(self, cause: Cause | None = None) -> None:
        """End the room. Valid in every state, any number of times.

        Before the pages land, this aborts the room. Callers that wait for the room receive
        the error at once, and lent pages return when their loans end. Raises: MisuseError if
        `cause` is not a Cause.
        """
        self._shell.close_room(self, _CLIENT_GONE if cause is None else check_cause(cause))
        if self.holding.state.target is PagePhase.LANDED:
            self.holding.feed(PageKind.CLOSE)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once: when the room ends, or at once if the room ended already."""
        if self.ended:
            callback()
        else:
            self.callbacks.append(callback)

    def __await__(self) -> Generator[Any, None, Self]:
        """Wait until the room is open, and return it.

        If the wait is cancelled, the room is closed, because the caller may have no handle to
        close.
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
    """The methods of a shell that a prefill room uses."""

    def begin_room(self, room: PrefillRoom) -> None: ...

    def send_chunk(
        self, room: PrefillRoom, pages: PageIndices, last: bool, handoff: bytes
    ) -> None: ...

    def close_prefill_room(self, room: PrefillRoom, cause: Cause) -> None: ...

    @property
    def num_pages(self) -> int: ...

    def room_bytes(self, counts: Counts) -> int: ...


class PrefillRoom:
    """One room at prefill: it sends pages to decode, and reports the outcome.

    Close it, or use it as an async context manager.
    """

    def __init__(self, shell: PrefillSide, record: PrefillRoomRecord) -> None:
        self._shell, self.record = shell, record
        # Tasks that serve all requests log about this room, and read the request's id here.
        self.request_id = CURRENT.get().request_id
        self.writes: dict[int, Write] = {}
        # Begins those of `writes` that wait until earlier ones end.
        self.queued: deque[Callable[[], bool]] = deque()
        self.landed_before = 0  # landed bytes of writes that have ended
        # `readers` counts late checksums, whose threads still read the room's pages.
        self.over, self.readers = False, 0
        self.when_matched: Answer[int] = Answer()
        self.when_done: Answer[None] = Answer()
        self.when_released: Answer[None] = Answer()
        self.callbacks: list[Callable[[], None]] = []  # the shell runs them when the room ends

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
        """True once the room ends. Its writes may still be draining."""
        return self.record.ended

    @property
    def opened_at_s(self) -> float:
        return self.record.opened_at_s

    @property
    def prefix_tokens(self) -> int:
        """Number of prompt tokens that decode already has. Known once the room is matched."""
        return self.record.prefix_tokens

    @property
    def bytes_landed(self) -> int:
        return self.landed_before + sum(write.landed_bytes for write in self.writes.values())

    @property
    def bytes_total(self) -> int:
        """Size of the whole room in bytes; 0 before its target pages are known."""
        return self._shell.room_bytes(self.record.wanted) if self.record.wanted else 0

    def story(self) -> Sequence[Line]:
        return self.record.story.lines()

    def begin(self) -> None:
        """Report that the engine has a place for the whole prompt, or will get one without waiting
        for other rooms.

        Notifies a decode that waits in `begun`. May be called any number of times.
        """
        self._shell.begin_room(self)

    async def matched(self) -> int:
        """Wait for decode's half, and return the number of prompt tokens that decode already has.

        Raises: the KvflowError that ended the room. Its `code` states the first cause.
        """
        return await self.when_matched.get()

    def send(
        self, pages: Sequence[int] | PageIndices, *, last: bool = False, handoff: bytes = b""
    ) -> None:
        """Queue one chunk: our `pages` (list or int32 [n]) are written to the next n target pages.
        In a pool of several spaces, the list has places of any of them, in the order of the spaces,
        and they are written to the next target places of each space.

        The pages are held until the write ends. The room never ends inside this call, even if n is
        0 or the data plane refuses the write. The last chunk carries the handoff, which decode's
        `landed` returns. All other chunks consist of full pages, without rows.
        `pool.layout.numbered` makes one list from the places of all spaces.

        Raises: MisuseError, and queues no chunk, if the room is not matched, its last chunk is
        already queued, the chunk has more pages than decode still expects (or fewer, if it is the
        last), a page is outside the pool, has no owner or is in quarantine, or `handoff` comes
        before the last chunk. Once the room ends, its error is raised instead.
        """
        shell = self._shell
        indices = page_indices(pages, shell.num_pages, f"room {self.record.room}")
        if type(handoff) is not bytes:
            check_handoff(handoff)
        shell.send_chunk(self, indices, bool(last), handoff)

    async def done(self) -> None:
        """Wait until every write landed. Raises: the KvflowError that ended the room."""
        await self.when_done.get()

    async def released(self) -> None:
        """Wait until the room ends, successfully or not, and no write or checksum reads its
        pages.
        """
        await self.when_released.get()

    def close(self, cause: Cause | None = None) -> None:
        """End the room. Valid in every state, any number of times.

        Decode is notified at once, and running writes are drained. Raises: MisuseError if `cause`
        is not a Cause.
        """
        self._shell.close_prefill_room(self, _CLIENT_GONE if cause is None else check_cause(cause))

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once: when the room ends, or at once if the room ended already."""
        if self.ended:
            callback()
        else:
            self.callbacks.append(callback)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
