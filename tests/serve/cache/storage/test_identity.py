"""Only what reads the same bytes the same way has the same identity."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from kvflow.memory.copies import host_layout
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError, MisuseError
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.protocols.pages.layout import PoolLayout, Space, build_layout, opaque_layout
from kvflow.serve.cache.storage.identity import PageViews, identity_of

K, V = StateKind("0.k", "bfloat16", (2, 8)), StateKind("0.v", "bfloat16", (2, 8))
STATE = StateKind("0.ssm", "float32", (4,), ROW)


def layout(
    *kinds: StateKind,
    page_size: int = 4,
    num_pages: int = 3,
    fingerprint: str = "model",
    order: str = "page_first",
) -> PoolLayout:
    rows = int(any(kind.unit == ROW for kind in kinds))
    return build_layout(
        kinds,
        page_size=page_size,
        num_pages=num_pages,
        num_rows=rows,
        fingerprint=fingerprint,
        order=order,  # type: ignore[arg-type]
    )


def test_the_number_of_pages_and_the_order_of_the_device_pool_make_no_difference() -> None:
    first = identity_of(layout(K, V))
    assert len(first) == 32
    assert identity_of(layout(K, V, num_pages=9)) == first
    assert identity_of(host_layout(layout(K, V, order="layer_first"), 1 << 20)) == first
    assert identity_of(layout(K, V, STATE)) == first  # of its pages


def test_it_stays_what_it_is_from_release_to_release() -> None:
    """Another identity loses what stores hold: change it with `_VERSION` alone."""
    assert (
        identity_of(layout(K, V)).hex()
        == "6894ea6b1ab7011af97cebc70c7a5cd1abcb8aa54f9a4d1faca157267a74f5fd"
    )
    assert (
        identity_of(layout(K, V, STATE), 1).hex()
        == "b21ba599a74aae6e28b02a31db4fb3669a5485771eb512091eeca9bbac6db3fc"
    )


@pytest.mark.parametrize(
    "other",
    [
        layout(K, V, fingerprint="another model"),
        layout(K, V, page_size=8),
        layout(V, K),
        layout(K),
        layout(K, V._replace(dtype="float16")),
        layout(K, V._replace(shape=(4, 4))),
        layout(K, V._replace(format="transposed")),
        layout(K._replace(start=2, whole=4), V._replace(start=2, whole=4)),
        opaque_layout(
            {"0.k": 128, "0.v": 128}, page_size=4, num_pages=3, tag="x", fingerprint="model"
        ),
    ],
)
def test_whatever_reads_other_bytes_is_another(other: PoolLayout) -> None:
    assert identity_of(other) != identity_of(layout(K, V))


def test_rows_and_pages_differ() -> None:
    both = layout(K, V, STATE)
    assert identity_of(both, 1) != identity_of(both)
    assert identity_of(both, 1) == identity_of(layout(STATE, K), 1)


def test_pages_of_two_spaces_differ_by_name_page_size_and_window() -> None:
    def identity(space: Space, kind: StateKind = V) -> bytes:
        kinds = K, kind._replace(space=space.name)
        made = build_layout(kinds, spaces=[Space("all", 3, 4), space], fingerprint="model")
        return identity_of(made, 1)

    first = identity(Space("window", 3, 4, 8))
    assert identity(Space("window", 9, 4, 8)) == first
    assert identity_of(layout(V)) != first
    others = Space("last", 3, 4, 8), Space("window", 3, 8, 8), Space("window", 3, 4, 4)
    assert len({first, *map(identity, others)}) == 4
    assert identity(Space("window", 3, 4, 8), V._replace(dtype="float16")) != first


def test_a_store_must_know_the_model() -> None:
    with pytest.raises(MisuseError, match="fingerprint of the pool is empty"):
        identity_of(layout(K, V, fingerprint=""))


def test_a_page_in_pieces_is_refused() -> None:
    with pytest.raises(LayoutError, match="has it in 2 buffers"):
        identity_of(layout(K, V, order="layer_first"))
    pool = PagedPool.allocate(layout(K, V, order="layer_first"), shared=False)
    with pytest.raises(LayoutError, match="has it in 2 buffers"):
        PageViews(pool)
    pool.close()


def test_views_are_the_bytes_of_the_pool_and_outlive_it() -> None:
    pool = PagedPool.allocate(layout(K, V), shared=False)
    views = PageViews(pool)
    assert views.value_bytes == pool.layout.page_bytes == 256
    pool.array("0.k")[1] = 7
    page = views[1]
    assert page.nbytes == 256
    assert np.frombuffer(page, dtype=np.uint16)[:64].tolist() == [7] * 64
    page[0] = 9
    assert pool.array("0.k")[1].flat[0] == 9
    for index in (-1, 3):
        with pytest.raises(LayoutError, match=rf"page {index} is outside 0\.\.2"):
            views[index]
    pool.close()
    del pool, views
    gc.collect()
    assert page[0] == 9
