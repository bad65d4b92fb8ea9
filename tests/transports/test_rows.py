"""Rows travel with pages in one write, through every plan."""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import numpy as np
import pytest

from kvflow.memory.pool import PagedPool
from kvflow.memory.staging import Staging
from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.layout import Order, Places
from kvflow.protocols.ports import DataPlane, WriteOutcome
from kvflow.transports.data import staged
from kvflow.transports.data.fake import FakeNetwork, FakePlane
from kvflow.transports.data.local import LocalPlane
from kvflow.transports.data.route import BlockQueue, Planner
from kvflow.transports.data.staged import StagedPlane
from tests.memory.kinds import (
    KINDS,
    check_restored,
    contents,
    has_rows,
    layout_of,
    names_of,
    places_at,
)
from tests.memory.test_snapshot import forgetting
from tests.transports.peer_process import end_of, pages

EVERY_NAME = [(kind, name) for kind in KINDS for name in names_of(kind)]


@asynccontextmanager
async def planes(
    backend: str, a: PagedPool, b: PagedPool
) -> AsyncIterator[tuple[DataPlane, DataPlane]]:
    """A source and a target; what "staged" copies goes a page a slice."""
    network, staging = FakeNetwork(), Staging(a) if backend == "staged" else None
    source: DataPlane = LocalPlane(staging.host.segment if staging else a.segment)
    target: DataPlane = LocalPlane(b.segment)
    if backend == "fake":
        source, target = FakePlane(network), FakePlane(network)
    elif staging:
        source = StagedPlane(source, staging)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(staged, "SLICE_BYTES", 1)
        yield source, target
    for plane in (source, target):
        await plane.close()
    if staging:
        assert staging.host.places.at_rest()
        staging.close()


def pair_of(kind: str, orders: tuple[Order, Order], shared: bool) -> tuple[PagedPool, PagedPool]:
    layouts = [
        layout_of(kind, 4, count, 5, order) for count, order in zip((8, 9), orders, strict=True)
    ]
    a, b = (PagedPool.allocate(layout, shared=shared) for layout in layouts)
    for seed, pool in enumerate((a, b)):
        for name in names_of(kind):
            view = pool.array(name)
            random = np.random.default_rng([seed, len(name)]).integers(
                0, 256, view.nbytes, dtype=np.uint8
            )
            view[:] = random.view(view.dtype).reshape(view.shape)
    return a, b


def moved_places(kind: str) -> tuple[Places, Places]:
    return (
        places_at(kind, pages(7, 0, 3), pages(4, 1)),
        places_at(kind, pages(1, 2, 8), pages(0, 3)),
    )


ALL_ORDERS = [
    ("page_first", "page_first"),
    ("page_first", "layer_first"),
    ("layer_first", "page_first"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["local", "staged", "fake"])
@pytest.mark.parametrize("orders", ALL_ORDERS)
async def test_pages_and_rows_of_every_kind_arrive(
    kind: str, backend: str, orders: tuple[Order, Order]
) -> None:
    a, b = pair_of(kind, orders, shared=True)
    here, there = moved_places(kind)
    before, was = contents(kind, a), contents(kind, b)
    moved_bytes = a.layout.room_bytes(tuple(own.size for own in here))
    ends = [pages(pool.layout.num_places) for pool in (a, b)]
    wrong = [
        (ends[0], pages(8), "outside 0"),
        (pages(7), ends[1], "outside 0"),
        (pages(), pages(), "no pages"),
    ]
    if has_rows(kind):  # 8 and 9 pages
        unit, name = ("page", "window") if kind == "windows" else ("row", "rows")
        onto = f"a {unit} of space '{name}' is written onto a page of space 'pages'"
        wrong += [(pages(8), pages(8), "lists differ"), (pages(8, 0), pages(0, 9), onto)]
    async with planes(backend, a, b) as (source, target):
        source.export(a.layout)
        route = await source.connect(*target.export(b.layout))
        write = route.write(a.layout.numbered(here), b.layout.numbered(there))
        assert await end_of(write) is WriteOutcome.LANDED
        assert write.landed_bytes == write.total_bytes == moved_bytes
        check_restored(kind, before, here, was, there, b)
        for sources, targets, text in wrong:
            with pytest.raises(LayoutError, match=text):
                route.write(sources, targets)


async def test_pages_of_a_model_of_rows_alone_land_without_a_byte() -> None:
    a, b = pair_of("mamba", ("page_first", "page_first"), shared=True)
    async with planes("local", a, b) as (source, target):
        source.export(a.layout)
        write = (await source.connect(*target.export(b.layout))).write(pages(1, 2), pages(0, 1))
        assert await end_of(write) is WriteOutcome.LANDED and write.total_bytes == 0


@pytest.mark.parametrize(("kind", "name"), EVERY_NAME)
def test_a_plan_that_forgets_a_name_is_found(kind: str, name: str) -> None:
    for lost in ("", name):
        a, b = pair_of(kind, ("page_first", "page_first"), shared=False)
        with forgetting(lost) if lost else nullcontext():
            planner = Planner(a.layout, b.layout, max_block_bytes=100)
        here, there = moved_places(kind)
        before, was = contents(kind, a), contents(kind, b)
        for start, end, size in zip(
            *planner.blocks(a.layout.numbered(here), b.layout.numbered(there)), strict=True
        ):
            ctypes.memmove(int(end), int(start), int(size))
        with pytest.raises(AssertionError, match=name) if lost else nullcontext():
            check_restored(kind, before, here, was, there, b)


@pytest.mark.parametrize(("max_bytes", "max_blocks"), [(0, 8), (-1, 8), (1 << 20, 0)])
def test_a_limit_of_nothing_gives_no_block(max_bytes: int, max_blocks: int) -> None:
    a, b = pair_of(next(iter(KINDS)), ("page_first", "layer_first"), shared=False)
    blocks = BlockQueue(Planner(a.layout, b.layout, max_block_bytes=100), pages(1, 3), pages(2, 5))
    whole = blocks.left_bytes
    assert blocks.take(max_bytes, max_blocks) == ([], [], [])
    assert blocks.left_bytes == whole == sum(blocks.take(1 << 20, 1 << 20).sizes)
    assert blocks.take(1 << 20, 1 << 20) == ([], [], [])
