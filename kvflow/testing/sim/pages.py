"""A page allocator that is looked at: a second set of books, and what of the world outside could touch a page."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from kvflow.handlers.decode import Quarantined
from kvflow.memory.allocator import Index, Kept, PageAllocator
from kvflow.protocols.errors import CapacityError, OwnershipError
from kvflow.protocols.pages.layout import PageIndices
from kvflow.testing.sim.faults import Faults


class Judge(Protocol):
    """Who is told when an invariant breaks."""

    def broken(self, invariant: str, text: str) -> None: ...


class WatchedPages(PageAllocator):
    """Implements `protocols.ports.PageStore`; some takes fail on purpose."""

    def __init__(self, num_pages: int, who: str, judge: Judge, faults: Faults) -> None:
        super().__init__(num_pages)
        self.owners: list[Hashable | None] = [None] * num_pages
        self.writers = [0] * num_pages  # writes that may still land on the page, proven or not
        self.lost = False  # with the process: what still lands there hurts no one
        self.readers = [0] * num_pages  # writes and model steps that use it as their source
        self._who, self._judge, self._faults = who, judge, faults

    def take(self, count: int, owner: Hashable) -> PageIndices:
        if self._faults.of_take():
            raise CapacityError("pages (on purpose)", count, 0)
        pages = super().take(count, owner)
        for page in pages.tolist():
            if self.owners[page] is not None:
                self._judge.broken("I1", f"{self._who}: page {page} of {self.owners[page]!r} is handed out again")
            self.owners[page] = owner
        self._count()
        return pages

    def move(self, pages: PageIndices, owner: Hashable, new_owner: Hashable) -> None:
        self._guard(super().move, pages, owner, new_owner)
        for page in pages.tolist():
            self.owners[page] = new_owner
            if self.writers[page] and grant_of(new_owner) is None:
                self._judge.broken("I2", f"{self._who}: page {page} goes to {new_owner!r} while a write may reach it")

    def give_back(self, pages: PageIndices, owner: Hashable) -> None:
        self._guard(super().give_back, pages, owner)
        for page in pages.tolist():
            if self.owners[page] is not None:
                self.owners[page] = Kept.RETURNING
        self._count()

    def unhold(self, pages: PageIndices) -> None:
        self._guard(super().unhold, pages)
        self._count()

    def _free_now(self, pages: PageIndices, where: Index) -> None:
        super()._free_now(pages, where)
        for page in pages.tolist():
            if self.writers[page]:
                self._judge.broken("I2", f"{self._who}: page {page} is free while a write may still reach it")
            if self.readers[page]:
                self._judge.broken("I13", f"{self._who}: page {page} is free while it is read or computed")
            self.owners[page] = None

    def _guard(self, call: object, *arguments: object) -> None:
        try:
            call(*arguments)  # type: ignore[operator]
        except OwnershipError as error:
            self._judge.broken("I1", f"{self._who}: {error}")
            raise

    def _count(self) -> None:
        if self.owners.count(None) != self.free_pages:
            self._judge.broken("I1", f"{self._who}: {self.free_pages} pages free, {self.owners.count(None)} unowned")


def grant_of(owner: Hashable | None) -> int | None:
    """The grant under which decode lends a page, in its room's hands or in quarantine."""
    if isinstance(owner, tuple):
        return owner[1] if owner[0] == "grant" else None
    return owner.grant if isinstance(owner, Quarantined) else None
