"""A store over all spaces of a pool. One array of indices names the places of a room (see
`protocols.pages.spaces`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

from kvflow.memory.allocator import PageAllocator
from kvflow.protocols.errors import CapacityError, OwnershipError
from kvflow.protocols.pages.layout import NO_PLACES, Counts, PageIndices, Places, PoolLayout

_Work = Callable[[PageAllocator, PageIndices], None]


class PlaceAllocator:
    """One store over the allocators of a pool's spaces.

    Implements `protocols.ports.PageStore`. An operation that raises changes no allocator. The
    allocators may also be used directly.
    """

    def __init__(self, layout: PoolLayout, allocators: Sequence[PageAllocator]) -> None:
        """`allocators` has one allocator for each space of `layout`, in the same order."""
        self._layout = layout
        self.allocators = tuple(allocators)

    def __repr__(self) -> str:
        return f"<PlaceAllocator of {' and '.join(map(repr, self.allocators))}>"

    @property
    def free_pages(self) -> int:
        """Free pages of the first space."""
        return self.allocators[0].free_pages

    @property
    def free(self) -> Counts:
        """Free places of each space."""
        return tuple(allocator.free_pages for allocator in self.allocators)

    def at_rest(self) -> bool:
        return all(allocator.at_rest() for allocator in self.allocators)

    def take(self, count: int, owner: Hashable) -> PageIndices:
        """Take pages of the first space. Raises: CapacityError (nothing is taken)."""
        return self.allocators[0].take(count, owner)

    def take_room(self, counts: Counts, owner: Hashable) -> PageIndices:
        """Take `counts` places, and return them in one list, grouped in the order of the spaces.

        Raises: CapacityError (nothing is taken).
        """
        found: list[PageIndices] = []
        try:
            for allocator, count in zip(self.allocators, counts, strict=True):
                found.append(allocator.take(count, owner))
        except CapacityError:
            for allocator, own in zip(self.allocators, found, strict=False):
                allocator.give_back(own, owner)
            raise
        return self._layout.numbered(found)

    def move(self, pages: PageIndices, owner: Hashable, new_owner: Hashable) -> None:
        self._in_all(
            pages,
            lambda allocator, own: allocator.move(own, owner, new_owner),
            lambda allocator, own: allocator.move(own, new_owner, owner),
        )

    def give_back(self, pages: PageIndices, owner: Hashable) -> None:
        parts = self._parts(pages)
        # If `owner` does not own a place of a later space, this raises before any place is given
        # back. The first allocator checks its own places.
        for allocator, own in parts[1:]:
            allocator.move(own, owner, owner)
        for allocator, own in parts:
            allocator.give_back(own, owner)

    def hold(self, pages: PageIndices) -> None:
        self._in_all(pages, PageAllocator.hold, PageAllocator.unhold)

    def unhold(self, pages: PageIndices) -> None:
        # `hold` would refuse a place that became free when its hold ended.
        self._in_all(pages, PageAllocator.unhold, PageAllocator.withhold)

    def withhold(self, pages: PageIndices) -> None:
        for allocator, own in self._parts(pages):
            allocator.withhold(own)

    def owned(self) -> dict[Hashable, int]:
        """Count the places of each owner in all spaces; see `PageAllocator.owned`."""
        found: dict[Hashable, int] = {}
        for allocator in self.allocators:
            for owner, count in allocator.owned().items():
                found[owner] = found.get(owner, 0) + count
        return found

    def count_by(self, kind: Hashable) -> int:
        return sum(allocator.count_by(kind) for allocator in self.allocators)

    def _parts(self, indices: PageIndices) -> list[tuple[PageAllocator, PageIndices]]:
        """Return the places of each space that has some in `indices`, with its allocator."""
        if not indices.size:
            return []
        low, high = int(indices.min()), int(indices.max())
        if not 0 <= low <= high < self._layout.num_places:
            raise OwnershipError(
                f"place {low if low < 0 else high} is outside 0..{self._layout.num_places - 1}"
            )
        both = zip(self.allocators, self._layout.split(indices), strict=True)
        return [(allocator, own) for allocator, own in both if own.size]

    def _in_all(self, indices: PageIndices, work: _Work, undo: _Work) -> None:
        """Do `work` in each space. If a space refuses, `undo` it in the spaces before."""
        done: list[tuple[PageAllocator, PageIndices]] = []
        try:
            for part in self._parts(indices):
                work(*part)
                done.append(part)
        except OwnershipError:
            for part in reversed(done):
                undo(*part)
            raise


def batches(places: Places, sizes: Counts) -> Iterator[Places]:
    """Yield the places in batches. A batch has places of one space only, at most `sizes` of them.

    A space whose size is 0 is left out.
    """
    for space, (own, size) in enumerate(zip(places, sizes, strict=True)):
        for start in range(0, len(own) if size else 0, size or 1):
            batch = [NO_PLACES] * len(places)
            batch[space] = own[start : start + size]
            yield tuple(batch)
