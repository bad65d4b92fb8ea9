"""A page store for engines that have their own allocator. It counts uses, and hands out no page."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import CapacityError, MisuseError, OwnershipError
from kvflow.protocols.limits import check_time
from kvflow.protocols.pages.layout import MANY_PAGES, Counts, PageIndices, ascends


class ExternalPages:
    """A store that counts the uses of pages, and leaves their allocation to the engine.

    Implements `protocols.ports.PageStore`.

    With `node = DecodeNode(pool, plane, pages=ExternalPages(pool.layout.num_places))`, the engine
    passes its own pages to every room (`room(..., pages=mine)`). A page is busy while a peer may
    write into it, or a write or a checksum reads it. The engine must not reuse a busy page. If an
    earlier node over the pool lent pages whose writer may still write, they are busy from the
    start. Every method may be called from any thread.
    """

    def __init__(self, num_pages: int) -> None:
        """Count the uses of `num_pages` pages. Raises: MisuseError if `num_pages` is below 1."""
        if num_pages < 1:
            raise MisuseError(f"num_pages {num_pages} is below 1")
        self._uses: NDArray[np.int32] = np.zeros(num_pages, dtype=np.int32)
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<ExternalPages of {self.num_pages} pages: {self.busy_pages} busy>"

    @property
    def num_pages(self) -> int:
        return self._uses.size

    @property
    def free_pages(self) -> int:
        """Always 0: only the engine knows which of its pages are free."""
        return 0

    @property
    def free(self) -> Counts:
        """Always empty, because the store knows neither the spaces nor their free pages."""
        return ()

    @property
    def busy_pages(self) -> int:
        return int(np.count_nonzero(self._uses))

    def at_rest(self) -> bool:
        """Return True if no page is busy."""
        return not self._uses.any()

    # --- called by the engine

    def busy(self, pages: Sequence[int] | PageIndices) -> PageIndices:
        """Return those of `pages` that are busy, in the given order.

        Raises: OwnershipError (a page outside the pool).
        """
        found = self._checked(pages)
        return found[self._uses[found] > 0]

    def wait_idle(self, pages: Sequence[int] | PageIndices, timeout_s: float | None = None) -> bool:
        """Block until no page of `pages` is busy. Returns False after `timeout_s`.

        Never call it on the node's event loop, because that loop ends the uses. Raises:
        OwnershipError (a page outside the pool), MisuseError (an invalid `timeout_s`).
        """
        found = self._checked(pages)
        if timeout_s is not None:
            check_time("timeout_s", timeout_s)
        with self._changed:
            return self._changed.wait_for(lambda: not self._uses[found].any(), timeout_s)

    # --- called by nodes

    def take(self, count: int, owner: Hashable) -> PageIndices:
        """Return an empty array for a `count` of 0: this store hands out no page.

        Raises: CapacityError for any other `count`: the room was opened without `pages`.
        """
        if count:
            error = CapacityError("pages", count, 0)
            error.args = (
                f"{owner!r} needs {count} pages and the node has none to give: the engine's "
                f"allocator owns them; open the room with pages=, {count} of them",
            )
            raise error
        return np.empty(0, dtype=np.int32)

    def take_room(self, counts: Counts, owner: Hashable) -> PageIndices:
        """See `take`."""
        return self.take(sum(counts), owner)

    def move(self, pages: PageIndices, owner: Hashable, new_owner: Hashable) -> None:
        """Refuse any pages, because this store hands out none. Raises: OwnershipError."""
        self._refuse(pages, "move")

    def give_back(self, pages: PageIndices, owner: Hashable) -> None:
        """Refuse any pages, because this store hands out none. Raises: OwnershipError."""
        self._refuse(pages, "give back")

    def hold(self, pages: PageIndices) -> None:
        """Count one more use of each page.

        Raises: OwnershipError (a page outside the pool; nothing is held).
        """
        found = self._checked(pages)
        with self._changed:
            self._count(found, 1)

    def unhold(self, pages: PageIndices) -> None:
        """End one use of each page.

        Raises: OwnershipError for a page that is not busy (no count changes).
        """
        found = self._checked(pages)
        with self._changed:
            counted = self._count(found, -1)
            if (wrong := self._uses[counted] < 0).any():
                # After an error the counts must be as before.
                self._count(found, 1)
                raise OwnershipError(f"unhold: page {counted[wrong][0]} is not in use")
            self._changed.notify_all()

    def withhold(self, pages: PageIndices) -> None:
        """Count one more use of each page, because a writer may still hold an earlier loan of it.

        Raises: OwnershipError (a page outside the pool; nothing is held).
        """
        self.hold(pages)

    def _count(self, pages: PageIndices, more: int) -> PageIndices:
        """Add `more` to the use count of each page, and return the pages, possibly sorted.

        Many pages are sorted first, because `np.add.at` takes 150 ms for a million pages.
        """
        if pages.size >= MANY_PAGES and ascends(ascending := np.sort(pages)):
            self._uses[ascending] += np.int32(more)
            return ascending
        np.add.at(self._uses, pages, more)
        return pages

    def _checked(self, pages: Sequence[int] | PageIndices) -> PageIndices:
        found = np.asarray(pages, dtype=np.int64)
        if found.ndim != 1:
            raise OwnershipError(f"pages have shape {found.shape}, not [n]")
        if (outside := (found < 0) | (found >= self.num_pages)).any():
            raise OwnershipError(f"page {found[outside][0]} is outside 0..{self.num_pages - 1}")
        return found.astype(np.int32)

    def _refuse(self, pages: PageIndices, what: str) -> None:
        if len(pages):
            raise OwnershipError(
                f"cannot {what} {len(pages)} pages: they belong to the engine's own allocator"
            )
