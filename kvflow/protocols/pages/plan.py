"""Turn page lists into block copies, with numpy and never a Python loop per page and layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.layout import PageIndices, PoolLayout, differences

Addresses = NDArray[np.int64]


class Blocks(NamedTuple):
    """Parallel int64 arrays [n]: copy `sizes[i]` bytes from `sources[i]` to `targets[i]`."""

    sources: Addresses
    targets: Addresses
    sizes: Addresses

    @property
    def total_bytes(self) -> int:
        return int(self.sizes.sum())


class _Segments(NamedTuple):
    """The same stretch of every page on both sides, int64 arrays [segments]; stride is the page's step in memory."""

    source_base: Addresses
    source_stride: Addresses
    target_base: Addresses
    target_stride: Addresses
    size: Addresses


class Pairing:
    """Two pools that fit together, worked out once; `blocks` then plans each write."""

    def __init__(self, source: PoolLayout, target: PoolLayout) -> None:
        """Raises: LayoutError that says what differs."""
        if found := differences(source, target):
            raise LayoutError("pools do not fit: " + "; ".join(found))
        self.source, self.target = source, target
        rows = np.array(_component_rows(source, target), dtype=np.int64)
        self._segments, self._target_buffers = _segments(source, target, rows), rows[:, 2]
        whole = (self._segments.size == self._segments.source_stride) & (
            self._segments.size == self._segments.target_stride
        )
        self._pages_are_adjacent = bool(whole.all())

    def check(self, source_pages: PageIndices, target_pages: PageIndices) -> None:
        """Raises: LayoutError for lists of different length or an index outside its pool."""
        if source_pages.shape != target_pages.shape or source_pages.ndim != 1:
            raise LayoutError(f"page lists differ: {source_pages.shape} source, {target_pages.shape} target")
        for name, pages, limit in (
            ("source", source_pages, self.source.num_pages),
            ("target", target_pages, self.target.num_pages),
        ):
            if pages.size and (int(pages.min()) < 0 or int(pages.max()) >= limit):
                raise LayoutError(f"{name} page is outside 0..{limit - 1}")

    def blocks(
        self,
        source_pages: PageIndices,
        target_pages: PageIndices,
        *,
        max_block_bytes: int,
        target_bases: Addresses | None = None,
    ) -> Blocks:
        """Plan one write. Runs of pages adjacent on both sides become one block; blocks over `max_block_bytes` are cut.

        `target_bases` (int64 [target buffers]) replaces the addresses of the target's buffers, for planes that map them
        elsewhere.
        """
        source, target, s = source_pages.astype(np.int64), target_pages.astype(np.int64), self._segments
        target_base = s.target_base if target_bases is None else s.target_base + self._rebase(target_bases)
        run_pages = np.ones(source.size, dtype=np.int64)
        if self._pages_are_adjacent and source.size > 1:
            starts = np.flatnonzero(np.r_[True, (np.diff(source) != 1) | (np.diff(target) != 1)])
            run_pages = np.diff(np.r_[starts, source.size])
            source, target = source[starts], target[starts]
        sources = (source[:, None] * s.source_stride + s.source_base).ravel()
        targets = (target[:, None] * s.target_stride + target_base).ravel()
        sizes = (run_pages[:, None] * s.size).ravel()
        return _cut(Blocks(sources, targets, sizes), max_block_bytes)

    def _rebase(self, target_bases: Addresses) -> Addresses:
        """Per segment: how far its target buffer lies from where the layout says."""
        claimed = np.array([b.address for b in self.target.buffers], dtype=np.int64)
        delta: Addresses = (target_bases - claimed)[self._target_buffers]
        return delta


_Row = tuple[int, int, int, int, int]  # source buffer, source offset, target buffer, target offset, size


def _component_rows(source: PoolLayout, target: PoolLayout) -> list[_Row]:
    """What to copy of every page, with neighbours on both sides merged."""
    rows: list[_Row] = []
    for b, o, tb, to, size in sorted(_opaque_rows(source, target) if source.tag else _typed_rows(source, target)):
        if rows:
            last_b, last_o, last_tb, last_to, n = rows[-1]
            if (last_b, last_o + n, last_tb, last_to + n) == (b, o, tb, to):
                rows[-1] = (last_b, last_o, last_tb, last_to, n + size)
                continue
        rows.append((b, o, tb, to, size))
    return rows


def _typed_rows(source: PoolLayout, target: PoolLayout) -> Iterator[_Row]:
    there = {c.name: c for c in target.components}
    for c in source.components:
        o = there[c.name]
        yield c.buffer, c.offset, o.buffer, o.offset, c.size_bytes


def _opaque_rows(source: PoolLayout, target: PoolLayout) -> Iterator[_Row]:
    """A page is a string of bytes, which the two sides may have cut at different places."""
    i = j = c_done = o_done = 0
    while i < len(source.components):
        c, o = source.components[i], target.components[j]
        size = min(c.size_bytes - c_done, o.size_bytes - o_done)
        yield c.buffer, c.offset + c_done, o.buffer, o.offset + o_done, size
        c_done, o_done = c_done + size, o_done + size
        if c_done == c.size_bytes:
            i, c_done = i + 1, 0
        if o_done == o.size_bytes:
            j, o_done = j + 1, 0


def _segments(source: PoolLayout, target: PoolLayout, rows: Addresses) -> _Segments:
    sb, so, tb, to, size = rows.T
    s_addr = np.array([b.address for b in source.buffers], dtype=np.int64)
    t_addr = np.array([b.address for b in target.buffers], dtype=np.int64)
    s_step = np.array([b.page_bytes for b in source.buffers], dtype=np.int64)
    t_step = np.array([b.page_bytes for b in target.buffers], dtype=np.int64)
    return _Segments(s_addr[sb] + so, s_step[sb], t_addr[tb] + to, t_step[tb], size)


def _cut(blocks: Blocks, max_block_bytes: int) -> Blocks:
    """Cut blocks over `max_block_bytes` into pieces of it, so that no single copy runs for long."""
    sources, targets, sizes = blocks
    if not sizes.size or int(sizes.max()) <= max_block_bytes:
        return blocks
    pieces = -(-sizes // max_block_bytes)
    owner = np.repeat(np.arange(sizes.size), pieces)
    nth = np.arange(owner.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = nth * max_block_bytes
    return Blocks(sources[owner] + offset, targets[owner] + offset, np.minimum(sizes[owner] - offset, max_block_bytes))
