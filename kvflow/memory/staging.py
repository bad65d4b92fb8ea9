"""Host memory beside a pool, which a data plane reads and writes where it cannot reach the pool.

It is a second pool with the components of the first, page-first, in memory that peers of this
machine can open, and pinned where the pool is on a device. Copies between the two follow the same
plan as a transfer.

Where two pools differ in width, the bytes of the staging have another order, in which slices lie
together (`pages.arrange`).

At decode, rooms lend pages of the staging: a late or lost writer reaches no other memory. A chunk
counts as landed once it is copied to the room's own pages (`StagedArrivals`). At prefill, each
slice passes through the staging (`transports.data.staged`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import numpy as np
from xxhash import xxh3_64

from kvflow.memory.checksum import SHARES, PoolSums, stores_of, sum_places
from kvflow.memory.copies import copier_for, copy_slices, host_layout
from kvflow.memory.page_tasks import THREADS, PageTask, PageTasks
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.arrange import by_shard
from kvflow.protocols.pages.coverage import Served, sends_all, spans_served
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices, Places, PoolLayout, resized
from kvflow.protocols.pages.plan import Pairing
from kvflow.protocols.ports import PageStore

# Some 0.2 ms over PCIe, 1 ms of memmove: no more than this is still copied after a cancel.
SLICE_BYTES = 4 << 20
_BROUGHT = b"brought"
_SCRATCH_BYTES = 1 << 20


class Staging:
    """The host memory beside one pool.

    It must stay open until the nodes and planes that use it are closed.
    """

    def __init__(
        self, pool: PagedPool, size_bytes: int = 0, *, shared: bool = True, shards: int = 1
    ) -> None:
        """Allocate the memory, pre-faulted: make the staging in a thread.

        `size_bytes` is for pages and rows; 0, or more than the pool has, means as many as the pool
        has. `shared` lets peers of this machine open it.

        `shards`, at decode: the number of shards of the prefills. What each of them sends of a page
        then lies in one stretch, while in the pool it is a slice of every token slot. Prefills of
        another width are served as well, in smaller blocks.

        Raises: LayoutError when there is not enough memory, or it cannot be pinned; MisuseError for
        a size that holds no page, or no row, and for `shards` below 1.
        """
        if shards < 1:
            raise MisuseError(f"staging for prefills of {shards} shards: there is at least 1")
        whole = resized(pool.layout, num_pages=pool.layout.num_pages, num_rows=pool.layout.num_rows)
        fits = host_layout(whole, size_bytes) if 0 < size_bytes < whole.size_bytes else whole
        self.pool, self._copier = pool, copier_for(pool)
        self.host = PagedPool.allocate(by_shard(fits, shards) if shards > 1 else fits, shared)
        self._out = Pairing(pool.layout, self.host.layout, ("pool", "staging"))
        self._into = Pairing(self.host.layout, pool.layout, ("staging", "pool"))
        self._share = functools.lru_cache(SHARES)(
            functools.partial(_share, self.host.layout, pool.layout)
        )
        self._copier.pin(self.host)

    def __repr__(self) -> str:
        layout = self.host.layout
        return f"<Staging of {layout.num_pages} pages and {layout.num_rows} rows for {self.pool!r}>"

    @property
    def mapped_by(self) -> tuple[object, ...]:
        """Objects that keep both pools mapped; see `PagedPool.mapped_by`."""
        return (*self.pool.mapped_by, *self.host.mapped_by)

    def copy_out(
        self,
        places: PageIndices,
        staged: PageIndices,
        stopped: Callable[[], bool],
        out: Pairing | None = None,
    ) -> bool:
        """Copy places of the pool into staging; True when all was copied. Runs in a thread.

        Indices of both number rows after the pages (`layout.Places`). `out` brings the bytes of the
        pages into another order (`pages.arrange`). `stopped` is asked before every slice. Raises:
        TransferError.
        """
        source, target = self.pool.layout.split(places), self.host.layout.split(staged)
        return copy_slices(out or self._out, source, target, SLICE_BYTES, self._copier, stopped)

    def copy_in(
        self,
        staged: PageIndices,
        places: PageIndices,
        stopped: Callable[[], bool],
        served: tuple[Served, ...] | None = None,
    ) -> bool:
        """Copy places of the staging into the pool, as `copy_out`.

        Only what one rank has `served` is copied, whose chunk landed: what other ranks send may
        still be on its way.
        """
        into = self._into
        if served is not None and not sends_all(self.pool.layout, served):
            into = self._share(served)
        source, target = self.host.layout.split(staged), self.pool.layout.split(places)
        return copy_slices(into, source, target, SLICE_BYTES, self._copier, stopped)

    def close(self) -> None:
        """Free the memory, when no copy runs. Idempotent."""
        self._copier.close()
        self.host.close()


def _share(host: PoolLayout, pool: PoolLayout, served: tuple[Served, ...]) -> Pairing:
    return Pairing(host, pool, ("staging", "pool"), only=spans_served(served))


class StagedArrivals(PageTasks):
    """Copies of chunks from staging to the pool. Implements `protocols.ports.Arrivals`."""

    def __init__(self, staging: Staging, *, verify: bool) -> None:
        """With `verify`, the answer for a chunk is the checksum of what landed in staging."""
        super().__init__("copy from staging")
        self._staging, self._verify = staging, verify
        self._sums, self._mapped_by = PoolSums(staging.host.layout), staging.mapped_by
        self.lent: PageStore = staging.host.places
        self.layout = staging.pool.layout

    def begin(
        self, lent: PageIndices, pages: PageIndices, served: tuple[Served, ...] | None = None
    ) -> PageTask:
        return self.start(
            functools.partial(self._bring, lent, pages, served), len(pages), self._mapped_by
        )

    def _bring(
        self,
        lent: PageIndices,
        pages: PageIndices,
        served: tuple[Served, ...] | None,
        cancelled: Callable[[], bool],
    ) -> bytes:
        answer = _BROUGHT
        if self._verify:
            answer = self._sums.sum(self._staging.host.layout.split(lent), served, cancelled)
        return answer if answer and self._staging.copy_in(lent, pages, cancelled, served) else b""


class StagedChecksums(PageTasks):
    """Checksums of a prefill's pool that the CPU cannot read.

    Implements `protocols.ports.Checksums`. Each thread copies some pages out at a time, and sums
    what is sent of the copy.
    """

    def __init__(self, pool: PagedPool) -> None:
        """Allocate host memory for each thread. Raises: LayoutError, as `Staging`."""
        super().__init__("checksum")
        layout = pool.layout
        largest = layout.page_bytes + layout.row_bytes
        self._scratch: SimpleQueue[Staging] = SimpleQueue()
        self._made = [
            Staging(pool, max(_SCRATCH_BYTES, 2 * largest), shared=False) for _ in range(THREADS)
        ]
        for scratch in self._made:
            self._scratch.put(scratch)
        self._layout, self._mapped_by = layout, pool.mapped_by

    def begin(self, pages: PageIndices, served: tuple[Served, ...] | None = None) -> PageTask:
        """Sum what prefill itself sends of `pages`, whatever `served` is."""
        return self.start(functools.partial(self._sum, pages), len(pages), self._mapped_by)

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            # A task that still runs is hung, and its thread may read this memory.
            if not self._running:
                for scratch in self._made:
                    scratch.close()

    def _sum(self, pages: PageIndices, cancelled: Callable[[], bool]) -> bytes:
        scratch = self._scratch.get()
        try:
            found, host = xxh3_64(), scratch.host.layout
            stores, places = stores_of(host.served), self._layout.split(pages)
            for part in _parts(places, host):
                onto = Places(_first(len(part.pages)), _first(len(part.rows)))
                if not scratch.copy_out(
                    self._layout.numbered(part), host.numbered(onto), cancelled
                ):
                    return b""
                if not sum_places(found, stores, onto, cancelled):
                    return b""
            return found.digest()
        finally:
            self._scratch.put(scratch)


def _parts(places: Places, host: PoolLayout) -> Iterator[Places]:
    """Yield pieces that fit into `host`: pages first, in the order in which they are summed."""
    for start in range(0, len(places.pages), host.num_pages):
        yield Places(places.pages[start : start + host.num_pages], NO_PLACES)
    for n in range(len(places.rows)):
        yield Places(NO_PLACES, places.rows[n : n + 1])


def _first(count: int) -> PageIndices:
    return np.arange(count, dtype=np.int32)
