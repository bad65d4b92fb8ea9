"""Writes that cannot be vouched for: their pages stay out of use until there is proof (I2, I3)."""

from __future__ import annotations

import asyncio

import pytest

from kvflow.handlers.rooms import DecodeRoom
from kvflow.protocols.errors import Code
from kvflow.protocols.machines.loan import LoanPhase
from kvflow.protocols.wire.messages import Abort, RoomFailed
from kvflow.testing.pair import Pair, pair, until
from kvflow.transports.data.fake import Fault
from tests.handlers.scenes import (
    WHY,
    code_of,
    every_rank_writes,
    known,
    ledger,
    links,
    midway,
    prove,
    record_of,
    sending,
    success,
)


async def doubtful(p: Pair, *faults: Fault, chunks: int = 1) -> DecodeRoom:
    source, target = await sending(p, *faults, chunks=chunks)
    assert await code_of(target.landed()) is Code.TRANSFER_ERROR
    assert await code_of(source.done()) is Code.TRANSFER_ERROR
    await until(lambda: source.phase.name == "LOST" and not p.prefill.pool.pages.held_pages)
    await until(lambda: set(record_of(target).lease.loans.values()) == {LoanPhase.DOUBTFUL})
    assert ledger(p.decode).quarantined_pages == 5
    assert p.decode.pages.free_pages == 59 and not p.decode.shell.endpoint.rooms
    return target


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.LATE])
@pytest.mark.parametrize("chunks", [1, 3])
async def test_pages_come_home_when_the_writer_is_fenced(
    p: Pair, fault: Fault, chunks: int
) -> None:
    await doubtful(p, fault, chunks=chunks)
    assert "ChunkDone" not in p.network.seen, (
        "nothing of the doubtful write, and nothing after it, was said to land"
    )
    await prove(p)
    assert not p.left()


async def test_close_does_not_wait_for_what_prefill_has_answered(p: Pair) -> None:
    # lost_after_s is a minute
    room = await doubtful(p, Fault.ERROR)
    async with asyncio.timeout(60):
        (loan,) = await p.decode.close()
    assert list(loan.pages) == list(room.pages)
    p.decodes.clear()


async def test_close_waits_for_the_answers_that_may_still_come(p: Pair) -> None:
    room = await doubtful(p, Fault.ERROR)
    source, target = await sending(p, Fault.STUCK, room=8)
    closing = asyncio.create_task(p.decode.close())
    await until(lambda: source.phase.name == "DRAINING")
    await until(lambda: set(record_of(target).lease.loans.values()) == {LoanPhase.RECALLED})
    assert not closing.done()
    p.plane(p.prefill).release()
    async with asyncio.timeout(60):
        (loan,) = await closing
    assert list(loan.pages) == list(room.pages) and target.when_released.given
    p.decodes.clear()


async def test_a_late_write_finds_its_pages_still_lent(p: Pair) -> None:
    await doubtful(p, Fault.LATE)
    mine = p.decode.pages.take(59, "everything else")
    before = p.decode.pool.pages_bytes(mine).copy()
    assert p.plane(p.prefill).land_late()
    assert (p.decode.pool.pages_bytes(mine) == before).all()
    assert ledger(p.decode).quarantined_pages == 5
    p.decode.pages.give_back(mine, "everything else")
    await prove(p)


async def test_doubt_in_one_chunk_is_remembered_when_others_drain(p: Pair) -> None:
    source, target = await sending(p, Fault.ERROR, Fault.STUCK, chunks=2)
    # Before the other write has ended.
    assert await code_of(target.landed()) is Code.TRANSFER_ERROR
    assert source.phase.name == "DRAINING" and p.network.seen["AbortAck"] == 0
    p.plane(p.prefill).release()
    await until(lambda: source.phase.name == "LOST")
    await prove(p)


async def test_an_abort_answered_with_doubt_loses_the_room(p: Pair) -> None:
    p.plane(p.prefill).script(Fault.ERROR)
    p.plane(p.prefill).hold()
    source, target = await sending(p)
    p.network.hold(Abort)
    target.close(WHY)
    p.network.hold(RoomFailed)
    p.plane(p.prefill).release()
    await until(lambda: target.phase.name == "LOST")
    assert await code_of(target.landed()) is WHY.code
    assert await code_of(source.done()) is Code.TRANSFER_ERROR
    p.network.release()
    await prove(p)


async def test_other_rooms_go_on_beside_quarantine(p: Pair) -> None:
    await doubtful(p, Fault.ERROR)
    for room in range(20, 24):
        await success(p, room)
    assert ledger(p.decode).quarantined_pages == 5
    await prove(p)


async def test_a_crash_in_mid_transfer_ends_rooms_and_loans(p: Pair) -> None:
    _, target = await midway(p)
    await p.crash(p.prefill)
    assert await code_of(target.landed()) is Code.PEER_LOST
    await until(p.decode.pool.pages.at_rest)
    assert target.phase.name == "LOST" and not p.left()
    await until(lambda: not links(p.decode))


async def test_one_dead_rank_of_three_quarantines_nothing_for_long() -> None:
    async with pair(ranks=3) as p:
        sources, target = await every_rank_writes(p)
        await p.crash(p.prefills[1])
        assert await code_of(target.landed()) is Code.PEER_LOST
        for source in (sources[0], sources[2]):
            assert await code_of(source.done()) is Code.PEER_LOST
        await p.rest()


async def test_a_decode_that_dies_is_written_to_no_more(p: Pair) -> None:
    source, _ = await midway(p)
    await p.crash(p.decode)
    assert await code_of(source.done()) is Code.PEER_LOST
    await until(lambda: not known(p.prefill))
    assert not p.left()
    await p.add_decode()
    p.plane(p.prefill).release()
    await success(p)
