"""Engines' own arrays in several spaces become one pool without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvflow.memory.pool import PagedPool
from kvflow.memory.streams import SpaceStreams
from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.differences import differences
from kvflow.protocols.pages.kinds import PAGE, ROW, SLOT, StateKind
from kvflow.protocols.pages.layout import PageIndices, Space, build_layout

F32 = np.float32


def numbers(*indices: int) -> PageIndices:
    return np.array(indices, dtype=np.int32)


def counting(*shape: int) -> Any:
    return np.arange(np.prod(shape), dtype=F32).reshape(shape)


def windowed(**more: Any) -> dict[str, SpaceStreams]:
    """5 pages of 8 tokens for the last 16 tokens, and 3 rows."""
    return {
        "window": SpaceStreams({"w": counting(5, 8, 2)}, 8, {"scale": counting(5, 3)}, 16),
        "state": SpaceStreams({"ssm": counting(3, 7)}, 0),
        **more,
    }


def test_every_space_is_described_as_its_arrays_are() -> None:
    arrays, spaces = {"k": counting(4, 4, 3)}, windowed()
    given: list[Any] = [spaces["window"].arrays[name] for name in ("w", "scale")]
    state: Any = spaces["state"].tensors["ssm"]
    pool = PagedPool.wrap(arrays, page_size=np.int64(4), spaces=spaces)
    assert pool.layout.spaces == (
        Space("pages", 4, 4),
        Space("window", 5, 8, 16),
        Space("state", 3, 0),
    )
    assert [(c.name, c.unit, c.space) for c in pool.layout.components] == [
        ("k", SLOT, 0),
        ("w", SLOT, 1),
        ("scale", PAGE, 1),
        ("ssm", ROW, 2),
    ]
    assert [b.space for b in pool.layout.buffers] == [0, 1, 1, 2]
    assert pool.layout.place_bytes == (4 * 3 * 4, 8 * 2 * 4 + 3 * 4, 7 * 4)
    assert pool.layout.wanted(40) == (10, 2, 1)
    assert pool.array("w") is given[0] and pool.array("k") is arrays["k"]
    assert pool.places_bytes(1, numbers(3, 0)).tobytes() == b"".join(
        array[place].tobytes() for place in (3, 0) for array in given
    )
    assert pool.rows_bytes(numbers(2)).tobytes() == state[2].tobytes()


def test_a_wrapped_pool_fits_one_that_is_allocated() -> None:
    window = SpaceStreams({"w": torch.zeros(5, 8, 2)}, 8, None, 16)
    pool = PagedPool.wrap({"k": torch.zeros(4, 4, 3)}, page_size=4, spaces={"window": window})
    kinds = [StateKind("k", "float32", (3,)), StateKind("w", "float32", (2,), space="window")]
    spaces = (Space("pages", 9, 4), Space("window", 7, 8, 16))
    assert not differences(pool.layout, build_layout(kinds, spaces=spaces))
    apart = (spaces[0], Space("window", 7, 8, 8))
    assert differences(pool.layout, build_layout(kinds, spaces=apart))


def test_rows_come_before_further_spaces() -> None:
    spaces = {"window": SpaceStreams({"w": counting(5, 8, 2)}, 8)}
    pool = PagedPool.wrap(
        {"k": counting(4, 4, 3)}, page_size=4, rows={"ssm": counting(3, 7)}, spaces=spaces
    )
    assert [space.name for space in pool.layout.spaces] == ["pages", "rows", "window"]
    assert pool.layout.row_space == 1 and pool.layout.bases == (0, 4, 7)


def test_pages_without_arrays_only_count_tokens() -> None:
    pool = PagedPool.wrap({}, page_size=4, spaces=windowed(), num_pages=40)
    assert pool.layout.counts == (40, 5, 3) and pool.layout.place_bytes[0] == 0
    with pytest.raises(LayoutError, match="needs num_pages"):
        PagedPool.wrap({}, page_size=4, spaces=windowed())


def test_opaque_pages_of_every_space_are_bytes() -> None:
    pool = PagedPool.wrap({"k": counting(4, 2, 9)}, page_size=4, spaces=windowed(), tag="engine")
    assert {c.dtype for c in pool.layout.components} == {"opaque"}
    assert pool.layout.place_bytes == (72, 76, 28)
    assert [space.page_size for space in pool.layout.spaces] == [4, 8, 0]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"window": SpaceStreams({}, 8)}, "space 'window' has no array"),
        ({"more": SpaceStreams({"k": counting(3, 7)}, 0)}, "stream 'k' is named twice"),
        ({"pages": SpaceStreams({"p": counting(3, 7)}, 0)}, "space 'pages' is given twice"),
        (
            {"state": SpaceStreams({"ssm": counting(3, 7)}, 0, {"s": counting(3, 1)})},
            "space 'state': per_page arrays need pages, and its page_size is 0",
        ),
        (
            {"state": SpaceStreams({"ssm": counting(3, 7)}, 0, None, 8)},
            "space 'state' has rows, and rows have no window",
        ),
        (
            {"window": SpaceStreams({"w": counting(5, 8, 2)}, 70_000)},
            r"space 'window': page_size 70000 is outside 0\.\.65536",
        ),
        (
            {"window": SpaceStreams({"w": counting(5, 8, 2)}, "8")},  # type: ignore[arg-type]
            "space 'window': page_size '8' is not an integer",
        ),
        (
            {"window": SpaceStreams({"w": counting(5, 8, 2)}, 8, None, -1)},
            "window -1 is outside 0",
        ),
        (
            {"window": SpaceStreams({"w": counting(5, 4, 2)}, 8)},
            r"'w': shape \(5, 4, 2\) is not .* with a page_size of 8",
        ),
        (
            {"window": SpaceStreams({"w": counting(5, 8, 2), "x": counting(6, 8, 2)}, 8)},
            "'x' has 6 pages, 'w' has 5",
        ),
        (
            {"state": SpaceStreams({"ssm": counting(3, 7), "c": counting(2, 7)}, 0)},
            "'c' has 2 rows, 'ssm' has 3",
        ),
        (
            {"window": SpaceStreams([counting(5, 8, 2)], 8)},  # type: ignore[arg-type]
            "from a mapping of stream names to arrays, not from a list",
        ),
    ],
)
def test_a_space_that_cannot_be_described_is_refused_by_name(
    more: dict[str, SpaceStreams], text: str
) -> None:
    with pytest.raises(LayoutError, match=text):
        PagedPool.wrap({"k": counting(4, 4, 3)}, page_size=4, spaces=windowed(**more))
