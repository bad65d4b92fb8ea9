"""Watched allocators: a second set of books, which also counts the readers and writers of each page
and row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from kvflow.handlers.decode import Quarantined
from kvflow.memory.allocator import Index, Kept, PageAllocator
from kvflow.memory.external import ExternalPages
from kvflow.memory.places import PlaceAllocator
from kvflow.memory.pool import PagedPool
from kvflow.proof.sim.content import PlaceBytes
from kvflow.protocols.errors import CapacityError, OwnershipError
from kvflow.protocols.pages.layout import PageIndices, PoolLayout
from kvflow.protocols.ports import PageStore


class Judge(Protocol):
    """Receiver of violations."""

    def broken(self, invariant: str, text: str) -> None: ...


class Books:
    """Second record of every place of one pool: its pages, and its rows, numbered on from them."""

    def __init__(self, pool: PagedPool, whole: PoolLayout | None) -> None:
        layout = pool.layout
        self.bytes, self.num_pages = PlaceBytes(layout, whole), layout.num_pages
        self.owners: list[Hashable | None] = [None] * layout.num_places
        self.writers = [0] * layout.num_places  # writes that may still land there, proven or not
        # Model steps and copies that use the place, and writes that read from it.
        self.readers = [0] * layout.num_places
        # Places of earlier loans. Their last owner stays in `owners` until they are free.
        self.withheld: set[int] = set()
        # Present stores of the nodes, by their first place: one for pages, one for rows.
        self.stores: dict[int, WatchedPages] = {}
        # The pool ended with its process: late writes there do no harm.
        self.lost = False

    @property
    def out(self) -> int:
        """Number of places that are not free."""
        return len(self.owners) - self.owners.count(None)

    def name(self, place: int) -> str:
        return f"page {place}" if place < self.num_pages else f"row {place - self.num_pages}"


def watch(
    pool: PagedPool,
    who: str,
    judge: Judge,
    fails: Callable[[], bool],
    whole: PoolLayout | None = None,
) -> Books:
    """Replace the allocators of a pool from which no page was taken, and return its books.

    `whole` is the layout of which the pool is one rank's share.
    """
    books, layout = Books(pool, whole), pool.layout
    # The pool makes it from the new allocators when it is needed.
    pool._places = None
    pool._pages = WatchedPages("page", layout.num_pages, 0, who, judge, books, fails)
    if layout.num_rows:
        pool._rows = WatchedPages(
            "row", layout.num_rows, layout.num_pages, who, judge, books, fails
        )
    return books


def another_store(pool: PagedPool) -> PageStore:
    """Return a store for the next node over a watched pool.

    It knows of the earlier store only what the pool and the node report. The engine of the next
    node uses it, too.
    """
    assert isinstance(pool._pages, WatchedPages)
    pages = pool._pages = pool._pages.again()
    if not isinstance(pool._rows, WatchedPages):
        pool._places = pages
        return pages
    rows = pool._rows = pool._rows.again()
    places = pool._places = PlaceAllocator(pool.layout, pages, rows)
    return places


def books_of(store: PageStore) -> Books:
    """Return the books of a node's watched store."""
    pages = store.pages if isinstance(store, PlaceAllocator) else store
    assert isinstance(pages, WatchedPages | WatchedExternalPages)
    return pages.books


