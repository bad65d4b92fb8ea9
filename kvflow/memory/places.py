"""A store over a pool's pages and rows. One array of indices names the pages and the row of a room
(see `layout.Places`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from kvflow.memory.allocator import PageAllocator
from kvflow.protocols.errors import CapacityError, OwnershipError
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices, Places, PoolLayout


class PlaceAllocator:
    """One store over the two allocators of a pool with rows.

    Implements `protocols.ports.PageStore`. An operation that raises changes neither allocator. The
    allocators may also be used directly.
    """

    def __init__(self, layout: PoolLayout, pages: PageAllocator, rows: PageAllocator) -> None:
        self._layout, self.pages, self.rows = layout, pages, rows

    def __repr__(self) -> str:
        return f"<PlaceAllocator of {self.pages!r} and {self.rows!r}>"

    @property
    def free_pages(self) -> int:
        return self.pages.free_pages

    def at_rest(self) -> bool:
        return self.pages.at_rest() and self.rows.at_rest()

    def take(self, count: int, owner: Hashable) -> PageIndices:
        return self.pages.take(count, owner)

    def take_room(self, count: int, owner: Hashable) -> PageIndices:
        """Take `count - 1` pages and a row, and return the row last.

        Raises: CapacityError (nothing is taken).
        """
        row = self.rows.take(1, owner)
        try:
            pages = self.pages.take(count - 1, owner)
        except CapacityError:
            self.rows.give_back(row, owner)
            raise
        return self._layout.numbered(Places(pages, row))

    def move(self, pages: PageIndices, owner: Hashable, new_owner: Hashable) -> None:
        both = self._split(pages)
        self.pages.move(both.pages, owner, new_owner)
        self._or_undo(
            lambda: self.rows.move(both.rows, owner, new_owner),
            lambda: self.pages.move(both.pages, new_owner, owner),
        )

    def give_back(self, pages: PageIndices, owner: Hashable) -> None:
        both = self._split(pages)
        # If `owner` does not own the rows, this raises before any page is given back.
        self.rows.move(both.rows, owner, owner)
        self.pages.give_back(both.pages, owner)
        self.rows.give_back(both.rows, owner)

    def hold(self, pages: PageIndices) -> None:
        both = self._split(pages)
        self.pages.hold(both.pages)
        self._or_undo(lambda: self.rows.hold(both.rows), lambda: self.pages.unhold(both.pages))

    def unhold(self, pages: PageIndices) -> None:
        both = self._split(pages)
        self.pages.unhold(both.pages)
        self._or_undo(lambda: self.rows.unhold(both.rows), lambda: self.pages.hold(both.pages))

    def withhold(self, pages: PageIndices) -> None:
        both = self._split(pages)
        self.pages.withhold(both.pages)
        self.rows.withhold(both.rows)

    def owned(self) -> dict[Hashable, int]:
        found = self.pages.owned()
        for owner, count in self.rows.owned().items():
            found[owner] = found.get(owner, 0) + count
        return found

    def count_by(self, kind: Hashable) -> int:
        return self.pages.count_by(kind) + self.rows.count_by(kind)

    def _split(self, indices: PageIndices) -> Places:
        if (
            indices.size
            and not 0 <= int(indices.min()) <= int(indices.max()) < self._layout.num_places
        ):
            raise OwnershipError(
                f"place {indices.max()} is outside 0..{self._layout.num_places - 1}"
            )
        return self._layout.split(indices) if indices.size else Places(NO_PLACES, NO_PLACES)

    @staticmethod
    def _or_undo(work: Callable[[], None], undo: Callable[[], None]) -> None:
        try:
            work()
        except OwnershipError:
            undo()
            raise
