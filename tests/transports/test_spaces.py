"""Places of three spaces travel in one write, byte for byte, over every plane that is here."""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvflow.memory import staging as memory_staging
from kvflow.memory.pool import PagedPool
from kvflow.memory.staging import Staging, prefill_bytes
from kvflow.protocols.errors import LayoutError, MisuseError, TransferError
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.protocols.pages.layout import Order, PageIndices, Places, Space, build_layout
from kvflow.protocols.ports import DataPlane, WriteOutcome
from kvflow.testing.pair import pair
from kvflow.transports.data import staged
from kvflow.transports.data.fake import FakeNetwork, FakePlane
from kvflow.transports.data.local import LocalPlane
from kvflow.transports.data.route import FEW_BLOCKS, Planner
from kvflow.transports.data.select import check_plane, open_plane
from kvflow.transports.data.staged import StagedPlane, StagedRoute
from tests.memory.kinds import layout_of
from tests.transports.peer_process import end_of, pages

HERE: Places = (pages(7, 0, 3), pages(9, 2, 3, 5), pages(4, 1))
THERE: Places = (pages(1, 2, 8), pages(0, 10, 4, 5), pages(0, 3))


def pool_of(num_pages: int, order: Order, seed: int, *, shared: bool = True) -> PagedPool:
    """Pages, pages of a window, and 5 rows, of random bytes."""
    pool = PagedPool.allocate(layout_of("windows", 4, num_pages, 5, order), shared=shared)
    for b in pool.layout.buffers:
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * b.size_bytes).from_address(b.address))
        memory[:] = np.random.default_rng([seed, b.size_bytes]).integers(
            0, 256, b.size_bytes, dtype=np.uint8
        )
    return pool


def every(pool: PagedPool) -> list[NDArray[np.uint8]]:
    """All bytes of all places, by space."""
    counts = pool.layout.counts
    return [pool.places_bytes(i, np.arange(n, dtype=np.int32)) for i, n in enumerate(counts)]


def check_landed(source: PagedPool, target: PagedPool, was: list[NDArray[np.uint8]]) -> None:
    """The target has the source's bytes at `THERE`, and elsewhere what it had before."""
    expected = [own.copy() for own in was]
    for space, (here, there) in enumerate(zip(HERE, THERE, strict=True)):
        expected[space][there] = source.places_bytes(space, here)
    for space, (found, wanted) in enumerate(zip(every(target), expected, strict=True)):
        assert np.array_equal(found, wanted), target.layout.spaces[space].name


@asynccontextmanager
async def planes(
    backend: str, source: PagedPool, target: PagedPool, staging_bytes: int = 0
) -> AsyncIterator[tuple[DataPlane, DataPlane]]:
    """A plane for each pool. What "staged" copies goes through staging of this size."""
    staging, network = None, FakeNetwork()
    try:
        check_plane("local" if backend in ("staged", "fake") else backend)
    except MisuseError as error:
        pytest.skip(str(error))
    made: tuple[DataPlane, DataPlane]
    if backend == "fake":
        made = FakePlane(network), FakePlane(network)
    elif backend == "staged":
        staging = Staging(source, staging_bytes)
        made = StagedPlane(LocalPlane(staging.host.segment), staging), LocalPlane(target.segment)
    else:
        made = (
            open_plane(backend, source.segment, None, "127.0.0.1"),
            open_plane(backend, target.segment, None, "127.0.0.1"),
        )
    try:
        yield made
    finally:
        for plane in made:
            await plane.close()
        if staging is not None:
            assert staging.host.places.at_rest()
            staging.close()


