"""Pages in another order: the same bytes, each once; those of one peer in one stretch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvflow.memory.copies import HostCopier
from kvflow.memory.pool import PagedPool
from kvflow.protocols.pages import arrange
from kvflow.protocols.pages.arrange import as_in, blocks_between, by_shard, from_shards
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.protocols.pages.layout import (
    PoolLayout,
    build_layout,
    opaque_layout,
)
from kvflow.protocols.pages.plan import Pairing
from kvflow.transports.data.slices import are_tiny
from tests.ranks.shards import PAGE_SIZE, Whole, everything, heads, latents, shard_of

PAGES = 3


def layout_of(streams: Sequence[Whole], shards: int = 1, *which: int) -> PoolLayout:
    kinds = [kind for shard in which or range(shards) for kind in shard_of(streams, shard, shards)]
    rows = 2 * any(s.kind.unit == "row" for s in streams)
    return build_layout(kinds, page_size=PAGE_SIZE, num_pages=PAGES, num_rows=rows)


def copied(source: PagedPool, target: PagedPool, through: PoolLayout) -> None:
    between = PagedPool.allocate(through, shared=False)
    pages = np.arange(PAGES, dtype=np.int32)
    rows = (np.arange(2, dtype=np.int32),) * (len(through.spaces) - 1)
    for here, there in ((source.layout, between.layout), (between.layout, target.layout)):
        lists = here.numbered((pages, *rows)), there.numbered((pages[::-1], *rows))
        HostCopier.copy(Pairing(here, there).blocks(*lists, max_block_bytes=1 << 20))
    between.close()


CASES = [(heads(2, 8), 2), (heads(3, 6), 3), (heads(2, 2), 4)]
CASES += [(latents(3), 2), (everything(2), 4), (everything(1), 8)]


@pytest.mark.parametrize(("streams", "shards"), CASES)
@pytest.mark.parametrize("width", [1, 2])
def test_bytes_go_there_and_back(streams: list[Whole], shards: int, width: int, seed: int) -> None:
    if width == 2 and any(s.axis is None for s in streams):
        width = 1  # copies are one too many to come back as they were
    own = layout_of(streams, width)
    cut = by_shard(own, shards)
    other = as_in(layout_of(streams, shards), own)
    for arranged in (cut, other):
        assert arranged.buffers == own.buffers and arranged.page_bytes == own.page_bytes
        arranged.check()
        pools = [PagedPool.allocate(own, shared=False) for _ in range(2)]
        rng = np.random.default_rng(seed)
        for c in own.components:
            array = pools[0].array(c.name, start=c.start, replica=c.replica)
            array[...] = rng.integers(0, 255, array.shape, dtype=np.uint8)
        copied(pools[0], pools[1], through=arranged)
        for c in own.components:
            before, after = (pool.array(c.name, start=c.start, replica=c.replica) for pool in pools)
            assert (before == after).all(), c.label
        for pool in pools:
            pool.close()


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_what_a_shard_sends_lies_in_one_stretch(shards: int) -> None:
    whole = layout_of(heads(3, 8))
    for shard in range(shards):
        part = layout_of(heads(3, 8), shards, shard)
        assert blocks_between(part, whole) == (8 * 8 // shards, True) == from_shards(whole, shards)
        assert blocks_between(part, by_shard(whole, shards)) == (part.page_bytes, False)
        assert blocks_between(as_in(part, whole), whole).in_slices


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_what_is_gathered_for_a_wider_decode_is_a_page_of_it(shards: int) -> None:
    whole, parts = layout_of(heads(3, 8)), layout_of(heads(3, 8), shards)
    assert blocks_between(whole, parts).in_slices
    assert blocks_between(as_in(parts, whole), parts) == (parts.page_bytes, False)


def test_widths_that_do_not_divide_each_other_need_both_sides() -> None:
    there = layout_of(heads(1, 6), 2)
    staged = by_shard(there, 3)
    for shard in range(3):
        part = layout_of(heads(1, 6), 3, shard)
        assert not blocks_between(as_in(staged, part), staged).in_slices
    assert blocks_between(layout_of(heads(1, 6), 3, 1), staged).in_slices


def test_what_no_shard_has_a_share_of_is_left_whole() -> None:
    for streams, shards in ((latents(2), 4), (heads(2, 8), 3)):
        layout = layout_of(streams)
        assert by_shard(layout, shards) == layout and not from_shards(layout, shards).in_slices
    keys = build_layout([("index_k", "uint8", (8,))], page_size=4, num_pages=2)
    assert by_shard(keys, 2) == keys
    opaque = opaque_layout({"kv": 4096}, page_size=4, num_pages=2, tag="mine")
    assert by_shard(opaque, 2) == as_in(opaque, opaque) == opaque
    assert not from_shards(opaque, 2).in_slices


def test_too_many_parts_are_left_together(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(heads(2, 8))
    monkeypatch.setattr(arrange, "MAX_COMPONENTS", 15)
    assert by_shard(layout, 4) == layout and by_shard(layout, 2) != layout


def test_a_pool_of_rows_alone_is_looked_at_by_its_rows() -> None:
    """A page of it has no bytes, which are no tiny slices."""
    ring = [Whole(0, StateKind("0.ring", "uint8", (5, 8, 2), ROW, axis=1), 1)]
    state = [Whole(0, StateKind("0.state", "uint8", (8, 3, 2), ROW))]
    for streams, blocks in ((ring, (8, True)), (state, (24, False))):
        whole = layout_of(streams)
        assert blocks_between(layout_of(streams, 2, 1), whole) == blocks == from_shards(whole, 2)


def test_only_slices_are_tiny() -> None:
    """A small page in one block is none: no staging would make it larger."""
    whole = layout_of(heads(1, 2))
    assert whole.page_bytes == 128 and not are_tiny("mooncake", blocks_between(whole, whole))
    slices = blocks_between(layout_of(heads(1, 2), 2, 1), whole)
    planes = ("mooncake", "nixl", "local", "mine")
    assert [plane for plane in planes if are_tiny(plane, slices)] == ["mooncake", "nixl"]
