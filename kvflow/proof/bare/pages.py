"""Decode's pages and rows as the world sees them: the owner of each, the writes that may still
reach it, and its bytes.

Rows are numbered on from the pages. In a pool with rows, the last place of a room is a row.
"""

from __future__ import annotations

from typing import Protocol

from kvflow.protocols.pages.layout import PoolLayout

Content = tuple[bytes, int]
"""A prompt's digest, and the number of its page (its row comes after them). Damage in transit has a
digest apart.
"""


class Judge(Protocol):
    """Receiver of violations."""

    def broken(self, invariant: str, text: str) -> None: ...


class FreePlaces:
    """Free pages and rows of one pool."""

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
        """Return `count` places for a room, or None if too few are free."""
        row = self._row and count > 0
        if count - row > len(self.pages) or row > len(self.rows):
            return None
        taken = [self.pages.pop() for _ in range(count - row)]
        return [*taken, self.rows.pop()] if row else taken

    def give_back(self, places: list[int]) -> None:
        for place in places:
            (self.pages if place < self.num_pages else self.rows).append(place)


class Pages:
    """Pages with their owners: a grant while a room or a loan has the page, the negative grant
    while the room's user keeps it.
    """

    def __init__(self, who: str, oracle: Judge, layout: PoolLayout) -> None:
        self._free = FreePlaces(layout)
        count = layout.num_places
        self.owners: list[int | None] = [None] * count
        self.writers = [0] * count  # writes that may still land on the page, proven or not
        # By rank, because each rank writes its part of a page.
        self.cells: list[dict[int, Content]] = [{} for _ in range(count)]
        # The pool ended with its process: late writes there do no harm.
        self.lost = False
        self._who, self._oracle = who, oracle

    def take(self, count: int, owner: int) -> list[int] | None:
        """Take `count` places for `owner`; None if too few are free."""
        taken, owners = self._free.take(count), self.owners
        for page in taken or ():
            if owners[page] is not None:
                self._oracle.broken(
                    "I1", f"{self._who}: page {page} of {owners[page]} is handed out again"
                )
            owners[page] = owner
        return taken

    def keep(self, pages: list[int], grant: int) -> None:
        """Pass the pages of a landed room to its user."""
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
        """Free all pages but those of the owners in `kept`, for the next decode over the pool."""
        for owner in self.owned() - kept:
            self.give_back(
                [page for page, other in enumerate(self.owners) if other == owner], owner
            )

    def owned(self) -> set[int]:
        return {owner for owner in self.owners if owner is not None}


def name_of(incarnation: int, grant: int) -> int:
    """Return the owner of pages that an earlier decode lent. It equals no grant of any decode."""
    return incarnation << 64 | grant
