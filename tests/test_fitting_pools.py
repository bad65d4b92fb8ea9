"""Opaque pages of two engines, cut into other streams, through whole nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvflow
from kvflow.protocols.pages.layout import opaque_layout

PAGE_SIZE, PAGES = 16, 8


def opaque_target(streams: dict[str, int]) -> kvflow.PagedPool:
    layout = opaque_layout(
        streams, page_size=PAGE_SIZE, num_pages=PAGES, tag="HND", fingerprint="llama tp1"
    )
    return kvflow.PagedPool.allocate(layout)


def opaque_source() -> tuple[kvflow.PagedPool, list[NDArray[Any]]]:
    """Two layers [pages, heads, slots, dim], shown as engines do: [pages, slots, heads, dim]."""
    layers = [
        np.random.default_rng(i).random((PAGES, 2, PAGE_SIZE, 3), dtype=np.float32)
        for i in range(2)
    ]
    shown = {f"layer {i}": layer.transpose(0, 2, 1, 3) for i, layer in enumerate(layers)}
    return kvflow.PagedPool.wrap(
        shown, page_size=PAGE_SIZE, tag="HND", fingerprint="llama tp1"
    ), layers


@pytest.mark.parametrize(
    "streams", [{"whole": 768}, {"layer 0": 384, "layer 1": 384}, {"a": 100, "b": 668}], ids=list
)
async def test_opaque_pages_arrive_whole(streams: dict[str, int]) -> None:
    (source, layers), target = opaque_source(), opaque_target(streams)
    async with (
        kvflow.PrefillNode(source, plane="local", verify_transfers=True) as prefill,
        kvflow.DecodeNode(target, plane="local", verify_transfers=True) as decode,
        prefill.room(1, range(40)) as sending,
        decode.room(1, [prefill.info], range(40)) as receiving,
    ):
        await sending.matched()
        pages = prefill.pages.take(3, "test")
        sending.send(pages, last=True)
        await receiving.landed()
        await sending.done()
        for ours, theirs in zip(pages.tolist(), receiving.pages, strict=True):
            found = target.pages_bytes(np.array([theirs], dtype=np.int32)).tobytes()
            assert found == layers[0][ours].tobytes() + layers[1][ours].tobytes()
        prefill.pages.give_back(pages, "test")
    target.close()
