"""The memory regions that a plane registers."""

from __future__ import annotations

import numpy as np
import pytest

import kvflow
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.transports.data.locators import regions_apart, regions_of

PAGES, PAGE_BYTES = 4, 64


def layout_of(*offsets: int) -> tuple[PoolLayout, int]:
    """A pool of spaces that begin at these bytes of one array, and the array's address."""
    memory = np.zeros(PAGES * PAGE_BYTES * 3, np.uint8)
    arrays = [
        memory[offset : offset + PAGES * PAGE_BYTES].reshape(PAGES, PAGE_BYTES)
        for offset in offsets
    ]
    spaces = {
        f"space {n}": kvflow.SpaceStreams({}, 4, {f"k{n}": array})
        for n, array in enumerate(arrays[1:], start=1)
    }
    pool = kvflow.PagedPool.wrap({}, 4, per_page={"k0": arrays[0]}, spaces=spaces)
    return pool.layout, int(memory.ctypes.data)


SIZE = PAGES * PAGE_BYTES


@pytest.mark.parametrize(
    ("offsets", "apart", "joined"),
    [
        ((0, 0), [(0, SIZE)], [(0, SIZE)]),
        ((0, 64), [(0, SIZE + 64)], [(0, SIZE + 64)]),
        ((64, 0, 32), [(0, SIZE + 64)], [(0, SIZE + 64)]),
        ((0, SIZE), [(0, SIZE), (SIZE, SIZE)], [(0, 2 * SIZE)]),
        ((0, SIZE + 64), [(0, SIZE), (SIZE + 64, SIZE)], [(0, SIZE), (SIZE + 64, SIZE)]),
    ],
)
def test_memory_of_several_spaces_is_registered_once(
    offsets: tuple[int, ...], apart: list[tuple[int, int]], joined: list[tuple[int, int]]
) -> None:
    layout, address = layout_of(*offsets)
    assert regions_apart(layout) == [(address + at, size) for at, size in apart]
    assert regions_of(layout) == [(address + at, size) for at, size in joined]


def test_the_first_space_may_have_a_window() -> None:
    memory = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    pool = kvflow.PagedPool.wrap({}, 4, per_page={"k": memory}, window=5)
    assert pool.layout.wanted(16) == (2,) and pool.layout.wanted(16, 12) == (1,)