class WatchedPages(PageAllocator):
    """Implements `protocols.ports.PageStore`, for the pages of a pool or its rows. Some takes fail
    on purpose.
    """

    def __init__(
        self,
        unit: str,
        count: int,
        first: int,
        who: str,
        judge: Judge,
        books: Books,
        fails: Callable[[], bool],
    ) -> None:
        """`first` is the place of number 0."""
        super().__init__(count, unit=unit)
        books.stores[first] = self
        self.books, self._first, self._who, self._judge, self._fails = (
            books,
            first,
            who,
            judge,
            fails,
        )

    def again(self) -> WatchedPages:
        """Return another store in its place, with the same books."""
        return WatchedPages(
            self._unit, self.num_pages, self._first, self._who, self._judge, self.books, self._fails
        )

    def take(self, count: int, owner: Hashable) -> PageIndices:
        if self._fails():
            raise CapacityError(f"{self._unit}s (on purpose)", count, 0)
        pages, owners = super().take(count, owner), self.books.owners
        for place in self._places(pages):
            if owners[place] is not None:
                self._broken(
                    "I1", f"{self.books.name(place)} of {owners[place]!r} is handed out again"
                )
            owners[place] = owner
        self._count()
        return pages

    def move(self, pages: PageIndices, owner: Hashable, new_owner: Hashable) -> None:
        self._guard(super().move, pages, owner, new_owner)
        books = self.books
        for place in self._places(pages):
            books.owners[place] = new_owner
            # Only a room or a quarantine may have pages that a write can still reach.
            if books.writers[place] and grant_of(new_owner) is None:
                self._broken(
                    "I2", f"{books.name(place)} goes to {new_owner!r} while a write may reach it"
                )

    def give_back(self, pages: PageIndices, owner: Hashable) -> None:
        self._guard(super().give_back, pages, owner)
        owners = self.books.owners
        for place in self._places(pages):
            if owners[place] is not None and place not in self.books.withheld:
                owners[place] = Kept.RETURNING
        self._count()

    def withhold(self, pages: PageIndices) -> None:
        super().withhold(pages)
        self.books.withheld.update(self._places(pages))

    def unhold(self, pages: PageIndices) -> None:
        self._guard(super().unhold, pages)
        self._count()

    def _free_now(self, pages: PageIndices, where: Index) -> None:
        super()._free_now(pages, where)
        books = self.books
        for place in self._places(pages):
            if books.writers[place]:
                self._broken("I2", f"{books.name(place)} is free while a write may still reach it")
            if books.readers[place]:
                self._broken("I13", f"{books.name(place)} is free while it is read or computed")
            books.owners[place] = None
            books.withheld.discard(place)

    def _places(self, indices: PageIndices) -> list[int]:
        found: list[int] = (indices + self._first).tolist() if self._first else indices.tolist()
        return found

    def _guard(self, call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except OwnershipError as error:
            self._broken("I1", str(error))
            raise

    def _count(self) -> None:
        if self.books.stores[self._first] is not self:
            # This store belongs to a closed node, to which only its withheld pages return.
            return
        unowned = self.books.owners[self._first : self._first + self.num_pages].count(None)
        if unowned != self.free_pages:
            self._broken("I1", f"{self.free_pages} {self._unit}s free, {unowned} unowned")

    def _broken(self, invariant: str, text: str) -> None:
        self._judge.broken(invariant, f"{self._who}: {text}")


class Borrower:
    """Request of an engine that hands out its own pages. It stays their owner, whatever the node
    does with them.
    """

    __slots__ = ("engine_gone", "grant", "room")

    def __init__(self, room: int) -> None:
        self.room = room
        self.grant: int | None = None  # under which its node lent them
        # The pages have no owner as soon as they are idle.
        self.engine_gone = False

    def __repr__(self) -> str:
        return f"request(room {self.room}, grant {self.grant})"


class WatchedExternalPages(ExternalPages):
    """The shipped store, which verifies that an idle page is out of reach of every reader and
    writer.
    """

    def __init__(self, books: Books, who: str, judge: Judge) -> None:
        super().__init__(len(books.owners))
        self.books, self._who, self._judge = books, who, judge

    def unhold(self, pages: PageIndices) -> None:
        try:
            super().unhold(pages)
        except OwnershipError as error:
            self._judge.broken("I1", f"{self._who}: {error}")
            raise
        for place in pages.tolist():
            if not self._uses[place]:
                self._idle(place)

    def _idle(self, place: int) -> None:
        books = self.books
        if books.writers[place]:
            self._judge.broken(
                "I2", f"{self._who}: {books.name(place)} is idle while a write may still reach it"
            )
        if books.readers[place]:
            self._judge.broken("I13", f"{self._who}: {books.name(place)} is idle while it is read")
        owner = books.owners[place]
        if isinstance(owner, Borrower) and owner.engine_gone:
            books.owners[place] = None


def grant_of(owner: Hashable | None) -> int | None:
    """Return the grant under which decode lends a page, whether its room or the quarantine
    has it.
    """
    if isinstance(owner, tuple):
        return owner[1] if owner[0] == "grant" else None
    return owner.grant if isinstance(owner, Quarantined | Borrower) else None
