"""Pools of every kind of state, written down apart from the layouts that are tested."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvflow.memory.pool import PagedPool
from kvflow.protocols.pages.kinds import PAGE, ROW, StateKind
from kvflow.protocols.pages.layout import (
    Order,
    PageIndices,
    Places,
    PoolLayout,
    Space,
    build_layout,
    opaque_layout,
)

Bytes = NDArray[np.uint8]

OPAQUE_PAGES, OPAQUE_ROWS = {"blob": 640, "scales": 64}, {"state": 96, "conv": 32}
KINDS: dict[str, list[StateKind]] = {
    "mha": [StateKind("0.k", "bfloat16", (2, 4)), StateKind("0.v", "bfloat16", (2, 4))],
    "mla": [StateKind("0.latent", "float16", (1, 16)), StateKind("0.rope", "float16", (1, 4))],
    "indexer": [
        StateKind("0.latent", "bfloat16", (1, 16)),
        StateKind("0.index_k", "float8_e4m3fn", (32,), format="ue8m0 scaled"),
        StateKind("0.index_scale", "float32", (1,)),
    ],
    "fp8": [
        StateKind("0.k", "float8_e4m3fn", (2, 8)),
        StateKind("0.v", "float8_e5m2", (2, 8)),
        StateKind("0.scale", "float32", (2,), PAGE),
    ],
    "fp4": [
        StateKind("0.k", "uint8", (2, 4), format="nvfp4"),
        StateKind("0.k_scale", "float8_e4m3fn", (4,), format="swizzled"),
        StateKind("0.summary", "float16", (8,), PAGE),
    ],
    "hybrid": [
        StateKind("0.k", "bfloat16", (2, 4)),
        StateKind("0.v", "bfloat16", (2, 4)),
        StateKind("1.conv", "bfloat16", (24, 4), ROW),
        StateKind("1.ssm", "float32", (4, 8, 2), ROW),
        StateKind("2.linear", "float32", (2, 4, 4), ROW),
    ],
    "mamba": [
        StateKind("0.conv", "float32", (24, 4), ROW),
        StateKind("0.ssm", "float32", (4, 8, 2), ROW),
    ],
    "draft": [
        StateKind(f"{model}.{x}", "bfloat16", (1, 4)) for model in ("0", "draft") for x in "kv"
    ],
    # Three spaces, whose streams are not in the order of the spaces.
    "windows": [
        StateKind("1.k", "bfloat16", (1, 4), space="window"),
        StateKind("0.k", "bfloat16", (2, 4)),
        StateKind("2.conv", "float32", (6, 4), ROW),
        StateKind("1.scale", "float32", (3,), PAGE, space="window"),
        StateKind("0.v", "bfloat16", (2, 4)),
        StateKind("2.ssm", "float32", (4, 8), ROW),
    ],
    "opaque": [],
}
NAMES = {"windows": ("pages", "window", "rows")}


def names_of(kind: str) -> list[str]:
    return [k.name for k in KINDS[kind]] or [*OPAQUE_PAGES, *OPAQUE_ROWS]


def layout_of(kind: str, page_size: int, num_pages: int, num_rows: int, order: Order) -> PoolLayout:
    sizes: dict[str, Any] = {
        "page_size": page_size,
        "num_pages": num_pages,
        "order": order,
        "fingerprint": kind,
    }
    if kind == "opaque":
        return opaque_layout(OPAQUE_PAGES, tag="t", rows=OPAQUE_ROWS, num_rows=num_rows, **sizes)
    if kind == "windows":
        spaces = (
            Space("pages", num_pages, page_size),
            Space("window", num_pages + 2, 2 * page_size, 3 * page_size),
            Space("rows", num_rows, 0),
        )
        return build_layout(KINDS[kind], spaces=spaces, order=order, fingerprint=kind)
    has_rows = any(k.unit == ROW for k in KINDS[kind])
    return build_layout(KINDS[kind], num_rows=num_rows if has_rows else 0, **sizes)


def space_of(kind: str, name: str) -> int:
    if kind == "opaque":
        return int(name in OPAQUE_ROWS)
    found = next(k for k in KINDS[kind] if k.name == name)
    spaces = NAMES.get(kind, ("pages", "rows"))
    return spaces.index(found.space or ("rows" if found.unit == ROW else "pages"))


def has_rows(kind: str) -> bool:
    return kind == "opaque" or any(k.unit == ROW for k in KINDS[kind])


def places_at(kind: str, pages: PageIndices, rows: PageIndices) -> Places:
    """Places of every space of a kind: in a window, the pages in reversed order."""
    found = [pages, pages[::-1].copy()] if kind == "windows" else [pages]
    return (*found, rows) if has_rows(kind) else tuple(found)


def take(pool: PagedPool, pages: int, rows: int, owner: Any) -> Places:
    """Take so many pages of every space with pages, and so many rows."""
    return tuple(
        allocator.take(rows if space.in_rows else pages, owner)
        for allocator, space in zip(pool.allocators, pool.layout.spaces, strict=True)
    )


def give_back(pool: PagedPool, places: Places, owner: Any) -> None:
    for allocator, own in zip(pool.allocators, places, strict=True):
        allocator.give_back(own, owner)


def overwrite(pool: PagedPool, seed: int) -> None:
    """A foreign request: new random bytes in all memory of every buffer."""
    assert pool.segment is None
    memory = np.frombuffer(pool._memory.memory, dtype=np.uint8)  # type: ignore[union-attr]
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.size, dtype=np.uint8)


def contents(kind: str, pool: PagedPool) -> dict[str, Bytes]:
    """Copies of all named buffers as bytes, [pages or rows, bytes of each]."""
    found = {}
    for name in names_of(kind):
        whole = np.ascontiguousarray(pool.array(name))
        found[name] = whole.view(np.uint8).reshape(whole.shape[0], -1).copy()
    return found


def check_restored(
    kind: str,
    before: dict[str, Bytes],
    source: Places,
    was: dict[str, Bytes],
    target: Places,
    pool: PagedPool,
) -> None:
    """`before` at `source` is in `pool` at `target`, and the rest of it is what it `was`."""
    after = contents(kind, pool)
    for name in names_of(kind):
        a, b = (places[space_of(kind, name)] for places in (source, target))
        assert (after[name][b] == before[name][a]).all(), f"{name} was not restored"
        others = np.setdiff1d(np.arange(len(after[name])), b)
        assert (after[name][others] == was[name][others]).all(), (
            f"{name} of a neighbour was touched"
        )
