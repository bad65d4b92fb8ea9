"""Pools whose pages have different sizes, described in pages of a size that both have.

If the pages of one pool are a whole number of pages of the other, each of the larger pages is
divided into *fine* pages. Fine page `i` of place p has the index `p * split + i`, where `split` is
the number of fine pages in a place. Both pools then have pages of the same size, and are compared,
planned and summed like any two pools. Only the addresses differ: see `FineLayout`.

A page can be divided if its bytes are known token by token. A value for each page, or a page of
which only the engine knows the format, has no parts.
"""

from __future__ import annotations

from itertools import accumulate

import msgspec
import numpy as np

from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.kinds import PAGE
from kvflow.protocols.pages.layout import PageIndices, PoolLayout
from kvflow.protocols.pages.spaces import MAX_PAGES, Counts


class FineLayout(PoolLayout, frozen=True, array_like=True, dict=True):
    """A pool whose places are divided into fine pages. It never travels: peers receive the layout
    that the pool has.

    `splits` has the number of fine pages in a place, by space. The component `c` of place p lies at
    `address + (p // split) * page_bytes + c.offset + (p % split) * c.size_bytes` in its buffer.
    """

    splits: Counts = ()


def splits_of(layout: PoolLayout) -> Counts:
    """Return the number of fine pages in a place of each space: 1 where places are not divided."""
    return layout.splits if isinstance(layout, FineLayout) else (1,) * len(layout.spaces)


