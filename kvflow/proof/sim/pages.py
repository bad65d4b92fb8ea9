"""Allocators that are looked at: a second set of books, and what of the world outside could touch a
page or a row.
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
    """Who is told when an invariant breaks."""

    def broken(self, invariant: str, text: str) -> None: ...


class Books:
    """What is known of every place of one pool: of its pages, and of its rows, numbered on from
    them.
    """

    def __init__(self, pool: PagedPool, whole: PoolLayout | None) -> None:
        layout = pool.layout
        self.bytes, self.num_pages = PlaceBytes(layout, whole), layout.num_pages
        self.owners: list[Hashable | None] = [None] * layout.num_places
        self.writers = [0] * layout.num_places  # writes that may still land there, proven or not
        # Model steps, copies, and writes that have it as their source.
        self.readers = [0] * layout.num_places
        self.withheld: set[int] = set()  # their last owner stands here until they are free
        # That nodes use now: of pages, and of rows, by their first place.
        self.stores: dict[int, WatchedPages] = {}
        self.lost = False  # with the process: what still lands there hurts no one

    @property
    def out(self) -> int:
        """How many are not free."""
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
    """Replace the allocators of a pool, of which nothing has been taken.

    `whole`: what it is one rank's share of.
    """
    books, layout = Books(pool, whole), pool.layout
    pool._places = None  # made of these when it is asked for
    pool._pages = WatchedPages("page", layout.num_pages, 0, who, judge, books, fails)
    if layout.num_rows:
        pool._rows = WatchedPages(
            "row", layout.num_rows, layout.num_pages, who, judge, books, fails
        )
    return books


def another_store(pool: PagedPool) -> PageStore:
    """A store for the next node over a pool that is watched, which knows nothing of the last one's
    but what the node tells it. The engine of the next node uses it, too."""
    assert isinstance(pool._pages, WatchedPages)
    pages = pool._pages = pool._pages.again()
    if not isinstance(pool._rows, WatchedPages):
        pool._places = pages
        return pages
    rows = pool._rows = pool._rows.again()
    places = pool._places = PlaceAllocator(pool.layout, pages, rows)
    return places


def books_of(store: PageStore) -> Books:
    """Of a node's store that was watched."""
    pages = store.pages if isinstance(store, PlaceAllocator) else store
    assert isinstance(pages, WatchedPages | WatchedExternalPages)
    return pages.books


class WatchedPages(PageAllocator):
    """Implements `protocols.ports.PageStore`, for the pages of a pool or its rows; some takes fail
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
        """`first`: the place of number 0."""
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
        """Another one in its place, with the same books."""
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
            return  # of a node that was closed: only what it withholds comes back to it
        unowned = self.books.owners[self._first : self._first + self.num_pages].count(None)
        if unowned != self.free_pages:
            self._broken("I1", f"{self.free_pages} {self._unit}s free, {unowned} unowned")

    def _broken(self, invariant: str, text: str) -> None:
        self._judge.broken(invariant, f"{self._who}: {text}")


class Borrower:
    """A request of an engine that hands out its pages by itself: who owns them, whatever the node
    does with them.
    """

    __slots__ = ("engine_gone", "grant", "room")

    def __init__(self, room: int) -> None:
        self.room = room
        self.grant: int | None = None  # under which its node has lent them
        self.engine_gone = False  # they are nobody's as soon as they are idle

    def __repr__(self) -> str:
        return f"request(room {self.room}, grant {self.grant})"


class WatchedExternalPages(ExternalPages):
    """The shipped store. When a page is idle, nothing may be able to touch it any more."""

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
    """The grant under which decode lends a page, in its room's hands or in quarantine."""
    if isinstance(owner, tuple):
        return owner[1] if owner[0] == "grant" else None
    return owner.grant if isinstance(owner, Quarantined | Borrower) else None
