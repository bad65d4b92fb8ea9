"""Pages and rows of one pool as the world sees them: who owns each, and what it contains.

Row numbers follow page numbers. In a pool with rows, the last place of a room is a row.
"""

from __future__ import annotations

from collections.abc import Hashable

from kvflow.proof.rules.places import Home, Receiver
from kvflow.protocols.pages.layout import PoolLayout

Content = tuple[bytes, int]
"""A prompt's digest, and the index of a page in that prompt. The row's index follows that of the
last page. Damage in transit replaces the digest with `DAMAGED`.
"""
Lease = tuple[int, int]
"""Owner of pages that a decode lends: the decode's incarnation, and the grant."""


class FreePlaces:
    def __init__(self, layout: PoolLayout) -> None:
        self.num_pages = layout.num_pages
        self.pages = list(range(layout.num_pages))
        self.rows = list(range(layout.num_pages, layout.num_places))
        self._row = bool(layout.num_rows)

    def __len__(self) -> int:
        return len(self.pages) + len(self.rows)

    def take(self, count: int) -> list[int] | None:
        row = self._row and count > 0
        if count - row > len(self.pages) or row > len(self.rows):
            return None
        taken = [self.pages.pop() for _ in range(count - row)]
        return [*taken, self.rows.pop()] if row else taken

    def give_back(self, places: list[int]) -> None:
        for place in places:
            (self.pages if place < self.num_pages else self.rows).append(place)


class Pages(Home):
    def __init__(self, who: str, judge: Receiver, layout: PoolLayout) -> None:
        super().__init__(who, layout, judge)
        self._free = FreePlaces(layout)

    def is_lent(self, place: int, target: int, grant: int) -> bool:
        return self.owners[place] == (target, grant)

    def may_be_written(self, owner: Hashable) -> bool:
        return False

    def take(self, count: int, owner: Hashable) -> list[int] | None:
        taken = self._free.take(count)
        self.taken(taken or (), owner)
        return taken

    def check(self, pages: list[int], owner: Hashable, what: str) -> None:
        """Verify that `owner` has these pages. `what` is the action in the text of a violation."""
        for page in pages:
            if self.owners[page] != owner:
                self.broken("I1", page, f"of {self.owners[page]!r} is {what} by {owner!r}")

    def give_back(self, pages: list[int], owner: Hashable) -> None:
        self.check(pages, owner, "given back")
        self.freed(pages)
        self._free.give_back(pages)


class DecodePages(Pages):
    """Pages of a decode. Those of a room belong to its lease, or to the user that keeps them."""

    def __init__(self, who: str, judge: Receiver, layout: PoolLayout) -> None:
        super().__init__(who, judge, layout)
        # Contents by page and rank, because each rank writes its own part of a page.
        self.cells: list[dict[int, Content]] = [{} for _ in self.owners]

    def keep(self, pages: list[int], lease: Lease) -> Hashable:
        user = ("user", *lease)
        self.check(pages, lease, "kept")
        self.moved(pages, user)
        return user

    def inherit(self, kept: set[Lease]) -> None:
        """Free all pages but those of the leases in `kept`, for the next decode over the pool."""
        for owner in set(self.owners) - kept - {None}:
            pages = [page for page, other in enumerate(self.owners) if other == owner]
            self.give_back(pages, owner)
