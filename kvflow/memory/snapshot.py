"""Snapshots: copies of a request's pages and rows in host memory, which can later be restored into
any pages and rows.

A snapshot consists of pages and rows of a second pool in host memory, which has the same components
(page-first). Copies use the same plan as transfers (`protocols.pages.plan`), so no stream, scale or
row can be left out. Host memory is bounded and accounted for like the pages of any other pool.

Copies run slice by slice in one thread. Pages and rows are held while a copy reads or writes them
(I13). Their owner may give them back during the copy, and they become free when it ends. A copy
that fails or is cancelled is first drained. An unfinished snapshot then frees its host memory. A
snapshot whose restore failed is intact, and can be restored again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import numpy as np

from kvflow.aio import Job, Threads, all_ended, must_pass, run_to_end
from kvflow.memory.copies import copier_for, copy_slices, host_layout
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import (
    CapacityError,
    HostMemoryError,
    LayoutError,
    MisuseError,
    OwnershipError,
)
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices, Places, PoolLayout, names_twice
from kvflow.protocols.pages.plan import Pairing
from kvflow.protocols.ports import PageStore

VERSION = 1
# A cancelled copy stops after the current slice, which takes some 2 ms with memmove.
SLICE_BYTES = 8 << 20
# The device is idle between two slices. A slice takes some 0.6 ms over PCIe 5.
DEVICE_SLICE_BYTES = 32 << 20


class Snapshot:
    """A copy of pages and rows in host memory, created by `SnapshotStore.take`."""

    version = VERSION

    def __init__(
        self, store: SnapshotStore, places: Places, num_pages: int, owner: Hashable
    ) -> None:
        self.places, self.owner = places, owner
        """Places in the store's host pool, and their owner there."""
        self.num_pages, self.num_rows = num_pages, int(places.rows.size)
        layout = store.host.layout
        self.size_bytes = (
            int(places.pages.size) * layout.page_bytes + self.num_rows * layout.row_bytes
        )
        self._store: SnapshotStore | None = store

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return (
            f"<Snapshot of {self.num_pages} pages and {self.num_rows} rows, {self.size_bytes} "
            f"bytes{state}>"
        )

    @property
    def closed(self) -> bool:
        return self._store is None

    @property
    def store(self) -> SnapshotStore:
        """Store whose host memory contains the snapshot. Raises: MisuseError after `close`."""
        if self._store is None:
            raise MisuseError("the snapshot is closed: its host memory has been freed")
        return self._store

    def close(self) -> None:
        """Free the host memory, once no copy reads it. Idempotent."""
        store, self._store = self._store, None
        if store is not None:
            store.forget(self)


