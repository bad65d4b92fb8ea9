"""The pages of one room at decode, in the stores that they come from.

`protocols.machines.ownership` decides who owns them; this module runs its commands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.arguments import page_indices
from kvflow.protocols.errors import OwnershipError
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
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices, PoolLayout
from kvflow.protocols.ports import PageStore, Quarantine
from kvflow.protocols.wire.messages import GrantId, RoomId

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

    @property
    def claimed(self) -> bool:
        """True while the room must learn what becomes of its pages."""
        return self.state.target in CLAIMED or self.state.staging in CLAIMED

    @property
    def quarantined(self) -> bool:
        return PagePhase.QUARANTINED in (self.state.target, self.state.staging)

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
