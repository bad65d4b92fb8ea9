"""Page allocator of an engine that hands out its own pages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvflow.memory.external import ExternalPages
from kvflow.proof.sim.pages import Books, Borrower
from kvflow.protocols.arguments import NO_PAGES
from kvflow.protocols.errors import CapacityError
from kvflow.protocols.pages.layout import PageIndices


class EnginePages:
    """Allocator of pages that no request of the engine holds, and that are not busy in `store`."""

    def __init__(self, books: Books, store: ExternalPages, fails: Callable[[], bool]) -> None:
        self._books, self._store, self._fails = books, store, fails
        self._taken: set[int] = set()

    def take(self, count: int, owner: Borrower) -> PageIndices:
        """Take `count` places, the last one a row if the pool has rows. Raises: CapacityError."""
        if self._fails():
            raise CapacityError("pages (on purpose)", count, 0)
        books, rows = self._books, len(self._books.owners) - self._books.num_pages
        busy = set(self._store.busy(range(len(books.owners))).tolist())
        found: list[int] = []
        for first, end, wanted in (
            (0, books.num_pages, count - bool(rows)),
            (books.num_pages, books.num_pages + rows, int(bool(rows))),
        ):
            free = [p for p in range(first, end) if p not in busy and p not in self._taken]
            if len(free) < wanted:
                raise CapacityError("pages" if not first else "rows", wanted, len(free))
            found += free[:wanted]
        books.taken(found, owner)
        self._taken.update(found)
        return np.array(found, dtype=np.int32) if found else NO_PAGES

    def free(self, pages: PageIndices) -> None:
        places = pages.tolist()
        self._books.freed(places)
        self._taken.difference_update(places)
