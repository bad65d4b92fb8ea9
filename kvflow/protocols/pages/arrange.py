"""Page-first layouts in which the bytes that one peer sends or receives are contiguous.

Between pools with different numbers of shards, the heads of one rank are a small block in every
token slot. Only kvflow's own copies read staging pages, so the bytes of a staging page may have any
order. This module cuts a pool's components into parts, and sorts the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvflow.protocols.pages.components import Component
from kvflow.protocols.pages.coverage import overlaps
from kvflow.protocols.pages.fine import in_common_pages, splits_of
from kvflow.protocols.pages.layout import MAX_COMPONENTS, PoolLayout, resized
from kvflow.protocols.pages.plan import Pairing

_Cut = Callable[[Component], Iterable[int]]
# The sort key of parts that the target lacks: they come after all others.
_LAST = (1 << 62, 0)


class Blocks(NamedTuple):
    """Statistics of the blocks in which a page is written. If pages have no bytes, the blocks are
    those of a place of the first space that has some. `in_slices` is True if some blocks are slices
    of token slots.
    """

    mean_bytes: int
    in_slices: bool


def blocks_between(source: PoolLayout, target: PoolLayout) -> Blocks:
    """Describe the blocks of a write from `source` to `target`. Raises: LayoutError."""
    pairing = Pairing(*in_common_pages(source, target), partly=True)
    space = next((i for i, size in enumerate(pairing.place_bytes) if size), 0)
    sides = (pairing.source, pairing.target)
    ours, theirs = (np.array([side.bases[space]], np.int32) for side in sides)
    sizes = pairing.blocks(ours, theirs, max_block_bytes=1 << 62).sizes
    return Blocks(int(sizes.mean()) if sizes.size else 0, pairing.in_slices)


def by_shard(layout: PoolLayout, shards: int) -> PoolLayout:
    """Return a page-first version of `layout` for a peer with `shards` shards: the bytes of each
    shard are one stretch of a page. Within a stretch, the bytes of each pipeline stage are
    contiguous too.
    """
    return _rearranged(layout, lambda c: _bounds(c, shards), lambda c: _shard(c, shards))


def from_shards(layout: PoolLayout, shards: int) -> Blocks:
    """Describe the blocks in which one prefill shard out of `shards` would write a page of
    `layout`.
    """
    one = resized(layout, (1,) * len(layout.spaces))
    parts = by_shard(one, shards).components
    first = min((_shard(c, shards) for c in parts), default=0)
    mine = tuple(c for c in parts if _shard(c, shards) == first)
    shard = resized(msgspec.structs.replace(one, components=mine), one.counts)
    return blocks_between(shard, layout)


def as_in(target: PoolLayout, source: PoolLayout) -> PoolLayout:
    """Return a page-first version of `source` that is cut and sorted like `target`. Parts that are
    adjacent in `target` are adjacent in the result too. Its pages are those of `source`, also if
    these are fine pages (see `fine`): they are then no parts of larger pages any more.
    """
    bounds: dict[str, set[int]] = {}
    places: dict[tuple[str, int], tuple[int, int]] = {}
    for s, t, first, end in overlaps(source.components, target.components):
        bounds.setdefault(s.name, set()).update((first, end))
        # The target may have several copies of a part. The first copy in memory decides.
        at = t.offset + (first - t.start) * t.size_bytes // t.shape[t.axis]
        places[s.name, first] = min((t.buffer, at), places.get((s.name, first), _LAST))
    return _rearranged(
        source, lambda c: bounds.get(c.name, ()), lambda c: places.get((c.name, c.start), _LAST)
    )


def _shard(c: Component, shards: int) -> int:
    return c.start * shards // _whole(c)


def _whole(c: Component) -> int:
    return c.whole or c.shape[c.axis]


def _bounds(c: Component, shards: int) -> range:
    """Return the entries at which the shards begin. A component is cut only if its number of
    entries is a multiple of the number of shards, or divides it.
    """
    whole = _whole(c)
    # Every shard has all of a vector, such as the keys of an indexer.
    if len(c.shape) < 2 or (whole % shards and shards % whole):
        return range(0)
    return range(0, whole, max(1, whole // shards))


def _rearranged(layout: PoolLayout, cut: _Cut, order: Callable[[Component], Any]) -> PoolLayout:
    """Cut and sort the components within the buffers of `layout`. Returns `layout` itself if its
    pages are opaque, or if there would be too many parts.
    """
    pieces = [piece for c in layout.components for piece in _pieces(c, cut(c))]
    if layout.tag or len(pieces) > MAX_COMPONENTS:
        return layout
    sized = msgspec.structs.replace(layout, components=tuple(sorted(pieces, key=order)))
    placed = resized(sized, layout.counts).components
    at = {b.space: i for i, b in enumerate(layout.buffers)}
    components = tuple(msgspec.structs.replace(c, buffer=at[c.space]) for c in placed)
    # In the new order a fine page is one stretch of memory, like any page.
    splits = splits_of(layout)
    buffers = tuple(
        msgspec.structs.replace(b, page_bytes=b.page_bytes // splits[b.space])
        for b in layout.buffers
    )
    return PoolLayout(layout.spaces, components, buffers, layout.tag, layout.fingerprint)


def _pieces(c: Component, bounds: Iterable[int]) -> Iterator[Component]:
    edges = [c.start, *sorted(b for b in set(bounds) if c.start < b < c.end), c.end]
    # A component that no bound cuts must not become a part of itself: its `whole` stays 0.
    if len(edges) == 2:
        yield c
        return
    entry = c.size_bytes // c.shape[c.axis]
    for first, end in pairwise(edges):
        shape = (*c.shape[: c.axis], end - first, *c.shape[c.axis + 1 :])
        size_bytes = entry * (end - first)
        yield msgspec.structs.replace(
            c, shape=shape, size_bytes=size_bytes, start=first, whole=_whole(c)
        )
