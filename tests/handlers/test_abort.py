"""A room ended on purpose, in every phase and from either side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.wire.messages import Abort, ChunkDone, Heartbeat
from kvflow.testing.pair import Pair, fill, until
from kvflow.transports.control.memory import Frame
from tests.handlers.scenes import (
    PROMPT,
    WHY,
    code_of,
    finish,
    header,
    known,
    matched,
    midway,
    more,
    record_of,
    sending,
    success,
    to_prefill,
)

Both = tuple[PrefillRoom, DecodeRoom]


async def between_chunks(p: Pair) -> Both:
    source, target = await matched(p)
    mine = p.prefill.pages.take(2, "engine")
    source.on_end(lambda: p.prefill.pages.give_back(mine, "engine"))
    source.send(mine)
    await until(lambda: record_of(target).state.filled == ((2,),))
    assert source.phase.name == "WAITING_FOR_INPUT"
    return source, target


async def first_chunk_running(p: Pair) -> Both:
    p.plane(p.prefill).hold()
    return await sending(p)


Scene = Callable[[Pair], Awaitable[Both]]
SCENES: list[Scene] = [matched, first_chunk_running, between_chunks, midway]


@pytest.mark.parametrize("side", ["decode", "prefill"])
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("again", [0, 1, 3])
async def test_one_side_ends_the_room(p: Pair, scene: Scene, side: str, again: int) -> None:
    source, target = await scene(p)
    mine: PrefillRoom | DecodeRoom = source if side == "prefill" else target
    mine.close(WHY)
    if mine is target:
        assert await code_of(target.landed()) is WHY.code  # at once: no network is waited for
    for _ in range(again):
        mine.close(Cause(Code.DEADLINE))
    assert await code_of(source.done()) is await code_of(target.landed()) is WHY.code
    await p.rest()
    assert target.cause == source.cause == WHY
    for _ in range(again):
        target.close()
        source.close()
    if side == "decode":
        assert target.phase.name == source.phase.name == "ABORTED"
        assert p.decode.counts.endings == p.prefill.counts.endings == {f"aborted:{WHY.code}": 1}
    else:
        assert target.phase.name == "FAILED" and source.phase.name in ("FAILED", "ABORTED")
        assert p.decode.counts.endings == {f"failed:{WHY.code}": 1}
    p.plane(p.prefill).release()
    await success(p, 8)


async def test_the_answer_goes_before_its_pages_are_let_go_and_users_are_told_after(
    p: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = await midway(p)
    seen: list[str] = []
    store, carry = p.prefill.shell.pages, p.network.carry
    unhold = store.unhold

    def let_go(pages: PageIndices) -> None:
        seen.append("let go")
        unhold(pages)

    def carried(frame: Frame) -> None:
        seen.append(type(frame.message).__name__)
        carry(frame)

    monkeypatch.setattr(store, "unhold", let_go)
    monkeypatch.setattr(p.network, "carry", carried)

    async def released() -> None:
        await source.released()
        seen.append("released")

    await until(lambda: "let go" in seen)  # of the chunk before
    waiting = asyncio.ensure_future(released())
    target.close(WHY)
    await waiting
    told = [
        what for what in seen[seen.index("Abort") :] if what in ("AbortAck", "let go", "released")
    ]
    assert told == ["AbortAck", "let go", "released"]


@pytest.mark.parametrize("scene", SCENES)
async def test_both_at_once_keep_their_own_cause(p: Pair, scene: Scene) -> None:
    source, target = await scene(p)
    target.close(Cause(Code.CLIENT_GONE))
    source.close(WHY)
    assert await code_of(target.landed()) is Code.CLIENT_GONE
    assert await code_of(source.done()) is WHY.code


async def test_closing_what_has_landed_is_no_abort(p: Pair) -> None:
    await success(p)
    await p.rest()
    assert p.network.seen["Abort"] == 0


async def test_freed_pages_are_written_by_their_new_owner_only(p: Pair) -> None:
    _, target = await midway(p)
    pages = target.pages.copy()
    target.close()
    await until(p.decode.pool.pages.at_rest)
    mine = p.decode.pages.take(64, "canary")
    fill(p.decode.pool, mine, 0xEE)
    p.plane(p.prefill).release()
    await success_on_a_full_pool(p)
    assert (p.decode.pool.pages_bytes(pages) == 0xEE).all()
    p.decode.pages.give_back(mine, "canary")


async def success_on_a_full_pool(p: Pair) -> None:
    prefill = p.prefill.room(9, PROMPT)
    with pytest.raises(Exception, match="pages: asked for 5, limit 0"):
        await p.decode.room(9, "sim", PROMPT)
    assert await code_of(prefill.matched()) is Code.CAPACITY


async def test_an_abort_that_crosses_the_last_chunk(p: Pair) -> None:
    p.network.hold(ChunkDone)
    source, target = await sending(p, chunks=2)
    await source.done()
    target.close(WHY)
    assert await code_of(target.landed()) is WHY.code
    p.network.release()
    await p.rest()
    assert target.phase.name == "ABORTED" and source.phase.name == "SUCCESS"


async def test_an_abort_after_success_for_a_grant_prefill_has_forgotten(p: Pair) -> None:
    source, target = await matched(p)
    await finish(p, source, target)
    await p.rest()
    half = p.prefill.room(7, PROMPT)  # the id is used again; what is late must not touch it (I6)
    for acks in range(3):
        assert p.network.seen["AbortAck"] == acks
        to_prefill(p, Abort(cause=WHY, **header(p, 7, target.grant)))
        await more(p, "AbortAck")
        assert not half.ended
    second = await p.decode.room(7, "sim", PROMPT)
    await finish(p, half, second)


@pytest.mark.parametrize("side", ["decode", "prefill"])
async def test_a_room_whose_deadline_passes_is_ended_by_the_side_that_has_it(
    p: Pair, side: str
) -> None:
    limits = {side: 30}
    source = p.prefill.room(7, PROMPT, deadline_s=limits.get("prefill"))
    target = await p.decode.room(7, "sim", PROMPT, deadline_s=limits.get("decode"))
    await source.matched()
    p.clock(getattr(p, side)).advance(31)
    assert await code_of(target.landed()) is await code_of(source.done()) is Code.DEADLINE


async def test_heartbeats_let_prefill_forget_what_has_ended(p: Pair) -> None:
    p.network.hold(Heartbeat)
    for room in range(5):
        await success(p, room)
    (peer,) = known(p.prefill)
    assert peer.grants.remembered == 5
    p.network.release()
    await until(lambda: not peer.grants.remembered)
    assert peer.grants.low_water > 5 and not peer.grants.unproven()


async def test_queued_chunks_never_reach_the_target(p: Pair) -> None:
    source, target = await matched(p)
    p.plane(p.prefill).hold()
    p.send_all(source, chunks=5)
    p.plane(p.prefill).step(1)
    target.close(WHY)
    assert await code_of(source.done()) is WHY.code
    p.plane(p.prefill).release()
    await p.rest()
    (first, *others) = p.plane(p.prefill).started
    assert first.landed_bytes == p.prefill.pool.layout.page_bytes
    assert not any(f.landed_bytes for f in others)
    landed = p.decode.pool.pages_bytes(target.pages).any(axis=1)
    assert landed.tolist() == [True, False, False, False, False]
