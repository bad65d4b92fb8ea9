"""Plans that turn lists of places into block copies, without a Python loop per place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.coverage import Spans, overlaps
from kvflow.protocols.pages.differences import Sides, differences
from kvflow.protocols.pages.fine import splits_of
from kvflow.protocols.pages.kinds import unit_bytes
from kvflow.protocols.pages.layout import PageIndices, PoolLayout

Addresses = NDArray[np.int64]


class Blocks(NamedTuple):
    """Parallel int64 arrays [n]: copy `sizes[i]` bytes from `sources[i]` to `targets[i]`."""

    sources: Addresses
    targets: Addresses
    sizes: Addresses

    @property
    def total_bytes(self) -> int:
        return int(self.sizes.sum())


NO_BLOCKS = Blocks(*(np.empty(0, np.int64) for _ in range(3)))


class _Segments(NamedTuple):
    """The stretches of a place of one space to copy, as int64 arrays [segments]. A stride is the
    distance in bytes from one place to the next. A stretch that repeats within a page, such as some
    of the heads of each slot, is one segment per repetition.

    If a side is described in fine pages (see `fine`), a stride is the distance between places of
    that side, each divided into `split` fine pages that are a step apart.
    """

    source_base: Addresses
    source_stride: Addresses
    target_base: Addresses
    target_stride: Addresses
    size: Addresses
    target_buffer: Addresses
    in_slices: bool
    source_split: int = 1
    source_step: Addresses | None = None
    target_split: int = 1
    target_step: Addresses | None = None


class Pairing:
    """Two pools that fit together. They are compared once, and `blocks` then plans each write."""

    def __init__(
        self,
        source: PoolLayout,
        target: PoolLayout,
        sides: Sides = ("prefill", "decode"),
        *,
        partly: bool = False,
        only: Spans | None = None,
    ) -> None:
        """`sides` gives the names of the two pools in errors. With `partly`, the target may have
        entries that the source lacks, and writes do not change those. If `only` is given, no other
        entries are copied.

        Raises: LayoutError naming the differences.
        """
        if found := differences(source, target, sides, partly=partly, only=only):
            raise LayoutError("pools do not fit: " + "; ".join(found))
        self.source, self.target = source, target
        self._spaces = [_segments(source, target, only, i) for i in range(len(source.spaces))]
        self.place_bytes = tuple(int(segments.size.sum()) for segments in self._spaces)
        """Bytes written per place of each space. If the target has several copies, each counts."""
        self.in_slices = any(segments.in_slices for segments in self._spaces)
        """True if some blocks are parts of one token slot, because the two sides split heads
        differently.
        """

    @property
    def page_bytes(self) -> int:
        """Bytes written per page of the first space."""
        return self.place_bytes[0]

    def check(self, source: PageIndices, target: PageIndices) -> None:
        """Check the two lists of a write, each with the places of all spaces: their lengths, their
        indices, and that both have the same spaces. Raises: LayoutError.
        """
        if source.shape != target.shape or source.ndim != 1:
            raise LayoutError(f"page lists differ: {source.shape} source, {target.shape} target")
        if len(self._spaces) == 1:
            self._check_space(0, source, target)
            return
        for side, layout, indices in (
            ("source", self.source, source),
            ("target", self.target, target),
        ):
            if indices.size and not 0 <= indices.min() <= indices.max() < layout.num_places:
                raise LayoutError(f"{side} place is outside 0..{layout.num_places - 1}")
        ours, theirs = self.source.counted(source), self.target.counted(target)
        if ours != theirs:
            raise LayoutError(
                f"page lists differ: {self.source.described(ours)} source, "
                f"{self.target.described(theirs)} target"
            )

    def _check_space(self, space: int, source: PageIndices, target: PageIndices) -> None:
        for side, layout, indices in (
            ("source", self.source, source),
            ("target", self.target, target),
        ):
            found = layout.spaces[space]
            if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= found.count):
                raise LayoutError(f"{side} {found.unit} is outside 0..{found.count - 1}")

    def blocks(
        self,
        source: PageIndices,
        target: PageIndices,
        *,
        max_block_bytes: int,
        target_bases: Addresses | None = None,
    ) -> Blocks:
        """Plan one write of the places in two lists, space after space.

        Where blocks are whole places of their buffers, places that are adjacent on both sides are
        merged into one block. Blocks over `max_block_bytes` are cut. `target_bases` (int64 [target
        buffers]) replaces the addresses of the target's buffers, for planes that map them
        elsewhere.
        """
        moved = None if target_bases is None else target_bases - _addresses(self.target)
        if len(self._spaces) == 1:
            found = _blocks(self._spaces[0], source, target, moved)
        else:
            parts = zip(
                self._spaces, self.source.split(source), self.target.split(target), strict=True
            )
            planned = [_blocks(*part, moved) for part in parts if part[1].size]
            found = (
                Blocks(*map(np.concatenate, zip(*planned, strict=True))) if planned else NO_BLOCKS
            )
        return _cut(found, max_block_bytes)


def _blocks(
    s: _Segments, source_list: PageIndices, target_list: PageIndices, moved: Addresses | None
) -> Blocks:
    """Plan the blocks of the segments `s`. `moved` (int64 [target buffers]) is added to the
    addresses of the target's buffers.
    """
    source, target = source_list.astype(np.int64), target_list.astype(np.int64)
    target_base = s.target_base if moved is None else s.target_base + moved[s.target_buffer]
    if s.source_step is not None:
        return _fine_blocks(s, source, target, target_base)
    lengths = np.ones(source.size, dtype=np.int64)
    # Adjacent pages can be one block only where a segment is a whole page on both sides.
    if source.size > 1 and ((s.size == s.source_stride) & (s.size == s.target_stride)).all():
        starts = np.flatnonzero(np.r_[True, (np.diff(source) != 1) | (np.diff(target) != 1)])
        lengths = np.diff(np.r_[starts, source.size])
        source, target = source[starts], target[starts]
    sources = (source[:, None] * s.source_stride + s.source_base).ravel()
    targets = (target[:, None] * s.target_stride + target_base).ravel()
    sizes = (lengths[:, None] * s.size).ravel()
    return Blocks(sources, targets, sizes)


def _fine_blocks(
    s: _Segments, source: Addresses, target: Addresses, target_base: Addresses
) -> Blocks:
    """Plan the blocks of fine pages."""
    assert s.source_step is not None and s.target_step is not None
    sides = (
        (source, s.source_split, s.source_step, s.source_stride),
        (target, s.target_split, s.target_step, s.target_stride),
    )
    # Adjacent fine pages can be one block only where each segment of one is followed by that of the
    # next, on both sides.
    new = np.ones(source.size, dtype=np.bool_)
    if all((s.size == step).all() for _, _, step, _ in sides):
        new[1:] = False
        for pages, split, step, stride in sides:
            new[1:] |= np.diff(pages) != 1
            if (stride != split * step).any():
                new |= pages % split == 0
    starts = np.flatnonzero(new)
    lengths = np.diff(np.r_[starts, source.size])
    at = [
        (pages[starts] // split)[:, None] * stride + (pages[starts] % split)[:, None] * step
        for pages, split, step, stride in sides
    ]
    sizes = lengths[:, None] * s.size
    return Blocks((at[0] + s.source_base).ravel(), (at[1] + target_base).ravel(), sizes.ravel())


def _addresses(layout: PoolLayout) -> Addresses:
    return np.array([b.address for b in layout.buffers], dtype=np.int64)


class _Stretch(NamedTuple):
    """Bytes to copy in every place, repeated `repeats` times at equal steps.

    The last two fields are the sizes of the two components in a fine page: the distances between
    fine pages of one place.
    """

    source_buffer: int
    source_offset: int
    target_buffer: int
    target_offset: int
    size: int
    repeats: int = 1
    source_step: int = 0
    target_step: int = 0
    source_fine: int = 0
    target_fine: int = 0

    def followed_by(self, other: _Stretch) -> bool:
        """Return True if `other` continues this stretch on both sides, so that they can merge."""
        source_end, target_end = self.source_offset + self.size, self.target_offset + self.size
        ends = (self.source_buffer, source_end, self.target_buffer, target_end)
        return other[:4] == ends and self.repeats == other.repeats == 1


def _stretches(
    source: PoolLayout, target: PoolLayout, only: Spans | None, space: int
) -> list[_Stretch]:
    """Return the stretches to copy, merged where they are adjacent on both sides."""
    found: list[_Stretch] = []
    # Components of a divided place lie apart, because each has all fine pages of its own.
    apart = splits_of(source)[space] > 1 or splits_of(target)[space] > 1
    if source.tag:
        every = _opaque_stretches(source, target, space)
    else:
        every = _typed_stretches(source, target, only, space)
    # Sorting puts stretches that can be merged next to each other.
    for stretch in sorted(every):
        if found and not apart and found[-1].followed_by(stretch):
            found[-1] = found[-1]._replace(size=found[-1].size + stretch.size)
        else:
            found.append(stretch)
    return found


def _typed_stretches(
    source: PoolLayout, target: PoolLayout, only: Spans | None, space: int
) -> Iterator[_Stretch]:
    ours = (c for c in source.components if c.space == space)
    for c, o, first, end in overlaps(ours, target.components, only):
        # With shape (heads, dim) and `axis` 0, an entry is one head, and the heads repeat in each
        # slot of the page.
        entry = unit_bytes(c.dtype, c.shape[c.axis + 1 :])
        size, steps = (end - first) * entry, [part.shape[c.axis] * entry for part in (c, o)]
        starts = [part.offset + (first - part.start) * entry for part in (c, o)]
        repeats = c.size_bytes // steps[0]
        # If all entries of both sides are copied, the repetitions are adjacent and make one
        # stretch.
        if steps == [size, size]:
            size, repeats = size * repeats, 1
        if repeats == 1:
            steps = [0, 0]
        where = (c.buffer, starts[0], o.buffer, starts[1], size, repeats)
        yield _Stretch(*where, steps[0], steps[1], c.size_bytes, o.size_bytes)


def _opaque_stretches(source: PoolLayout, target: PoolLayout, space: int) -> Iterator[_Stretch]:
    """Yield the stretches of an opaque place, which the two sides may cut at different places."""
    ours, theirs = (
        [c for c in layout.components if c.space == space] for layout in (source, target)
    )
    i = j = c_done = o_done = 0
    while i < len(ours):
        c, o = ours[i], theirs[j]
        size = min(c.size_bytes - c_done, o.size_bytes - o_done)
        yield _Stretch(c.buffer, c.offset + c_done, o.buffer, o.offset + o_done, size)
        c_done, o_done = c_done + size, o_done + size
        if c_done == c.size_bytes:
            i, c_done = i + 1, 0
        if o_done == o.size_bytes:
            j, o_done = j + 1, 0


def _segments(source: PoolLayout, target: PoolLayout, only: Spans | None, space: int) -> _Segments:
    found = np.array(_stretches(source, target, only, space), dtype=np.int64).reshape(
        -1, len(_Stretch._fields)
    )
    (
        source_buffer,
        source_offset,
        target_buffer,
        target_offset,
        size,
        repeats,
        source_step,
        target_step,
        source_fine,
        target_fine,
    ) = found.T
    # Each repetition of a stretch becomes a segment: `of` is the index of its stretch, and `nth`
    # its number within that stretch.
    of = np.repeat(np.arange(len(found)), repeats)
    nth: Addresses = np.arange(of.size) - (np.cumsum(repeats) - repeats)[of]
    source_strides, target_strides = (
        np.array([b.page_bytes for b in layout.buffers], dtype=np.int64)
        for layout in (source, target)
    )
    segments = _Segments(
        (_addresses(source)[source_buffer] + source_offset)[of] + nth * source_step[of],
        source_strides[source_buffer][of],
        (_addresses(target)[target_buffer] + target_offset)[of] + nth * target_step[of],
        target_strides[target_buffer][of],
        size[of],
        target_buffer[of],
        bool((repeats > 1).any()),
    )
    splits = splits_of(source)[space], splits_of(target)[space]
    if splits == (1, 1):
        return segments
    ours, theirs = (
        stride[buffer] if split == 1 else step
        for split, stride, buffer, step in (
            (splits[0], source_strides, source_buffer, source_fine),
            (splits[1], target_strides, target_buffer, target_fine),
        )
    )
    return segments._replace(
        source_split=splits[0],
        source_step=ours[of],
        target_split=splits[1],
        target_step=theirs[of],
    )


def _cut(blocks: Blocks, max_block_bytes: int) -> Blocks:
    sources, targets, sizes = blocks
    if not sizes.size or int(sizes.max()) <= max_block_bytes:
        return blocks
    pieces = -(-sizes // max_block_bytes)
    owner = np.repeat(np.arange(sizes.size), pieces)
    nth = np.arange(owner.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = nth * max_block_bytes
    return Blocks(
        sources[owner] + offset,
        targets[owner] + offset,
        np.minimum(sizes[owner] - offset, max_block_bytes),
    )
