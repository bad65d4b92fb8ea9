"""Snapshots: byte for byte back; host memory is bounded, and freed once."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.memory import checksum
from kvflow.memory.checksum import PageChecksums
from kvflow.memory.copies import HostCopier
from kvflow.memory.external import ExternalPages
from kvflow.memory.pool import PagedPool
from kvflow.memory.snapshot import Snapshot, SnapshotStore
from kvflow.protocols.errors import Code, HostMemoryError, LayoutError, MisuseError, OwnershipError
from kvflow.protocols.pages import plan
from kvflow.protocols.pages.kinds import PAGE, ROW, SLOT, StateKind
from kvflow.protocols.pages.layout import NO_PLACES, Order, Places, PoolLayout, build_layout
from tests.memory.gate import CopyGate
from tests.memory.kinds import (
    KINDS,
    check_restored,
    contents,
    give_back,
    layout_of,
    names_of,
    overwrite,
    places_at,
    take,
)

CHUNK_PAGES = 3
PAGES, ROWS = np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32)
ORDERS: list[Order] = ["page_first", "layer_first"]


def allocate(
    kind: str, page_size: int = 4, num_pages: int = 14, order: Order = "page_first", rows: int = 5
) -> PagedPool:
    return PagedPool.allocate(layout_of(kind, page_size, num_pages, rows, order), shared=False)


def at_rest(pool: PagedPool) -> bool:
    return pool.places.at_rest()


def shuffled(places: Places, seed: int) -> Places:
    random = np.random.default_rng(seed)
    return tuple(random.permutation(own) for own in places)


def mapped(pool: PagedPool) -> list[str]:
    found: list[str] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(text, 16) for text in line.split()[0].split("-"))
        found.extend(line for b in pool.layout.buffers if start <= b.address < end)
    return found


def unchanged(_: str) -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def forgetting(name: str) -> Iterator[None]:
    """Plans that leave one component out."""
    right = {text: getattr(plan, text) for text in ("_typed_stretches", "_opaque_stretches")}

    def mutant(walk: Callable[..., Any]) -> Callable[..., Any]:
        def forgetful(
            source: PoolLayout, target: PoolLayout, *more: Any
        ) -> Iterator[tuple[int, ...]]:
            lost = next(c for c in source.components if c.name == name)
            for stretch in walk(source, target, *more):
                if (
                    stretch[0] != lost.buffer
                    or not lost.offset <= stretch[1] < lost.offset + lost.size_bytes
                ):
                    yield stretch

        return forgetful

    for text, walk in right.items():
        setattr(plan, text, mutant(walk))
    try:
        yield
    finally:
        for text, walk in right.items():
            setattr(plan, text, walk)


async def round_trip(
    kind: str,
    a: PagedPool,
    b: PagedPool,
    tokens: int,
    seed: int = 0,
    during: Callable[[str], AbstractContextManager[None]] = unchanged,
    **options: Any,
) -> None:
    """A request leaves `a`, its places go to others, and it comes back in `b`, elsewhere."""
    overwrite(a, seed)
    with during("copy out"):
        store, other = (SnapshotStore(pool, 1 << 20, **options) for pool in (a, b))
    pages = a.layout.pages_for(tokens)
    source = shuffled(take(a, pages, 1, "mine"), seed)
    before = contents(kind, a)
    held = await store.take(source)
    sizes = zip(source, a.layout.place_bytes, strict=True)
    assert held.size_bytes == store.used_bytes == sum(len(own) * size for own, size in sizes)
    give_back(a, source, "mine")
    assert at_rest(a)
    overwrite(a, seed + 1)
    if b is not a:
        overwrite(b, seed + 2)
    take(b, 2, 1, "neighbour")
    target = shuffled(take(b, pages, 1, "again"), seed + 3)
    was = contents(kind, b)
    with during("restore"):
        await other.restore(held, target)
    check_restored(kind, before, source, was, target, b)
    held.close()
    held.close()
    assert store.used_bytes == other.used_bytes == 0 and at_rest(store.host)
    for owner in ("neighbour", "again"):
        give_back(b, tuple(allocator.pages_of(owner) for allocator in b.allocators), owner)
    assert at_rest(a) and at_rest(b)
    await store.close()
    await other.close()


@given(
    st.sampled_from(list(KINDS)),
    st.sampled_from([1, 16, 64]),
    st.sampled_from(["0", "1", "page - 1", "page", "page + 1", "chunk - 1", "chunk", "chunk + 1"]),
    st.sampled_from(ORDERS),
    st.sampled_from(ORDERS),
    st.booleans(),
    st.integers(0, 1 << 20),
)
@settings(max_examples=200, deadline=None)
def test_every_buffer_comes_back_and_no_neighbour_is_touched(
    kind: str,
    page_size: int,
    length: str,
    order: Order,
    other_order: Order,
    same_pool: bool,
    seed: int,
) -> None:
    lengths = {"page": page_size, "chunk": CHUNK_PAGES * page_size}
    base, _, off = length.partition(" ")
    tokens = int(base) if base.isdigit() else max(0, lengths[base] + int(off.replace(" ", "") or 0))
    a = allocate(kind, page_size, order=order)
    b = a if same_pool else allocate(kind, page_size, num_pages=17, order=other_order, rows=4)
    chunk_bytes = CHUNK_PAGES * (a.layout.page_bytes or a.layout.row_bytes)
    asyncio.run(round_trip(kind, a, b, tokens, seed, slice_bytes=chunk_bytes))
    assert a.layout.size_bytes == sum(view.size for view in contents(kind, a).values())
    for pool in {a, b}:
        assert mapped(pool)
        pool.close()
        assert not mapped(pool)  # every buffer's memory has gone back


# --- mutants: a walk that leaves one name out

EVERY_NAME = [(kind, name) for kind in KINDS for name in names_of(kind)]


@pytest.mark.parametrize(("kind", "name"), EVERY_NAME)
@pytest.mark.parametrize("walk", ["copy out", "restore"])
async def test_a_copy_that_forgets_a_name_is_found(kind: str, name: str, walk: str) -> None:
    a, b = allocate(kind), allocate(kind, num_pages=17)
    with pytest.raises(AssertionError, match=f"{name} was not restored"):
        await round_trip(
            kind,
            a,
            b,
            tokens=9,
            during=lambda now: forgetting(name) if now == walk else nullcontext(),
        )


@pytest.mark.parametrize(("kind", "name"), EVERY_NAME)
async def test_a_checksum_that_forgets_a_name_is_found(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = allocate(kind)
    overwrite(pool, 1)
    places = pool.layout.numbered(places_at(kind, PAGES, ROWS))

    async def tells_them_apart() -> bool:
        sums = PageChecksums(pool)
        view = pool.array(name).reshape(len(pool.array(name)), -1).view(np.uint8)
        before = await sums.begin(places).done
        view[1, 0] ^= 255
        after = await sums.begin(places).done
        await sums.close()
        return before != after

    right = checksum._stretches

    def forgetful(layout: PoolLayout, *more: Any) -> Any:
        left = tuple(c for c in layout.components if c.name != name)
        return right(msgspec.structs.replace(layout, components=left), *more)

    assert await tells_them_apart()
    monkeypatch.setattr(checksum, "_stretches", forgetful)
    assert not await tells_them_apart()


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_release_that_forgets_a_store_is_found(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = SnapshotStore.forget

    def forgetful(store: SnapshotStore, closed: Snapshot) -> None:
        closed.places = (*closed.places[:lost], NO_PLACES, *closed.places[lost + 1 :])
        right(store, closed)

    monkeypatch.setattr(SnapshotStore, "forget", forgetful)
    with pytest.raises(AssertionError):
        await round_trip("windows", allocate("windows"), allocate("windows"), tokens=9)


# --- what goes wrong


def store_of(
    kind: str = "hybrid", limit_pages: int = 40, **options: Any
) -> tuple[PagedPool, SnapshotStore]:
    pool = allocate(kind)
    overwrite(pool, 1)
    return pool, SnapshotStore(
        pool, limit_pages * (pool.layout.page_bytes or pool.layout.row_bytes), **options
    )


def other_layout(**changes: Any) -> PoolLayout:
    given = {
        "streams": KINDS["hybrid"],
        "page_size": 4,
        "num_pages": 14,
        "num_rows": 5,
        "fingerprint": "hybrid",
    }
    return build_layout(**{**given, **changes})


def replaced(name: str, **fields: Any) -> list[StateKind]:
    return [k._replace(**fields) if k.name == name else k for k in KINDS["hybrid"]]


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (other_layout(page_size=8), "page_size: snapshot 4, pool 8"),
        (other_layout(fingerprint="tp2"), "model fingerprint: snapshot 'hybrid', pool 'tp2'"),
        (
            other_layout(streams=replaced("0.k", dtype="float16")),
            "0.k dtype: snapshot bfloat16, pool float16",
        ),
        (other_layout(streams=replaced("1.ssm", shape=(4, 8, 4))), "1.ssm shape: snapshot"),
        (
            other_layout(streams=replaced("0.v", unit=PAGE)),
            "0.v unit: snapshot one per slot, pool one per page",
        ),
        (other_layout(streams=replaced("0.v", format="x")), "0.v format: snapshot '', pool 'x'"),
        (other_layout(streams=KINDS["hybrid"][:4]), "2.linear: only snapshot has it"),
        (
            other_layout(streams=[*KINDS["hybrid"], StateKind("3.k", "uint8", (1,))]),
            "3.k: only pool has it",
        ),
    ],
)
async def test_a_pool_that_does_not_fit_is_refused_with_the_difference(
    layout: PoolLayout, text: str
) -> None:
    pool, store = store_of()
    other = PagedPool.allocate(layout, shared=False)
    elsewhere = SnapshotStore(other, 1 << 20)
    held = await store.take(take(pool, 2, 1, "mine"))
    with pytest.raises(LayoutError, match=re.escape(text)):
        await elsewhere.restore(held, take(other, 2, 1, "again"))
    assert other.pages.held_pages == other.rows.held_pages == 0 and not held.closed
    await elsewhere.close()
    await store.close()


async def test_places_that_do_not_fit_are_refused() -> None:
    pool, store = store_of()
    mine = take(pool, 3, 1, "mine")
    held = await store.take(mine)
    again = pages, rows = take(pool, 3, 1, "again")
    for wrong, error, text in (
        ((pages[:2], rows), LayoutError, "cannot be restored into 2 pages and 1 row"),
        ((pages, NO_PLACES), LayoutError, "cannot be restored into 3 pages and 0 rows"),
        ((pages[[0, 1, 1]], rows), OwnershipError, "a page is named twice"),
        ((pages + 20, rows), LayoutError, "page is outside 0..13"),
        ((pages, rows + 5), LayoutError, "row is outside 0..4"),
        ((pages[None].repeat(3, 0), rows), LayoutError, r"pages have shape \(3, 3\), not \[n\]"),
        (
            (pool.pages.take(3, "x"), np.array([4], dtype=np.int32)),
            OwnershipError,
            "row 4 has no owner",
        ),
    ):
        with pytest.raises(error, match=text):
            await store.restore(held, wrong)
        assert pool.pages.held_pages == pool.rows.held_pages == 0
    pool.pages.give_back(pool.pages.pages_of("x"), "x")
    pool.pages.give_back(mine[0][:1], "mine")
    with pytest.raises(OwnershipError, match="has no owner"):
        await store.take(mine)
    held.version = 2
    with pytest.raises(LayoutError, match="version 2, and only version 1"):
        await store.restore(held, again)
    del held.version
    held.close()
    assert store.used_bytes == 0 and store.count == 0
    with pytest.raises(MisuseError, match="the snapshot is closed"):
        await store.restore(held, again)
    await store.close()
    for call in (store.take(again), store.restore(held, again)):
        with pytest.raises(MisuseError, match="store of snapshots is closed"):
            await call


async def test_places_are_given_as_places() -> None:
    pool, store = store_of(limit_pages=11, num_rows=2)
    places = take(pool, 1, 1, "a")
    held = await store.take(places)
    for wrong, text in (
        (list(places), r"one array for each space \(pages, rows\), not as a list"),
        (places[:1], r"one array for each space \(pages, rows\), not as a tuple of 1"),
    ):
        given: Any = wrong
        for call in (store.take(given), store.restore(held, given)):
            with pytest.raises(MisuseError, match=text):
                await call
    held.close()
    await store.close()


@pytest.mark.parametrize("units", [(SLOT,), (ROW,), (SLOT, ROW)], ids=str)
async def test_a_limit_that_is_too_small_names_one_that_is_enough(units: tuple[str, ...]) -> None:
    kinds = [StateKind(unit, "float32", (9,), unit) for unit in units]
    rows = 4 if ROW in units else 0
    pool = PagedPool.allocate(
        build_layout(kinds, page_size=4, num_pages=6, num_rows=rows), shared=False
    )
    for num_rows in (None, 2) if rows else (None,):
        with pytest.raises(
            MisuseError, match=r"1 bytes of host memory do not hold .*; \d+ are enough"
        ) as small:
            SnapshotStore(pool, 1, num_rows=num_rows)
        enough = int(str(small.value).split()[-3])
        await SnapshotStore(pool, enough, num_rows=num_rows).close()
        if len(units) == 1:
            with pytest.raises(MisuseError, match=f"{enough - 1} bytes of host memory do not hold"):
                SnapshotStore(pool, enough - 1, num_rows=num_rows)


async def test_host_memory_is_bounded_and_a_full_one_is_named() -> None:
    pool, store = store_of(limit_pages=11, num_rows=2)
    layout = pool.layout
    assert store.host.layout.size_bytes <= store.limit_bytes
    assert (
        store.host.layout.num_pages
        == (11 * layout.page_bytes - 2 * layout.row_bytes) // layout.page_bytes
        == 2
    )
    first = await store.take(take(pool, 1, 1, "a"))
    with pytest.raises(
        HostMemoryError, match="needs 2 pages of host memory, and 1 are free"
    ) as full:
        await store.take(take(pool, 2, 1, "b"))
    assert (full.value.asked, full.value.limit, full.value.code) == (2, 1, Code.CAPACITY)
    second = await store.take(take(pool, 0, 1, "c"))
    with pytest.raises(HostMemoryError, match="needs 1 rows of host memory, and 0 are free"):
        await store.take(take(pool, 1, 1, "d"))
    assert (
        store.used_bytes
        == first.size_bytes + second.size_bytes
        == layout.page_bytes + 2 * layout.row_bytes
    )
    first.close()
    second.close()
    assert store.used_bytes == 0
    await store.close()
    for limit in (0, -1, layout.row_bytes, layout.page_bytes):
        with pytest.raises(MisuseError, match="bytes of host memory do not hold"):
            SnapshotStore(pool, limit)


@pytest.mark.parametrize("slices", [0, 1, 3])
@pytest.mark.parametrize("how", ["error", "cancel", "cancel twice", "close"])
@pytest.mark.parametrize("copy", ["out", "back"])
async def test_half_a_copy_leaves_everything_accounted_for(
    copy: str, how: str, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, store = store_of(slice_bytes=allocate("hybrid").layout.page_bytes)
    mine, again = take(pool, 4, 1, "mine"), take(pool, 4, 1, "again")
    before = contents("hybrid", pool)
    held = await store.take(mine)
    copying, go_on, copied, right = threading.Event(), threading.Event(), [0], HostCopier.copy

    def failing(blocks: Any) -> None:
        if copied[0] == slices:
            copying.set()
            assert go_on.wait(20)
            if how == "error":
                raise OSError("the copy engine has failed")
        right(blocks)
        copied[0] += 1

    monkeypatch.setattr(HostCopier, "copy", staticmethod(failing))
    running = asyncio.ensure_future(
        store.take(mine) if copy == "out" else store.restore(held, again)
    )
    await asyncio.to_thread(copying.wait, 20)
    assert pool.pages.held_pages == 4 and pool.rows.held_pages == 1
    give_back(pool, mine, "mine")  # an abort: they are free only when nothing reads them any more
    closing: list[asyncio.Future[None]] = []
    for _ in range(2 if how == "cancel twice" else how == "cancel"):
        running.cancel()
        await asyncio.sleep(0)
    if how == "close":
        closing.append(asyncio.ensure_future(store.close()))
        await asyncio.sleep(0)
    assert not running.done() and pool.pages.held_pages == 4
    go_on.set()
    with pytest.raises({"error": OSError, "close": MisuseError}.get(how, asyncio.CancelledError)):
        await running
    assert copied[0] == slices + (how != "error")  # drained: the slice under way, and none after it
    assert pool.pages.held_pages == pool.rows.held_pages == 0
    assert pool.pages.owned() == {"again": 4} and pool.rows.owned() == {"again": 1}
    monkeypatch.undo()
    if closing:
        await closing[0]
        assert held.closed and store.used_bytes == 0 and not mapped(store.host)
        return
    assert store.used_bytes == held.size_bytes
    was = contents("hybrid", pool)
    await store.restore(held, again)  # it is whole, and can be restored again
    check_restored("hybrid", before, mine, was, again, pool)
    held.close()
    assert store.used_bytes == 0
    await store.close()


async def test_a_snapshot_closed_while_it_is_restored_is_freed_once_and_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, store = store_of()
    held = await store.take(take(pool, 3, 1, "mine"))
    gate = CopyGate(monkeypatch)
    running = asyncio.ensure_future(store.restore(held, take(pool, 3, 1, "again")))
    await gate.reached()
    size_bytes = held.size_bytes
    held.close()
    held.close()
    assert store.used_bytes == size_bytes and store.count == 0
    gate.go.set()
    await running
    assert store.used_bytes == 0 and at_rest(store.host)
    await store.close()


async def test_the_store_of_a_snapshot_waits_for_a_restore_into_another_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (pool, store), (other, elsewhere) = store_of(), store_of(slice_bytes=100)
    held = await store.take(take(pool, 3, 1, "mine"))
    gate = CopyGate(monkeypatch)
    running = asyncio.ensure_future(elsewhere.restore(held, take(other, 3, 1, "again")))
    await gate.reached()
    closing = asyncio.ensure_future(store.close())
    await asyncio.sleep(0)
    assert not closing.done() and mapped(store.host)
    gate.go.set()
    with pytest.raises(MisuseError, match="store of snapshots was closed"):
        await running
    await closing
    assert not mapped(store.host)
    await elsewhere.close()


async def test_pages_of_the_engine_s_own_are_held_where_they_are_counted() -> None:
    pool = allocate("mha")
    external = ExternalPages(pool.layout.num_pages)
    store = SnapshotStore(pool, 1 << 16, allocators=(external,))
    taking = asyncio.ensure_future(store.take((np.array([3, 9], dtype=np.int32),)))
    await asyncio.sleep(0)
    assert external.busy([3, 9]).tolist() == [3, 9]
    (await taking).close()
    assert external.at_rest() and store.used_bytes == 0
    await store.close()
