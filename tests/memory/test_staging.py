"""Staging: every byte there and back, sums of what the CPU cannot read, and sizes that hold."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvflow.memory import page_tasks
from kvflow.memory import staging as module
from kvflow.memory.checksum import SHARES, PageChecksums
from kvflow.memory.copies import host_layout
from kvflow.memory.pool import PagedPool
from kvflow.memory.staging import (
    PREFILL_BYTES,
    StagedArrivals,
    StagedChecksums,
    Staging,
    prefill_bytes,
)
from kvflow.protocols.errors import LayoutError, MisuseError
from kvflow.protocols.pages.coverage import Served
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.protocols.pages.layout import Order, PageIndices, Places, build_layout
from kvflow.protocols.pages.plan import Pairing
from tests.memory.gate import CopyGate
from tests.memory.kinds import (
    KINDS,
    check_restored,
    contents,
    layout_of,
    names_of,
    overwrite,
    places_at,
)
from tests.memory.test_snapshot import forgetting

ORDERS: list[Order] = ["page_first", "layer_first"]


def made(kind: str, order: Order = "page_first", num_pages: int = 14) -> PagedPool:
    pool = PagedPool.allocate(layout_of(kind, 4, num_pages, 5, order), shared=False)
    overwrite(pool, 1)
    return pool


def places(kind: str, pages: tuple[int, ...], rows: tuple[int, ...]) -> Places:
    return places_at(kind, *(np.array(indices, dtype=np.int32) for indices in (pages, rows)))


def never() -> bool:
    return False


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
async def test_every_buffer_goes_there_and_back(kind: str, order: Order) -> None:
    pool = made(kind, order)
    staging = Staging(pool, shared=False)
    here, between, there = (
        places(kind, *p) for p in (((7, 0, 3), (4,)), ((9, 2, 5), (0,)), ((1, 2, 8), (3,)))
    )
    out, lent, into = (
        pool.layout.numbered(here),
        staging.host.layout.numbered(between),
        pool.layout.numbered(there),
    )
    before = contents(kind, pool)
    assert staging.copy_out(out, lent, never)
    overwrite(pool, 2)
    was = contents(kind, pool)
    arrivals = StagedArrivals(staging, verify=True)
    task = arrivals.begin(lent, into)
    found = await task.done
    check_restored(kind, before, here, was, there, pool)
    sums = PageChecksums(staging.host)
    assert found == await sums.begin(lent).done
    plain = StagedArrivals(staging, verify=False)
    assert await plain.begin(lent, into).done == b"brought"
    for tasks in (arrivals, sums, plain):
        await tasks.close()
    staging.close()
    pool.close()


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS for name in names_of(kind)]
)
@pytest.mark.parametrize("way", ["_out", "_into"])
def test_a_copy_that_forgets_a_name_is_found(kind: str, name: str, way: str) -> None:
    pool = made(kind, num_pages=6)
    staging = Staging(pool, shared=False)
    ends = {"_out": (pool.layout, staging.host.layout), "_into": (staging.host.layout, pool.layout)}
    with forgetting(name):
        setattr(staging, way, Pairing(*ends[way]))
    here, there = places(kind, (1, 4), (2,)), places(kind, (0, 5), (3,))
    out, into = pool.layout.numbered(here), pool.layout.numbered(there)
    before = contents(kind, pool)
    assert staging.copy_out(out, out, never)
    overwrite(pool, 2)
    was = contents(kind, pool)
    assert staging.copy_in(out, into, never)
    with pytest.raises(AssertionError, match=name):
        check_restored(kind, before, here, was, there, pool)
    staging.close()
    pool.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_sum_through_scratch_is_that_of_the_pool(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SCRATCH_BYTES", 1)  # two pages at a time
    pool = made(kind)
    direct, staged = PageChecksums(pool), StagedChecksums(pool)
    found = []
    for seed, pages, rows in (
        (1, (3,), ()),
        (2, (3, 1, 9, 0, 5), (2,)),
        (3, (3, 1, 9, 0, 5), (2,)),
    ):
        overwrite(pool, seed)
        wanted = pool.layout.numbered(places(kind, pages, rows))
        sums = [await checksums.begin(wanted).done for checksums in (direct, staged)]
        assert sums[0] == sums[1] != b""
        found.append(sums[0])
    assert found[1] != found[2]
    for checksums in (direct, staged):
        await checksums.close()
    pool.close()


@pytest.mark.parametrize("kind", ["mha", "hybrid", "mamba", "windows"])
def test_sizes(kind: str) -> None:
    pool = made(kind)
    layout = pool.layout
    for size_bytes in (0, layout.size_bytes, 1 << 40):
        whole = Staging(pool, size_bytes, shared=False)
        assert whole.host.layout.counts == layout.counts
        whole.close()
    limit = 2 * layout.room_bytes(tuple(1 if s.in_rows else 2 for s in layout.spaces))
    some = Staging(pool, limit, shared=False)
    assert 0 < some.host.layout.size_bytes <= limit < layout.size_bytes
    assert some.host.segment is None
    assert [space.name for space in some.host.layout.spaces] == [
        space.name for space in layout.spaces
    ]
    some.close()
    with pytest.raises(MisuseError, match="1 bytes of host memory do not hold"):
        Staging(pool, 1)
    pool.close()


@pytest.mark.parametrize(
    ("page_mib", "row_mib", "size_mib"),
    [(1, 0, 256), (1, 4, 256), (40, 0, 512), (1, 77, 768), (1, 302, 2652)],
)
def test_a_prefills_default_is_enough_for_four_decodes(
    page_mib: int, row_mib: int, size_mib: int
) -> None:
    kinds = [StateKind("k", "uint8", (page_mib << 18,))]
    if row_mib:
        kinds.append(StateKind("s", "uint8", (row_mib << 20,), ROW))
    rows = 64 if row_mib else 0
    layout = build_layout(kinds, page_size=4, num_pages=4096, num_rows=rows)
    found = prefill_bytes(layout)
    assert found == size_mib << 20
    counts = host_layout(layout, found).counts
    assert counts[0] >= 12 and (not row_mib or counts[1] >= 4)


def test_a_prefills_default_is_never_more_than_a_small_pool_needs() -> None:
    layout = build_layout([("k", "uint8", (64 << 20,))], page_size=1, num_pages=6)
    assert layout.size_bytes > PREFILL_BYTES and prefill_bytes(layout) >= layout.size_bytes


def test_more_than_there_is_memory_for_is_refused() -> None:
    layout = build_layout([("k", "float32", (1 << 20,))], page_size=1024, num_pages=1 << 20)
    with pytest.raises(LayoutError, match="no memory for a pool"):
        Staging(PagedPool(layout))


async def test_what_peers_say_that_they_serve_is_kept_within_bounds() -> None:
    """A peer may cut its spans otherwise at each registration."""
    layout = build_layout([StateKind("0.k", "uint8", (32, 2), axis=0)], page_size=2, num_pages=3)
    pool = PagedPool.allocate(layout, shared=False)
    staging = Staging(pool, shared=False)
    arrivals = StagedArrivals(staging, verify=True)
    one = np.array([1], dtype=np.int32)
    cuts = [(first, end) for end in range(1, 32) for first in range(end)]
    assert len(cuts) > 2 * SHARES
    for first, end in cuts:
        overwrite(pool, 3)
        before = pool.array("0.k").copy()
        staging.host.array("0.k")[...] = 77
        assert await arrivals.begin(one, one, (Served("0.k", first, end),)).done
        before[1, :, first:end] = 77
        assert (pool.array("0.k") == before).all(), (first, end)
    kept = (staging._share.cache_info(), arrivals._sums._gathered.cache_info())
    assert [info.currsize for info in kept] == [SHARES, SHARES]
    await arrivals.close()
    staging.close()
    pool.close()


def test_what_each_shard_sends_of_a_page_lies_in_one_stretch() -> None:
    heads = [StateKind(name, "uint8", (4, 2)) for name in ("0.k", "0.v")]
    half = [kind._replace(shape=(2, 2), start=2, whole=4) for kind in heads]
    pool = PagedPool.allocate(build_layout(heads, page_size=4, num_pages=2), shared=False)
    rank, one = build_layout(half, page_size=4, num_pages=2), np.array([1], np.int32)
    blocks = []
    for shards in (1, 2):
        staging = Staging(pool, shared=False, shards=shards)
        pairing = Pairing(rank, staging.host.layout, ("rank", "staging"), partly=True)
        blocks.append(pairing.blocks(one, one, max_block_bytes=1 << 20).sizes.size)
        staging.close()
    assert blocks[1] == 1 < blocks[0]
    pool.close()


async def test_close_gives_the_host_memory_back() -> None:
    pool = made("mha")
    staging, checksums = Staging(pool, shared=False), StagedChecksums(pool)
    await checksums.close()
    late = checksums.begin(pool.layout.numbered(places("mha", (1,), ())))
    assert await late.done == b"" and "there is no thread" in late.error
    staging.close()
    for host in (staging.host, *(scratch.host for scratch in checksums._made)):
        with pytest.raises(LayoutError, match="the pool is closed"):
            host.array("0.k")
    pool.close()


async def test_a_cancelled_landing_brings_nothing_and_answers_nothing() -> None:
    """An answer would say that the chunk is where it is used."""
    pool = made("mha")
    staging, was = Staging(pool, shared=False), contents("mha", pool)
    arrivals = StagedArrivals(staging, verify=False)
    lent: PageIndices = np.array([1], dtype=np.int32)
    task = arrivals.begin(lent, lent)
    task.cancel()
    answer = await task.done
    await task.released
    if not answer:  # it had not begun, or was stopped
        assert all(
            (a == b).all()
            for a, b in zip(was.values(), contents("mha", pool).values(), strict=True)
        )
    assert arrivals._bring(lent, lent, None, lambda: True) == b""
    await arrivals.close()
    staging.close()
    pool.close()


async def test_scratch_that_a_hanging_thread_reads_stays_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_tasks, "CLOSE_S", 0.01)
    pool, gate = made("mha"), CopyGate(monkeypatch)
    checksums = StagedChecksums(pool)
    task = checksums.begin(pool.layout.numbered(places("mha", (1,), ())))
    await gate.reached()
    await checksums.close()
    assert not task.released.done()
    assert not any("closed" in repr(scratch.host) for scratch in checksums._made)
    gate.go.set()
    await asyncio.wait_for(task.released, 20)
    assert task.error == ""
    for scratch in checksums._made:
        scratch.close()
    pool.close()
