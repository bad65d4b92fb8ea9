"""Expected content of a request's places at decode, and of places that others took after it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import chain, starmap

from kvflow.memory.allocator import PageAllocator
from kvflow.memory.pool import PagedPool
from kvflow.proof.sim.content import content
from kvflow.proof.sim.pages import Books
from kvflow.proof.sim.stay import ALL_PAGES, ALL_ROWS
from kvflow.protocols.errors import CapacityError
from kvflow.protocols.pages.layout import Counts, PageIndices

Broken = Callable[[str], None]
ANY = b""
"""Content of a place that no step has written yet."""


class State:
    """Expected content of one request's places, in their order, by space."""

    def __init__(self, books: Books, digest: bytes, places: list[int], broken: Broken) -> None:
        self._books, self._digest, self._broken = books, digest, broken
        self._version = 0
        landed = starmap(self._content, enumerate(places))
        counts = books.counted(places)
        self._spaces = [[next(landed) for _ in range(count)] for count in counts]
        # True after the state was dropped, until it is computed again.
        self.lost = False

    def add_page(self, space: int) -> None:
        self._spaces[space].append(ANY)

    def lose(self) -> None:
        self._spaces, self.lost = [[ANY] * len(space) for space in self._spaces], True

    def check(self, places: list[int], when: str) -> None:
        for place, data in zip(places, chain.from_iterable(self._spaces), strict=True):
            if data is not ANY and self._books.bytes.read(place) != data:
                self._broken(f"{when}, {self._books.name(place)} has other bytes than its own")

    def compute(self, places: list[int]) -> None:
        """Write what a model step writes: the last place of each space, or all after a loss."""
        self._version += 1
        base = 0
        for space in self._spaces:
            for index in range(0 if self.lost else max(0, len(space) - 1), len(space)):
                place = places[base + index]
                data = space[index] = self._content(base + index, place)
                self._books.bytes.write(place, data)
            base += len(space)
        self.lost = False

    def _content(self, index: int, place: int) -> bytes:
        return content(self._digest, index, self._books.bytes.size(place), self._version)


class Squatter:
    """Another request. It takes places that a request left, and detects late writes to them."""

    def __init__(
        self, pool: PagedPool, books: Books, sizes: Counts, what: str, broken: Broken
    ) -> None:
        """Take places. `what` states which: as many as `sizes`, all pages, all rows, or none."""
        self._books, self._broken = books, broken
        self._taken: list[tuple[PageAllocator, PageIndices, list[int]]] = []
        layout = pool.layout
        for store, space, first, size in zip(
            pool.allocators, layout.spaces, layout.bases, sizes, strict=True
        ):
            every = what == (ALL_ROWS if space.in_rows else ALL_PAGES)
            if what and (size or not first):
                self._take(store, store.free_pages if every else size, first)

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
