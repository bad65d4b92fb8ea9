"""Rooms whose pages no peer can write: what lands in staging is brought to them (I2, I13)."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from kvflow.handlers import decode
from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.memory import page_tasks
from kvflow.memory.checksum import PageChecksums
from kvflow.memory.copies import HostCopier
from kvflow.memory.external import ExternalPages
from kvflow.memory.staging import StagedArrivals, Staging
from kvflow.node import DecodeNode
from kvflow.protocols.errors import CapacityError, Code, KvflowError
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.ports import UnprovenLoan
from kvflow.protocols.waiting import PASSED_FOR_S, Waits
from kvflow.testing.pair import PAGE_SIZE, Pair, pair, small_layout, until
from kvflow.transports.data.fake import Fault
from tests.handlers.scenes import PROMPT, assert_same_bytes, finish, ledger, matched
from tests.memory.gate import CopyGate
from tests.memory.kinds import contents, layout_of, overwrite

PAGE_BYTES = small_layout().page_bytes


@asynccontextmanager
async def staged(**options: Any) -> AsyncIterator[Pair]:
    async with pair(**options) as made:
        yield made
        for node in made.prefills:
            made.plane(node).release()
        await made.rest()


@pytest.fixture
async def p() -> AsyncIterator[Pair]:
    async with staged(staging_bytes=0) as made:
        yield made


@pytest.fixture
async def little() -> AsyncIterator[Pair]:
    """Staging of seven pages: two rooms of five do not fit."""
    async with staged(staging_bytes=7 * PAGE_BYTES) as made:
        yield made


async def left_in_doubt(p: Pair, source: PrefillRoom, target: DecodeRoom, pages: int) -> None:
    """The write of the room fails and may still land: its pages stay lent."""
    p.plane(p.prefill).script(Fault.LATE)
    p.send_all(source)
    with pytest.raises(KvflowError):
        await target.landed()
    await until(lambda: p.decode.quarantined_pages == pages)


async def closed_in_doubt(
    p: Pair, source: PrefillRoom, target: DecodeRoom, pages: int
) -> tuple[Staging, UnprovenLoan]:
    """As `left_in_doubt`, then decode closes. Returns its staging, and the loan that it leaves."""
    await left_in_doubt(p, source, target, pages)
    first, staging = p.decode, p.decode.staging
    assert isinstance(staging, Staging)
    [loan] = await first.close()
    p.decodes.remove(first)
    return staging, loan


def verify_checksums(p: Pair) -> None:
    p.prefill.shell.checksums = PageChecksums(p.prefill.pool)
    p.decode.shell.endpoint.core.verify = True
    arrivals = p.decode._arrivals
    assert isinstance(arrivals, StagedArrivals)
    arrivals._verify = True


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("verify", [False, True])
async def test_a_room_lands_in_its_own_pages(p: Pair, chunks: int, verify: bool) -> None:
    if verify:
        verify_checksums(p)
    source, target = await matched(p)
    assert p.decode.exported[1].buffers != p.decode.pool.layout.buffers, (
        "peers know the staging's addresses only"
    )
    pages = p.send_all(source, chunks=chunks)
    assert await target.landed() == b"handoff"
    assert_same_bytes(p, pages, target)
    await until(lambda: p.decode.staging_at_rest)
    target.close()
    await p.rest()
    assert p.decode.counts.mismatched == 0


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("had", [0, 3])
async def test_a_last_chunk_without_pages_lands_through_staging_too(
    p: Pair, verify: bool, had: int
) -> None:
    if verify:
        verify_checksums(p)
    prompt = range(3 * PAGE_SIZE)
    source = p.prefill.room(7, prompt)
    target = await p.decode.room(7, "sim", prompt, prefix_tokens=(3 - had) * PAGE_SIZE)
    await source.matched()
    mine = p.prefill.pages.take(had, "engine")
    if had:
        source.send(mine)
    source.send([], last=True, handoff=b"handoff")
    assert await target.landed() == b"handoff" and len(target.pages) == had
    await source.done()
    p.prefill.pages.give_back(mine, "engine")
    target.close()


async def test_a_changed_byte_in_staging_is_found(p: Pair) -> None:
    verify_checksums(p)
    p.plane(p.prefill).hold()
    source, target = await matched(p)
    p.send_all(source)
    p.plane(p.prefill).step(5 - 1)
    p.decode.reached.array("0.k")[target.holding.lent[0]] ^= 1
    p.plane(p.prefill).release()
    with pytest.raises(KvflowError, match=r"checksum [0-9a-f]{16} at prefill"):
        await target.landed()


async def test_nothing_has_landed_before_it_is_brought(
    p: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = CopyGate(monkeypatch)
    source, target = await matched(p)
    pages = p.send_all(source, chunks=2)
    await source.done()
    await gate.reached()
    assert not target.when_landed.given and not target.ended
    gate.go.set()
    await target.landed()
    assert_same_bytes(p, pages, target)
    target.close()


@pytest.mark.parametrize("chunks", [1, 2])
async def test_a_copy_that_fails_fails_its_room(
    p: Pair, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = CopyGate(monkeypatch, fails_at=1)
    gate.go.set()
    source, target = await matched(p)
    p.send_all(source, chunks=chunks)
    text = (
        r"chunk [01] of rank 0: the pages could not be brought to where they are used: the copy "
        r"from staging failed"
    )
    with pytest.raises(KvflowError, match=text) as caught:
        await target.landed()
    assert caught.value.code is Code.ENGINE_ERROR
    await target.released()


async def test_an_abort_in_mid_copy_frees_the_pages_when_the_copy_has_ended(
    p: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = CopyGate(monkeypatch)
    source, target = await matched(p)
    p.send_all(source)
    await gate.reached()
    target.close()
    await until(lambda: target.grant not in p.decode.shell.endpoint.rooms and source.ended)
    free = p.decode.pool.pages.free_pages, p.decode.reached.pages.free_pages
    assert free == (p.decode.pool.pages.capacity - 5, p.decode.reached.pages.capacity - 5)
    assert not target.when_released.given
    gate.go.set()
    await target.released()


async def test_rooms_wait_for_staging_in_order(little: Pair) -> None:
    p = little
    p.plane(p.prefill).hold()
    first = await matched(p, 1)
    sources = [p.prefill.room(n, PROMPT) for n in (2, 3, 4)]
    others = [p.decode.room(n, "sim", PROMPT) for n in (2, 3, 4)]
    await until(lambda: len(p.decode.shell.waiting) == 3)
    assert [len(room.pages) for room in others] == [0, 0, 0], (
        "no page of the pool is taken meanwhile"
    )
    others[1].close()
    await until(lambda: sources[1].ended and len(p.decode.shell.waiting) == 2)
    p.plane(p.prefill).release()
    for source, target in (first, (sources[0], others[0]), (sources[2], others[2])):
        await source.matched()
        assert [room.holding.lent.size for room in others] in ([0, 0, 0], [5, 0, 0], [0, 0, 5])
        pages = p.send_all(source)
        await target.landed()
        assert_same_bytes(p, pages, target)
        target.close()
    await p.rest()
    assert not p.decode.shell.waiting


async def sized(p: Pair, room: int, pages: int) -> tuple[PrefillRoom, DecodeRoom]:
    prompt = range(pages * PAGE_SIZE)
    return p.prefill.room(room, prompt), p.decode.room(room, "sim", prompt)


async def test_rooms_that_fit_pass_a_large_one_for_a_while_and_then_it_has_what_comes_back(
    little: Pair,
) -> None:
    """Of seven pages three are lent; five are wanted, and then two at a time, for ever."""
    p = little
    holder = await sized(p, 1, 3)
    await holder[1].opened()
    large = await sized(p, 2, 5)
    await until(lambda: large[1].grant and p.decode.shell.waiting)
    passing = [await sized(p, room, 2) for room in (3, 4)]
    for pair_of in passing:
        await pair_of[1].opened()
        assert not large[1].when_opened.given
    p.clock(p.decode).advance(PASSED_FOR_S)
    late = await sized(p, 5, 2)
    await finish(p, *passing[0])
    await finish(p, *passing[1])
    await until(lambda: p.decode.reached.pages.free_pages == 4)
    assert not late[1].when_opened.given, (
        "four pages are free, and two wanted: they are kept for the large room"
    )
    waits = p.decode.staging_waits
    assert waits is not None and (waits.rooms, waits.pages, waits.stuck_rooms) == (2, 7, 0)
    assert waits.oldest_s >= PASSED_FOR_S
    await finish(p, *holder)
    await finish(p, *large)
    await finish(p, *late)


async def stuck(p: Pair) -> DecodeRoom:
    p.plane(p.prefill).script(Fault.STUCK)
    source, target = await sized(p, 1, 3)
    await source.matched()
    p.send_all(source)
    await until(lambda: p.plane(p.prefill).writes)
    return target


async def test_a_room_that_quarantine_keeps_from_its_pages_keeps_nobody_else_waiting(
    little: Pair,
) -> None:
    p = little
    (await stuck(p)).close()
    await until(lambda: p.decode.quarantined_pages == 3)
    large = await sized(p, 2, 5)
    await until(lambda: p.decode.shell.waiting)
    p.clock(p.decode).advance(10 * PASSED_FOR_S)
    for room in (3, 4, 5):
        await finish(p, *await sized(p, room, 2))
    waits = p.decode.staging_waits
    assert waits is not None and (waits.rooms, waits.stuck_rooms) == (1, 1)
    p.plane(p.prefill).release()  # the proof comes
    await finish(p, *large)
    await p.rest()
    assert p.decode.staging_waits == Waits(0, 0, 0, 0.0)


async def test_a_room_that_quarantine_keeps_from_its_pages_after_it_has_waited_keeps_nobody_else(
    little: Pair,
) -> None:
    p = little
    holder = await stuck(p)
    large = await sized(p, 2, 5)
    await until(lambda: p.decode.shell.waiting)
    p.clock(p.decode).advance(PASSED_FOR_S)
    small = await sized(p, 3, 2)
    await until(lambda: len(p.decode.shell.waiting) == 2)
    holder.close()
    await finish(p, *small)
    waits = p.decode.staging_waits
    assert waits is not None and (waits.rooms, waits.stuck_rooms) == (1, 1)
    p.plane(p.prefill).release()
    await finish(p, *large)


async def test_rows_are_no_pages_that_may_come_back() -> None:
    kinds = StateKind("0.k", "uint8", (8,)), StateKind("1.ssm", "uint8", (8,), ROW)
    layout = build_layout(kinds, page_size=PAGE_SIZE, num_pages=64, num_rows=32)
    async with staged(
        source_layout=layout, target_layout=layout, staging_bytes=2 * 7 * layout.page_bytes
    ) as p:
        assert p.decode.reached.layout.num_pages == 7 and p.decode.reached.layout.num_rows > 7

        def send(source: PrefillRoom, pages: int) -> None:
            taken = p.prefill.pages.take_room((pages, 1), source)
            source.on_end(lambda: p.prefill.pages.give_back(taken, source))
            source.send(taken, last=True, handoff=b"handoff")

        p.plane(p.prefill).script(Fault.STUCK)
        holder = await sized(p, 1, 2)
        await holder[0].matched()
        send(holder[0], 2)
        await until(lambda: p.plane(p.prefill).writes)
        holder[1].close()
        await until(lambda: p.decode.quarantined_pages == 3)
        large = await sized(p, 2, 6)
        await until(lambda: p.decode.shell.waiting)
        p.clock(p.decode).advance(10 * PASSED_FOR_S)
        waits = p.decode.staging_waits
        assert waits is not None and (waits.rooms, waits.stuck_rooms) == (1, 1)
        source, target = await sized(p, 3, 2)
        await source.matched()
        send(source, 2)
        await target.landed()
        target.close()
        p.plane(p.prefill).release()  # the proof comes
        await large[1].opened()
        large[1].close()


async def test_a_room_that_waits_has_what_the_last_of_several_copies_lets_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends, begun, real = [threading.Event(), threading.Event()], itertools.count(), HostCopier.copy
    reached = [threading.Event(), threading.Event()]

    def copy(blocks: Any) -> None:
        mine = next(begun)
        reached[mine].set()
        assert ends[mine].wait(20)
        real(blocks)

    monkeypatch.setattr(HostCopier, "copy", staticmethod(copy))
    monkeypatch.setattr(page_tasks, "THREADS", 2)
    async with staged(staging_bytes=7 * PAGE_BYTES) as p:
        source, target = await matched(p, 1)
        p.send_all(source, chunks=2)
        await until(lambda: all(event.is_set() for event in reached))
        _, late = await sized(p, 2, 4)
        await until(lambda: p.decode.shell.waiting)
        target.close()
        await until(lambda: target.grant not in p.decode.shell.endpoint.rooms and source.ended)
        ends[0].set()
        await until(lambda: target.holding.state.uses == 1)
        assert p.decode.reached.pages.free_pages == 2 and not len(late.holding.lent)
        ends[1].set()
        await until(lambda: p.decode.reached.pages.free_pages != 2)
        assert len(late.holding.lent) == 4, (
            "it is lent what comes back at the moment in which it comes back"
        )
        late.close()


async def test_what_many_rooms_wait_for_is_lent_in_slices(
    little: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "LEND_WORK", 2)
    p = little
    holder = await sized(p, 1, 7)
    await holder[1].opened()
    small = [await sized(p, room, 1) for room in range(2, 9)]
    await until(lambda: len(p.decode.shell.waiting) == 7)
    turns: list[int] = []
    lend = p.decode.shell._lend_waiting

    def lend_waiting() -> None:
        before = len(p.decode.shell.waiting)
        lend()
        turns.append(before - len(p.decode.shell.waiting))

    p.decode.shell._lend_waiting = lend_waiting  # type: ignore[method-assign]
    holder[1].close()
    await asyncio.gather(*(finish(p, *both) for both in small))
    assert max(turns) == 2 and sum(turns) == 7


async def test_a_room_that_waits_meets_its_deadline(little: Pair) -> None:
    p = little
    p.plane(p.prefill).hold()
    first, target = await matched(p, 1)
    late = p.decode.room(2, "sim", PROMPT, deadline_s=5)
    await until(lambda: p.decode.shell.waiting)
    p.clock(p.decode).advance(6)
    with pytest.raises(KvflowError) as caught:
        await late
    assert caught.value.code is Code.DEADLINE and not p.decode.shell.waiting
    p.plane(p.prefill).release()
    await finish(p, first, target)


async def test_a_room_that_never_fits_is_refused_with_the_numbers(little: Pair) -> None:
    source = little.prefill.room(7, range(8 * PAGE_SIZE))
    asked, most = 8 * PAGE_SIZE, 7 * PAGE_SIZE
    text = rf"room 7 in staging, .*\(a larger one has more\): asked for {asked}, limit {most}"
    with pytest.raises(CapacityError, match=text) as at_decode:
        await little.decode.room(7, "sim", range(8 * PAGE_SIZE))
    with pytest.raises(KvflowError, match=text) as at_prefill:
        await source.matched()
    assert at_decode.value.code is at_prefill.value.code is Code.BAD_REQUEST, (
        "a router would try a 503 again"
    )
    await little.rest()


async def test_a_late_write_reaches_nothing_but_staging(p: Pair) -> None:
    source, target = await matched(p)
    await left_in_doubt(p, source, target, 5)
    lent = p.decode.reached.places.owned()
    assert list(lent.values()) == [5]
    before = p.decode.pool.pages_bytes(np.arange(64, dtype=np.int32)).tobytes()
    assert p.plane(p.prefill).land_late() > 0
    assert p.decode.pool.pages_bytes(np.arange(64, dtype=np.int32)).tobytes() == before
    assert p.decode.reached.places.owned() == lent
    await p.crash(p.prefill)
    await until(lambda: not p.decode.quarantined_pages)


async def test_a_prefill_that_dies_in_mid_write_leaves_its_loan_until_the_fence(p: Pair) -> None:
    p.plane(p.prefill).hold()
    source, target = await matched(p)
    p.send_all(source, chunks=2)
    p.plane(p.prefill).step(4)
    await p.crash(p.prefill)
    p.clock(p.decode).advance(1000)
    with pytest.raises(KvflowError):
        await target.landed()
    await target.released()


async def test_what_is_unproven_at_the_end_stays_with_the_staging(p: Pair) -> None:
    source, target = await matched(p)
    staging, loan = await closed_in_doubt(p, source, target, 5)
    assert staging.pool.pages.at_rest() and not staging.host.places.at_rest()
    assert staging.host.unproven == [loan] and not staging.pool.unproven
    await target.released()
    second = await p.add_decode(over=staging)
    assert second.quarantined_pages == 5
    p.plane(p.prefill).die()
    await until(lambda: not second.quarantined_pages)
    assert staging.host.places.at_rest() and not ledger(second).quarantined_pages


async def test_a_room_that_waits_has_what_an_earlier_node_left_once_that_is_proven(
    little: Pair,
) -> None:
    p = little
    source, target = await sized(p, 7, 3)
    await source.matched()
    staging, loan = await closed_in_doubt(p, source, target, 3)
    second = await p.add_decode(over=staging)
    target = second.room(8, p.ranks, PROMPT)
    await until(lambda: second.shell.waiting)
    # Another node over the staging has the proof.
    staging.host.quarantine.forget(loan.incarnation, loan.writer)
    await until(lambda: not second.quarantined_pages)
    await until(lambda: target.holding.lent.size == 5)
    target.close()
    await target.released()


async def test_a_room_that_waits_has_what_another_node_over_the_staging_gives_back(
    little: Pair,
) -> None:
    p = little
    source, target = await matched(p)
    assert isinstance(p.decode.staging, Staging)
    second = await p.add_decode(over=p.decode.staging)
    waits = second.room(8, p.ranks, PROMPT)
    await until(lambda: second.shell.waiting)
    target.close()
    await until(lambda: waits.holding.lent.size == 5)
    waits.close()
    await waits.released()
    assert source.ended


async def test_what_an_earlier_node_left_in_the_pool_keeps_no_room_from_the_staging() -> None:
    """That node had no staging. Its pages are in quarantine, and none of them is the staging's."""
    async with pair() as p:
        source, target = await sized(p, 7, 5)
        await source.matched()
        await left_in_doubt(p, source, target, 5)
        first = p.decode
        assert await first.close()
        p.decodes.remove(first)
        staging = Staging(first.pool, 16 * PAGE_BYTES)
        try:
            second = await p.add_decode(over=staging)
            holder, large = (
                await second.room(8, p.ranks, range(4)),
                second.room(9, p.ranks, range(16 * PAGE_SIZE)),
            )
            await until(lambda: second.shell.waiting)
            waits = second.staging_waits
            assert second.quarantined_pages == 5 and waits is not None and waits.stuck_rooms == 0
            holder.close()
            await until(lambda: large.holding.lent.size == 16)
            large.close()
            await p.crash(p.prefill)
            await until(lambda: not second.quarantined_pages)
            assert second.shell.staging_can_come_back == (16,)
            assert second.shell.earlier.beside == (0,)
            await p.rest()
            await second.close()
            p.decodes.remove(second)
        finally:
            staging.close()


