"""Users are cancelled at every await, and nodes close at every moment (I5, I12)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.protocols.errors import AbortedError, Code, KvflowError
from kvflow.protocols.wire.messages import Abort, Bootstrap, Incarnation, Register, Registered
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.testing.pair import QUICK, Pair, pair, until
from kvflow.transports.data.fake import Fault
from tests.handlers.scenes import (
    PROMPT,
    WHY,
    code_of,
    every_rank_writes,
    known,
    ledger,
    links,
    matched,
    midway,
    offered,
    sending,
    success,
)

Waits = Callable[[PrefillRoom, DecodeRoom], Awaitable[object]]
AWAITS: dict[str, Waits] = {
    "matched": lambda source, _: source.matched(),
    "done": lambda source, _: source.done(),
    "landed": lambda _, target: target.landed(),
}


async def opened(p: Pair, room: int) -> DecodeRoom:
    return await p.decode.room(room, "sim", PROMPT)


async def cancelled(task: asyncio.Future[object] | asyncio.Future[DecodeRoom]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("name", AWAITS)
@pytest.mark.parametrize("turns", range(4))
async def test_a_cancelled_wait_leaves_the_room_as_it_is(p: Pair, name: str, turns: int) -> None:
    p.network.hold(Bootstrap)
    p.plane(p.prefill).hold()
    source, target = await p.open(7, PROMPT)
    if name != "matched":
        p.network.release()
        await source.matched()
        p.send_all(source)
    waiting = asyncio.ensure_future(AWAITS[name](source, target))
    for _ in range(turns):
        await asyncio.sleep(0)
    await cancelled(waiting)
    assert not (source.ended or target.ended)
    p.network.release()
    await source.matched()
    if name == "matched":
        p.send_all(source)
    p.plane(p.prefill).release()
    assert await target.landed() == b"handoff"
    target.close()


@pytest.mark.parametrize("kind", [Register, Registered], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("turns", range(4))
async def test_an_opening_that_is_cancelled_leaves_no_room(p: Pair, kind: type, turns: int) -> None:
    p.network.hold(kind)
    opening = asyncio.ensure_future(opened(p, 7))
    other = asyncio.ensure_future(opened(p, 8))
    for _ in range(turns):
        await asyncio.sleep(0)
    await cancelled(opening)
    left = {record.room for record in p.decode.shell.endpoint.rooms.values()}
    assert left <= {8} and p.decode.pool.pages.at_rest()
    p.network.release()
    (await other).close()  # the one who waits for the same registration is not harmed
    await success(p, 9)


async def test_an_opening_is_cancelled_while_the_registry_is_asked(p: Pair) -> None:
    asked, resolve = asyncio.Event(), p.decode._resolve
    assert resolve is not None

    async def slow(word: str) -> object:
        await asked.wait()
        return await resolve(word)

    p.decode._resolve = slow  # type: ignore[assignment]
    openings = [asyncio.ensure_future(opened(p, room)) for room in (7, 8)]
    await asyncio.sleep(0)
    await cancelled(openings[0])
    asked.set()
    (await openings[1]).close()


SCENES = [matched, midway]


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("stuck", [False, True])
async def test_closing_prefill_in_mid_transfer(
    p: Pair, scene: Callable[[Pair], Awaitable[tuple[PrefillRoom, DecodeRoom]]], stuck: bool
) -> None:
    source, target = await (sending(p, Fault.STUCK) if stuck else scene(p))
    half = p.prefill.room(50, PROMPT)
    lonely = await offered(p, 51)
    node = p.prefills.pop(0)
    closing = asyncio.ensure_future(node.close())
    await asyncio.sleep(0)
    if stuck:
        assert await code_of(target.landed()) is Code.SHUTDOWN
        assert not p.decode.pool.pages.at_rest() and not closing.done()
        p.plane(node).release()
    await closing
    for waiting in (source.done(), half.matched(), target.landed(), lonely.landed()):
        assert await code_of(waiting) in (Code.SHUTDOWN, Code.PEER_LOST)
    assert node.pool.pages.at_rest() and not node.shell.endpoint.rooms
    await p.rest()
    await node.close()


async def test_a_closing_prefill_takes_no_new_room(p: Pair) -> None:
    source, target = await sending(p, Fault.STUCK)
    node = p.prefills[0]
    closing = asyncio.ensure_future(node.close())
    await asyncio.sleep(0)
    with pytest.raises(AbortedError):
        node.room(8, PROMPT)
    late = await p.decode.room(9, "sim", PROMPT)
    assert await code_of(late.landed()) is Code.SHUTDOWN
    p.prefills.clear()
    p.plane(node).release()
    await closing
    assert await code_of(source.done()) is await code_of(target.landed()) is Code.SHUTDOWN
    await p.rest()


@pytest.mark.parametrize("scene", SCENES)
async def test_closing_decode_in_mid_transfer(
    p: Pair, scene: Callable[[Pair], Awaitable[tuple[PrefillRoom, DecodeRoom]]]
) -> None:
    source, target = await scene(p)
    node = p.decodes.pop(0)
    await node.close()
    assert await code_of(target.landed()) is await code_of(source.done()) is Code.SHUTDOWN
    assert node.pool.pages.at_rest() and not node.shell.endpoint.rooms and not len(ledger(node))
    await until(lambda: not known(p.prefill))
    await p.rest()
    await node.close()


async def test_closing_decode_while_prefill_does_not_answer(p: Pair) -> None:
    source, target = await midway(p)
    p.network.drop(Abort, times=1_000)
    node = p.decodes.pop(0)
    closing = asyncio.ensure_future(node.close())
    assert await code_of(target.landed()) is Code.SHUTDOWN
    p.clock(node).advance(p.timing.lost_after_s + 1)
    await closing
    assert target.ended and not node.shell.endpoint.rooms
    assert ledger(node).quarantined_pages == 5 == 64 - node.pages.free_pages
    assert await code_of(source.done()) is Code.SHUTDOWN, "decode has said goodbye"


async def test_closing_decode_waits_for_no_prefill_that_never_answered(p: Pair) -> None:
    p.network.cut()
    room = p.decode.room(7, "sim", PROMPT)
    await until(lambda: links(p.decode))
    node = p.decodes.pop(0)
    async with asyncio.timeout(p.timing.lost_after_s / 4):
        await node.close()
    assert await code_of(room.landed()) is Code.SHUTDOWN


async def test_closing_decode_waits_for_no_living_prefill_that_owes_nothing() -> None:
    async with pair(ranks=2) as p:
        _, target = await every_rank_writes(p)
        p.network.cut(p.prefills[1].info.control)
        p.clock(p.decode).advance(p.timing.lost_after_s + 1)
        assert await code_of(target.landed()) is Code.PEER_LOST
        p.plane(p.prefill).release()
        await until(lambda: len(ledger(p.decode)) == 1)
        node = p.decodes.pop(0)
        async with asyncio.timeout(p.timing.lost_after_s / 4):
            (loan,) = await node.close()
        assert loan.writer == p.prefills[1].exported[0] and list(loan.pages) == list(target.pages)


async def test_closing_decode_while_the_registry_is_asked(p: Pair) -> None:
    asked, ended = asyncio.Event(), asyncio.Event()

    async def resolve(_: str) -> list[RankInfo]:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return []

    p.decode._resolve = resolve
    room = p.decode.room(7, "sim", PROMPT)
    await asked.wait()
    await p.decodes.pop(0).close()
    assert ended.is_set() and await code_of(room.landed()) is Code.SHUTDOWN


async def test_closing_decode_while_a_write_cannot_be_stopped() -> None:
    async with pair(timing=msgspec.structs.replace(QUICK, lost_after_s=0.4)) as p:
        source, target = await sending(p, Fault.STUCK)
        node = p.decodes.pop(0)
        await node.close()
        assert target.phase.name == "LOST" and not node.shell.endpoint.rooms
        assert ledger(node).quarantined_pages == 5
        assert await code_of(source.done()) is Code.SHUTDOWN
        p.plane(p.prefill).release()
        await p.rest()


async def test_closing_decode_while_rooms_are_being_opened(p: Pair) -> None:
    p.network.hold(Registered)
    openings = [asyncio.ensure_future(opened(p, room)) for room in range(3)]
    await until(lambda: links(p.decode))
    node = p.decodes.pop(0)
    await node.close()
    for opening in openings:
        with pytest.raises(AbortedError, match="shutting down"):
            await opening
    assert node.pool.pages.at_rest()


async def test_nodes_that_never_started_or_are_closed_twice(p: Pair) -> None:
    await success(p)
    for node in p.nodes:
        await node.close()
        await node.close()
    with pytest.raises(KvflowError):
        p.prefill.room(8, PROMPT)
    with pytest.raises(KvflowError):
        await p.decode.room(8, p.ranks, PROMPT)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_leaving_by_an_exception_tells_the_other_side(p: Pair, side: str) -> None:
    source, target = await midway(p)
    with pytest.raises(ZeroDivisionError):
        async with source if side == "prefill" else target:
            raise ZeroDivisionError
    for waiting in (source.done(), target.landed()):
        assert await code_of(waiting) in (Code.CLIENT_GONE, Code.ENGINE_ERROR)
    await p.rest()
    source.close(WHY)
    target.close(WHY)


async def test_a_decode_that_left_before_its_way_was_reported_open(p: Pair) -> None:
    """The decode left between the end of the task that opens the way and its report."""
    shell = p.prefill.shell
    stranger = Incarnation(p.decode.incarnation ^ 1)
    assert stranger not in shell.routes
    shell._connected(stranger, None)
    assert p.prefill.counts.handler_errors == 0
