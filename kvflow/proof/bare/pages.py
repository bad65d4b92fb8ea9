"""Places of one pool as the world sees them: who owns each, and what it contains.

The places of all spaces are numbered in one list: see `protocols.pages.spaces`.
"""

from __future__ import annotations

from collections.abc import Hashable

from kvflow.proof.rules.places import Home, Receiver
from kvflow.protocols.pages.layout import Counts, PoolLayout

Content = tuple[bytes, int]
"""A prompt's digest, and a position among the places that the whole prompt fills. Damage in transit
replaces the digest with `DAMAGED`.
"""
Lease = tuple[int, int]
"""Owner of pages that a decode lends: the decode's incarnation, and the grant."""


class Pages(Home):
    def __init__(self, who: str, judge: Receiver, layout: PoolLayout) -> None:
        super().__init__(who, layout, judge)
        # The free places of each space.
        self._free = [
            list(range(base, base + count))
            for base, count in zip(layout.bases, layout.counts, strict=True)
        ]

    def is_lent(self, place: int, target: int, grant: int) -> bool:
        return self.owners[place] == (target, grant)

    def may_be_written(self, owner: Hashable) -> bool:
        return False

    def take(self, counts: Counts, owner: Hashable) -> list[int] | None:
        """Take places of each space. Returns None, and takes none, if too few are free."""
        for free, count in zip(self._free, counts, strict=True):
            if count > len(free):
                return None
        taken = [
            free.pop() for free, count in zip(self._free, counts, strict=True) for _ in range(count)
        ]
        self.taken(taken, owner)
        return taken

    def check(self, pages: list[int], owner: Hashable, what: str) -> None:
        """Verify that `owner` has these pages. `what` is the action in the text of a violation."""
        for page in pages:
            if self.owners[page] != owner:
                self.broken("I1", page, f"of {self.owners[page]!r} is {what} by {owner!r}")

    def give_back(self, pages: list[int], owner: Hashable) -> None:
        self.check(pages, owner, "given back")
        self.freed(pages)
        for page in pages:
            self._free[self.spaces[page]].append(page)


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
