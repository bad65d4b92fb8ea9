"""Pages of two sizes: what is planned in fine pages is what a naive copy does, token by token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvflow.protocols.arguments import room_in_fine_pages
from kvflow.protocols.errors import CapacityError, LayoutError
from kvflow.protocols.pages.arrange import as_in, blocks_between, by_shard
from kvflow.protocols.pages.components import Component
from kvflow.protocols.pages.differences import differences
from kvflow.protocols.pages.fine import (
    FineLayout,
    FinePages,
    fine_pages,
    in_common_pages,
    in_pages_of,
    splits_of,
)
from kvflow.protocols.pages.kinds import PAGE, StateKind
from kvflow.protocols.pages.layout import (
    Order,
    PageIndices,
    PoolLayout,
    Space,
    build_layout,
    opaque_layout,
)
from kvflow.protocols.pages.plan import Pairing
from kvflow.protocols.pages.spaces import MAX_PAGES, counts_less
from kvflow.testing.shards import shard_layout
from tests.protocols.test_plan import Memory, copied, placed

ORDERS: st.SearchStrategy[Order] = st.sampled_from(["page_first", "layer_first"])
KINDS = [
    StateKind("0.k", "uint8", (4, 3)),
    StateKind("0.v", "bfloat16", (4, 2)),
    StateKind("0.index_k", "uint8", (5,)),
    StateKind("1.k", "uint8", (4, 2), space="window"),
    StateKind("2.ssm", "float32", (4, 3), "row"),
]


def pool(
    sizes: tuple[int, int], counts: tuple[int, int, int], order: Order, window: int = 10
) -> PoolLayout:
    spaces = (
        Space("pages", counts[0], sizes[0]),
        Space("window", counts[1], sizes[1], window),
        Space("rows", counts[2], 0),
    )
    return build_layout(KINDS, spaces=spaces, order=order)


class Room(NamedTuple):
    """Two pools, the places of one room in each, and the room's tokens."""

    source: PoolLayout
    target: PoolLayout
    ours: PageIndices
    theirs: PageIndices
    tokens: int
    prefix: int


