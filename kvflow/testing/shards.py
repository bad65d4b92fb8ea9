"""Layouts for prefill ranks, each of which holds a part of what decode's pool holds."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from kvflow.protocols.pages.components import Component
from kvflow.protocols.pages.kinds import StateKind
from kvflow.protocols.pages.layout import Order, PoolLayout, build_layout


def shard_layout(
    layout: PoolLayout, rank: int, ranks: int, order: Order = "page_first"
) -> PoolLayout:
    """Return the layout of one rank, which holds a part of each component along that component's
    axis. It has the same spaces as `layout`.

    Parts are as even as possible. If an axis has fewer entries than there are ranks, several ranks
    hold copies of one entry.
    """
    if ranks == 1:
        return layout
    kinds = [_share(layout, c, rank, ranks) for c in layout.components]
    return build_layout(kinds, spaces=layout.spaces, order=order, fingerprint=layout.fingerprint)


def _share(layout: PoolLayout, c: Component, rank: int, ranks: int) -> StateKind:
    count = c.shape[c.axis]
    if count < ranks:
        # The ranks that hold the same entry have numbered copies of it.
        firsts = [each * count // ranks for each in range(ranks)]
        twins = [each for each in range(ranks) if firsts[each] == firsts[rank]]
        start, share, copy, copies = firsts[rank], 1, twins.index(rank), len(twins)
    else:
        edges = list(pairwise(each * count // ranks for each in range(ranks + 1)))
        (start, end), copy, copies = edges[rank], 0, 1
        share = end - start
    shape = (*c.shape[: c.axis], share, *c.shape[c.axis + 1 :])
    space = layout.spaces[c.space].name
    return StateKind(
        c.name, c.dtype, shape, c.unit, c.format, start, count, copy, copies, c.axis, space
    )


def placed_at_zero(layout: PoolLayout) -> PoolLayout:
    """Return `layout` with every buffer at address 0, so that planned addresses are offsets."""
    return msgspec.structs.replace(
        layout, buffers=tuple(msgspec.structs.replace(b, address=0) for b in layout.buffers)
    )
