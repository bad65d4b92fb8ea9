"""Decode's pages and rows as the world sees them: who owns each, which writes may still reach it,
what it holds.

Rows are numbered on from the pages, and a room of a pool with rows has one of them, as its last
place.
"""

from __future__ import annotations

from typing import Protocol

from kvflow.protocols.pages.layout import PoolLayout

Content = tuple[bytes, int]
"""A prompt's digest, and which page of it, or its row after them; damage on the way gives a digest
of its own.
"""


class Judge(Protocol):
    """Is told when an invariant breaks."""

    def broken(self, invariant: str, text: str) -> None: ...


class FreePlaces:
    """The free pages and rows of one pool."""

    def __init__(self, layout: PoolLayout) -> None:
        self.num_pages = layout.num_pages
        self.pages, self.rows = (
            list(range(layout.num_pages)),
            list(range(layout.num_pages, layout.num_places)),
        )
        self._row = bool(layout.num_rows)

    def __len__(self) -> int:
        return len(self.pages) + len(self.rows)

    def take(self, count: int) -> list[int] | None:
        """What a room of `count` places has; None when there are not so many."""
        row = self._row and count > 0
        if count - row > len(self.pages) or row > len(self.rows):
            return None
        taken = [self.pages.pop() for _ in range(count - row)]
        return [*taken, self.rows.pop()] if row else taken

    def give_back(self, places: list[int]) -> None:
        for place in places:
            (self.pages if place < self.num_pages else self.rows).append(place)


class Pages:
    """Owners are grants while a room or a loan has the page, negative grants while a room's user
    keeps it.
    """

    def __init__(self, who: str, oracle: Judge, layout: PoolLayout) -> None:
        self._free = FreePlaces(layout)
        count = layout.num_places
        self.owners: list[int | None] = [None] * count
        self.writers = [0] * count  # writes that may still land on the page, proven or not
        # By rank: each writes its part of a page.
        self.cells: list[dict[int, Content]] = [{} for _ in range(count)]
        self.lost = False  # with the process: what still lands there hurts no one
        self._who, self._oracle = who, oracle

    def take(self, count: int, owner: int) -> list[int] | None:
        """None when there are not so many."""
        taken, owners = self._free.take(count), self.owners
        for page in taken or ():
            if owners[page] is not None:
                self._oracle.broken(
                    "I1", f"{self._who}: page {page} of {owners[page]} is handed out again"
                )
            owners[page] = owner
        return taken

    def keep(self, pages: list[int], grant: int) -> None:
        """The room has landed: its user has them now."""
        for page in pages:
            if self.owners[page] != grant:
                self._oracle.broken(
                    "I1", f"{self._who}: page {page} of {self.owners[page]} lands for {grant}"
                )
            if self.writers[page]:
                self._oracle.broken(
                    "I2",
                    f"{self._who}: grant {grant} lands while a write may still reach page {page}",
                )
            self.owners[page] = -grant

    def give_back(self, pages: list[int], owner: int) -> None:
        owners, writers = self.owners, self.writers
        for page in pages:
            if owners[page] != owner:
                self._oracle.broken(
                    "I1", f"{self._who}: page {page} of {owners[page]} is given back by {owner}"
                )
            if writers[page]:
                self._oracle.broken(
                    "I2", f"{self._who}: page {page} is free while a write may still reach it"
                )
            owners[page] = None
        self._free.give_back(pages)

    def rename(self, pages: list[int], owner: int, name: int) -> None:
        for page in pages:
            if self.owners[page] != owner:
                self._oracle.broken(
                    "I1", f"{self._who}: page {page} of {self.owners[page]} was lent by {owner}"
                )
            self.owners[page] = name

    def inherit(self, kept: set[int]) -> None:
        """The next decode over the pool hands out all that is not under a loan of these owners."""
        for owner in self.owned() - kept:
            self.give_back(
                [page for page, other in enumerate(self.owners) if other == owner], owner
            )

    def owned(self) -> set[int]:
        return {owner for owner in self.owners if owner is not None}


def name_of(incarnation: int, grant: int) -> int:
    """The owner of pages that a decode which is gone has lent: no grant, of whatever decode."""
    return incarnation << 64 | grant
