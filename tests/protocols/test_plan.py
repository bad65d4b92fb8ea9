"""Planned blocks do what a naive copy, page by page and component by component, would do."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.kinds import PAGE, ROW, SLOT, StateKind
from kvflow.protocols.pages.layout import (
    Order,
    PageIndices,
    Places,
    PoolLayout,
    build_layout,
    opaque_layout,
)
from kvflow.protocols.pages.plan import Blocks, Pairing

Memory = NDArray[np.uint8]
Case = tuple[PoolLayout, PoolLayout, Places, Places, int]


def placed(layout: PoolLayout, at: int) -> PoolLayout:
    """The layout with buffers at `at`, and gaps between them into which nothing may spill."""
    buffers = []
    for b in layout.buffers:
        buffers.append(msgspec.structs.replace(b, address=at))
        at += b.size_bytes + 13
    return msgspec.structs.replace(layout, buffers=tuple(buffers))


def copied(blocks: Blocks, source: Memory, target: Memory) -> Memory:
    out = target.copy()
    for s, t, n in zip(*blocks, strict=True):
        out[t : t + n] = source[s : s + n]
    return out


def naively(
    source: PoolLayout, target: PoolLayout, s: Places, t: Places, a: Memory, b: Memory
) -> Memory:
    out = b.copy()
    there = {c.name: c for c in target.components}
    for c in source.components:
        o = there[c.name]
        for i, j in zip(s[c.space], t[c.space], strict=True):
            sb, tb = source.buffers[c.buffer], target.buffers[o.buffer]
            at = sb.address + i * sb.page_bytes + c.offset
            to = tb.address + j * tb.page_bytes + o.offset
            out[to : to + c.size_bytes] = a[at : at + c.size_bytes]
    return out


@st.composite
def cases(draw: st.DrawFn) -> Case:
    orders: st.SearchStrategy[Order] = st.sampled_from(["page_first", "layer_first"])
    dtypes = st.sampled_from(["uint8", "bfloat16", "float32"])
    units = st.sampled_from([SLOT, SLOT, PAGE, ROW])
    streams = [
        StateKind(name, draw(dtypes), (draw(st.integers(1, 5)),), draw(units))
        for name in ("0.k", "0.v", "1.k", "1.v", "scale")[: draw(st.integers(1, 5))]
    ]
    other = draw(st.permutations(streams)) if draw(st.booleans()) else streams
    page_size = draw(st.integers(1, 4))
    counts = [draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))]
    some_rows = st.tuples(st.integers(1, 4), st.integers(1, 4))
    counts.append(draw(some_rows) if any(k.unit == ROW for k in streams) else (0, 0))
    pages, rows = counts
    source = build_layout(
        streams, page_size=page_size, num_pages=pages[0], num_rows=rows[0], order=draw(orders)
    )
    target = build_layout(
        list(other), page_size=page_size, num_pages=pages[1], num_rows=rows[1], order=draw(orders)
    )
    picked: list[list[PageIndices]] = []
    for sizes in counts:
        count = draw(st.integers(0, min(sizes)))
        lists = [
            draw(st.permutations(range(n))) if draw(st.booleans()) else list(range(n))
            for n in sizes
        ]
        picked.append([np.array(p[:count], dtype=np.int32) for p in lists])
    s, t = ((picked[0][i], picked[1][i])[: len(source.spaces)] for i in (0, 1))
    return placed(source, 7), placed(target, 3), s, t, draw(st.integers(1, 200))


@given(cases())
@settings(max_examples=300)
def test_blocks_equal_a_naive_copy(case: Case) -> None:
    source, target, s, t, limit = case
    size = max(layout.size_bytes + 20 * len(layout.buffers) for layout in (source, target))
    a = np.random.default_rng(0).integers(1, 255, size, dtype=np.uint8)
    b = np.zeros(size, dtype=np.uint8)
    pairing = Pairing(source, target)
    lists = (source.numbered(s), target.numbered(t))
    pairing.check(*lists)
    blocks = pairing.blocks(*lists, max_block_bytes=limit)
    assert blocks.total_bytes == source.room_bytes(tuple(own.size for own in s))
    assert not blocks.sizes.size or 0 < int(blocks.sizes.min()) <= int(blocks.sizes.max()) <= limit
    assert (copied(blocks, a, b) == naively(source, target, s, t, a, b)).all()


@given(cases())
@settings(max_examples=60)
def test_target_bases_move_the_target_and_nothing_else(case: Case) -> None:
    source, target, s, t, limit = case
    moved = placed(target, 1000)
    bases = np.array([b.address for b in moved.buffers], dtype=np.int64)
    lists = (source.numbered(s), target.numbered(t))
    got = Pairing(source, target).blocks(*lists, max_block_bytes=limit, target_bases=bases)
    expected = Pairing(source, moved).blocks(*lists, max_block_bytes=limit)
    assert all((g == e).all() for g, e in zip(got, expected, strict=True))


def pool(order: Order, num_pages: int = 64) -> PoolLayout:
    streams: list[tuple[str, str, tuple[int, ...]]] = [
        (f"{i}.{part}", "bfloat16", (2, 8)) for i in range(4) for part in "kv"
    ]
    return placed(build_layout(streams, page_size=4, num_pages=num_pages, order=order), 0)


def test_adjacent_pages_become_one_block() -> None:
    pages = np.array([5, 6, 7, 20, 21, 40], dtype=np.int32)
    paged, layered = pool("page_first"), pool("layer_first")
    runs, layers, mixed = (
        Pairing(*pools).blocks(pages, pages, max_block_bytes=1 << 20).sizes
        for pools in ((paged, paged), (layered, layered), (paged, layered))
    )
    assert (runs // paged.page_bytes).tolist() == [3, 2, 1]
    assert (len(layers), len(mixed)) == (3 * 8, 6 * 8)


@pytest.mark.parametrize(
    ("source_pages", "target_pages"),
    [([0], [0, 1]), ([64], [0]), ([0], [64]), ([-1], [0]), ([0], [-1]), ([[0]], [[0]])],
)
def test_bad_lists_are_refused(source_pages: list[int], target_pages: list[int]) -> None:
    pairing = Pairing(pool("page_first"), pool("layer_first"))
    with pytest.raises(LayoutError):
        pairing.check(
            np.array(source_pages, dtype=np.int32), np.array(target_pages, dtype=np.int32)
        )


def test_pools_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LayoutError, match="page_size"):
        other = build_layout([("0.k", "bfloat16", (2, 8))], page_size=8, num_pages=4)
        Pairing(pool("page_first"), other)


def page_of(layout: PoolLayout, memory: Memory, page: int) -> bytes:
    """One page of an opaque pool: its components one after the other."""
    parts = []
    for c in layout.components:
        b = layout.buffers[c.buffer]
        at = b.address + page * b.page_bytes + c.offset
        parts.append(memory[at : at + c.size_bytes].tobytes())
    return b"".join(parts)


@st.composite
def opaque(draw: st.DrawFn, side: str, page_bytes: int) -> PoolLayout:
    cuts = sorted(draw(st.sets(st.integers(1, page_bytes - 1), max_size=5)))
    sizes = np.diff([0, *cuts, page_bytes]).tolist()
    order: Order = draw(st.sampled_from(["page_first", "layer_first"]))
    streams = {f"{side} {i}": size for i, size in enumerate(sizes)}
    return opaque_layout(streams, page_size=3, num_pages=4, tag="any", order=order)


@given(st.data(), st.integers(2, 20))
def test_opaque_pages_arrive_whole_however_cut(data: st.DataObject, page_bytes: int) -> None:
    source = placed(data.draw(opaque("source", page_bytes)), 5)
    target = placed(data.draw(opaque("target", page_bytes)), 9)
    s, t = np.array([3, 0, 1], dtype=np.int32), np.array([0, 1, 2], dtype=np.int32)
    a = np.arange(4 * page_bytes + 200, dtype=np.int64).astype(np.uint8)
    blocks = Pairing(source, target).blocks(s, t, max_block_bytes=7)
    after = copied(blocks, a, np.full(a.size, 255, dtype=np.uint8))
    for i, j in zip(s.tolist(), t.tolist(), strict=True):
        assert page_of(target, after, j) == page_of(source, a, i)
    assert page_of(target, after, 3) == b"\xff" * page_bytes


def test_opaque_pages_cut_alike_are_one_block_a_run() -> None:
    source, target = (
        placed(opaque_layout(s, page_size=4, num_pages=8, tag="t"), 0)
        for s in ({"a": 64}, {"b": 24, "c": 40})
    )
    pages = np.arange(8, dtype=np.int32)
    blocks = Pairing(source, target).blocks(pages, pages, max_block_bytes=1 << 20)
    assert blocks.sizes.tolist() == [512]
