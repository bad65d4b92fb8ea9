"""Descriptors: what holds is accepted, what does not is refused by name."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.layout import (
    MAX_PAGES,
    Buffer,
    Component,
    PoolLayout,
    build_layout,
    differences,
    pack_pages,
    unpack_pages,
)

STREAMS = [("0.k", "bfloat16", (8, 16)), ("0.v", "bfloat16", (8, 4)), ("0.scale", "uint8", (3,))]


def test_page_first_is_one_buffer_and_layer_first_one_each() -> None:
    page_first = build_layout(STREAMS, page_size=4, num_pages=10)
    layer_first = build_layout(STREAMS, page_size=4, num_pages=10, order="layer_first")
    assert [c.offset for c in page_first.components] == [0, 1024, 1280]
    assert [c.buffer for c in layer_first.components] == [0, 1, 2]
    assert page_first.page_bytes == layer_first.page_bytes == 1292
    assert page_first.size_bytes == layer_first.size_bytes == 12920
    assert [page_first.pages_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert differences(page_first, layer_first) == []


def _changed(**fields: object) -> PoolLayout:
    return msgspec.structs.replace(build_layout(STREAMS, page_size=4, num_pages=10), **fields)


_K = Component("0.k", "bfloat16", (8, 16), 0, 0, 1024)
_BUFFER = Buffer("pages", 1024, 10240)


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (_changed(page_size=0), "page_size"),
        (_changed(page_size=(1 << 16) + 1), "page_size"),
        (_changed(num_pages=0), "num_pages"),
        (_changed(num_pages=MAX_PAGES + 1), "num_pages"),
        (_changed(num_pages=11), "buffer 'pages'"),
        (_changed(components=()), "components"),
        (_changed(buffers=()), "buffers"),
        (_changed(buffers=(Buffer("pages", 0, 12920),)), "buffer 'pages'"),
        (_changed(buffers=(Buffer("pages", 1292, 12919),)), "buffer 'pages'"),
        (_changed(buffers=(Buffer("pages", 1292, 12920, -1),)), "buffer 'pages'"),
        (PoolLayout(4, 10, (msgspec.structs.replace(_K, dtype="complex64"),), (_BUFFER,)), "dtype"),
        (PoolLayout(4, 10, (msgspec.structs.replace(_K, shape=()),), (_BUFFER,)), "shape"),
        (PoolLayout(4, 10, (msgspec.structs.replace(_K, shape=(-8, -16)),), (_BUFFER,)), "shape"),
        (PoolLayout(4, 10, (msgspec.structs.replace(_K, size_bytes=1023),), (_BUFFER,)), "shape"),
        (PoolLayout(4, 10, (msgspec.structs.replace(_K, buffer=1),), (_BUFFER,)), "no buffer 1"),
        (PoolLayout(4, 10, (msgspec.structs.replace(_K, buffer=-1),), (_BUFFER,)), "no buffer -1"),
        (PoolLayout(4, 10, (msgspec.structs.replace(_K, offset=-1),), (_BUFFER,)), "leave"),
        (PoolLayout(4, 10, (msgspec.structs.replace(_K, offset=1),), (_BUFFER,)), "leave"),
    ],
)
def test_a_descriptor_that_does_not_hold_is_refused(layout: PoolLayout, names: str) -> None:
    with pytest.raises(LayoutError, match=names):
        layout.check()


@pytest.mark.parametrize(("page_size", "num_pages", "dtype"), [(0, 1, "uint8"), (1, 0, "uint8"), (1, 1, "float7")])
def test_nonsense_is_not_laid_out(page_size: int, num_pages: int, dtype: str) -> None:
    with pytest.raises(LayoutError):
        build_layout([("k", dtype, (1,))], page_size=page_size, num_pages=num_pages)


def test_differences_say_what_differs() -> None:
    ours = build_layout([*STREAMS, ("only.here", "uint8", (1,))], page_size=4, num_pages=10)
    other = [("0.k", "float16", (8, 16)), ("0.v", "bfloat16", (4, 4)), ("0.scale", "uint8", (3,)), ("x", "uint8", (1,))]
    theirs = build_layout(other, page_size=8, num_pages=99)
    found = differences(ours, theirs)
    assert len(found) == 5
    for part in ("page_size: prefill 4, decode 8", "0.k dtype", "0.v shape", "here: only prefill", "x: only decode"):
        assert any(part in line for line in found)


def test_differences_of_many_layers_are_summed_up() -> None:
    source, target = (
        build_layout([(f"{i}.k", dtype, (1,)) for i in range(36)], page_size=1, num_pages=1)
        for dtype in ("float32", "float16")
    )
    assert differences(source, target)[-2:] == ["4.k dtype: prefill float32, decode float16", "and 31 more"]


def test_a_layout_survives_the_wire() -> None:
    layout = build_layout(STREAMS, page_size=4, num_pages=10, order="layer_first")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=PoolLayout) == layout


@given(st.lists(st.integers(0, 499), unique=True, max_size=50))
def test_page_lists_survive_the_wire(pages: list[int]) -> None:
    assert unpack_pages(pack_pages(np.array(pages, dtype=np.int32)), 500).tolist() == pages


@pytest.mark.parametrize("pages", [[0, 500], [-1], [3, 3], [2**31 - 1]])
def test_page_lists_are_checked(pages: list[int]) -> None:
    with pytest.raises(LayoutError, match="pages"):
        unpack_pages(pack_pages(np.array(pages, dtype=np.int32)), 500)


def test_a_ragged_page_list_is_refused() -> None:
    with pytest.raises(LayoutError, match="int32"):
        unpack_pages(b"\0\0\0", 500)
