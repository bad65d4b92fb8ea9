"""Descriptors: what holds is accepted, what does not is refused by name."""

from __future__ import annotations

from typing import cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.protocols.arguments import own_pages, pack_pages, unpack_pages
from kvflow.protocols.errors import LayoutError, MisuseError
from kvflow.protocols.pages.components import Buffer, Component
from kvflow.protocols.pages.differences import differences
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.protocols.pages.layout import (
    MAX_LABEL,
    Order,
    PoolLayout,
    build_layout,
    names_twice,
    opaque_layout,
)
from kvflow.protocols.pages.spaces import MAX_PAGES, Space

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


PAGES = Space("pages", 10, 4)
_K = Component("0.k", "bfloat16", (8, 16), 0, 0, 1024)
_BUFFER = Buffer("pages", 1024, 10240)
_BLOB = Component("blob", "opaque", (1024,), 0, 0, 1024)
_LONG = "x" * (MAX_LABEL + 1)


def _of(component: Component, buffer: Buffer = _BUFFER, tag: str = "") -> PoolLayout:
    return PoolLayout((PAGES,), (component,), (buffer,), tag)


def _space(**fields: object) -> PoolLayout:
    return _changed(spaces=(msgspec.structs.replace(PAGES, **fields),))


def _k(**fields: object) -> PoolLayout:
    return _of(msgspec.structs.replace(_K, **fields))


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (_space(page_size=0), "first space of a pool has pages"),
        (_space(page_size=(1 << 16) + 1), "page_size"),
        (_space(count=0), "num_pages"),
        (_space(count=MAX_PAGES + 1), "num_pages"),
        (_space(count=11), "buffer 'pages'"),
        (_changed(components=(_K,) * 4097), "4097 components"),
        (_changed(buffers=()), "buffers"),
        (_changed(buffers=(Buffer("pages", 0, 12920),)), "buffer 'pages'"),
        (_changed(buffers=(Buffer("pages", 1292, 12919),)), "buffer 'pages'"),
        (_changed(buffers=(Buffer("pages", 1292, 12920, -1),)), "buffer 'pages'"),
        (_k(dtype="complex64"), "dtype"),
        (_k(shape=()), "shape"),
        (_k(shape=(-8, -16)), "shape"),
        (_k(size_bytes=1023), "shape"),
        (_k(buffer=1), "buffer 1 is outside"),
        (_k(buffer=-1), "buffer -1 is outside"),
        (_k(offset=-1), "leave"),
        (_k(offset=1), "leave"),
        (PoolLayout((PAGES,), (_K, _K), (_BUFFER,)), "component '0.k' is named twice"),
        (_k(name=_LONG), "over the limit of 256"),
        (_of(_K, msgspec.structs.replace(_BUFFER, name=_LONG)), "over the limit of 256"),
        (_of(_BLOB, tag=_LONG), "tag of 257 characters"),
        (_changed(fingerprint=_LONG), "fingerprint of 257 characters"),
        (_of(_BLOB), "unknown dtype 'opaque'"),
        (_of(_K, tag="tag"), "dtype 'bfloat16'"),
        (_of(msgspec.structs.replace(_BLOB, shape=(512,)), tag="tag"), r"shape \(512,\)"),
        (_of(Component("b", "opaque", (0,), 0, 0, 0), tag="tag"), r"shape \(0,\)"),
    ],
)
def test_a_descriptor_that_does_not_hold_is_refused(layout: PoolLayout, names: str) -> None:
    with pytest.raises(LayoutError, match=names):
        layout.check()


@pytest.mark.parametrize(
    ("page_size", "num_pages", "dtype"), [(0, 1, "uint8"), (1, 0, "uint8"), (1, 1, "float7")]
)
def test_nonsense_is_not_laid_out(page_size: int, num_pages: int, dtype: str) -> None:
    with pytest.raises(LayoutError):
        build_layout([("k", dtype, (1,))], page_size=page_size, num_pages=num_pages)


@pytest.mark.parametrize("wrong", [1.5, "16", None])
def test_sizes_are_integers(wrong: object) -> None:
    with pytest.raises(LayoutError, match=r"page_size .* is not an integer"):
        build_layout(STREAMS, page_size=wrong, num_pages=1)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"num_pages .* is not an integer"):
        opaque_layout({"blob": 8}, page_size=1, num_pages=wrong, tag="x")  # type: ignore[arg-type]


def test_sizes_from_numpy_survive_the_wire() -> None:
    layout = build_layout(
        [("k", "uint8", (np.int16(3),))], page_size=np.int64(4), num_pages=np.int32(10)
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=PoolLayout) == layout


def test_an_order_nobody_knows_is_refused() -> None:
    with pytest.raises(LayoutError, match="order 'token_first' is neither"):
        build_layout(STREAMS, page_size=1, num_pages=1, order=cast(Order, "token_first"))


def opaque(streams: dict[str, int], tag: str = "flash-attn HND", page_size: int = 16) -> PoolLayout:
    return opaque_layout(streams, page_size=page_size, num_pages=10, tag=tag)


def test_opaque_pools_fit_when_tag_page_size_and_bytes_agree() -> None:
    whole, layers = opaque({"blob": 1001}), opaque({"layer 0": 500, "layer 1": 501})
    # Which needs not be a multiple of the page size.
    assert whole.page_bytes == layers.page_bytes == 1001
    assert differences(whole, layers) == differences(layers, whole) == []
    assert differences(whole, opaque({"blob": 1001}, tag="flash-attn NHD")) == [
        "page tag: prefill 'flash-attn HND', decode 'flash-attn NHD'"
    ]
    assert differences(whole, opaque({"blob": 1000}, page_size=8)) == [
        "page_size: prefill 16, decode 8 (only the engine knows where the tokens lie in a page "
        "with a tag)",
        "bytes per page: prefill 1001, decode 1000",
    ]
    typed = build_layout([("blob", "uint8", (1,))], page_size=16, num_pages=10)
    assert differences(whole, typed)[0] == "page tag: prefill 'flash-attn HND', decode ''"


