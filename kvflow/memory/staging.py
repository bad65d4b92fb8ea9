"""Staging: a second pool in host memory, which a data plane reads and writes instead of a pool that
it cannot reach.

The staging has the components of the pool, page-first. Peers on this machine can open its memory,
which is pinned if the pool is on a device. Copies between the two pools are planned like transfers.

If the pools of prefill and decode divide heads differently, the staging stores bytes in another
order, in which the bytes for one peer are contiguous (`pages.arrange`).

At decode, rooms lend staging pages, so a late or lost writer can reach no other memory. A
chunk counts as landed once it is copied to the room's own pages (`StagedArrivals`). At prefill,
each slice passes through the staging (`transports.data.staged`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
from xxhash import xxh3_64

from kvflow.memory.checksum import FINE, SHARES, PoolSums, stores_of, sum_places
from kvflow.memory.copies import copier_for, copy_listed, host_layout, least_bytes
from kvflow.memory.page_tasks import THREADS, PageTask, PageTasks
from kvflow.memory.places import batches
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.arrange import by_shard
from kvflow.protocols.pages.coverage import Served, sends_all, spans_served
from kvflow.protocols.pages.fine import in_pages_of
from kvflow.protocols.pages.layout import Counts, PageIndices, PoolLayout, resized
from kvflow.protocols.pages.plan import Pairing
from kvflow.protocols.pages.spaces import counts_fit
from kvflow.protocols.ports import PageStore

# A cancelled copy stops after the current slice: some 0.2 ms over PCIe, 1 ms with memmove.
SLICE_BYTES = 4 << 20
# The default at a prefill: enough for some twenty decodes where slices have their full size.
PREFILL_BYTES = 256 << 20
# Where pages or rows are large, the default is enough for this many decodes: three slices of one
# page each, and one row.
PREFILL_DECODES = 4
_BROUGHT = b"brought"
_SCRATCH_BYTES = 1 << 20


def prefill_bytes(layout: PoolLayout) -> int:
    """Return the default bytes of staging at a prefill with a pool of this layout."""
    # Staging is never larger than the pool.
    wanted = tuple(
        min(space.count, PREFILL_DECODES * (1 if space.in_rows else 3)) if size else 0
        for space, size in zip(layout.spaces, layout.place_bytes, strict=True)
    )
    found = max(PREFILL_BYTES, least_bytes(layout))
    while found < layout.room_bytes(layout.counts):
        if counts_fit(wanted, host_layout(layout, found).counts):
            break
        found += PREFILL_BYTES
    return found


class Staging:
    """The staging of one pool.

    It must stay open until the nodes and data planes that use it are closed.
    """

    def __init__(
        self, pool: PagedPool, size_bytes: int = 0, *, shared: bool = True, shards: int = 1
    ) -> None:
        """Allocate and pre-fault the memory. Create the staging in a thread, because this is slow.

        `size_bytes` bounds the memory of all spaces. With 0, or more than the size of the pool,
        the staging is as large as the pool. With `shared`, peers on this machine can open it.

        `shards` is for decode: the number of tensor-parallel shards of a prefill. The bytes of a
        page that one shard sends are then contiguous, whereas in the pool they are a slice of every
        token slot. A prefill with another number of shards also works, in smaller blocks.

        Raises: LayoutError if there is not enough memory, or it cannot be pinned; MisuseError if
        not even one place of each space fits into `size_bytes`, or if `shards` is below 1.
        """
        if shards < 1:
            raise MisuseError(f"staging for prefills of {shards} shards: there is at least 1")
        whole = resized(pool.layout, pool.layout.counts)
        fits = host_layout(whole, size_bytes) if 0 < size_bytes < whole.size_bytes else whole
        self.pool, self._copier = pool, copier_for(pool)
        self.host = PagedPool.allocate(by_shard(fits, shards) if shards > 1 else fits, shared)
        self._out = Pairing(pool.layout, self.host.layout, ("pool", "staging"))
        self._into = Pairing(self.host.layout, pool.layout, ("staging", "pool"))
        self._share = functools.lru_cache(SHARES)(
            functools.partial(_share, self.host.layout, pool.layout)
        )
        # Plans for copies of fine pages (see `pages.fine`), by their sizes.
        self._fine = functools.lru_cache(FINE)(
            functools.partial(_fine, self.host.layout, pool.layout)
        )
        self._copier.pin(self.host)

    def __repr__(self) -> str:
        layout = self.host.layout
        return f"<Staging of {layout.described(layout.counts)} for {self.pool!r}>"

    @property
    def mapped_by(self) -> tuple[object, ...]:
        """Objects that keep the memory of both pools mapped; see `PagedPool.mapped_by`."""
        return (*self.pool.mapped_by, *self.host.mapped_by)

    def copy_out(
        self,
        places: PageIndices,
        staged: PageIndices,
        stopped: Callable[[], bool],
        out: Pairing | None = None,
    ) -> bool:
        """Copy places of the pool into the staging, and call `stopped` before each slice.

        The call blocks, so make it in a thread. Returns False if `stopped` ended the copy. Both
        arrays have the places of all spaces in one list (see `pages.spaces`). With `out`, the copy
        arranges the bytes in another order (`pages.arrange`). Raises: TransferError.
        """
        return copy_listed(out or self._out, places, staged, SLICE_BYTES, self._copier, stopped)

    def copy_in(
        self,
        staged: PageIndices,
        places: PageIndices,
        stopped: Callable[[], bool],
        served: tuple[Served, ...] | None = None,
        page_sizes: Counts = (),
    ) -> bool:
        """Copy places of the staging into the pool; see `copy_out`.

        With `served`, only the parts that one rank served are copied. That rank's chunk has landed,
        but writes by other ranks may still be running. With `page_sizes`, both lists number fine
        pages of these sizes, and the other bytes of their pages are not touched.
        """
        into = self._into
        if served is not None and not sends_all(self.pool.layout, served):
            into = self._share(served, page_sizes)
        elif page_sizes:
            into = self._fine(page_sizes)[1]
        return copy_listed(into, staged, places, SLICE_BYTES, self._copier, stopped)

    def plan_out(self, page_sizes: Counts = ()) -> Pairing:
        """Return a plan for `copy_out`. With `page_sizes`, its lists number fine pages of these
        sizes. Raises: LayoutError.
        """
        return self._fine(page_sizes)[0] if page_sizes else self._out

    def close(self) -> None:
        """Free the memory. Call it when no copy runs. Idempotent."""
        self._copier.close()
        self.host.close()


def _share(
    host: PoolLayout, pool: PoolLayout, served: tuple[Served, ...], page_sizes: Counts = ()
) -> Pairing:
    if page_sizes:
        host, pool = in_pages_of(host, page_sizes), in_pages_of(pool, page_sizes)
    return Pairing(host, pool, ("staging", "pool"), only=spans_served(served))


def _fine(host: PoolLayout, pool: PoolLayout, page_sizes: Counts) -> tuple[Pairing, Pairing]:
    """Return the plans for copies out of a pool and into it, in fine pages."""
    staging, own = (in_pages_of(layout, page_sizes) for layout in (host, pool))
    return (
        Pairing(own, staging, ("pool", "staging")),
        Pairing(staging, own, ("staging", "pool")),
    )


class StagedArrivals(PageTasks):
    """Copies chunks from the staging to the pool. Implements `protocols.ports.Arrivals`."""

    def __init__(self, staging: Staging, *, verify: bool) -> None:
        """With `verify`, the result of each copy is the checksum of what landed in the staging."""
        super().__init__("copy from staging")
        self._staging, self._verify = staging, verify
        self._sums, self._mapped_by = PoolSums(staging.host.layout), staging.mapped_by
        self.lent: PageStore = staging.host.places
        self.layout = staging.pool.layout

    def begin(
        self,
        lent: PageIndices,
        pages: PageIndices,
        served: tuple[Served, ...] | None = None,
        page_sizes: Counts = (),
    ) -> PageTask:
        work = functools.partial(self._bring, lent, pages, served, page_sizes=page_sizes)
        return self.start(work, len(pages), self._mapped_by)

    def _bring(
        self,
        lent: PageIndices,
        pages: PageIndices,
        served: tuple[Served, ...] | None,
        cancelled: Callable[[], bool],
        page_sizes: Counts = (),
    ) -> bytes:
        answer = _BROUGHT
        if self._verify:
            sums = self._sums.in_pages_of(page_sizes)
            answer = sums.sum(sums.layout.split(lent), served, cancelled)
        brought = answer and self._staging.copy_in(lent, pages, cancelled, served, page_sizes)
        return answer if brought else b""


class StagedChecksums(PageTasks):
    """Checksums over a prefill's pool that the CPU cannot access.

    Each thread copies a few pages at a time to host memory, and sums the parts that prefill sends.
    """

    def __init__(self, pool: PagedPool) -> None:
        """Allocate host memory for each thread.

        Raises: LayoutError if there is not enough memory, or it cannot be pinned.
        """
        super().__init__("checksum")
        layout = pool.layout
        least = least_bytes(layout)
        self._scratch: SimpleQueue[Staging] = SimpleQueue()
        self._made = [
            Staging(pool, max(_SCRATCH_BYTES, least), shared=False) for _ in range(THREADS)
        ]
        for scratch in self._made:
            self._scratch.put(scratch)
        self._mapped_by = pool.mapped_by

    def at_once(self, *_: object) -> bytes:
        """Return no checksum: the event loop copies nothing from a device."""
        return b""

    def begin(
        self,
        pages: PageIndices,
        served: tuple[Served, ...] | None = None,
        page_sizes: Counts = (),
    ) -> PageTask:
        """Sum the parts of `pages` that this prefill sends. `served` is ignored."""
        work = functools.partial(self._sum, pages, page_sizes=page_sizes)
        return self.start(work, len(pages), self._mapped_by)

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            # The thread of a task that hangs may still use this memory.
            if not self._running:
                for scratch in self._made:
                    scratch.close()

    def _sum(
        self, pages: PageIndices, cancelled: Callable[[], bool], page_sizes: Counts = ()
    ) -> bytes:
        scratch = self._scratch.get()
        try:
            out = scratch.plan_out(page_sizes)
            found, layout, host = xxh3_64(), out.source, out.target
            stores, places = stores_of(host.served), layout.split(pages)
            for part in batches(places, host.counts):
                onto = tuple(np.arange(len(indices), dtype=np.int32) for indices in part)
                lists = layout.numbered(part), host.numbered(onto)
                if not scratch.copy_out(*lists, cancelled, out):
                    return b""
                if not sum_places(found, stores, onto, cancelled):
                    return b""
            return found.digest()
        finally:
            self._scratch.put(scratch)
