"""The allocator of the pages of one space. It records the owner of every page (I1), and defers the
return of pages that are still in use (I13).

Every page is in exactly one state: reserved, free, owned, or returning (given back while held, or
withheld while free). An operation takes a few microseconds for one page, and well under a
millisecond for 2,048 pages.

An allocator belongs to one event loop. Operations that change it still take a lock, because a node
that closes in another thread may withhold pages, and may later free them. The lock costs a few tens
of nanoseconds.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvflow.memory.page_waiter import PageWaiter
from kvflow.protocols.errors import CapacityError, MisuseError, OwnershipError
from kvflow.protocols.pages.layout import MANY_PAGES, NO_PLACES, Counts, PageIndices, ascends

# `_NOBODYS` stands for an owner without an account, so no page carries it.
_FREE, _RESERVED, _RETURNING, _NOBODYS = -1, -2, -3, -4

Index = NDArray[np.integer[Any]] | slice


class Kept(Enum):
    """The key under which `owned()` counts returning pages."""

    RETURNING = "returning"


class Reclaimable(Protocol):
    """An owner, such as a cache, that gives up pages when another owner needs them."""

    @property
    def evictable_pages(self) -> int:
        """Pages that the owner can give back now."""

    def evict(self, count: int) -> None:
        """Give back `count` pages, or as many as possible."""


class _Account:
    """The pages of one owner: the mark that they carry, and their number."""

    __slots__ = ("count", "mark")

    def __init__(self, mark: int) -> None:
        self.mark, self.count = mark, 0


class PageAllocator:
    """The owners of the pages of one space. Implements `protocols.ports.PageStore` for a pool that
    has no other space.

    Pages are taken in ascending runs where possible, so that writes coalesce.
    """

    def __init__(self, num_pages: int, reserved: int = 0, unit: str = "page") -> None:
        """The first `reserved` pages are never handed out (engines keep a null page there).

        `unit` is the word for a page in error texts; for rows it is "row".

        Raises: MisuseError if `num_pages` or `reserved` is out of range.
        """
        if num_pages < 1:
            raise MisuseError(f"num_{unit}s {num_pages} is below 1")
        if not 0 <= reserved <= num_pages:
            raise MisuseError(
                f"reserved {reserved} is outside 0..{num_pages}, the {unit}s of the pool"
            )
        self._unit = unit
        self._num_pages, self._reserved = num_pages, reserved
        # The first `_free` entries are the free pages. `take` takes from the end of these.
        self._stack: PageIndices = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._free = num_pages - reserved
        self._marks: NDArray[np.int32] = np.full(num_pages, _FREE, dtype=np.int32)
        self._marks[:reserved] = _RESERVED
        self._holds: NDArray[np.int32] = np.zeros(num_pages, dtype=np.int32)
        self._accounts: dict[Hashable, _Account] = {}
        self._next_mark = itertools.count()
        self._spare_marks: list[int] = []  # marks of former owners
        self._returning = 0
        # This is a list because a worker that changes its role has two caches for a while.
        self.reclaimables: list[Reclaimable] = []
        self.waiters: set[PageWaiter] = set()
        self._lock = threading.Lock()
        # The sum of `_holds`. While it is 0, `give_back` does not search `_holds`.
        self._held_calls = 0

    def __repr__(self) -> str:
        more = f", {self._reserved} reserved" if self._reserved else ""
        return (
            f"<PageAllocator of {self._num_pages} {self._unit}s: {self._free} free{more}, "
            f"{len(self._accounts)} owners, {self.held_pages} held, {self._returning} returning>"
        )

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def capacity(self) -> int:
        """Pages of the pool that are not reserved."""
        return self._num_pages - self._reserved

    @property
    def allocators(self) -> tuple[PageAllocator, ...]:
        """This allocator, as that of the only space; see `places.PlaceAllocator.allocators`."""
        return (self,)

    @property
    def free_pages(self) -> int:
        return self._free

    @property
    def free(self) -> Counts:
        """Free pages, as the count of the only space."""
        return (self._free,)

    @property
    def available_pages(self) -> int:
        """Free pages, plus those that `reclaimables` could give back.

        A model step or a write may still be reading some of these evictable pages.
        """
        return (
            self._free + sum(r.evictable_pages for r in self.reclaimables)
            if self.reclaimables
            else self._free
        )

    def reclaim(self, count: int) -> int:
        """Evict pages of `reclaimables` until `count` pages are free, if that is possible.

        Returns the number of free pages. A page that a model step or a write still reads is not
        free after its eviction, so more pages are evicted instead.
        """
        for owner in self.reclaimables:
            while self._free < count <= self.available_pages:
                before = owner.evictable_pages
                owner.evict(count - self._free)
                if owner.evictable_pages == before:
                    break
        return self._free

    @property
    def held_pages(self) -> int:
        """Pages with at least one hold."""
        return int(np.count_nonzero(self._holds))

    @property
    def returning_pages(self) -> int:
        """Pages without an owner that become free when their last hold ends. They were given back
        while held, or withheld while free.
        """
        return self._returning

    def take(self, count: int, owner: Hashable) -> PageIndices:
        """Take `count` free pages for `owner`. Raises: CapacityError (nothing is taken)."""
        with self._lock:
            if count > self._free or count < 0:
                raise CapacityError(f"{self._unit}s", count, self._free)
            top = self._free
            pages: PageIndices = self._stack[top - count : top][::-1].copy()
            # Ascending pages can be written in a few large blocks.
            if count >= MANY_PAGES and not ascends(pages):
                pages.sort()
            if count:
                account = self._account(owner)
                # A scalar is several times faster than an array of one page.
                if count == 1:
                    self._marks[int(pages[0])] = account.mark
                else:
                    self._marks[pages if count < MANY_PAGES else _where(pages)[0]] = account.mark
                account.count += count
                self._free = top - count
            return pages

    def take_room(self, counts: Counts, owner: Hashable) -> PageIndices:
        """Take pages for a room in a pool that has no other space.

        Raises: CapacityError (nothing is taken).
        """
        (count,) = counts
        return self.take(count, owner)

    def move(self, pages: PageIndices, owner: Hashable, new_owner: Hashable) -> None:
        """Change the owner of `pages`.

        Raises: OwnershipError when `owner` does not own a page (nothing is moved).
        """
        with self._lock:
            pages, where = self._owned_by(pages, owner)
            if not pages.size:
                return
            # The owner moves all its pages to an owner without pages, so the account is renamed.
            if pages.size == self._accounts[owner].count and new_owner not in self._accounts:
                self._accounts[new_owner] = self._accounts.pop(owner)
                return
            account = self._account(new_owner)
            self._marks[where] = account.mark
            account.count += pages.size
            self._debit(owner, pages.size)

    def give_back(self, pages: PageIndices, owner: Hashable) -> None:
        """Return pages to the free list. A held page follows when its last hold ends (I13).

        Raises: OwnershipError for a page that `owner` does not own, or that is named twice (nothing
        is given back).
        """
        with self._lock:
            pages, where = self._owned_by(pages, owner)
            count = pages.size
            if not count:
                return
            if self._held_calls and (self._holds[where] > 0).any():
                busy = self._holds[pages] > 0
                kept, pages = pages[busy], pages[~busy]
                self._marks[kept if kept.size < MANY_PAGES else _where(kept)[0]] = _RETURNING
                self._returning += kept.size
                where = pages if pages.size < MANY_PAGES else _where(pages)[0]
            self._free_now(pages, where)
            self._debit(owner, count)
        if pages.size:
            self.wake_waiters()

    def hold(self, pages: PageIndices) -> None:
        """Add one hold to each of `pages`, for a reader or writer that cannot be stopped.

        A page that is named twice is held twice. Raises: OwnershipError for a page without an owner
        (nothing is held).
        """
        with self._lock:
            pages = self._checked(pages)
            # Rooms of one page are common, and a scalar is several times faster than an array.
            if pages.size == 1:
                page = int(pages[0])
                if self._marks[page] in (_FREE, _RETURNING):
                    raise OwnershipError(f"hold: {self._unit} {page} has no owner")
                self._holds[page] += 1
                self._held_calls += 1
                return
            where, once = _where(pages) if pages.size >= MANY_PAGES else (pages, False)
            marks = self._marks[where]
            if (ownerless := (marks == _FREE) | (marks == _RETURNING)).any():
                raise OwnershipError(
                    f"hold: {self._unit} {self._named(where, ownerless)} has no owner"
                )
            if once:
                self._holds[where] += 1
            else:
                # `+=` would count a page that is named twice only once.
                np.add.at(self._holds, pages, 1)
            self._held_calls += pages.size

    def unhold(self, pages: PageIndices) -> None:
        """End one hold on `pages`. Returning pages without another hold become free.

        Raises: OwnershipError for a page that has fewer holds than this call ends (no hold ends).
        """
        with self._lock:
            pages = self._checked(pages)
            if pages.size == 1 and not self._returning:
                page = int(pages[0])
                if not self._holds[page]:
                    raise OwnershipError(f"unhold: {self._unit} {page} is not held that often")
                self._holds[page] -= 1
                self._held_calls -= 1
                return
            ready = NO_PLACES
            where, once = _where(pages) if pages.size >= MANY_PAGES else (pages, False)
            if once:
                left = self._holds[where] - np.int32(1)
            else:
                np.subtract.at(self._holds, pages, 1)
                left = self._holds[where]
            if (left < 0).any():
                if not once:
                    np.add.at(self._holds, pages, 1)
                raise OwnershipError(
                    f"unhold: {self._unit} {self._named(where, left < 0)} is not held that often"
                )
            if once:
                self._holds[where] = left
            self._held_calls -= pages.size
            if self._returning:
                found = np.arange(where.start, where.stop) if isinstance(where, slice) else where
                ended = np.sort(found[(left == 0) & (self._marks[where] == _RETURNING)]).astype(
                    np.int32
                )
                # A page that is named twice must be freed only once.
                ready = ended[np.diff(ended, prepend=-1) != 0]
                self._returning -= ready.size
                self._free_now(ready, ready if ready.size < MANY_PAGES else _where(ready)[0])
        if ready.size:
            self.wake_waiters()

    def withhold(self, pages: PageIndices) -> None:
        """Keep pages from every new owner until `unhold`.

        Free pages leave the free list, and owned pages cannot return to it. Each call adds one hold
        to each page. May be called from any thread. Raises: OwnershipError for a page outside the
        pool (nothing is withheld).
        """
        with self._lock:
            pages = self._checked(pages)
            free = np.unique(pages[self._marks[pages] == _FREE])
            if free.size:
                stack = self._stack[: self._free]
                stack = stack[~np.isin(stack, free)]
                self._stack[: stack.size] = stack
                self._free = stack.size
                self._marks[free] = _RETURNING
                self._returning += free.size
            np.add.at(self._holds, pages, 1)
            self._held_calls += pages.size

    def owned(self) -> dict[Hashable, int]:
        """Count the pages of each owner. Returning pages are counted under `Kept.RETURNING`.

        The counts, the free pages and the reserved pages add up to `num_pages`.
        """
        found: dict[Hashable, int] = {
            owner: account.count for owner, account in self._accounts.items()
        }
        if self._returning:
            found[Kept.RETURNING] = self._returning
        return found

    def count_by(self, kind: Hashable) -> int:
        """Count the pages of all owners that match `kind`.

        An owner matches if it equals `kind`, is a tuple that begins with `kind`, or is an instance
        of the class `kind`.
        """
        total = 0
        for owner, account in self._accounts.items():
            named = owner[0] if isinstance(owner, tuple) and owner else owner
            if named == kind or (isinstance(kind, type) and isinstance(owner, kind)):
                total += account.count
        return total

    def pages_of(self, owner: Hashable) -> PageIndices:
        """Return every page of `owner`, ascending.

        The search is linear in the size of the pool: use it in audits and tests only.
        """
        account = self._accounts.get(owner)
        return np.flatnonzero(self._marks == (account.mark if account else _NOBODYS)).astype(
            np.int32
        )

    def at_rest(self) -> bool:
        """Return True if every page is free, reserved or evictable, and no page is held."""
        return self.available_pages == self.capacity and not self._held_calls

    def _account(self, owner: Hashable) -> _Account:
        account = self._accounts.get(owner)
        if account is None:
            mark = self._spare_marks.pop() if self._spare_marks else next(self._next_mark)
            account = self._accounts[owner] = _Account(mark)
        return account

    def _debit(self, owner: Hashable, count: int) -> None:
        account = self._accounts[owner]
        account.count -= count
        if not account.count:
            del self._accounts[owner]
            self._spare_marks.append(account.mark)

    def wake_waiters(self) -> None:
        """Wake every waiter, because pages became free, or because `reclaim` may now succeed.

        May be called from any thread.
        """
        # Iterate over a copy, because another thread may add or remove a waiter at the same time.
        for waiter in tuple(self.waiters):
            waiter.wake()

    def tell_evictable(self) -> None:
        """Wake each waiter if more pages are available than when it began to wait."""
        for waiter in tuple(self.waiters):
            waiter.evictable()

    def _free_now(self, pages: PageIndices, where: Index) -> None:
        """Put pages on the free list. `where` is `_where(pages)[0]`, or `pages` if they are few."""
        top = self._free
        if pages.size == 1:
            page = int(pages[0])
            self._marks[page], self._stack[top], self._free = _FREE, page, top + 1
            return
        self._marks[where] = _FREE
        self._stack[top : top + pages.size] = pages[::-1]
        self._free = top + pages.size

    def _checked(self, pages: PageIndices) -> PageIndices:
        """Return `pages` as an array of indices in the pool.

        Raises: OwnershipError for an index outside the pool. numpy would accept a negative index,
        and count it from the end.
        """
        found: PageIndices = np.asarray(pages, dtype=np.int32)
        if found.ndim != 1:
            raise OwnershipError(f"{self._unit}s have shape {found.shape}, not [n]")
        if found.size:
            # Read as unsigned numbers, negative indices are above every page.
            most = int(found[0]) if found.size == 1 else int(found.view(np.uint32).max())
            if not 0 <= most < self._num_pages:
                low = int(found.min())
                raise OwnershipError(
                    f"{self._unit} {low if low < 0 else int(found.max())} is outside "
                    f"0..{self._num_pages - 1}"
                )
        return found

    def _owned_by(self, pages: PageIndices, owner: Hashable) -> tuple[PageIndices, Index]:
        """Check that `owner` owns each of `pages`, and that each is named once. Returns the pages,
        and an index of them (see `_where`).

        Raises: OwnershipError.
        """
        pages = self._checked(pages)
        count = pages.size
        if not count:
            return pages, pages
        account = self._accounts.get(owner)
        mark = _NOBODYS if account is None else account.mark
        if count == 1:
            page = int(pages[0])
            if self._marks[page] != mark:
                raise OwnershipError(f"{self._unit} {page} is {self._whose(page)}, not {owner!r}'s")
            return pages, pages
        where, once = _where(pages) if pages.size >= MANY_PAGES else (pages, False)
        foreign = self._marks[where] != mark
        if foreign.any():
            page = self._named(where, foreign)
            raise OwnershipError(f"{self._unit} {page} is {self._whose(page)}, not {owner!r}'s")
        if not once:
            ascending = np.sort(pages)
            if (twice := ascending[1:] == ascending[:-1]).any():
                raise OwnershipError(f"{self._unit} {ascending[np.argmax(twice)]} is named twice")
        return pages, where

    @staticmethod
    def _named(where: Index, which: NDArray[np.bool_]) -> int:
        first = int(np.argmax(which))
        return where.start + first if isinstance(where, slice) else int(where[first])

    def _whose(self, page: int) -> str:
        mark = int(self._marks[page])
        fixed = {_FREE: "free", _RESERVED: "reserved", _RETURNING: "on its way back already"}
        if mark in fixed:
            return fixed[mark]
        return next(
            f"{owner!r}'s" for owner, account in self._accounts.items() if account.mark == mark
        )


def _where(pages: PageIndices) -> tuple[Index, bool]:
    """Return a numpy index that selects `pages`, and True if it names each page once.

    The index is a slice, or an ascending array of intp: numpy would convert an int32 array each
    time that it is used.
    """
    if not ascends(pages):
        index = np.sort(pages).astype(np.intp)
        return index, ascends(index)
    if int(pages[-1]) - int(pages[0]) == pages.size - 1:
        return slice(int(pages[0]), int(pages[-1]) + 1), True
    return pages.astype(np.intp), True
