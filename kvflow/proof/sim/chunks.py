"""Chunks of a simulated room: how many places of each space every chunk has, and which."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from itertools import accumulate, pairwise

from kvflow.protocols.pages.layout import Counts, PoolLayout
from kvflow.protocols.pages.spaces import counts_less, counts_sum, spans_at


class Way(IntEnum):
    """When the pages of a window are sent. The number of a room decides."""

    LAST = 0  # all with the last chunk, as the row
    ALONG = 1  # one with every chunk, and the rest with the last one
    ALONE = 2  # in a chunk of their own, before the last one


def way_of(room: int) -> Way:
    return Way(room % len(Way))


def regrouped(pages: Sequence[int], factor: int) -> Sequence[int]:
    """Return the number of pages in every chunk, if pages are `factor` times as large. A page is in
    the chunk that fills it; the last one need not be full.
    """
    if factor == 1:
        return pages
    ends = [end // factor for end in accumulate(pages)]
    ends[-1] = -(-sum(pages) // factor)
    return [count for count in (b - a for a, b in pairwise((0, *ends))) if count]


def in_chunks(
    layout: PoolLayout, pages: Sequence[int], wanted: Counts, way: Way
) -> tuple[Counts, ...]:
    """Return the number of places in every chunk of a room that fills `wanted` places.

    `pages` has the number of pages of the first space in every chunk. `way` may add a chunk.
    """
    if len(wanted) == 1:
        return tuple([(count,) for count in pages])
    chunks, alone = [[count, *wanted[1:]] for count in pages], [0] * len(wanted)
    for space, count in enumerate(wanted[1:], 1):
        own = [0] * len(chunks)
        if way is Way.ALONG and not layout.spaces[space].in_rows:
            own = [int(number < count) for number in range(len(chunks))]
        elif way is Way.ALONE and not layout.spaces[space].in_rows:
            alone[space] = count
        own[-1] = count - alone[space] - sum(own[:-1])
        for chunk, places in zip(chunks, own, strict=True):
            chunk[space] = places
    found = [tuple(chunk) for chunk in chunks]
    return (*found[:-1], tuple(alone), found[-1]) if any(alone) else tuple(found)


@cache
def positions(
    whole: Counts, wanted: Counts, chunks: tuple[Counts, ...]
) -> tuple[Sequence[int], ...]:
    """Return the positions of every chunk in a list of `whole` places, of which the last `wanted`
    ones of each space are sent. Callers must not change the result, which is kept.
    """
    found, done = [], counts_less(whole, wanted)
    for counts in chunks:
        spans = spans_at(whole, done, counts)
        found.append([place for first, end in spans for place in range(first, end)])
        done = counts_sum(done, counts)
    return tuple(found)