async def test_pages_of_the_engine_s_own_are_busy_until_they_have_been_brought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with staged(staging_bytes=0) as p:
        own = ExternalPages(64)
        p.decode.shell.stores.pages = p.decode.pages = own
        gate = CopyGate(monkeypatch)
        source = p.prefill.room(7, PROMPT)
        target = await p.decode.room(7, "sim", PROMPT, pages=[9, 4, 7, 3, 5])
        await source.matched()
        pages = p.send_all(source)
        await gate.reached()
        target.close()
        await until(lambda: not p.decode.shell.endpoint.rooms)
        assert own.busy_pages == 5
        gate.go.set()
        await target.released()
        assert own.at_rest() and list(target.pages) == [9, 4, 7, 3, 5] and pages.size == 5


async def test_a_row_is_brought_with_the_last_chunk() -> None:
    layouts = (
        layout_of("hybrid", 4, 20, 4, "page_first"),
        layout_of("hybrid", 4, 16, 3, "layer_first"),
    )
    async with staged(source_layout=layouts[0], target_layout=layouts[1], staging_bytes=0) as p:
        for seed, node in enumerate(p.nodes):
            overwrite(node.pool, seed)
        source, target = await p.open(7, range(1, 11))
        await source.matched()
        pages, row = p.prefill.pool.pages.take(3, "engine"), p.prefill.pool.rows.take(1, "engine")
        source.send(pages[:2])
        source.send(np.append(pages[2:], row + np.int32(20)), last=True, handoff=b"handoff")
        await target.landed()
        there, its_row = p.decode.pool.layout.split(target.pages)
        ours, theirs = contents("hybrid", p.prefill.pool), contents("hybrid", p.decode.pool)
        assert (ours["0.k"][pages] == theirs["0.k"][there]).all()
        assert (ours["1.ssm"][row] == theirs["1.ssm"][its_row]).all()
        target.close()
        p.prefill.pool.pages.give_back(pages, "engine")
        p.prefill.pool.rows.give_back(row, "engine")


async def test_a_staging_of_another_pool_is_refused(p: Pair) -> None:
    other = p.decode.staging
    with pytest.raises(KvflowError, match="is not for <PagedPool"):
        DecodeNode(p.prefill.pool, p.plane(p.decode), staging=other)