class SnapshotStore:
    """The snapshots of one pool, and their bounded host memory. Belongs to one event loop."""

    def __init__(
        self,
        pool: PagedPool,
        limit_bytes: int,
        *,
        num_rows: int | None = None,
        pages: PageStore | None = None,
        rows: PageStore | None = None,
        slice_bytes: int | None = None,
    ) -> None:
        """Allocate and pre-fault the host memory. Create the store in a thread, because this is
        slow.

        `limit_bytes` bounds the memory of pages and `num_rows` rows together. By default there are
        as many rows as in the pool, but no more than fit into half of the limit. `pages` and `rows`
        are the stores of the pool, by default the pool's own allocators.

        Raises: LayoutError if there is not enough memory, or it cannot be pinned for the pool's
        device; MisuseError if not even one page, or one row, fits into the limit.
        """
        self.pool, self.limit_bytes = pool, limit_bytes
        self._copier = copier_for(pool)
        self.host = PagedPool.allocate(
            host_layout(pool.layout, limit_bytes, num_rows), shared=False
        )
        self._copier.pin(self.host)
        self.host_rows = self.host.rows if pool.layout.num_rows else None
        self._pages: PageStore = pages or pool.pages
        self._rows: PageStore | None = rows or (pool.rows if pool.layout.num_rows else None)
        self._out = Pairing(pool.layout, self.host.layout, ("pool", "host memory"))
        self._slice_bytes = slice_bytes or (SLICE_BYTES if pool.on_host else DEVICE_SLICE_BYTES)
        self._numbers = itertools.count(1)
        self._open: set[Snapshot] = set()
        self._copies: set[Job[bool]] = set()
        self._thread = Threads("snapshot")
        self._closed = False

    def __repr__(self) -> str:
        return (
            f"<SnapshotStore of {self.limit_bytes} bytes: {self.used_bytes} used by "
            f"{len(self._open)} snapshots>"
        )

    @property
    def used_bytes(self) -> int:
        """Bytes of host memory in use: by open and unfinished snapshots, and by closed ones that a
        copy still reads.
        """
        layout, pages, rows = self.host.layout, self.host.pages, self.host_rows
        used = (pages.num_pages - pages.free_pages) * layout.page_bytes
        return (
            used if rows is None else used + (rows.num_pages - rows.free_pages) * layout.row_bytes
        )

    @property
    def count(self) -> int:
        return len(self._open)

    async def take(self, places: Places) -> Snapshot:
        """Copy pages and rows out of the pool. Their owner may give them back during the copy.

        Raises: HostMemoryError (nothing was copied), OwnershipError for pages without an owner,
        LayoutError for an index outside the pool, MisuseError if `places` is not a `Places`.
        """
        self._check_open()
        _check_given(places)
        source = _with_bytes(places, self.pool.layout)
        snapshot = self._reserve(source, len(places.pages))
        try:
            self._out.check(source.pages, snapshot.places.pages, source.rows, snapshot.places.rows)
            with _held(self._pages, places.pages), _held(self._rows, places.rows):
                await self._copy(self._out, source, snapshot.places, self)
        except BaseException:
            snapshot.close()
            raise
        return snapshot

    async def restore(self, snapshot: Snapshot, places: Places) -> None:
        """Copy a snapshot into pages and rows of this pool, in the given order.

        The snapshot may come from another pool whose layout fits. It stays open. After an error the
        content of the places is undefined. Raises: LayoutError that names the difference between
        the layouts, OwnershipError for a page that has no owner or is named twice, MisuseError for
        a closed snapshot.
        """
        self._check_open()
        _check_given(places)
        if snapshot.version != VERSION:
            raise LayoutError(
                f"the snapshot has version {snapshot.version}, and only version {VERSION} can be "
                "restored"
            )
        theirs = snapshot.store
        pairing = Pairing(theirs.host.layout, self.pool.layout, ("snapshot", "pool"))
        if (len(places.pages), len(places.rows)) != (snapshot.num_pages, snapshot.num_rows):
            raise LayoutError(
                f"{snapshot!r} cannot be restored into {len(places.pages)} pages and "
                f"{len(places.rows)} rows"
            )
        target = _with_bytes(places, self.pool.layout)
        pairing.check(snapshot.places.pages, target.pages, snapshot.places.rows, target.rows)
        for unit, indices in (("page", target.pages), ("row", target.rows)):
            if indices.size and names_twice(indices, int(indices.min()), int(indices.max())):
                raise OwnershipError(f"restore: a {unit} is named twice")
        with (
            _held(self._pages, places.pages),
            _held(self._rows, places.rows),
            _held(theirs.host.pages, snapshot.places.pages),
            _held(theirs.host_rows, snapshot.places.rows),
        ):
            await self._copy(pairing, snapshot.places, target, theirs)

    async def close(self) -> None:
        """Stop and drain every copy, close every snapshot, and free the host memory."""
        self._closed = True
        for copy in self._copies:
            copy.cancel()
        try:
            await all_ended(copy.ended for copy in self._copies)
        finally:
            # No copy runs any more, even if this call was cancelled, so the memory can be freed.
            self._thread.close()
            for snapshot in list(self._open):
                snapshot.close()
            self._copier.close()
            self.host.close()

    def forget(self, snapshot: Snapshot) -> None:
        """Give back the host memory of a snapshot. Only `Snapshot.close` calls it."""
        self._open.remove(snapshot)
        self.host.pages.give_back(snapshot.places.pages, snapshot.owner)
        if self.host_rows is not None:
            self.host_rows.give_back(snapshot.places.rows, snapshot.owner)

    def _reserve(self, source: Places, num_pages: int) -> Snapshot:
        owner = ("snapshot", next(self._numbers))
        pages = self._take("page", self.host.pages, source.pages.size, owner)
        try:
            rows = self._take("row", self.host_rows, source.rows.size, owner)
        except HostMemoryError:
            self.host.pages.give_back(pages, owner)
            raise
        snapshot = Snapshot(self, Places(pages, rows), num_pages, owner)
        self._open.add(snapshot)
        return snapshot

    def _take(self, unit: str, store: PageStore | None, count: int, owner: Hashable) -> PageIndices:
        if store is None or not count:
            return NO_PLACES
        try:
            return store.take(count, owner)
        except CapacityError:
            raise HostMemoryError(unit, count, store.free_pages, self.limit_bytes) from None

    async def _copy(
        self, pairing: Pairing, source: Places, target: Places, other: SnapshotStore
    ) -> None:
        """Run a copy in the thread, until it ends or is drained.

        `other` is the store of the snapshot that is copied; it may be this store.
        """
        copy = self._thread.start(
            copy_slices, pairing, source, target, self._slice_bytes, self._copier
        )
        # The copy uses the memory of both stores, so closing either one must stop it.
        both = (self._copies, other._copies)
        for copies in both:
            copies.add(copy)
        try:
            whole = await run_to_end(copy.ended, stop=copy.cancel)
        except asyncio.CancelledError as error:
            if must_pass(error):
                raise
            # A store was closed before the thread began the copy.
            whole = False
        finally:
            for copies in both:
                copies.discard(copy)
        if not whole:
            raise MisuseError("the copy was stopped: a store of snapshots was closed")

    def _check_open(self) -> None:
        if self._closed:
            raise MisuseError("the store of snapshots is closed")


def _check_given(places: Places) -> None:
    if not isinstance(places, Places):
        raise MisuseError(
            "pages and rows are given as kvflow.Places(pages, rows), not as a "
            f"{type(places).__name__}; pool.layout.split makes it of a room's"
        )


def _with_bytes(places: Places, layout: PoolLayout) -> Places:
    """Return `places`, without the pages if pages of the pool have no bytes: the host pool has no
    memory for them.
    """
    pages = places.pages if layout.page_bytes else NO_PLACES
    return Places(np.asarray(pages, dtype=np.int32), np.asarray(places.rows, dtype=np.int32))


@contextmanager
def _held(store: PageStore | None, indices: PageIndices) -> Iterator[None]:
    if store is None or not len(indices):
        yield
        return
    store.hold(indices)
    try:
        yield
    finally:
        store.unhold(indices)
