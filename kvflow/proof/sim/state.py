"""Expected content of a request's places at decode, and of places that others took after it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import starmap

from kvflow.memory.allocator import PageAllocator
from kvflow.memory.pool import PagedPool
from kvflow.proof.sim.content import content
from kvflow.proof.sim.pages import Books
from kvflow.proof.sim.stay import ALL_PAGES, ALL_ROWS
from kvflow.protocols.errors import CapacityError
from kvflow.protocols.pages.layout import PageIndices

Broken = Callable[[str], None]
ANY = b""
"""Content of a place that no step has written yet."""


class State:
    """Expected content of one request's pages, in their order, and of its row."""

    def __init__(self, books: Books, digest: bytes, places: list[int], broken: Broken) -> None:
        self._books, self._digest, self._broken = books, digest, broken
        self._version = 0
        landed = list(starmap(self._content, enumerate(places)))
        count = sum(place < books.num_pages for place in places)
        self._pages, self._rows = landed[:count], landed[count:]
        # True after the state was dropped, until it is computed again.
        self.lost = False

    def add_page(self) -> None:
        self._pages.append(ANY)

    def lose(self) -> None:
        self._pages, self._rows, self.lost = [ANY] * len(self._pages), [ANY] * len(self._rows), True

    def check(self, places: list[int], when: str) -> None:
        for place, data in zip(places, (*self._pages, *self._rows), strict=True):
            if data is not ANY and self._books.bytes.read(place) != data:
                self._broken(f"{when}, {self._books.name(place)} has other bytes than its own")

    def compute(self, places: list[int]) -> None:
        """Write what a model step writes: the last page and the row, or all places after a loss."""
        self._version += 1
        count = len(self._pages)
        for index in range(0 if self.lost else count - 1, len(places)):
            data = self._content(index, places[index])
            self._books.bytes.write(places[index], data)
            if index < count:
                self._pages[index] = data
            else:
                self._rows[index - count] = data
        self.lost = False

    def _content(self, index: int, place: int) -> bytes:
        return content(self._digest, index, self._books.bytes.size(place), self._version)


class Squatter:
    """Another request. It takes places that a request left, and detects late writes to them."""

    def __init__(
        self, pool: PagedPool, books: Books, sizes: tuple[int, int], what: str, broken: Broken
    ) -> None:
        """Take places. `what` states which: as many as `sizes`, all pages, all rows, or none."""
        self._books, self._broken = books, broken
        self._taken: list[tuple[PageAllocator, PageIndices, list[int]]] = []
        if what:
            self._take(pool.pages, pool.pages.free_pages if what == ALL_PAGES else sizes[0], 0)
        if what and sizes[1]:
            self._take(
                pool.rows, pool.rows.free_pages if what == ALL_ROWS else sizes[1], books.num_pages
            )

    def leave(self) -> None:
        for store, taken, places in self._taken:
            for place in places:
                if self._books.bytes.read(place) != self._content(place):
                    self._broken(f"{self._books.name(place)}, which it has left, was written to")
            store.give_back(taken, self)

    def _take(self, store: PageAllocator, count: int, first: int) -> None:
        with suppress(CapacityError):
            taken = store.take(min(count, store.free_pages), self)
            places = (taken + first).tolist()
            self._taken.append((store, taken, places))
            for place in places:
                self._books.bytes.write(place, self._content(place))

    def _content(self, place: int) -> bytes:
        return content(b"another request", place, self._books.bytes.size(place))
