"""Watched allocators: a second set of books, with the readers and writers of each place."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from kvflow.handlers.rooms import Quarantined
from kvflow.memory.allocator import Index, Kept, PageAllocator
from kvflow.memory.external import ExternalPages
from kvflow.memory.places import PlaceAllocator
from kvflow.memory.pool import PagedPool
from kvflow.proof.rules.places import Home, Receiver
from kvflow.proof.sim.content import PlaceBytes
from kvflow.protocols.errors import CapacityError, OwnershipError
from kvflow.protocols.pages.layout import PageIndices, PoolLayout
from kvflow.protocols.ports import PageStore


class Books(Home):
    """Independent record of every place of one pool, with access to its bytes and stores."""

    def __init__(
        self, pool: PagedPool, whole: PoolLayout | None, who: str, judge: Receiver
    ) -> None:
        super().__init__(who, pool.layout, judge)
        self.bytes = PlaceBytes(pool.layout, whole)
        # Places of earlier loans. Their last owner stays in `owners` until they are free.
        self.withheld: set[int] = set()
        # Current stores, by their first place: one for each space.
        self.stores: dict[int, WatchedPages] = {}

    def is_lent(self, place: int, target: int, grant: int) -> bool:
        return grant_of(self.owners[place]) == grant

    def may_be_written(self, owner: Hashable) -> bool:
        return grant_of(owner) is not None

    def freed(self, places: Iterable[int]) -> None:
        places = list(places)
        super().freed(places)
        self.withheld.difference_update(places)


def watch(
    pool: PagedPool,
    who: str,
    judge: Receiver,
    fails: Callable[[], bool],
    whole: PoolLayout | None = None,
) -> Books:
    """Replace the allocators of an unused pool with watched ones, and return the books.

    If the pool is one rank's share of a layout, `whole` is that layout.
    """
    books, layout = Books(pool, whole, who, judge), pool.layout
    # The pool makes a new place allocator from the new allocators on demand.
    pool._places = None
    pool._allocators = tuple(
        WatchedPages(space.unit, space.count, first, books, fails)
        for space, first in zip(layout.spaces, layout.bases, strict=True)
    )
    return books


def another_store(pool: PagedPool) -> PageStore:
    """Return a new store for the next node over a watched pool, and for that node's engine.

    The new store does not know which pages the earlier one lent: it learns that only from the pool
    and the node.
    """
    again: list[WatchedPages] = []
    for allocator in pool.allocators:
        assert isinstance(allocator, WatchedPages)
        again.append(allocator.again())
    pool._allocators, pool._places = tuple(again), None
    return pool.places


def books_of(store: PageStore) -> Books:
    pages = store.allocators[0] if isinstance(store, PlaceAllocator) else store
    assert isinstance(pages, WatchedPages | WatchedExternalPages)
    return pages.books


class WatchedPages(PageAllocator):
    """Watched allocator of one space of a pool. Some takes fail on purpose."""

    def __init__(
        self, unit: str, count: int, first: int, books: Books, fails: Callable[[], bool]
    ) -> None:
        """Manage `count` pages or rows. `first` is the place of the first one."""
        super().__init__(count, unit=unit)
        books.stores[first] = self
        self.books, self._first, self._fails = books, first, fails

    def again(self) -> WatchedPages:
        return WatchedPages(self._unit, self.num_pages, self._first, self.books, self._fails)

    def take(self, count: int, owner: Hashable) -> PageIndices:
        if self._fails():
            raise CapacityError(f"{self._unit}s (on purpose)", count, 0)
        pages = super().take(count, owner)
        self.books.taken(self._places(pages), owner)
        self._count()
        return pages

    def move(self, pages: PageIndices, owner: Hashable, new_owner: Hashable) -> None:
        self._guard(super().move, pages, owner, new_owner)
        self.books.moved(self._places(pages), new_owner)

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
        self.books.freed(self._places(pages))

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
            # A closed node used this store, and only withheld pages still return to it.
            return
        unowned = self.books.owners[self._first : self._first + self.num_pages].count(None)
        if unowned != self.free_pages:
            self._broken("I1", f"{self.free_pages} {self._unit}s free, {unowned} unowned")

    def _broken(self, invariant: str, text: str) -> None:
        self.books.judge.broken(invariant, f"{self.books.who}: {text}")


class Borrower:
    """A request, which owns pages of its engine whatever the node does with them."""

    __slots__ = ("engine_gone", "grant", "room")

    def __init__(self, room: int) -> None:
        self.room = room
        self.grant: int | None = None  # grant under which its node lent the pages
        # True after the engine ended. The pages then lose their owner as soon as they are idle.
        self.engine_gone = False

    def __repr__(self) -> str:
        return f"request(room {self.room}, grant {self.grant})"


class WatchedExternalPages(ExternalPages):
    """The shipped store, with a check that no reader or writer reaches an idle page."""

    def __init__(self, books: Books) -> None:
        super().__init__(len(books.owners))
        self.books = books

    def unhold(self, pages: PageIndices) -> None:
        try:
            super().unhold(pages)
        except OwnershipError as error:
            self.books.judge.broken("I1", f"{self.books.who}: {error}")
            raise
        for place in pages.tolist():
            if not self._uses[place]:
                self._idle(place)

    def _idle(self, place: int) -> None:
        self.books.out_of_use(place, "idle")
        owner = self.books.owners[place]
        if isinstance(owner, Borrower) and owner.engine_gone:
            self.books.owners[place] = None


def grant_of(owner: Hashable | None) -> int | None:
    """Return the grant under which decode lends the pages of `owner`, or None if it lends none."""
    if isinstance(owner, tuple):
        return owner[1] if owner[0] == "grant" else None
    return owner.grant if isinstance(owner, Quarantined | Borrower) else None