def in_pages_of(layout: PoolLayout, page_sizes: Counts) -> PoolLayout:
    """Describe a pool in pages of `page_sizes`, one size for each space. Returns `layout` itself if
    those are its own.

    Raises: LayoutError for a number of sizes that is not that of the spaces, and for a space whose
    pages cannot be divided into pages of that size.
    """
    if len(page_sizes) != len(layout.spaces):
        raise LayoutError(f"{len(page_sizes)} page sizes for {len(layout.spaces)} spaces")
    splits: list[int] = []
    for i, (space, size) in enumerate(zip(layout.spaces, page_sizes, strict=True)):
        if size == space.page_size:
            splits.append(1)
        elif why := undividable(layout, i, size):
            raise LayoutError(f"pages of {space.page_size} tokens in pages of {size}: {why}")
        else:
            splits.append(space.page_size // size)
    if max(splits) == 1:
        return layout
    spaces = tuple(
        msgspec.structs.replace(space, count=space.count * split, page_size=size)
        for space, size, split in zip(layout.spaces, page_sizes, splits, strict=True)
    )
    components = tuple(
        msgspec.structs.replace(c, size_bytes=c.size_bytes // splits[c.space])
        for c in layout.components
    )
    return FineLayout(
        spaces, components, layout.buffers, layout.tag, layout.fingerprint, tuple(splits)
    )


def common_sizes(source: PoolLayout, target: PoolLayout) -> tuple[Counts, Counts]:
    """Return the page sizes in which each of two pools is to be described, so that both have pages
    of the same size: the smaller size of each space. A space whose larger pages cannot be divided
    keeps its size on both sides.
    """
    if [space.name for space in source.spaces] != [space.name for space in target.spaces]:
        return _sizes(source), _sizes(target)
    found: list[tuple[int, int]] = []
    for i, (ours, theirs) in enumerate(zip(source.spaces, target.spaces, strict=True)):
        a, b = ours.page_size, theirs.page_size
        if a != b and not undividable(source if a > b else target, i, min(a, b)):
            a = b = min(a, b)
        found.append((a, b))
    return tuple(a for a, _ in found), tuple(b for _, b in found)


def in_common_pages(source: PoolLayout, target: PoolLayout) -> tuple[PoolLayout, PoolLayout]:
    """Describe two pools in pages of the same size; see `common_sizes`. Pools whose pages have the
    same size are returned as they are.
    """
    if source.spaces[0].page_size == target.spaces[0].page_size and len(source.spaces) == 1:
        return source, target
    ours, theirs = common_sizes(source, target)
    return in_pages_of(source, ours), in_pages_of(target, theirs)


def undividable(layout: PoolLayout, space: int, page_size: int) -> str:
    """Return the reason why the pages of a space cannot be divided into pages of `page_size`
    tokens, or an empty string if they can.
    """
    whole = layout.spaces[space]
    if page_size < 1 or whole.in_rows or whole.page_size % page_size:
        return "neither size is a multiple of the other"
    if layout.tag:
        return "only the engine knows where the tokens lie in a page with a tag"
    for c in layout.components:
        if c.space == space and c.unit == PAGE:
            return f"{c.name} is one piece for each page, not one for each token"
    if (count := whole.count * (whole.page_size // page_size)) > MAX_PAGES:
        return f"{count} pages of {page_size} tokens, where {MAX_PAGES} are the limit"
    return ""


def _sizes(layout: PoolLayout) -> Counts:
    return tuple(space.page_size for space in layout.spaces)


def divided(places: PageIndices, split: int, base: int = 0) -> PageIndices:
    """Return the fine pages of some places of one space, each of which has `split` of them. `base`
    is the index of the first fine page of the space.
    """
    first = places.astype(np.int64)[:, None] * split + base
    return (first + np.arange(split)).ravel().astype(np.int32)


class FinePages(msgspec.Struct, frozen=True, gc=False):
    """The fine pages of the places of one room. `page_sizes` has their size in tokens, by space,
    and `splits` the number of them in a place.

    The first place of a space may begin with `skipped` fine pages that the room does not fill,
    because decode has these tokens already, or because they are outside the window. The room fills
    the next `counts` fine pages. Both sides of a room agree on `page_sizes` and `counts`.
    """

    page_sizes: Counts
    splits: Counts
    skipped: Counts
    counts: Counts

    def of(
        self, layout: PoolLayout, places: PageIndices, done: Counts | None = None
    ) -> PageIndices:
        """Return the fine pages of some places, as one list of a pool that is described in fine
        pages. `places` is a list of `layout`. It has the places of the room after the first `done`
        ones of each space, by default all.
        """
        found: list[PageIndices] = []
        bases = accumulate(
            (count * split for count, split in zip(layout.counts, self.splits, strict=True)),
            initial=0,
        )
        for space, (own, base) in enumerate(zip(layout.split(places), bases, strict=False)):
            split = self.splits[space]
            every = divided(own, split, base)
            # The position of the first of them among the room's fine pages.
            at = (done[space] * split if done is not None else 0) - self.skipped[space]
            found.append(every[max(0, -at) : max(0, self.counts[space] - at)])
        return np.concatenate(found, dtype=np.int32)

    def done_after(self, done: Counts) -> Counts:
        """Return how many fine pages of each space the first `done` places of a room have."""
        return tuple(
            min(max(0, places * split - skipped), count)
            for places, split, skipped, count in zip(
                done, self.splits, self.skipped, self.counts, strict=True
            )
        )


def fine_pages(
    layout: PoolLayout, page_sizes: Counts, tokens: int, prefix_tokens: int
) -> FinePages:
    """Return the fine pages that a room of `tokens` tokens fills in a pool, after a prefix.
    `page_sizes` are sizes into which the pages of the pool can be divided.
    """
    splits, skipped, counts = [], [], []
    for space, size in zip(layout.spaces, page_sizes, strict=True):
        fine = space
        split = 1
        if size != space.page_size:
            fine, split = msgspec.structs.replace(space, page_size=size), space.page_size // size
        before = fine.first(tokens, prefix_tokens) - split * space.first(tokens, prefix_tokens)
        splits.append(split)
        skipped.append(max(0, before))
        counts.append(fine.wanted(tokens, prefix_tokens))
    return FinePages(page_sizes, tuple(splits), tuple(skipped), tuple(counts))
