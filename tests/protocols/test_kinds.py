"""State kinds: what is kept per token slot, per page and per request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.differences import differences
from kvflow.protocols.pages.kinds import PAGE, ROW, SLOT, StateKind
from kvflow.protocols.pages.layout import PoolLayout, build_layout, opaque_layout
from kvflow.protocols.pages.plan import Pairing
from kvflow.protocols.pages.spaces import MAX_ROWS, Space

HYBRID = [
    StateKind("0.k", "bfloat16", (2, 8)),
    StateKind("0.index_k", "float8_e4m3fn", (32,)),
    StateKind("0.index_scale", "float32", (1,)),
    StateKind("0.page_scale", "float32", (2,), PAGE),
    StateKind("1.conv", "bfloat16", (16, 4), ROW),
    StateKind("1.ssm", "float32", (4, 8, 2), ROW),
]


def hybrid(**changes: Any) -> PoolLayout:
    return build_layout(HYBRID, **{"page_size": 4, "num_pages": 6, "num_rows": 3, **changes})


def test_each_unit_has_its_own_bytes() -> None:
    layout = hybrid()
    assert {c.name: (c.unit, c.size_bytes) for c in layout.components} == {
        "0.k": (SLOT, 2 * 8 * 2 * 4),
        "0.index_k": (SLOT, 32 * 4),
        "0.index_scale": (SLOT, 4 * 4),
        "0.page_scale": (PAGE, 8),
        "1.conv": (ROW, 128),
        "1.ssm": (ROW, 256),
    }
    assert (layout.page_bytes, layout.row_bytes) == (280, 384)
    assert [(b.name, layout.unit_of(b), b.size_bytes) for b in layout.buffers] == [
        ("pages", PAGE, 1680),
        ("rows", ROW, 1152),
    ]
    by_layer = hybrid(order="layer_first")
    assert [by_layer.unit_of(b) for b in by_layer.buffers] == [PAGE] * 4 + [ROW] * 2
    assert by_layer.size_bytes == layout.size_bytes == 6 * 280 + 3 * 384
    assert differences(layout, by_layer) == []


def test_a_model_of_state_rows_alone_has_pages_without_bytes() -> None:
    layout = build_layout(HYBRID[4:], page_size=4, num_pages=6, num_rows=3)
    assert (layout.page_bytes, layout.row_bytes) == (0, 384)
    pages, rows = np.arange(3, dtype=np.int32), np.array([2, 0], dtype=np.int32)
    both = layout.numbered((pages, rows))
    plan = Pairing(layout, layout).blocks(both, both, max_block_bytes=1 << 20)
    assert plan.total_bytes == 2 * 384


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        (
            StateKind("x", "uint8", (1,), "token"),
            {},
            "'x': unknown unit 'token'; use slot, page, row",
        ),
        (StateKind("x", "uint8", (0,), ROW), {}, "'x': shape"),
        (StateKind("0.k", "uint8", (4,), ROW), {}, "'0.k' is named twice"),
        (StateKind("x", "uint8", (4,), format="f" * 300), {}, "of 300 characters"),
        (
            StateKind("x", "uint8", (4,)),
            {"num_rows": 0},
            "0 rows: a pool with components of the unit 'row'",
        ),
        (StateKind("x", "uint8", (4,)), {"num_rows": -1}, "num_rows -1"),
        (StateKind("x", "uint8", (4,)), {"num_rows": MAX_ROWS + 1}, "num_rows"),
        (StateKind("x", "uint8", (4,)), {"num_rows": 1.5}, "num_rows 1.5 is not an integer"),
    ],
)
def test_a_bad_kind_is_refused(kind: StateKind, changes: dict[str, object], text: str) -> None:
    given = {"page_size": 4, "num_pages": 6, "num_rows": 3, **changes}
    with pytest.raises(LayoutError, match=text):
        build_layout([*HYBRID, kind], **given)  # type: ignore[arg-type]


def _with(layout: PoolLayout, **fields: object) -> PoolLayout:
    return msgspec.structs.replace(layout, **fields)


def _buffer(layout: PoolLayout, which: int, **fields: object) -> PoolLayout:
    buffers = list(layout.buffers)
    buffers[which] = msgspec.structs.replace(buffers[which], **fields)
    return _with(layout, buffers=tuple(buffers))


def _component(layout: PoolLayout, which: int, **fields: object) -> PoolLayout:
    components = list(layout.components)
    components[which] = msgspec.structs.replace(components[which], **fields)
    return _with(layout, components=tuple(components))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            lambda p: _with(p, spaces=(p.spaces[0], Space("rows", 4, 0))),
            "'rows': 1152 bytes do not hold 4 rows of 384",
        ),
        (lambda p: _buffer(p, 1, space=0), "do not hold 6 pages of 384"),
        (lambda p: _buffer(p, 1, space=2), r"buffer 'rows': space 2 is outside 0\.\.1"),
        (lambda p: _component(p, 0, buffer=1), "'0.k' is in space 0, its buffer 'rows' in 1"),
        (lambda p: _component(p, 5, buffer=0), "'1.ssm' is in space 1, its buffer 'pages' in 0"),
        (lambda p: _component(p, 0, unit=ROW), "its unit is 'row', that of its space 'pages'"),
        (lambda p: _component(p, 5, unit=PAGE), "its unit is 'page', that of its space 'rows'"),
        (lambda p: _component(p, 5, offset=129), "buffer's row"),
    ],
)
def test_what_a_peer_says_of_rows_is_checked(
    changed: Callable[[PoolLayout], PoolLayout], text: str
) -> None:
    with pytest.raises(LayoutError, match=text):
        changed(hybrid()).check()


def test_rows_and_formats_are_compared() -> None:
    changed = [k._replace(format="nvfp4") if k.name == "0.index_scale" else k for k in HYBRID[:5]]
    changed[3] = changed[3]._replace(unit=SLOT)
    other = build_layout(
        [*changed, StateKind("1.ssm", "bfloat16", (4, 8, 2), ROW)],
        page_size=4,
        num_pages=6,
        num_rows=9,
    )
    assert differences(hybrid(), other, ("snapshot", "pool")) == [
        "0.index_scale format: snapshot '', pool 'nvfp4'",
        "0.page_scale unit: snapshot one per page, pool one per slot",
        "1.ssm dtype: snapshot float32, pool bfloat16",
    ]
    without = build_layout(HYBRID[:4], page_size=4, num_pages=6)
    assert differences(without, hybrid()) == [
        "spaces: prefill 'pages', decode 'pages, rows'",
        "1.conv: only decode has it",
        "1.ssm: only decode has it",
    ]
    assert differences(hybrid(num_rows=7, num_pages=1), hybrid()) == []


def test_rows_of_opaque_pools_are_compared_as_their_pages_are() -> None:
    def opaque(**rows: int) -> PoolLayout:
        return opaque_layout(
            {"kv": 100}, page_size=4, num_pages=2, tag="t", rows=rows, num_rows=2 if rows else 0
        )

    assert differences(opaque(conv=60, ssm=40), opaque(state=100)) == []
    assert differences(opaque(conv=60), opaque()) == [
        "spaces: prefill 'pages, rows', decode 'pages'"
    ]
    assert differences(opaque(conv=60), opaque(conv=50)) == ["bytes per row: prefill 60, decode 50"]
    assert differences(opaque(conv=60, ssm=40), opaque(ssm=40, conv=60))[0] == (
        "conv: bytes 0..60 of a row at prefill, 40..100 at decode"
    )
    both = np.array([1, 3], dtype=np.int32)  # page 1 and row 1
    pairing = Pairing(opaque(conv=60, ssm=40), opaque(state=100))
    plan = pairing.blocks(both, both, max_block_bytes=1 << 20)
    assert plan.sizes.tolist() == [100, 100]


class ShorterLayout(msgspec.Struct, frozen=True, array_like=True):
    """`PoolLayout` as a peer reads it that knows fewer elements: it leaves the others out."""

    spaces: tuple[tuple[object, ...], ...]
    components: tuple[tuple[object, ...], ...]
    buffers: tuple[tuple[object, ...], ...]
    tag: str = ""
    fingerprint: str = ""


def test_a_peer_that_knows_fewer_elements_of_a_layout_reads_a_pool_of_one_space() -> None:
    layout = build_layout(HYBRID[:2], page_size=4, num_pages=6, fingerprint="m")
    packed = msgspec.msgpack.encode(layout)
    before = msgspec.msgpack.decode(packed, type=ShorterLayout)
    assert [s[:3] for s in before.spaces] == [("pages", 6, 4)] and before.fingerprint == "m"
    assert [c[:6] for c in before.components] == [
        ("0.k", "bfloat16", [2, 8], 0, 0, 128),
        ("0.index_k", "float8_e4m3fn", [32], 0, 128, 128),
    ]
    assert [b[:4] for b in before.buffers] == [("pages", 256, 1536, 0)]
    shortened = ShorterLayout(
        tuple(s[:3] for s in before.spaces),
        tuple(c[:6] for c in before.components),
        tuple(b[:4] for b in before.buffers),
        "",
        "m",
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(shortened), type=PoolLayout) == layout
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(hybrid()), type=PoolLayout) == hybrid()