def test_opaque_streams_of_one_name_lie_at_one_place() -> None:
    found = differences(opaque({"k": 8, "v": 8}), opaque({"v": 8, "k": 8}))
    assert found[0] == "k: bytes 0..8 of a page at prefill, 8..16 at decode"


def test_an_opaque_pool_needs_a_tag() -> None:
    with pytest.raises(LayoutError, match="tag is empty"):
        opaque({"blob": 8}, tag="")


def test_fingerprints_are_compared() -> None:
    ours, theirs = (
        build_layout(STREAMS, page_size=4, num_pages=10, fingerprint=f) for f in ("llama tp1", "")
    )
    assert differences(ours, ours) == []
    assert differences(ours, theirs) == ["model fingerprint: prefill 'llama tp1', decode ''"]


def test_a_peer_that_knows_neither_tag_nor_fingerprint_is_understood() -> None:
    layout = build_layout(STREAMS, page_size=4, num_pages=10)
    old = msgspec.msgpack.encode(msgspec.msgpack.decode(msgspec.msgpack.encode(layout))[:3])
    assert msgspec.msgpack.decode(old, type=PoolLayout) == layout


def test_differences_say_what_differs() -> None:
    ours = build_layout([*STREAMS, ("only.here", "uint8", (1,))], page_size=4, num_pages=10)
    other = [
        ("0.k", "float16", (8, 16)),
        ("0.v", "bfloat16", (4, 4)),
        ("0.scale", "uint8", (3,)),
        ("x", "uint8", (1,)),
    ]
    theirs = build_layout(other, page_size=8, num_pages=99)
    found = differences(ours, theirs)
    assert len(found) == 5
    for part in (
        "page_size: prefill 4, decode 8",
        "0.k dtype",
        "0.v shape",
        "here: only prefill",
        "x: only decode",
    ):
        assert any(part in line for line in found)


def test_differences_of_many_layers_are_summed_up() -> None:
    source, target = (
        build_layout([(f"{i}.k", dtype, (1,)) for i in range(36)], page_size=1, num_pages=1)
        for dtype in ("float32", "float16")
    )
    assert differences(source, target)[-2:] == [
        "4.k dtype: prefill float32, decode float16",
        "and 31 more",
    ]


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


@given(st.data(), st.sampled_from([60, 1 << 23, 1 << 31]))
def test_a_page_named_twice_is_found_wherever_it_is(data: st.DataObject, top: int) -> None:
    pages = data.draw(st.lists(st.integers(0, top - 1), min_size=1, max_size=60))
    array = np.array(pages, dtype=np.int32)
    assert names_twice(array, min(pages), max(pages)) == (len(set(pages)) < len(pages))


def test_a_large_page_list_is_checked_without_a_hash_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """`np.unique` took a second of prefill's event loop for the largest legal Bootstrap."""
    monkeypatch.setattr(np, "unique", None)
    pages = np.random.default_rng(1).permutation(1 << 16).astype(np.int32)
    assert (unpack_pages(pack_pages(pages), 1 << 16) == pages).all()
    with pytest.raises(LayoutError, match="twice"):
        unpack_pages(pack_pages(np.append(pages, pages[7])), 1 << 16)


# --- a user's own pages


def layout(num_rows: int) -> PoolLayout:
    kinds = [
        StateKind("k", "float32", (2,)),
        *([StateKind("s", "float32", (4,), ROW)] if num_rows else []),
    ]
    return build_layout(kinds, page_size=4, num_pages=8, num_rows=num_rows)


@pytest.mark.parametrize(
    ("num_rows", "pages", "wanted", "text"),
    [
        (0, [0, 7, 7], (3,), "a page is given twice"),
        (0, [0, 7], (3,), "2 pages given, its prompt needs 3 pages"),
        (0, [0, 8], (2,), r"page 8 is outside 0\.\.7"),
        (
            2,
            [0, 8],
            (2, 1),
            (
                r"1 pages and 1 row given, its prompt needs 2 pages and 1 row \(row n of 'rows' "
                r"is given as 8 \+ n\)"
            ),
        ),
        (2, [0, 1, 10], (2, 1), r"page 10 is outside 0\.\.9"),
    ],
)
def test_what_is_refused(
    num_rows: int, pages: list[int], wanted: tuple[int, ...], text: str
) -> None:
    with pytest.raises(MisuseError, match=f"^room 7: {text}$"):
        own_pages(pages, layout(num_rows), 7, wanted)


def test_the_places_of_a_space_are_given_together() -> None:
    with pytest.raises(LayoutError, match="place 1 of space 'pages' follows place 8 of space 'row"):
        own_pages([0, 8, 1], layout(2), 7, (2, 1))


@pytest.mark.parametrize(
    ("num_rows", "pages", "wanted"),
    [(0, [], (0,)), (0, [7, 0], (2,)), (2, [8], (0, 1)), (2, [7, 0, 9], (2, 1))],
)
def test_what_is_taken(num_rows: int, pages: list[int], wanted: tuple[int, ...]) -> None:
    assert own_pages(pages, layout(num_rows), 7, wanted).tolist() == pages
