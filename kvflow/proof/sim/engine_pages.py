"""Page allocator of an engine that hands out its own pages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvflow.memory.external import ExternalPages
from kvflow.proof.sim.pages import Books, Borrower
from kvflow.protocols.arguments import NO_PAGES
from kvflow.protocols.errors import CapacityError
from kvflow.protocols.pages.layout import Counts, PageIndices


class EnginePages:
    """Allocator of pages that no request of the engine holds, and that are not busy in `store`."""

    def __init__(self, books: Books, store: ExternalPages, fails: Callable[[], bool]) -> None:
        self._books, self._store, self._fails = books, store, fails
        self._taken: set[int] = set()

    def take(self, counts: Counts, owner: Borrower) -> PageIndices:
        """Take places of every space, in the order of spaces. Raises: CapacityError."""
        if self._fails():
            raise CapacityError("pages (on purpose)", sum(counts), 0)
        books, layout = self._books, self._books.layout
        busy = set(self._store.busy(range(len(books.owners))).tolist())
        found: list[int] = []
        for space, first, wanted in zip(layout.spaces, layout.bases, counts, strict=True):
            places = range(first, first + space.count)
            free = [p for p in places if p not in busy and p not in self._taken]
            if len(free) < wanted:
                raise CapacityError(f"{space.unit}s", wanted, len(free))
            found += free[:wanted]
        books.taken(found, owner)
        self._taken.update(found)
        return np.array(found, dtype=np.int32) if found else NO_PAGES

    def free(self, pages: PageIndices) -> None:
        places = pages.tolist()
        self._books.freed(places)
        self._taken.difference_update(places)
