"""`released()`: nothing touches the room's pages any more, on both sides (I2, I13)."""

from __future__ import annotations

import asyncio

import pytest

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.protocols.errors import Code
from kvflow.testing.pair import Pair, pair, until
from kvflow.transports.data.fake import Fault
from tests.handlers.scenes import PROMPT, WHY, code_of, every_rank_writes, more, sending


async def both(source: PrefillRoom, target: DecodeRoom) -> list[asyncio.Task[None]]:
    waiting = [asyncio.create_task(room.released()) for room in (source, target)]
    await asyncio.sleep(0)
    return waiting


async def test_after_a_success(p: Pair) -> None:
    p.plane(p.prefill).hold()
    source, target = await sending(p)
    waiting = await both(source, target)
    assert not any(task.done() for task in waiting) and p.prefill.pool.pages.held_pages == 5
    p.plane(p.prefill).release()
    await asyncio.gather(*waiting)
    assert not p.prefill.pool.pages.held_pages and not len(p.decode.shell.endpoint.core.ledger)
    assert len(target.keep("sequence")) == 5, "they are the user's, and no one else's"
    p.decode.pages.give_back(target.pages, "sequence")


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_not_before_the_write_has_ended(p: Pair, side: str) -> None:
    source, target = await sending(p, Fault.STUCK)
    (source if side == "prefill" else target).close(WHY)
    assert await code_of(source.done()) is await code_of(target.landed()) is WHY.code
    waiting = await both(source, target)
    await more(p, "Heartbeat", 5)
    await more(p, "Abort", 2)  # repeated, and not answered
    assert not any(task.done() for task in waiting) and p.network.seen["AbortAck"] == 0
    assert p.prefill.pool.pages.held_pages == 5 and p.decode.pages.free_pages == 59
    assert len(p.decode.shell.endpoint.core.ledger) == 1 and source.phase.name == "DRAINING"
    p.plane(p.prefill).release()
    await asyncio.gather(*waiting)
    assert not p.prefill.pool.pages.held_pages and p.decode.pages.free_pages == 64


async def test_a_doubtful_write_releases_its_source_pages_at_once_and_the_target_on_proof(
    p: Pair,
) -> None:
    source, target = await sending(p, Fault.ERROR)
    assert await code_of(target.landed()) is Code.TRANSFER_ERROR
    await source.released()
    waiting = asyncio.create_task(target.released())
    await until(lambda: target.phase.name in ("FAILED", "LOST"))
    assert not waiting.done() and p.decode.quarantined_pages == 5
    await p.crash(p.prefill)
    await waiting
    assert p.decode.pool.pages.at_rest()


async def test_the_slowest_of_several_ranks_decides() -> None:
    async with pair(ranks=2) as p:
        first, second = p.prefills
        p.plane(second).script(Fault.STUCK)
        sources, target = await every_rank_writes(p)
        target.close(WHY)
        await sources[0].released()
        waiting = await both(sources[1], target)
        await until(lambda: len(p.decode.shell.endpoint.core.ledger) == 1)
        assert not any(task.done() for task in waiting) and p.decode.pages.free_pages == 59
        p.plane(second).release()
        await asyncio.gather(*waiting)
        assert p.decode.pool.pages.at_rest()
        assert first.pool.pages.held_pages == second.pool.pages.held_pages == 0


async def test_rooms_that_never_had_a_page(p: Pair) -> None:
    lonely = p.prefill.room(7, PROMPT)
    lonely.close(WHY)
    await lonely.released()
    announced = p.decode.announce(8, "sim", PROMPT)
    announced.close(WHY)
    await announced.released()
    refused = p.decode.room(9, [], PROMPT)
    assert await code_of(refused.landed()) is Code.PEER_LOST
    await refused.released()


async def test_a_cancelled_wait_changes_nothing(p: Pair) -> None:
    source, target = await sending(p, Fault.STUCK)
    target.close(WHY)
    for task in await both(source, target):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert p.decode.pages.free_pages == 59
    p.plane(p.prefill).release()
    await source.released()
    await target.released()
