"""Decode's pages as the world sees them: who owns each, which writes may still reach it, and what it holds."""

from __future__ import annotations

from typing import Protocol

from kvflow.testing.sim.variety import NUM_PAGES

Content = tuple[bytes, int]
"""A prompt's digest, and which page of it; a page that was damaged on its way has a digest of its own."""


class Judge(Protocol):
    """Is told when an invariant breaks."""

    def broken(self, invariant: str, text: str) -> None: ...


class Pages:
    """Owners are grants while a room or a loan has the page, negative grants while a room's user keeps it."""

    def __init__(self, who: str, oracle: Judge) -> None:
        self.free = list(range(NUM_PAGES))
        self.owners: list[int | None] = [None] * NUM_PAGES
        self.writers = [0] * NUM_PAGES  # writes that may still land on the page, proven or not
        self.cells: list[dict[int, Content]] = [{} for _ in range(NUM_PAGES)]  # by rank: each writes its part of a page
        self.lost = False  # with the process: what still lands there hurts no one
        self._who, self._oracle = who, oracle

    def take(self, count: int, owner: int) -> list[int] | None:
        """None when there are not so many."""
        if count > len(self.free):
            return None
        free, owners = self.free, self.owners
        taken = [free.pop() for _ in range(count)]
        for page in taken:
            if owners[page] is not None:
                self._oracle.broken("I1", f"{self._who}: page {page} of {owners[page]} is handed out again")
            owners[page] = owner
        return taken

    def keep(self, pages: list[int], grant: int) -> None:
        """The room has landed: its user has them now."""
        for page in pages:
            if self.owners[page] != grant:
                self._oracle.broken("I1", f"{self._who}: page {page} of {self.owners[page]} lands for {grant}")
            if self.writers[page]:
                self._oracle.broken("I2", f"{self._who}: grant {grant} lands while a write may still reach page {page}")
            self.owners[page] = -grant

    def give_back(self, pages: list[int], owner: int) -> None:
        owners, writers = self.owners, self.writers
        for page in pages:
            if owners[page] != owner:
                self._oracle.broken("I1", f"{self._who}: page {page} of {owners[page]} is given back by {owner}")
            if writers[page]:
                self._oracle.broken("I2", f"{self._who}: page {page} is free while a write may still reach it")
            owners[page] = None
        self.free.extend(pages)

    def owned(self) -> set[int]:
        return {owner for owner in self.owners if owner is not None}
