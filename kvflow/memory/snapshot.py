"""Snapshots: copies of a request's places in host memory, which can later be restored into any
other places.

A snapshot consists of places of a second pool in host memory, which has the same spaces and
components (page-first). Copies use the same plan as transfers (`protocols.pages.plan`), so no
stream, scale or row can be left out. Host memory is bounded and accounted for like the pages of any
other pool.

Copies run slice by slice in one thread. Places are held while a copy reads or writes them (I13).
Their owner may give them back during the copy, and they become free when it ends. A copy that fails
or is cancelled is first drained. An unfinished snapshot then frees its host memory. A snapshot
whose restore failed is intact, and can be restored again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

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
from kvflow.protocols.pages.layout import (
    NO_PLACES,
    Counts,
    PageIndices,
    Places,
    PoolLayout,
    names_twice,
    unit_named,
)
from kvflow.protocols.pages.plan import Pairing
from kvflow.protocols.ports import PageStore

VERSION = 1
# A cancelled copy stops after the current slice, which takes some 2 ms with memmove.
SLICE_BYTES = 8 << 20
# The device is idle between two slices. A slice takes some 0.6 ms over PCIe 5.
DEVICE_SLICE_BYTES = 32 << 20


class Snapshot:
    """A copy of places in host memory, created by `SnapshotStore.take`."""

    version = VERSION

    def __init__(
        self, store: SnapshotStore, places: Places, counts: Counts, owner: Hashable
    ) -> None:
        """`counts` are the numbers of places of the request, by space. Those without bytes are not
        in `places`.
        """
        self.places, self.owner = places, owner
        """Places in the store's host pool, and their owner there."""
        self.counts = counts
        layout = store.host.layout
        self.size_bytes = layout.room_bytes(tuple(len(own) for own in places))
        self._store: SnapshotStore | None = store
        self._described = layout.described(counts)

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<Snapshot of {self._described}, {self.size_bytes} bytes{state}>"

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
        allocators: Sequence[PageStore] | None = None,
        slice_bytes: int | None = None,
    ) -> None:
        """Allocate and pre-fault the host memory. Create the store in a thread, because this is
        slow.

        `limit_bytes` bounds the memory of all spaces together. Every space with rows has
        `num_rows` of them; by default as many as in the pool, but no more than fit into half of
        the limit. `allocators` are those of the spaces, by default the pool's own.

        Raises: LayoutError if there is not enough memory, or it cannot be pinned for the pool's
        device; MisuseError if not even one place of each space fits into the limit.
        """
        self.pool, self.limit_bytes = pool, limit_bytes
        self._copier = copier_for(pool)
        self.host = PagedPool.allocate(
            host_layout(pool.layout, limit_bytes, num_rows), shared=False
        )
        self._copier.pin(self.host)
        self._allocators: Sequence[PageStore] = allocators or pool.allocators
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
        host = self.host
        return host.layout.room_bytes(tuple(a.num_pages - a.free_pages for a in host.allocators))

    @property
    def count(self) -> int:
        return len(self._open)

    async def take(self, places: Places) -> Snapshot:
        """Copy places of all spaces out of the pool. Their owner may give them back during the
        copy.

        Raises: HostMemoryError (nothing was copied), OwnershipError for pages without an owner,
        LayoutError for an index outside the pool, MisuseError if `places` has not one array for
        each space.
        """
        self._check_open()
        layout = self.pool.layout
        given = _checked(places, layout)
        source = _with_bytes(given, layout)
        snapshot = self._reserve(source, tuple(len(own) for own in given))
        try:
            _check_inside(source, layout)
            with _held(self._allocators, given):
                await self._copy(self._out, source, snapshot.places, self)
        except BaseException:
            snapshot.close()
            raise
        return snapshot

    async def restore(self, snapshot: Snapshot, places: Places) -> None:
        """Copy a snapshot into places of this pool, in the given order.

        The snapshot may come from another pool whose layout fits. It stays open. After an error the
        content of the places is undefined. Raises: LayoutError that names the difference between
        the layouts, OwnershipError for a page that has no owner or is named twice, MisuseError for
        a closed snapshot.
        """
        self._check_open()
        layout = self.pool.layout
        given = _checked(places, layout)
        if snapshot.version != VERSION:
            raise LayoutError(
                f"the snapshot has version {snapshot.version}, and only version {VERSION} can be "
                "restored"
            )
        theirs = snapshot.store
        pairing = Pairing(theirs.host.layout, layout, ("snapshot", "pool"))
        counts = tuple(len(own) for own in given)
        if counts != snapshot.counts:
            raise LayoutError(f"{snapshot!r} cannot be restored into {layout.described(counts)}")
        target = _with_bytes(given, layout)
        _check_inside(target, layout)
        for space, own in enumerate(target):
            if own.size and names_twice(own, int(own.min()), int(own.max())):
                raise OwnershipError(f"restore: a {unit_named(layout, space)} is named twice")
        with (
            _held(self._allocators, given),
            _held(theirs.host.allocators, snapshot.places),
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
        for allocator, own in zip(self.host.allocators, snapshot.places, strict=True):
            allocator.give_back(own, snapshot.owner)

    def _reserve(self, source: Places, counts: Counts) -> Snapshot:
        owner = ("snapshot", next(self._numbers))
        found: list[PageIndices] = []
        allocators = self.host.allocators
        for space, (allocator, own) in enumerate(zip(allocators, source, strict=True)):
            try:
                found.append(allocator.take(own.size, owner))
            except CapacityError:
                for before, taken in zip(allocators, found, strict=False):
                    before.give_back(taken, owner)
                unit = unit_named(self.host.layout, space)
                raise HostMemoryError(
                    unit, own.size, allocator.free_pages, self.limit_bytes
                ) from None
        snapshot = Snapshot(self, tuple(found), counts, owner)
        self._open.add(snapshot)
        return snapshot

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


def _checked(places: object, layout: PoolLayout) -> Places:
    """Return `places` as int32 arrays. Raises: MisuseError unless there is one for each space."""
    if not isinstance(places, tuple) or len(places) != len(layout.spaces):
        given = f"tuple of {len(places)}" if isinstance(places, tuple) else type(places).__name__
        names = ", ".join(space.name for space in layout.spaces)
        raise MisuseError(
            f"places are given as a tuple with one array for each space ({names}), not as a "
            f"{given}; pool.layout.split makes it of a room's"
        )
    return tuple(np.asarray(own, dtype=np.int32) for own in places)


def _with_bytes(places: Places, layout: PoolLayout) -> Places:
    """Return `places`, without those of spaces whose places have no bytes: the host pool has no
    memory for them.
    """
    return tuple(
        own if size else NO_PLACES for own, size in zip(places, layout.place_bytes, strict=True)
    )


def _check_inside(places: Places, layout: PoolLayout) -> None:
    """Check that places are in their spaces. In one list, an index outside of one space would be a
    place of another.
    """
    for space, (own, count) in enumerate(zip(places, layout.counts, strict=True)):
        if own.ndim != 1:
            raise LayoutError(f"{unit_named(layout, space)}s have shape {own.shape}, not [n]")
        if own.size and not 0 <= int(own.min()) <= int(own.max()) < count:
            raise LayoutError(f"{unit_named(layout, space)} is outside 0..{count - 1}")


@contextmanager
def _held(allocators: Sequence[PageStore], places: Places) -> Iterator[None]:
    with ExitStack() as held:
        for allocator, own in zip(allocators, places, strict=True):
            if own.size:
                allocator.hold(own)
                held.callback(allocator.unhold, own)
        yield
