"""One foreign word in a page is seen, and counted once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvflow.bench.canary import CANARY, CanaryPool
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.layout import Order, build_layout

PAGES = np.array([9, 2, 30, 31, *range(10, 28)], dtype=np.int32)
STREAMS: list[tuple[str, str, tuple[int, ...]]] = [("k", "uint8", (32,)), ("v", "uint8", (16,))]


def pool_of(order: Order, page_size: int = 4) -> PagedPool:
    return PagedPool.allocate(build_layout(STREAMS, page_size=page_size, num_pages=32, order=order))


@pytest.fixture
def pool() -> Iterator[PagedPool]:
    made = pool_of("page_first")
    yield made
    made.close()


@pytest.mark.parametrize("whole", [False, True])
def test_what_nobody_touched_is_clean(pool: PagedPool, whole: bool) -> None:
    canary = CanaryPool(pool)
    canary.mark(PAGES, whole=True)
    assert canary.foreign_bytes(PAGES, whole=whole).tolist() == [0] * len(PAGES)
    assert canary.marks_per_page == 2 * len(STREAMS)


@pytest.mark.parametrize(
    ("stream", "slot", "byte", "marked"),
    [("k", 0, 3, True), ("k", 3, 31, True), ("v", 3, 15, True), ("k", 1, 5, False)],
)
def test_a_foreign_byte_is_seen(
    pool: PagedPool, stream: str, slot: int, byte: int, marked: bool
) -> None:
    canary = CanaryPool(pool)
    canary.mark(PAGES, whole=True)
    pool.tensor(stream)[30, slot, byte] = 1
    expected = [int(page == 30) for page in PAGES]
    assert canary.foreign_bytes(PAGES, whole=True).tolist() == expected
    assert canary.foreign_bytes(PAGES).tolist() == (expected if marked else [0] * len(PAGES))


def test_marks_alone_leave_the_rest(pool: PagedPool) -> None:
    canary = CanaryPool(pool)
    canary.fill()
    canary.mark(PAGES)
    inside = pool.layout.page_bytes - canary.marks_per_page * CANARY.nbytes
    assert canary.foreign_bytes(PAGES, whole=True).tolist() == [inside] * len(PAGES)
    assert not canary.foreign_bytes(PAGES).any()


def test_the_part_that_moved(pool: PagedPool) -> None:
    canary = CanaryPool(pool)
    canary.fill()
    assert canary.moved(PAGES) == 1.0
    canary.mark(PAGES[: len(PAGES) // 2])
    assert canary.moved(PAGES) == 0.5


@pytest.mark.parametrize(("order", "page_size"), [("layer_first", 4), ("page_first", 1)])
def test_pools_it_cannot_watch_are_refused(order: Order, page_size: int) -> None:
    streams: list[tuple[str, str, tuple[int, ...]]] = [("k", "uint8", (36,)), ("v", "uint8", (20,))]
    pool = PagedPool.allocate(build_layout(streams, page_size=page_size, num_pages=2, order=order))
    with pytest.raises(MisuseError):
        CanaryPool(pool)
    pool.close()
