"""Pools over memory that is given by addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvflow.memory.raw import Region, SpaceRegions, pool_at
from kvflow.memory.shared import SharedSegment
from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.differences import differences
from kvflow.protocols.pages.layout import Space


def memory(count: int, page_bytes: int) -> Any:
    return np.zeros(count * page_bytes, dtype=np.uint8)


def region(name: str, array: Any, page_bytes: int, **fields: Any) -> Region:
    return Region(name, array.ctypes.data, array.nbytes, page_bytes, **fields)


def test_a_page_is_the_same_bytes_of_every_region() -> None:
    k, v = memory(4, 8), memory(4, 6)
    pool = pool_at([region("k", k, 8), region("v", v, 6)], 2, fingerprint="model")
    k.reshape(4, 8)[2], v.reshape(4, 6)[2] = 3, 5
    assert pool.pages_bytes(np.array([2], np.int32)).tolist() == [[3] * 8 + [5] * 6]
    pool.array("v")[1] = 7
    assert v[6:12].tolist() == [7] * 6
    assert (pool.layout.page_bytes, pool.layout.num_pages) == (14, 4)
    assert (pool.layout.page_size, pool.layout.fingerprint) == (2, "model")


def test_a_pool_may_have_regions_of_several_spaces() -> None:
    k, window, state = memory(4, 8), memory(3, 6), memory(2, 5)
    spaces = {
        "window": SpaceRegions([region("w", window, 6)], 4, 8),
        "rows": SpaceRegions([region("state", state, 5)], 0),
    }
    pool = pool_at([region("k", k, 8)], 2, spaces=spaces)
    assert pool.layout.spaces == (
        Space("pages", 4, 2),
        Space("window", 3, 4, 8),
        Space("rows", 2, 0),
    )
    assert pool.layout.place_bytes == (8, 6, 5)
    window.reshape(3, 6)[1], state.reshape(2, 5)[1] = 3, 7
    assert pool.places_bytes(1, np.array([1], np.int32)).tolist() == [[3] * 6]
    assert pool.places_bytes(2, np.array([1], np.int32)).tolist() == [[7] * 5]
    with pytest.raises(LayoutError, match="space 'window' needs at least one region"):
        pool_at([region("k", k, 8)], 2, spaces={"window": SpaceRegions([], 4)})
    with pytest.raises(LayoutError, match="'k' and 'again' share bytes"):
        again = SpaceRegions([region("again", k, 8)], 0)
        pool_at([region("k", k, 8)], 2, spaces={"rows": again})


def test_bytes_at_the_end_that_fill_no_page_are_not_used() -> None:
    pool = pool_at([region("k", memory(1, 27), 8)], 1)
    assert pool.layout.num_pages == 3
    assert pool.layout.buffers[0].size_bytes == 24


@pytest.mark.parametrize(
    ("regions", "text"),
    [
        ([], "at least one region"),
        ([("k", 0, 8, 8)], "region 'k': 8 bytes at address 0 do not hold one page"),
        ([("k", 4096, 7, 8)], "7 bytes at address 4096 do not hold one page of 8 bytes"),
        ([("k", 4096, 8, 0)], "do not hold one page of 0 bytes"),
        ([("k", "x", 8, 8)], "region 'k': address 'x' is not an integer"),
        ([("k", 4096, 32, 8), ("v", 8192, 16, 8)], "'v' has 2 pages, 'k' has 4"),
        ([("k", 4096, 32, 8), ("v", 4127, 32, 8)], "'k' and 'v' share bytes"),
        ([("k", 4096, 32, 8), ("k", 8192, 32, 8)], "'k' is named twice"),
    ],
)
def test_what_is_no_pool_is_refused(regions: list[Any], text: str) -> None:
    with pytest.raises(LayoutError) as raised:
        pool_at([Region(*each) for each in regions], 1, device="cuda:0")
    assert text in str(raised.value)


def test_regions_next_to_each_other_share_nothing() -> None:
    pool = pool_at([Region("v", 4128, 32, 8), Region("k", 4096, 32, 8)], 1, device="cuda:0")
    assert [b.address for b in pool.layout.buffers] == [4128, 4096]


def test_memory_on_a_device_has_no_array() -> None:
    pool = pool_at([Region("k", 4096, 32, 8)], 1, device="cuda:0")
    assert not pool.on_host
    with pytest.raises(LayoutError, match="'k' is on cuda:0, and has no array"):
        pool.array("k")


def test_a_segment_holds_all_of_it() -> None:
    segment = SharedSegment.create(8192)
    try:
        inside = Region("k", segment.address + 4096, 4096, 64)
        assert pool_at([inside], 1, segment=segment).segment is segment
        with pytest.raises(LayoutError, match="'k' does not lie in"):
            pool_at([inside._replace(size_bytes=4160)], 1, segment=segment)
    finally:
        segment.close()


def test_two_pools_of_the_same_bytes_must_mean_the_same() -> None:
    keep = memory(4, 8), memory(4, 8)
    mine, theirs = (
        pool_at([region("k", array, 8, format=label)], 1).layout
        for array, label in zip(keep, ("SGLang x", "SGLang y"), strict=True)
    )
    assert not differences(mine, mine, ("prefill", "decode"))
    assert "SGLang y" in "".join(differences(mine, theirs, ("prefill", "decode")))
