"""Rooms of pools with rows: the row is the last of the room's places, and shares their fate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.memory.checksum import PageChecksums
from kvflow.memory.places import PlaceAllocator
from kvflow.protocols.errors import (
    CapacityError,
    KvflowError,
    LayoutError,
    MisuseError,
    OwnershipError,
)
from kvflow.protocols.pages.layout import PageIndices, Places, build_layout
from kvflow.testing.pair import Pair, pair, until
from kvflow.transports.data.fake import Fault
from tests.memory.kinds import (
    KINDS,
    check_restored,
    contents,
    give_back,
    layout_of,
    overwrite,
    take,
)

PROMPT = range(1, 11)  # 3 pages of 4 tokens
KIND = "hybrid"


@pytest.fixture
async def p() -> AsyncIterator[Pair]:
    layouts = layout_of(KIND, 4, 20, 4, "page_first"), layout_of(KIND, 4, 16, 3, "layer_first")
    async with pair(source_layout=layouts[0], target_layout=layouts[1]) as made:
        for seed, node in enumerate(made.nodes):
            overwrite(node.pool, seed)
        yield made


def places_of(node: Any, places: PageIndices) -> Places:
    found: Places = node.pool.layout.split(places)
    return found


def at_rest(p: Pair) -> bool:
    return not p.left() and all(node.pool.rows.at_rest() for node in p.nodes)


def computed(p: Pair, room: PrefillRoom, pages: int = 3) -> Places:
    """Take what an engine computed for a prompt; it is given back when the room ends."""
    pool = p.prefill.pool
    mine = take(pool, pages, 1, "engine")
    room.on_end(lambda: give_back(pool, mine, "engine"))
    return mine


async def opened(p: Pair, room: int = 7) -> tuple[PrefillRoom, DecodeRoom]:
    source, target = await p.open(room, PROMPT)
    await source.matched()
    return source, target


@pytest.mark.parametrize("chunks", [(3,), (1, 2), (2, 1), (3, 0)])
@pytest.mark.parametrize("verified", [False, True])
async def test_the_row_lands_with_the_last_chunk(
    p: Pair, chunks: tuple[int, ...], verified: bool
) -> None:
    if verified:
        for node in p.nodes:
            node.shell.checksums = PageChecksums(node.pool)
            node.shell.endpoint.core.verify = True  # type: ignore[union-attr]
    source, target = await opened(p)
    mine = computed(p, source)
    before, was = contents(KIND, p.prefill.pool), contents(KIND, p.decode.pool)
    assert (
        source.bytes_total == 3 * p.prefill.pool.layout.page_bytes + p.prefill.pool.layout.row_bytes
    )
    first = 0
    for i, count in enumerate(chunks):
        last = i == len(chunks) - 1
        part = mine[0][first : first + count]
        first += count
        source.send(p.prefill.pool.layout.numbered((part, mine[1])) if last else part, last=last)
    await target.landed()
    assert source.bytes_landed == source.bytes_total
    kept = target.keep("sequence")
    got = places_of(p.decode, kept)
    assert [own.size for own in got] == [3, 1]
    check_restored(KIND, before, mine, was, got, p.decode.pool)
    assert p.decode.counts.bytes_moved == source.bytes_total
    assert p.decode.pool.rows.owned() == {"sequence": 1}
    p.decode.pages.give_back(kept, "sequence")
    source.close()
    await until(lambda: at_rest(p))


async def test_a_full_prefix_still_needs_its_row(p: Pair) -> None:
    source = p.prefill.room(7, PROMPT)
    target = await p.decode.room(7, "sim", PROMPT, prefix_tokens=len(PROMPT))
    assert await source.matched() == len(PROMPT)
    mine = computed(p, source, pages=0)
    before, was = contents(KIND, p.prefill.pool), contents(KIND, p.decode.pool)
    source.send(p.prefill.pool.layout.numbered(mine), last=True)
    await target.landed()
    check_restored(KIND, before, mine, was, places_of(p.decode, target.pages), p.decode.pool)
    target.close()
    source.close()
    await until(lambda: at_rest(p))


async def test_chunks_that_put_rows_where_pages_go_are_refused(p: Pair) -> None:
    source, target = await opened(p)
    mine, layout = computed(p, source), p.prefill.pool.layout
    pages, row = mine[0], layout.num_pages + mine[1]
    for wrong, last, text in (
        (pages, True, "chunk of 3 pages and 0 rows, 3 pages and 1 row of decode's are left"),
        (
            np.r_[pages[:1], row],
            False,
            r"a row in a chunk that is not the last \(row n of 'rows' is given as 20 \+ n, with",
        ),
        (np.r_[pages[:2], row, pages[2:]], True, "space 'pages' follows place"),
        (np.r_[pages, pages[:1]], True, "chunk of 4 pages and 0 rows, 3 pages and 1 row"),
        (
            np.r_[pages, pages[:1]],
            False,
            "chunk of 4 pages and 0 rows, 3 pages and 1 row of decode's are left",
        ),
        (
            layout.numbered(mine),
            False,
            r"\(row n of 'rows' is given as 20 \+ n, with the last chunk\)$",
        ),
        (np.r_[pages, layout.num_pages + 4], True, "is outside 0..23"),
        (np.r_[pages, layout.num_pages + (mine[1] + 1) % 4], True, "has no owner"),
    ):
        with pytest.raises((MisuseError, LayoutError, OwnershipError), match=text):
            source.send(wrong, last=last)
        assert p.prefill.pool.pages.held_pages == p.prefill.pool.rows.held_pages == 0
    source.send(layout.numbered(mine), last=True)
    await target.landed()
    target.close()
    source.close()
    await until(lambda: at_rest(p))


async def test_own_pages_without_their_row_are_refused_where_they_are_given(p: Pair) -> None:
    needed = r"its prompt needs 3 pages and 1 row \(row n of 'rows' is given as 16 \+ n\)$"
    for given, counted in (([0, 1, 2], "3 pages and 0 rows"), ([0, 1, 17], "2 pages and 1 row")):
        with pytest.raises(MisuseError, match=f"^room 7: {counted} given, {needed}"):
            p.decode.room(7, p.ranks, PROMPT, pages=given)
    assert at_rest(p)


@pytest.mark.parametrize("fault", [None, Fault.ERROR, Fault.LATE])
async def test_a_row_on_loan_comes_back_on_proof_only(p: Pair, fault: Fault | None) -> None:
    plane = p.plane(p.prefill)
    plane.hold()
    if fault:
        plane.script(fault)
    source, target = await opened(p)
    mine = computed(p, source)
    source.send(p.prefill.pool.layout.numbered(mine), last=True)
    assert p.decode.pool.rows.free_pages == 2 and p.prefill.pool.rows.held_pages == 1
    if fault:
        plane.release()
        with pytest.raises(KvflowError):
            await target.landed()
        await until(lambda: p.decode.quarantined_pages == 4)
        assert p.decode.pool.rows.free_pages == 2 and target.ended
        await p.crash(p.prefill)
        await until(lambda: p.decode.pool.rows.at_rest() and p.decode.pool.pages.at_rest())
        return
    target.close()
    assert p.decode.pool.rows.free_pages == 2
    plane.release()
    await until(lambda: at_rest(p))


async def test_no_row_left_is_a_refusal_that_takes_no_page(p: Pair) -> None:
    rows = p.decode.pool.rows.take(3, "others")
    with pytest.raises(CapacityError, match="rows: asked for 1, limit 0"):
        await p.decode.room(7, "sim", PROMPT)
    assert p.decode.pool.pages.at_rest()
    p.decode.pool.rows.give_back(rows, "others")
    pages = p.decode.pool.pages.take(15, "others")
    with pytest.raises(CapacityError, match="pages: asked for 3, limit 1"):
        await p.decode.room(8, "sim", PROMPT)
    assert p.decode.pool.rows.at_rest()
    p.decode.pool.pages.give_back(pages, "others")
    await until(lambda: at_rest(p))


async def test_a_decode_without_the_row_is_refused_by_name(p: Pair) -> None:
    without = build_layout(KINDS[KIND][:2], page_size=4, num_pages=8, fingerprint=KIND)
    decode = await p.add_decode(without)
    with pytest.raises(KvflowError, match=r"1\.conv: only prefill has it"):
        await decode.room(7, "sim", PROMPT)
    await asyncio.sleep(0)


def test_what_names_pages_and_rows_is_done_for_both_or_for_neither() -> None:
    from kvflow.memory.pool import PagedPool

    pool = PagedPool.allocate(layout_of(KIND, 4, 6, 2, "page_first"), shared=False)
    store = pool.places
    assert isinstance(store, PlaceAllocator)
    mine = store.take_room((2, 1), "a")
    assert mine.tolist() == [0, 1, 6] and store.owned() == {"a": 3} and store.count_by("a") == 3
    theirs = np.array([0, 1, 7], dtype=np.int32)
    for call in (store.hold, lambda x: store.move(x, "a", "b"), lambda x: store.give_back(x, "a")):
        with pytest.raises(OwnershipError, match="row 1"):
            call(theirs)
        assert store.owned() == {"a": 3} and pool.pages.held_pages == 0
    for call in (store.hold, store.unhold):
        with pytest.raises(OwnershipError, match=r"place 8 is outside 0\.\.7"):
            call(np.array([8], dtype=np.int32))
    store.hold(mine)
    with pytest.raises(OwnershipError, match="row 1 is not held"):
        store.unhold(theirs)
    assert pool.pages.held_pages == 2
    store.move(mine, "a", "b")
    store.give_back(mine, "b")
    assert not store.at_rest() and pool.rows.returning_pages == 1
    store.unhold(mine)
    assert store.at_rest() and store.free == (6, 2)


@pytest.mark.parametrize("walk", ["give_back", "hold", "move"])
async def test_a_store_that_forgets_the_row_is_found(
    p: Pair, walk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: of what a room holds only the pages are given back, held or moved."""
    right = getattr(PlaceAllocator, walk)

    def pages_only(store: PlaceAllocator, places: PageIndices, *more: Any) -> Any:
        return right(store, places[places < store.allocators[0].num_pages], *more)

    monkeypatch.setattr(PlaceAllocator, walk, pages_only)
    source, target = await opened(p)
    mine = computed(p, source)
    plane = p.plane(p.prefill)
    plane.hold()
    with pytest.raises((AssertionError, OwnershipError)):
        source.send(p.prefill.pool.layout.numbered(mine), last=True)
        assert p.prefill.pool.rows.held_pages == 1
        plane.release()
        await target.landed()
        kept = target.keep("sequence")
        assert p.decode.pool.rows.owned() == {"sequence": 1}
        p.decode.pages.give_back(kept, "sequence")
        assert p.decode.pool.rows.at_rest()
    plane.release()
