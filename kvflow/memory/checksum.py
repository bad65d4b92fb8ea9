"""Checksums of pages (XXH3, 64 bits), computed in threads.

Equal content has an equal checksum, however the pools are laid out. A checksum that takes too long
counts as failed.

Passing a checksum to a thread and back takes longer than summing 64 KiB. A smaller one is therefore
computed on the event loop, up to a limit per turn of the loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import time
from collections.abc import Callable
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_digest

from kvflow.memory.gathered import GatheredSum, is_as_it_lies
from kvflow.memory.page_tasks import WITHIN_S, PageTask, PageTasks
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.components import in_order
from kvflow.protocols.pages.coverage import Served
from kvflow.protocols.pages.fine import in_pages_of, splits_of
from kvflow.protocols.pages.layout import Counts, PageIndices, Places, PoolLayout

# Size of a cache of plans. The ranks of one room need at most half of it.
SHARES = 128
# Size of a cache by page size: few peers of one node have pages of different sizes.
FINE = 4
# `update` holds the GIL for smaller blocks than this. After so many bytes of them, other threads
# get a turn, which takes some 100 us: half as long as summing the bytes.
_RELEASES_GIL_BYTES = 100_000
_BREATH_BYTES = 1 << 20
# Largest checksum computed on the event loop, some 10 us, and the limit for one of its turns.
AT_ONCE_BYTES = 64 << 10
_TURN_BYTES = 4 * AT_ONCE_BYTES
# Summing a short stretch takes as long as summing this many bytes.
_STRETCH_COST_BYTES = 2 << 10


class _Stretch(NamedTuple):
    """The `size_bytes` bytes at `offset` in every place of a space, `page_bytes` apart. If places
    are divided into `split` fine pages, those of one place are `size_bytes` apart.
    """

    memory: memoryview
    page_bytes: int
    offset: int
    size_bytes: int
    split: int = 1


Stores = tuple[list[_Stretch], ...]
"""For each space, the parts of a place that a checksum covers, in order."""


class PageChecksums(PageTasks):
    """Checksums over one pool in host memory. Implements `protocols.ports.Checksums`.

    The pool must stay open until `close` returns.
    """

    def __init__(
        self, pool: PagedPool, layout: PoolLayout | None = None, *, within_s: float = WITHIN_S
    ) -> None:
        """`layout` describes the part of the pool that checksums cover, by default all of it.

        A checksum fails after `within_s` seconds. Raises: LayoutError for a pool that is not in
        host memory.
        """
        if not pool.on_host:
            raise LayoutError("checksums are for pools in host memory")
        super().__init__("checksum", within_s)
        self._mapped_by = pool.mapped_by
        self._sums = PoolSums(layout or pool.layout)
        self._turn_bytes = 0  # bytes summed on the event loop in its current turn
        self._closed = False

    def at_once(
        self,
        pages: PageIndices,
        served: tuple[Served, ...] | None = None,
        page_sizes: Counts = (),
    ) -> bytes:
        """Return the checksum if so few bytes are summed that passing them to a thread would cost
        more, otherwise empty bytes.

        The bytes count against the limit for one turn of the event loop.
        """
        sums = self._sums.in_pages_of(page_sizes) if page_sizes else self._sums
        places = sums.layout.split(pages)
        cost = sums.cost_bytes(places)
        if cost > AT_ONCE_BYTES or self._turn_bytes + cost > _TURN_BYTES:
            return b""
        if self._closed or not sums.as_it_lies(served):
            return b""
        if not self._turn_bytes:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._turn_bytes += cost
        return sums.sum_few(places)

    def begin(
        self,
        pages: PageIndices,
        served: tuple[Served, ...] | None = None,
        page_sizes: Counts = (),
    ) -> PageTask:
        sums = self._sums.in_pages_of(page_sizes)
        places = sums.layout.split(pages)
        return self.start(
            functools.partial(sums.sum, places, served), len(places[0]), self._mapped_by
        )

    def _begin_turn(self) -> None:
        self._turn_bytes = 0

    async def close(self) -> None:
        self._closed = True
        try:
            await super().close()
        finally:
            self._sums.close()
            self._mapped_by = ()


class PoolSums:
    """Computes checksums over whole pages, or over what one rank sent."""

    def __init__(self, layout: PoolLayout) -> None:
        self.layout, self._stores = layout, stores_of(layout)
        self._gathered = functools.lru_cache(SHARES)(functools.partial(_gathered, layout))
        self._fine = functools.lru_cache(FINE)(lambda sizes: PoolSums(in_pages_of(layout, sizes)))
        self._place_costs = [
            sum(max(s.size_bytes, _STRETCH_COST_BYTES) for s in stretches)
            for stretches in self._stores
        ]
        # What a place is if a single stretch has all of it.
        stretches = self._stores[0]
        one = len(self._stores) == len(stretches) == 1 and stretches[0].split == 1
        self._one_stretch = stretches[0] if one else None
        self._lies = functools.lru_cache(SHARES)(functools.partial(is_as_it_lies, layout))

    def cost_bytes(self, places: Places) -> int:
        """Return the bytes of `places`, where a short stretch counts as some more."""
        costs = self._place_costs
        if len(costs) == 1:
            return places[0].size * costs[0]
        return sum(indices.size * cost for indices, cost in zip(places, costs, strict=True))

    def as_it_lies(self, served: tuple[Served, ...] | None) -> bool:
        """Return True if nothing must be gathered for a checksum of what one rank served."""
        return served is None or self._lies(served)

    def in_pages_of(self, page_sizes: Counts) -> PoolSums:
        """Return the sums over fine pages of these sizes (see `pages.fine`), or these sums if no
        sizes are given. Raises: LayoutError.
        """
        return self._fine(page_sizes) if page_sizes else self

    def sum(
        self, places: Places, served: tuple[Served, ...] | None, cancelled: Callable[[], bool]
    ) -> bytes:
        """Return the checksum of `places`, or an empty result if cancelled.

        The call blocks, so make it in a thread. With `served`, the checksum covers only the parts
        that one rank sent, in that rank's order of bytes, so that it can be compared with the
        rank's own checksum.
        """
        if served is not None and (gathered := self._gathered(served)) is not None:
            return gathered.sum(places, cancelled)
        found = xxh3_64()
        return found.digest() if sum_places(found, self._stores, places, cancelled) else b""

    def sum_few(self, places: Places) -> bytes:
        """Return the checksum of a few `places` as they lie."""
        if (one := self._one_stretch) is None or places[0].size != 1:
            return self.sum(places, None, lambda: False)
        # A hash object takes several calls, as long as summing some KiB.
        start = int(places[0][0]) * one.page_bytes + one.offset
        return xxh3_64_digest(one.memory[start : start + one.size_bytes])

    def close(self) -> None:
        self._one_stretch = None
        self._stores = tuple([] for _ in self._stores)
        self._gathered.cache_clear()
        self._lies.cache_clear()
        self._fine.cache_clear()


def _gathered(layout: PoolLayout, served: tuple[Served, ...]) -> GatheredSum | None:
    """Return a plan, or None if whole pages can be summed without gathering."""
    return None if is_as_it_lies(layout, served) else GatheredSum(layout, served)


def sum_places(
    found: xxh3_64, stores: Stores, places: Places, cancelled: Callable[[], bool]
) -> bool:
    """Update `found` with the places of each space in turn. Returns False if cancelled."""
    summed_bytes = 0
    for stretches, indices in zip(stores, places, strict=True):
        # All stretches of a space are divided alike.
        split = stretches[0].split if stretches else 1
        for page in indices.tolist():
            place, fine = divmod(page, split)
            for s in stretches:
                start = place * s.page_bytes + s.offset + fine * s.size_bytes
                found.update(s.memory[start : start + s.size_bytes])
                if s.size_bytes < _RELEASES_GIL_BYTES:
                    summed_bytes += s.size_bytes
            if cancelled():
                return False
            if summed_bytes >= _BREATH_BYTES:
                summed_bytes = 0
                # `sleep(0)` lets another thread take the GIL.
                time.sleep(0)
    return True


def stores_of(layout: PoolLayout) -> Stores:
    """Return what a checksum covers in a pool in host memory. The memory must stay mapped."""
    memories = [
        memoryview((ctypes.c_uint8 * b.size_bytes).from_address(b.address)) for b in layout.buffers
    ]
    return tuple(
        _stretches(layout, memories, space, split) for space, split in enumerate(splits_of(layout))
    )


def _stretches(
    layout: PoolLayout, memories: list[memoryview], space: int, split: int
) -> list[_Stretch]:
    """Return the parts of each place of a space, in an order that peers with another layout share.

    The parts are sorted by `in_order`. In an opaque pool, they have the order in which its layout
    lists them. Successive parts that are adjacent in memory are merged.
    """
    found: list[_Stretch] = []
    for c in layout.components if layout.tag else in_order(layout.components):
        if c.space != space:
            continue
        new = _Stretch(
            memories[c.buffer], layout.buffers[c.buffer].page_bytes, c.offset, c.size_bytes, split
        )
        last = found[-1] if found else None
        if (
            last is not None
            and split == 1
            and last.memory is new.memory
            and last.offset + last.size_bytes == new.offset
        ):
            found[-1] = last._replace(size_bytes=last.size_bytes + new.size_bytes)
        else:
            found.append(new)
    return found