@pytest.mark.parametrize("backend", ["local", "staged", "fake", "mooncake", "nixl"])
@pytest.mark.parametrize(
    "orders",
    [("page_first", "page_first"), ("page_first", "layer_first"), ("layer_first", "page_first")],
    ids="-".join,
)
async def test_every_byte_of_three_spaces_arrives(
    backend: str, orders: tuple[Order, Order]
) -> None:
    a, b = pool_of(8, orders[0], 1), pool_of(9, orders[1], 2)
    # A staging of other sizes than the pool numbers its places in other ways.
    async with planes(backend, a, b, a.layout.size_bytes // 2) as (source, target):
        if isinstance(source, StagedPlane):
            counts, limits = source._staging.host.layout.counts, a.layout.counts
            assert all(n < most for n, most in zip(counts[:2], limits, strict=False))
        source.export(a.layout)
        route = await source.connect(*target.export(b.layout))
        was = every(b)
        write = route.write(a.layout.numbered(HERE), b.layout.numbered(THERE))
        assert await end_of(write) is WriteOutcome.LANDED
        assert write.landed_bytes == write.total_bytes == a.layout.room_bytes((3, 4, 2))
        check_landed(a, b, was)
        # One place of each space, as a room of a short prompt has.
        for space, base in enumerate(a.layout.bases):
            was, there = every(b), b.layout.bases[space] + 4
            assert await end_of(route.write(pages(base), pages(there))) is WriteOutcome.LANDED
            was[space][4] = a.places_bytes(space, pages(0))[0]
            assert all(map(np.array_equal, every(b), was))
        for sources, targets, text in (
            (pages(0, 8), pages(9, 0), "is written onto a"),
            (pages(8, 18), pages(20, 9), "'window' is written onto a row of space 'rows'"),
            (pages(0, 18), pages(0, 9), "lists differ"),
            (pages(23), pages(24), "outside"),
            (pages(22), pages(25), "outside"),
        ):
            was = every(b)
            with pytest.raises(LayoutError, match=text):
                route.write(sources, targets)
            assert all(map(np.array_equal, every(b), was))


# --- rooms


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("plane", ["fake", "local", "fake, staged", "local, staged"])
async def test_a_room_moves_the_places_of_three_spaces(plane: str, chunks: int) -> None:
    orders: tuple[Order, Order] = "page_first", "layer_first"
    layouts = [
        layout_of("windows", 4, count, 5, order)
        for count, order in zip((12, 14), orders, strict=True)
    ]
    staging = 0 if "staged" in plane else None
    async with pair(
        source_layout=layouts[0],
        target_layout=layouts[1],
        staging_bytes=staging,
        source_staging_bytes=staging if "local" in plane else None,
        open_plane=(lambda pool: LocalPlane(pool.segment)) if "local" in plane else None,
    ) as p:
        source, target = await p.open(7, range(22))
        await source.matched()
        sent = p.send_all(source, chunks=chunks)
        # 6 pages of 4 tokens, the pages of 8 tokens that hold the last 12 tokens, and a row.
        assert p.prefill.pool.layout.counted(sent) == (6, 2, 1)
        here = p.prefill.pool.layout.split(sent)
        there = p.decode.pool.layout.split(np.asarray(target.pages))
        assert await target.landed() == b"handoff"
        for space, (ours, theirs) in enumerate(zip(here, there, strict=True)):
            landed = p.decode.pool.places_bytes(space, theirs)
            assert np.array_equal(landed, p.prefill.pool.places_bytes(space, ours))
            base = p.prefill.pool.layout.bases[space]
            assert (landed == (ours + base + 1)[:, None]).all()
            whole = every(p.decode.pool)[space]
            assert np.count_nonzero(whole) == landed.size, "and no other place has changed"
        await source.done()
        p.decode.pages.give_back(target.keep("me"), "me")
        await p.rest()


# --- plans


def copied(blocks: Any) -> None:
    for source, target, size in zip(*blocks, strict=True):
        ctypes.memmove(int(target), int(source), int(size))


@pytest.mark.parametrize("counts", [(8, 10, 5), (1, 1, 1), (1, 4, 1)])
def test_the_few_blocks_of_tiny_writes_are_those_of_the_plan(counts: tuple[int, ...]) -> None:
    kinds = [
        StateKind("0.k", "uint8", (3,)),
        StateKind("1.k", "uint8", (5,), space="window"),
        StateKind("1.v", "uint8", (2,), space="window"),
        StateKind("2.ssm", "uint8", (7,), ROW),
    ]

    def made(counts: tuple[int, ...], seed: int) -> PagedPool:
        sized = zip(("pages", "window", "rows"), counts, (4, 8, 0), strict=True)
        layout = build_layout(kinds, spaces=[Space(*each) for each in sized], order="layer_first")
        pool = PagedPool.allocate(layout, shared=False)
        for c in layout.components:
            view = pool.array(c.name)
            view[...] = np.random.default_rng([seed, c.size_bytes]).integers(0, 256, view.shape)
        return pool

    a, b, c = made(counts, 1), made((8, 9, 5), 2), made((8, 9, 5), 2)
    for source, target in (
        ((0,), (7,)),
        ((counts[0],), (8 + 3,)),
        ((counts[0] + counts[1],), (17 + 4,)),
        ((0, counts[0], counts[0] + counts[1]), (5, 8 + 8, 17)),
    ):
        lists = pages(*source), pages(*target)
        few = Planner(a.layout, b.layout, max_block_bytes=1 << 20).few_blocks(*lists)
        assert few is not None
        copied(few)
        planner = Planner(a.layout, c.layout, max_block_bytes=1 << 20)
        copied(planner.blocks(*lists))
        assert all(map(np.array_equal, every(b), every(c)))
        assert planner.bytes_of(lists[0]) == sum(few.sizes)
        ours, theirs = (pool.layout.split(own) for pool, own in ((a, lists[0]), (b, lists[1])))
        for space in range(3):
            there = b.places_bytes(space, theirs[space])
            assert np.array_equal(there, a.places_bytes(space, ours[space]))


def test_many_blocks_of_any_space_are_not_few() -> None:
    kinds = [StateKind("0.k", "uint8", (3,)), StateKind("2.ssm", "uint8", (7,), ROW)]
    kinds += [StateKind(f"1.{i}", "uint8", (2,), space="window") for i in range(FEW_BLOCKS // 2)]
    spaces = (Space("pages", 200, 4), Space("window", 9, 8), Space("rows", 3, 0))
    layout = build_layout(kinds, spaces=spaces, order="layer_first")
    planner = Planner(layout, layout, max_block_bytes=1 << 20)

    def is_few(*counts: int) -> bool:
        own = [base + np.arange(n) for base, n in zip(layout.bases, counts, strict=True)]
        some = np.concatenate(own).astype(np.int32)
        found = planner.few_blocks(some, some)
        assert found is None or len(found.sizes) <= FEW_BLOCKS
        return found is not None

    assert is_few(0, 2, 0) and not is_few(1, 2, 0) and not is_few(0, 2, 1) and not is_few(0, 3, 0)
    assert is_few(FEW_BLOCKS - 1, 0, 1) and not is_few(FEW_BLOCKS, 0, 1)


# --- staging at prefill


async def test_slices_of_a_write_have_places_of_one_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = pool_of(8, "page_first", 1), pool_of(9, "page_first", 2)
    monkeypatch.setattr(staged, "SLICE_BYTES", 1 << 10)
    monkeypatch.setattr(staged, "_ROUTES", 1)
    async with planes("staged", a, b) as (source, target):
        source.export(a.layout)
        route = await source.connect(*target.export(b.layout))
        assert isinstance(route, StagedRoute)
        sizes = a.layout.place_bytes
        most = tuple(
            min(max(1, count // 3), (1 << 10) // size)
            for count, size in zip(a.layout.counts, sizes, strict=True)
        )
        assert route.slice_counts == most == (2, 3, 1)
        assert [own.size for own in route.places] == [6, 9, 3]
        slices: list[tuple[list[int], list[int]]] = []
        right = route.copy_out

        def watched(write: Any, places: PageIndices, staging: PageIndices) -> Any:
            slices.append((places.tolist(), staging.tolist()))
            return right(write, places, staging)

        monkeypatch.setattr(route, "copy_out", watched)
        was = every(b)
        write = route.write(a.layout.numbered(HERE), b.layout.numbered(THERE))
        assert await end_of(write) is WriteOutcome.LANDED
        check_landed(a, b, was)
        assert [places for places, _ in slices] == [
            [7, 0],
            [3],
            [17, 10, 11],
            [13],
            [22],
            [19],
        ]
        for places, staging in slices:
            counted = [a.layout.counted(np.array(own)) for own in (places, staging)]
            assert counted[0] == counted[1] and sum(map(bool, counted[0])) == 1
        assert [sorted(own) for own in route.places] == [list(range(n)) for n in (6, 9, 3)]


@pytest.mark.parametrize(("rows", "owned"), [(512, 3), (16, 2), (5, 1)])
async def test_a_route_leaves_rows_for_others(rows: int, owned: int) -> None:
    a = PagedPool.allocate(layout_of("windows", 4, 96, rows, "page_first"))
    b = pool_of(9, "page_first", 2)
    async with planes("staged", a, b) as (source, target):
        source.export(a.layout)
        address = target.export(b.layout)
        routes = [await source.connect(*address) for _ in range(5)]
        for route in routes:
            assert isinstance(route, StagedRoute)
            assert route.slice_counts == (4, 4, 1)
            assert [own.size for own in route.places] == [12, 12, owned]


async def test_slices_of_every_space_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pool_of(96, "page_first", 1), pool_of(9, "page_first", 2)
    one_page, one_of_window, _ = a.layout.place_bytes
    assert 2 * one_page > 3 * one_of_window
    monkeypatch.setattr(staged, "SLICE_BYTES", 3 * one_of_window)
    async with planes("staged", a, b) as (source, target):
        source.export(a.layout)
        route = await source.connect(*target.export(b.layout))
        assert isinstance(route, StagedRoute)
        assert route.slice_counts == (1, 3, 1)


async def test_routes_share_no_part_of_a_page_of_any_space() -> None:
    """Only the pages of the window are divided, so that each has four parts."""
    kinds = [
        StateKind("0.k", "uint8", (3,)),
        StateKind("1.k", "uint8", (5,), space="window"),
        StateKind("2.ssm", "uint8", (7,), ROW),
    ]
    large, small = (
        PagedPool.allocate(
            build_layout(
                kinds, spaces=(Space("pages", 96, 4), Space("window", n, size), Space("rows", 9, 0))
            )
        )
        for n, size in ((96, 8), (384, 2))
    )
    async with planes("staged", large, small) as (source, target):
        source.export(large.layout)
        address = target.export(small.layout)
        routes = [await source.connect(*address) for _ in range(3)]
        parts: list[list[int]] = [[], [], []]
        for route in routes:
            assert isinstance(route, StagedRoute)
            owned = route.staging.host.layout.split(route._owned)
            for space, (own, fine) in enumerate(zip(owned, route.places, strict=True)):
                split = 4 if space == 1 else 1
                assert sorted(fine.tolist()) == [
                    int(place) * split + part for place in np.sort(own) for part in range(split)
                ]
                parts[space] += fine.tolist()
        assert all(len(set(own)) == len(own) for own in parts)


@pytest.mark.parametrize("lacking", range(3))
async def test_a_route_takes_staging_of_every_space_or_none(lacking: int) -> None:
    a, b = pool_of(8, "page_first", 1), pool_of(9, "page_first", 2)
    async with planes("staged", a, b) as (source, target):
        assert isinstance(source, StagedPlane)
        host = source._staging.host
        source.export(a.layout)
        allocator = host.allocators[lacking]
        taken = allocator.take(allocator.free_pages, "another")
        before = host.places.owned()
        with pytest.raises(TransferError, match="no staging is left for another decode"):
            await source.connect(*target.export(b.layout))
        assert host.places.owned() == before
        allocator.give_back(taken, "another")


async def test_a_prefills_default_has_staging_for_four_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bytes alone would hold one row, and no other decode would be served."""
    monkeypatch.setattr(memory_staging, "PREFILL_BYTES", 512)
    a, b = (pool_of(64, "page_first", seed) for seed in (1, 2))
    size_bytes = prefill_bytes(a.layout)
    assert size_bytes < a.layout.size_bytes
    async with planes("staged", a, b, size_bytes) as (source, target):
        source.export(a.layout)
        exported = target.export(b.layout)
        for _ in range(memory_staging.PREFILL_DECODES):
            await source.connect(*exported)