@st.composite
def rooms(draw: st.DrawFn, shards: int = 1) -> Room:
    small = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    factors = draw(st.sampled_from([(2, 1), (4, 1), (1, 2), (3, 2), (2, 4)]))
    flips = draw(st.tuples(st.booleans(), st.booleans()))
    both = [
        (size, size * factor)[:: -1 if flip else 1]
        for size, factor, flip in zip(small, factors, flips, strict=True)
    ]
    sides = tuple(zip(*both, strict=True))
    tokens, window = draw(st.integers(1, 40)), draw(st.integers(0, 12))
    # A prefix is whole pages of decode, in every space, or the whole prompt.
    unit = np.lcm(*sides[1])
    prefix = draw(st.integers(0, tokens // unit).map(lambda n: int(n * unit)) | st.just(tokens))
    layouts, lists, rng = [], [], np.random.default_rng(draw(st.integers(0, 99)))
    for sizes in sides:
        wanted = pool(sizes, (1, 1, 1), "page_first", window).wanted(tokens, prefix)
        counts = (wanted[0] + 3, wanted[1] + 1, wanted[2] + 2)
        layout = pool(sizes, counts, draw(ORDERS), window)
        if draw(st.booleans()):
            taken = [np.arange(count, dtype=np.int32) for count in wanted]
        else:
            taken = [
                rng.permutation(count)[:n].astype(np.int32)
                for count, n in zip(counts, wanted, strict=True)
            ]
        layouts.append(layout)
        lists.append(layout.numbered(taken))
    source = placed(shard_layout(layouts[0], shards - 1, shards), 7)
    return Room(source, placed(layouts[1], 3), lists[0], lists[1], tokens, prefix)


def at(layout: PoolLayout, places: PageIndices, c: Component, token: int, room: Room) -> int:
    """Where a token of a component is. Places of a room begin with the page of its first token."""
    space, own = layout.spaces[c.space], layout.split(places)[c.space]
    b = layout.buffers[c.buffer]
    if space.in_rows:
        return b.address + int(own[0]) * b.page_bytes + c.offset
    first = max(room.prefix, room.tokens - space.window if space.window else 0)
    page, slot = divmod(token, space.page_size)
    place = int(own[page - first // space.page_size])
    return b.address + place * b.page_bytes + c.offset + slot * c.size_bytes // space.page_size


def naively(room: Room, memory: Memory, before: Memory) -> tuple[Memory, NDArray[np.bool_]]:
    """What the target holds then, and which of its bytes a room may change: all slots of the fine
    pages that hold a token of it.
    """
    out, may = before.copy(), np.zeros(before.size, np.bool_)
    there = {c.name: c for c in room.target.components}
    for c in room.source.components:
        o, space = there[c.name], room.source.spaces[c.space]
        ours, theirs = (side.spaces[c.space].page_size for side in (room.source, room.target))
        fine = min(ours, theirs)
        if space.in_rows:
            tokens, slot = range(1), c.size_bytes
        else:
            first = max(room.prefix, room.tokens - space.window if space.window else 0)
            tokens = range(first // fine * fine, -(-room.tokens // fine) * fine)
            tokens, slot = tokens if first < room.tokens else range(0), c.size_bytes // ours
        # Of a shard, the heads of one slot are a part of the target's.
        entry, whole = slot // c.shape[c.axis], o.size_bytes // (theirs or 1) // o.shape[o.axis]
        assert entry == whole
        for token in tokens:
            s = at(room.source, room.ours, c, token, room)
            t = at(room.target, room.theirs, o, token, room) + (c.start - o.start) * entry
            out[t : t + slot] = memory[s : s + slot]
            may[t : t + slot] = True
    return out, may


def planned(room: Room, limit: int) -> tuple[Memory, Memory]:
    """Memory of the target after the planned copy, and after a naive one."""
    source, target = in_common_pages(room.source, room.target)
    sizes = tuple(space.page_size for space in target.spaces)
    ours, theirs = (
        fine_pages(side, sizes, room.tokens, room.prefix) for side in (room.source, room.target)
    )
    assert ours.counts == theirs.counts
    lists = ours.of(room.source, room.ours), theirs.of(room.target, room.theirs)
    size = max(side.size_bytes + 20 * len(side.buffers) for side in (source, target))
    a = np.random.default_rng(0).integers(1, 255, size, dtype=np.uint8)
    b = np.random.default_rng(1).integers(1, 255, size, dtype=np.uint8)
    pairing = Pairing(source, target, partly=True)
    pairing.check(*lists)
    blocks = pairing.blocks(*lists, max_block_bytes=limit)
    assert not blocks.sizes.size or 0 < int(blocks.sizes.min()) <= int(blocks.sizes.max()) <= limit
    expected, may = naively(room, a, b)
    found = copied(blocks, a, b)
    assert blocks.total_bytes == np.count_nonzero(may)
    return found, expected


@given(rooms(), st.integers(1, 300))
@settings(max_examples=200)
def test_blocks_equal_a_naive_copy_of_tokens(room: Room, limit: int) -> None:
    found, expected = planned(room, limit)
    assert (found == expected).all(), "and no other byte has changed"


@given(rooms(shards=2), st.integers(1, 300))
@settings(max_examples=100)
def test_the_heads_of_a_shard_go_to_their_slots(room: Room, limit: int) -> None:
    found, expected = planned(room, limit)
    assert (found == expected).all()


@given(rooms(), st.data())
def test_chunks_make_up_a_room(room: Room, data: st.DataObject) -> None:
    """However a room is cut, its chunks have each of its fine pages once, in order."""
    source, target = in_common_pages(room.source, room.target)
    sizes = tuple(space.page_size for space in target.spaces)
    ours = fine_pages(room.source, sizes, room.tokens, room.prefix)
    own, whole = room.source.split(room.ours), ours.of(room.source, room.ours)
    done: tuple[int, ...] = (0,) * len(own)
    found: list[list[int]] = [[] for _ in own]
    while any(left := tuple(len(n) - d for n, d in zip(own, done, strict=True))):
        counts = tuple(n - data.draw(st.integers(0, n)) for n in left)
        part = [n[d : d + c] for n, d, c in zip(own, done, counts, strict=True)]
        fine = ours.of(room.source, room.source.numbered(part), done)
        before, done = done, tuple(d + c for d, c in zip(done, counts, strict=True))
        assert source.counted(fine) == counts_less(ours.done_after(done), ours.done_after(before))
        for space, pages in enumerate(source.split(fine)):
            found[space] += pages.tolist()
    assert ours.done_after(done) == ours.counts == source.counted(whole)
    assert [pages.tolist() for pages in source.split(whole)] == found


def test_a_divided_page_is_its_fine_pages_in_order() -> None:
    layout = pool((8, 4), (3, 2, 2), "layer_first")
    fine = in_pages_of(layout, (2, 4, 0))
    assert isinstance(fine, FineLayout) and splits_of(fine) == (4, 1, 1)
    assert (fine.counts, fine.page_size, fine.bases) == ((12, 2, 2), 2, (0, 12, 14))
    assert fine.buffers == layout.buffers and fine.served.counts == fine.counts
    assert in_pages_of(layout, (8, 4, 0)) is layout
    assert in_common_pages(layout, layout) == (layout, layout)
    of = FinePages((2, 4, 0), (4, 1, 1), (1, 0, 0), (6, 2, 1)).of
    # Pages 2 and 0, both pages of the window, and row 1, from the second fine page on.
    places = np.array([2, 0, 4, 3, 6], np.int32)
    assert of(layout, places).tolist() == [9, 10, 11, 0, 1, 2, 13, 12, 15]
    assert of(layout, places[1:2], (1, 0, 0)).tolist() == [0, 1, 2]


def test_adjacent_fine_pages_become_one_block() -> None:
    streams = [("0.k", "uint8", (8,)), ("0.v", "uint8", (8,))]
    large = [
        placed(build_layout(streams, page_size=8, num_pages=4, order=order), 0)
        for order in ("page_first", "layer_first")
    ]
    small = [
        placed(build_layout(streams, page_size=2, num_pages=16, order=order), 0)
        for order in ("page_first", "layer_first")
    ]
    pages = np.arange(16, dtype=np.int32)

    def sizes(source: PoolLayout, target: PoolLayout) -> list[int]:
        pairing = Pairing(*in_common_pages(source, target))
        return sorted(pairing.blocks(pages, pages, max_block_bytes=1 << 20).sizes.tolist())

    # Both layer-first: all pages of a layer. Large pages page by page: a layer of each of them.
    assert sizes(large[1], small[1]) == sizes(small[1], large[1]) == [256] * 2
    assert sizes(large[0], small[1]) == sizes(small[1], large[0]) == [64] * 8
    assert sizes(large[0], small[0]) == sizes(small[0], large[1]) == [16] * 32


@pytest.mark.parametrize("order", ["page_first", "layer_first"])
def test_a_page_in_the_order_of_a_peer_has_fine_pages_of_that_order(order: Order) -> None:
    """What gathers slices in staging works in fine pages too: each is one stretch then."""
    staging = by_shard(pool((8, 4), (3, 2, 2), "page_first"), 2)
    target = pool((2, 4), (12, 2, 2), order)
    host, _ = in_common_pages(staging, target)
    arranged = as_in(target, host)
    assert not isinstance(arranged, FineLayout) and arranged.spaces == host.spaces
    arranged.check()
    assert arranged.size_bytes == staging.size_bytes
    assert blocks_between(arranged, target).mean_bytes >= blocks_between(host, target).mean_bytes


# --- what cannot be divided


def of_pages(page_size: int, *more: StateKind, num_pages: int = 4) -> PoolLayout:
    kinds = [StateKind("0.k", "uint8", (8,)), *more]
    return build_layout(kinds, page_size=page_size, num_pages=num_pages)


SCALE = StateKind("0.scale", "uint8", (8,), PAGE)


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        (of_pages(6), of_pages(4), "page_size: prefill 6, decode 4 (neither size is a multiple"),
        (
            of_pages(8, SCALE),
            of_pages(4, SCALE),
            "page_size: prefill 8, decode 4 (0.scale is one piece for each page",
        ),
        (
            of_pages(4, SCALE),
            of_pages(8, SCALE),
            "page_size: prefill 4, decode 8 (0.scale is one piece for each page",
        ),
        (
            opaque_layout({"blob": 64}, page_size=8, num_pages=4, tag="t"),
            opaque_layout({"blob": 32}, page_size=4, num_pages=4, tag="t"),
            "page_size: prefill 8, decode 4 (only the engine knows where the tokens lie",
        ),
        (
            of_pages(1 << 16, num_pages=MAX_PAGES // 32),
            of_pages(1 << 8),
            f"({MAX_PAGES * 8} pages of 256 tokens, where {MAX_PAGES} are the limit",
        ),
    ],
    ids=["no multiple", "per page", "per page there", "opaque", "too many"],
)
def test_what_cannot_be_divided_is_refused_by_name(
    source: PoolLayout, target: PoolLayout, text: str
) -> None:
    sides = in_common_pages(source, target)
    assert sides == (source, target)
    assert text in differences(*sides)[0]
    with pytest.raises(LayoutError, match="pools do not fit: page_size"):
        Pairing(*sides)


def test_one_space_may_fit_where_another_does_not() -> None:
    source, target = pool((8, 4), (3, 2, 2), "page_first"), pool((4, 3), (3, 2, 2), "page_first")
    assert [
        found.partition(" (")[0] for found in differences(*in_common_pages(source, target))
    ] == ["window: page_size: prefill 4, decode 3"]
    other = build_layout([("0.k", "uint8", (8,))], page_size=4, num_pages=2)
    assert in_common_pages(source, other) == (source, other), "they have other spaces"


@pytest.mark.parametrize("sizes", [(8, 4), (16, 4, 0), (3, 4, 0), (0, 4, 0), (8, 4, 1), ()])
def test_sizes_that_are_none_of_a_pool_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError):
        in_pages_of(pool((8, 4), (3, 2, 2), "page_first"), sizes)


def test_a_room_of_too_many_fine_pages_is_refused() -> None:
    layout = of_pages(1 << 16)
    assert room_in_fine_pages(layout, (1,), 1 << 19, 0).counts == (1 << 19,)
    with pytest.raises(CapacityError, match="in the smaller of the two page sizes"):
        room_in_fine_pages(layout, (1,), (1 << 19) + 1, 0)
