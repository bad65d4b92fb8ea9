"""The checksum of what one rank sent is the same over its pool and over decode's."""

from __future__ import annotations

import numpy as np
import pytest
from xxhash import xxh3_64

from kvflow.memory import gathered
from kvflow.memory.checksum import PoolSums
from kvflow.memory.pool import PagedPool
from kvflow.protocols.pages.coverage import Served, served_of
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.protocols.pages.layout import Order, PageIndices, build_layout

HEADS = [StateKind(name, "uint8", (4, 2)) for name in ("0.k", "0.v")]
LATENT, STATE = StateKind("1.latent", "uint8", (3,)), StateKind("2.state", "uint8", (4, 3), ROW)
HALF = [kind._replace(shape=(2, 2), start=2, whole=4) for kind in HEADS]  # of a rank: heads 2 and 3
STATE_HALF = STATE._replace(shape=(2, 3), start=2, whole=4)
COPIES = [LATENT._replace(replica=copy, replicas=2) for copy in range(2)]

# What a rank has, and what decode has.
CASES: dict[str, tuple[list[StateKind], list[StateKind]]] = {
    "slices": (HALF, HEADS),
    "slices beside others": ([*HALF, LATENT], [*HEADS, LATENT]),
    "copies": ([LATENT], COPIES),
    "one of two names in copies": ([*HEADS, LATENT], [*HEADS, *COPIES]),
    "rows": ([STATE], [STATE]),
    "slices of rows": ([STATE_HALF], [STATE]),
    "slices of pages and rows": ([*HALF, STATE_HALF], [*HEADS, STATE]),
}


def indices(*numbers: int) -> PageIndices:
    return np.array(numbers, dtype=np.int32)


def filled(kinds: list[StateKind], order: Order) -> PagedPool:
    """Each byte depends on its name, place, slot and entry, as both pools count entries."""
    rows = 3 if any(kind.unit == ROW for kind in kinds) else 0
    pool = PagedPool.allocate(
        build_layout(kinds, page_size=2, num_pages=5, num_rows=rows, order=order), shared=False
    )
    for c in pool.layout.components:
        array = pool.array(c.name, start=c.start, replica=c.replica)
        whole = np.random.default_rng(sum(c.name.encode())).integers(
            0, 256, (5, 2, 4, 3), dtype=np.uint8
        )
        if c.name == LATENT.name:
            array[...] = whole[:, :, 0]
        elif c.unit == ROW:
            array[...] = whole[: len(array), 0, c.start : c.end]
        else:
            array[...] = whole[:, :, c.start : c.end, :2]
    return pool


def summed(pool: PagedPool, served: tuple[Served, ...] | None) -> bytes:
    layout = pool.layout
    places = tuple(indices(2, 0) if s.in_rows else indices(4, 1, 2) for s in layout.spaces)
    return PoolSums(layout).sum(places, served, lambda: False)


@pytest.mark.parametrize("orders", [("page_first", "layer_first"), ("layer_first", "page_first")])
@pytest.mark.parametrize("batch_bytes", [1, 1 << 20])
@pytest.mark.parametrize("case", CASES)
def test_both_ends_sum_alike(
    case: str, batch_bytes: int, orders: tuple[Order, Order], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "_BATCH_BYTES", batch_bytes)
    rank, decode = (filled(kinds, order) for kinds, order in zip(CASES[case], orders, strict=True))
    served = served_of(rank.layout)
    sent = summed(rank, None)
    assert len(sent) == 8 and summed(decode, served) == sent
    for c in decode.layout.components:  # a byte of the last place that was sent
        array, at = (
            decode.array(c.name, start=c.start, replica=c.replica),
            (2, 3) if c.unit == ROW else (2, 1),
        )
        array[at] ^= 1
        assert summed(decode, served) != sent, c.label
        array[at] ^= 1
    assert summed(decode, served) == sent


def test_what_serves_nothing_is_the_sum_of_nothing() -> None:
    decode = filled(HEADS, "page_first")
    assert summed(decode, ()) == xxh3_64().digest()


def test_a_cancelled_sum_is_none() -> None:
    decode = filled(HEADS, "page_first")
    half = served_of(filled(HALF, "page_first").layout)
    assert PoolSums(decode.layout).sum((indices(1),), half, lambda: True) == b""
