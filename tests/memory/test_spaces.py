"""Sums, copies and snapshots of places in three spaces; see also the kind "windows" in `kinds`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kvflow.memory import checksum, gathered
from kvflow.memory.checksum import PageChecksums, PoolSums
from kvflow.memory.copies import host_layout, least_bytes, one_bytes
from kvflow.memory.places import batches
from kvflow.memory.pool import PagedPool
from kvflow.memory.residency import Resident
from kvflow.memory.snapshot import SnapshotStore
from kvflow.memory.staging import Staging
from kvflow.protocols.errors import (
    CapacityError,
    HostMemoryError,
    LayoutError,
    MisuseError,
    OwnershipError,
)
from kvflow.protocols.machines.residency import ResidencyPhase as P
from kvflow.protocols.pages.coverage import served_of
from kvflow.protocols.pages.kinds import PAGE, ROW, StateKind
from kvflow.protocols.pages.layout import (
    Counts,
    PageIndices,
    Places,
    PoolLayout,
    Space,
    build_layout,
)
from kvflow.testing.shards import shard_layout
from tests.memory.gate import CopyGate
from tests.memory.kinds import KINDS, give_back, layout_of, overwrite, take

NAMES = ("pages", "window", "rows")
OWNER = ("sequence", 1)


def indices(*numbers: int) -> PageIndices:
    return np.array(numbers, dtype=np.int32)


def small() -> PagedPool:
    """8 pages, 10 pages of the window, and 3 rows, of random bytes."""
    pool = PagedPool.allocate(layout_of("windows", 4, 8, 3, "page_first"), shared=False)
    overwrite(pool, 7)
    return pool


def bytes_at(pool: PagedPool, places: Places) -> list[NDArray[np.uint8]]:
    return [pool.places_bytes(space, own) for space, own in enumerate(places)]


def same(one: list[NDArray[np.uint8]], other: list[NDArray[np.uint8]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# --- pools


def test_bytes_of_places_are_those_of_their_space() -> None:
    pool = small()
    for space, name in enumerate(NAMES):
        own = indices(2, 0)
        streams = [c.name for c in pool.layout.components if c.space == space]
        found = [
            np.ascontiguousarray(pool.array(stream)[own]).reshape(2, -1).view(np.uint8)
            for stream in streams
        ]
        assert np.array_equal(pool.places_bytes(space, own), np.concatenate(found, axis=1)), name
    assert pool.array("1.k").shape == (10, 8, 1, 4) and pool.tensor("1.k").shape == (10, 8, 1, 4)
    assert pool.array("1.scale").shape == (10, 3) and pool.array("0.k").shape == (8, 4, 2, 4)
    assert pool.array("2.conv").shape == (3, 6, 4)
    sizes = pool.layout.place_bytes
    assert repr(pool).startswith(
        f"<PagedPool of 8 pages, 4 tokens and {sizes[0]} bytes each and 10 'window' pages, 8 "
        f"tokens and {sizes[1]} bytes each and 3 rows of {sizes[2]} bytes, in 6 streams"
    )
    pool.close()


def test_tensors_of_torchs_own_memory_are_those_of_their_space() -> None:
    pool = PagedPool.allocate(layout_of("windows", 4, 8, 3, "page_first"), device="cpu")
    for name, shape in (("0.k", (8, 4, 2, 4)), ("1.k", (10, 8, 1, 4)), ("2.ssm", (3, 4, 8))):
        tensor = pool.tensor(name)
        assert tensor.shape == shape
        tensor[2] = 1
        found = next(c for c in pool.layout.components if c.name == name)
        landed = pool.places_bytes(found.space, indices(2, 1))
        assert np.count_nonzero(landed[0]) and not landed[1].any(), name
    pool.close()


def test_shards_have_the_spaces_of_the_whole() -> None:
    kinds = [StateKind("0.k", "uint8", (4, 2)), StateKind("1.k", "uint8", (4, 2), space="window")]
    spaces = (Space("pages", 8, 4), Space("window", 5, 8, 16))
    whole = build_layout(kinds, spaces=spaces)
    half = shard_layout(whole, 1, 2)
    assert half.spaces == spaces and [c.space for c in half.components] == [0, 1]
    assert [(c.start, c.whole, c.shape) for c in half.components] == [(2, 4, (2, 2))] * 2


# --- checksums


@pytest.mark.parametrize("lost", range(3))
async def test_a_checksum_that_forgets_a_space_is_found(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = small()
    places = tuple(indices(2, 1) for _ in NAMES)
    right = checksum._stretches

    async def tells_apart() -> list[bool]:
        """Whether the sum changes with a byte of a place of each space."""
        sums, listed, found = PageChecksums(pool), pool.layout.numbered(places), []
        before = await sums.begin(listed).done
        assert len(before) == 8
        for name in ("0.v", "1.k", "2.ssm"):
            view = pool.array(name).view(np.uint8)
            view[1].reshape(-1)[-1] ^= 255
            found.append(await sums.begin(listed).done != before)
            view[1].reshape(-1)[-1] ^= 255
        await sums.close()
        return found

    def forgetful(layout: PoolLayout, memories: Any, space: int, split: int) -> Any:
        return [] if space == lost else right(layout, memories, space, split)

    assert await tells_apart() == [True, True, True]
    monkeypatch.setattr(checksum, "_stretches", forgetful)
    assert await tells_apart() == [space != lost for space in range(3)]
    pool.close()


async def test_a_checksum_depends_on_the_space_that_places_are_in() -> None:
    pool = small()
    sums = PageChecksums(pool)
    lists = [
        tuple(indices(1) if space == only else indices() for space in range(3)) for only in range(3)
    ]
    found = [await sums.begin(pool.layout.numbered(places)).done for places in lists]
    assert len(set(found)) == 3
    await sums.close()
    pool.close()


def test_spaces_that_are_divided_into_other_numbers_of_parts_are_summed() -> None:
    """The parts of a large page have the sum of small pages with the same tokens."""
    kinds = [kind for kind in KINDS["windows"] if kind.unit != PAGE]
    large, small = (
        PagedPool.allocate(
            build_layout(
                [*kinds, StateKind("1.v", "uint8", (3,), space="window")],
                spaces=(Space("pages", *pages), Space("window", *window), Space("rows", 3, 0)),
            ),
            shared=False,
        )
        for pages, window in (((4, 8), (3, 12)), ((8, 4), (12, 3)))
    )
    overwrite(large, 7)
    for c in small.layout.components:
        small.array(c.name)[...] = large.array(c.name).reshape(small.array(c.name).shape)
    sums = PoolSums(large.layout).in_pages_of((4, 3, 0))
    for places in (
        (indices(7, 0, 3), indices(11, 2), indices(1)),
        (indices(), indices(5, 10, 0), indices()),
        (indices(6), indices(), indices()),
    ):
        expected = PoolSums(small.layout).sum(places, None, lambda: False)
        assert sums.sum(places, None, lambda: False) == expected
    large.close()
    small.close()


HEADS = [
    StateKind("0.k", "uint8", (4, 2)),
    StateKind("1.k", "uint8", (4, 3), space="window"),
    StateKind("2.state", "uint8", (4, 5), ROW),
]
HALF = [k._replace(shape=(2, *k.shape[1:]), start=2, whole=4) for k in HEADS]
SPACES = (Space("pages", 8, 4), Space("window", 6, 2, 8), Space("rows", 3, 0))


def filled(kinds: list[StateKind]) -> PagedPool:
    """Each byte depends on its name, place, slot and entry."""
    pool = PagedPool.allocate(build_layout(kinds, spaces=SPACES), shared=False)
    for c in pool.layout.components:
        random = np.random.default_rng(sum(c.name.encode()))
        whole = random.integers(0, 256, (8, 4, 4, 5), dtype=np.uint8)
        view = pool.array(c.name)
        entries, width = slice(c.start, c.end), c.shape[-1]
        if c.unit == ROW:
            view[...] = whole[: len(view), 0, entries, :width]
        else:
            view[...] = whole[: len(view), : view.shape[1], entries, :width]
    return pool


@pytest.mark.parametrize("batch_bytes", [1, 30, 1 << 20])
def test_gathered_bytes_of_every_space_are_summed(
    batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathered, "_BATCH_BYTES", batch_bytes)
    rank, decode = filled(HALF), filled(HEADS)
    served = served_of(rank.layout)
    places = (indices(7, 0, 3), indices(5, 2), indices(1))

    def summed(pool: PagedPool, *more: Any) -> bytes:
        return PoolSums(pool.layout).sum(places, more[0] if more else None, lambda: False)

    sent = summed(rank)
    assert len(sent) == 8 and summed(decode, served) == sent
    for name, place in (("0.k", 3), ("1.k", 2), ("2.state", 1)):
        view = decode.array(name)[place].reshape(-1)
        view[-1] ^= 1  # of the second half
        assert summed(decode, served) != sent, name
        view[-1] ^= 1
        view[0] ^= 1  # of the first half, which another rank serves
        assert summed(decode, served) == sent, name
        view[0] ^= 1

    def forgetful(places: Places, sizes: Counts) -> Iterator[Places]:
        return batches(places, (sizes[0], 0, sizes[2]))

    monkeypatch.setattr(gathered, "batches", forgetful)
    assert summed(decode, served) != sent


def test_a_rank_that_serves_one_space_is_summed_over_that_space() -> None:
    decode = filled(HEADS)
    for space, kind in enumerate(HALF):
        rank = filled([kind])
        places = (indices(7, 0, 3), indices(5, 2), indices(1))
        only = tuple(own if i == space else indices() for i, own in enumerate(places))
        sums = PoolSums(rank.layout)
        sent = sums.sum(places, None, lambda: False)
        assert sent == sums.sum(only, None, lambda: False)
        found = PoolSums(decode.layout).sum(places, served_of(rank.layout), lambda: False)
        assert found == sent != b""


# --- host memory


@pytest.mark.parametrize("num_rows", [None, 2])
def test_host_memory_is_divided_among_all_spaces(num_rows: int | None) -> None:
    layout = layout_of("windows", 4, 80, 30, "page_first")
    page, row = one_bytes(layout)
    assert (page, row) == (layout.place_bytes[0] + layout.place_bytes[1], layout.place_bytes[2])
    least = least_bytes(layout, num_rows)
    for limit in (least, 10 * least, layout.size_bytes // 2, 3 * layout.size_bytes):
        fits = host_layout(layout, limit, num_rows)
        assert fits.size_bytes <= limit and min(fits.counts) >= 1
        assert [s.name for s in fits.spaces] == list(NAMES) and fits.spaces[1].window == 12
        rows = fits.counts[2]
        assert rows == (2 if num_rows else min(30, limit // 2 // row))
        # No further page of either kind would fit, and both kinds have their share.
        assert limit - fits.size_bytes < page
        assert abs(fits.counts[0] / 80 - fits.counts[1] / 82) < 1 / 40
    with pytest.raises(
        MisuseError,
        match=f"do not hold a page of {layout.place_bytes[0]} bytes and one of "
        f"{layout.place_bytes[1]} bytes and {num_rows or 1} x {row} bytes of rows; {least} are",
    ):
        host_layout(layout, page + (num_rows or 1) * row - 1, num_rows)


async def test_a_full_space_of_host_memory_is_named_and_nothing_is_kept() -> None:
    pool = small()
    sizes = pool.layout.place_bytes
    # One page each of 80 tokens' worth, and 2 rows.
    store = SnapshotStore(pool, sizes[0] + sizes[1] + 2 * sizes[2], num_rows=2)
    assert store.host.layout.counts == (1, 1, 2)
    for wanted, text in (
        ((2, 1, 1), "2 pages of host memory, and 1 are free"),
        ((1, 2, 1), "2 'window' pages of host memory, and 1 are free"),
        ((1, 1, 3), "3 rows of host memory, and 2 are free"),
    ):
        places = pool.layout.split(pool.places.take_room(wanted, "mine"))
        with pytest.raises(HostMemoryError, match=text):
            await store.take(places)
        assert store.used_bytes == 0 and store.host.places.at_rest()
        give_back(pool, places, "mine")
        assert pool.places.at_rest()
    await store.close()
    pool.close()


async def test_places_of_every_space_are_held_while_they_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = small()
    store = SnapshotStore(pool, 1 << 16)
    mine, again = (
        pool.layout.split(pool.places.take_room((2, 1, 1), owner)) for owner in ("mine", "again")
    )
    ours, theirs = pool.allocators, store.host.allocators
    gate = CopyGate(monkeypatch)
    taking = asyncio.ensure_future(store.take(mine))
    await gate.reached()
    assert [a.held_pages for a in ours] == [2, 1, 1]
    give_back(pool, mine, "mine")
    assert [a.returning_pages for a in ours] == [2, 1, 1]
    gate.go.set()
    held = await taking
    assert [a.held_pages for a in (*ours, *theirs)] == [0] * 6
    monkeypatch.undo()
    gate = CopyGate(monkeypatch)
    restoring = asyncio.ensure_future(store.restore(held, again))
    await gate.reached()
    assert [a.held_pages for a in (*ours, *theirs)] == [2, 1, 1] * 2
    give_back(pool, again, "again")
    held.close()
    assert [a.returning_pages for a in (*ours, *theirs)] == [2, 1, 1] * 2
    gate.go.set()
    await restoring
    assert pool.places.at_rest() and store.host.places.at_rest()
    await store.close()
    pool.close()


def other(**changes: Any) -> PoolLayout:
    layout = layout_of("windows", 4, 8, 3, "page_first")
    spaces = [
        msgspec.structs.replace(space, **changes.get(space.name, {})) for space in layout.spaces
    ]
    renamed = changes.get("window", {}).get("name", "window")
    kinds = [k._replace(space=renamed) if k.space else k for k in KINDS["windows"]]
    if changes.get("order"):
        spaces = [spaces[0], spaces[2], spaces[1]]
    return build_layout(kinds, spaces=spaces, fingerprint="windows")


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (other(window={"name": "sliding"}), "sliding"),
        (other(window={"page_size": 4}), "window.*4"),
        (other(window={"window": 8}), "window.*8"),
        (other(order="rows first"), "rows.*window"),
        (layout_of("mha", 4, 8, 3, "page_first"), "window"),
    ],
    ids=["name", "page size", "window", "order", "missing"],
)
async def test_a_pool_of_other_spaces_is_refused_by_name(layout: PoolLayout, text: str) -> None:
    pool = small()
    layout = msgspec.structs.replace(layout, fingerprint="windows")
    there = PagedPool.allocate(layout, shared=False)
    store, elsewhere = (SnapshotStore(each, 1 << 16) for each in (pool, there))
    held = await store.take(pool.layout.split(pool.places.take_room((2, 1, 1), "mine")))
    with pytest.raises(LayoutError, match=text):
        await elsewhere.restore(held, take(there, 2, 1, "again"))
    assert all(not allocator.held_pages for allocator in there.allocators) and not held.closed
    for each in (store, elsewhere):
        await each.close()


async def test_a_snapshot_has_the_bytes_of_every_space() -> None:
    pool = small()
    store = SnapshotStore(pool, 1 << 16)
    places = pool.layout.split(pool.places.take_room((3, 2, 1), "mine"))
    before = bytes_at(pool, places)
    held = await store.take(places)
    for space, count in enumerate(pool.layout.counts):
        outside = tuple(own + count * (i == space) for i, own in enumerate(places))
        with pytest.raises(LayoutError, match=rf"is outside 0\.\.{count - 1}"):
            await store.take(outside)
    assert held.counts == (3, 2, 1) and same(bytes_at(store.host, held.places), before)
    assert held.size_bytes == store.used_bytes == pool.layout.room_bytes((3, 2, 1))
    assert repr(held) == (
        f"<Snapshot of 3 pages, 2 'window' pages and 1 row, {held.size_bytes} bytes>"
    )
    overwrite(pool, 8)
    pages, window, rows = there = pool.layout.split(pool.places.take_room((3, 2, 1), "again"))
    for wrong, error in (
        ((pages[:2], window, rows), "cannot be restored into 2 pages, 2 'window' pages and 1 row"),
        ((pages, window[:1], rows), "cannot be restored into 3 pages, 1 'window' pages and 1 row"),
        ((pages, window + 8, rows), "'window' page is outside 0..9"),
        ((pages + 6, window, rows), "page is outside 0..7"),
    ):
        with pytest.raises(LayoutError, match=error):
            await store.restore(held, wrong)
    untouched = pool.layout.split(np.setdiff1d(np.arange(21), pool.layout.numbered(there)))
    was = bytes_at(pool, untouched)
    await store.restore(held, there)
    assert same(bytes_at(pool, there), before) and same(bytes_at(pool, untouched), was)
    held.close()
    assert store.host.places.at_rest()
    await store.close()
    pool.close()


@pytest.mark.parametrize(("space", "named"), [(0, "page"), (1, "'window' page"), (2, "row")])
async def test_a_place_of_any_space_is_restored_once(space: int, named: str) -> None:
    pool = small()
    store = SnapshotStore(pool, 1 << 14)
    places = pool.layout.split(pool.places.take_room((2, 2, 2), "mine"))
    held = await store.take(places)
    twice = tuple(own[[0, 0]] if i == space else own for i, own in enumerate(places))
    with pytest.raises(OwnershipError, match=f"a {named} is named twice"):
        await store.restore(held, twice)
    held.close()
    await store.close()
    pool.close()


# --- residency


@asynccontextmanager
async def resident() -> AsyncIterator[tuple[PagedPool, SnapshotStore, Resident]]:
    pool = small()
    store = SnapshotStore(pool, 1 << 14)
    places = pool.layout.split(pool.places.take_room((3, 2, 1), OWNER))
    request = Resident(OWNER, places, allocators=pool.allocators, store=store)
    yield pool, store, request
    request.close()
    assert pool.places.at_rest() and store.used_bytes == 0
    await store.close()
    pool.close()


async def test_a_state_of_three_spaces_leaves_and_comes_back() -> None:
    async with resident() as (pool, store, request):
        before = bytes_at(pool, request.places)
        await request.retract()
        assert request.phase is P.AWAY and pool.places.at_rest() and store.count == 1
        overwrite(pool, 99)
        pool.places.take_room((1, 1, 1), "another")
        assert await request.resume()
        assert request.sizes == (3, 2, 1) and same(bytes_at(pool, request.places), before)
        assert repr(request) == f"<Resident {OWNER!r}: resident, places by space: 3, 2, 1>"
        pool.places.give_back(indices(0, 8, 18), "another")


@pytest.mark.parametrize("lacking", range(3))
async def test_a_state_comes_back_whole_or_not_at_all(lacking: int) -> None:
    async with resident() as (pool, store, request):
        before = bytes_at(pool, request.places)
        await request.retract()
        allocator = pool.allocators[lacking]
        taken = allocator.take(allocator.free_pages, "another")
        with pytest.raises(CapacityError):
            await request.resume()
        assert request.phase is P.AWAY and OWNER not in pool.places.owned() and store.count == 1
        allocator.give_back(taken, "another")
        assert await request.resume()
        assert same(bytes_at(pool, request.places), before)


async def test_a_state_changes_in_each_space() -> None:
    async with resident() as (pool, _, request):
        request.add(pool.allocators[1].take(2, OWNER), 1)
        request.add(pool.pages.take(1, OWNER))
        assert request.sizes == (4, 4, 1)
        first = request.places[1][:1]
        pool.allocators[1].give_back(first, OWNER)
        request.hand_over(1, 1)
        assert request.sizes == (4, 3, 1) and first[0] not in request.places[1]
        await request.retract()
        request.needs(2, 1)
        assert request.sizes == (4, 2, 1)
        request.needs(6)
        assert not await request.resume() and [own.size for own in request.places] == [6, 2, 1]


def test_a_state_needs_an_allocator_for_each_space() -> None:
    pool = small()
    with pytest.raises(MisuseError, match="places of 3 spaces are given with 1 allocators"):
        Resident(OWNER, (indices(), indices(), indices()), allocators=(pool.pages,))
    pool.close()


# --- staging


def test_staging_copies_places_of_every_space() -> None:
    pool = small()
    staging = Staging(pool, shared=False)
    assert repr(staging).startswith("<Staging of 8 pages, 10 'window' pages and 3 rows for <Paged")
    here = (indices(6, 1), indices(9, 0, 4), indices(2))
    between = (indices(0, 3), indices(2, 1, 8), indices(0))
    before = bytes_at(pool, here)
    lists = pool.layout.numbered(here), staging.host.layout.numbered(between)
    assert staging.copy_out(*lists, lambda: False)
    assert same(bytes_at(staging.host, between), before)
    overwrite(pool, 8)
    was = bytes_at(pool, tuple(np.arange(n, dtype=np.int32) for n in pool.layout.counts))
    there = (indices(2, 5), indices(3, 6, 7), indices(1))
    assert staging.copy_in(lists[1], pool.layout.numbered(there), lambda: False)
    for whole, own, landed in zip(was, there, before, strict=True):
        whole[own] = landed
    now = bytes_at(pool, tuple(np.arange(n, dtype=np.int32) for n in pool.layout.counts))
    assert same(now, was), "and no other place has changed"
    staging.close()
    pool.close()
