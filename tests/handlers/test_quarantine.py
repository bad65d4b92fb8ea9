"""Quarantine is bounded by admission, and an operator can end loans without proof."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvflow.protocols.errors import Code, LostError, MisuseError, QuarantineError
from kvflow.protocols.wire.messages import Abort
from kvflow.testing.pair import Pair, pair, until
from kvflow.transports.control.memory import LOST, Fate, Frame
from kvflow.transports.data.fake import Fault
from tests.handlers.scenes import PROMPT, all_read, code_of, ledger, links, midway, sending, success


async def silent(p: Pair, room: int = 7) -> None:
    """Prefill writes, and falls silent: the five pages of its room are in quarantine."""
    source, target = await midway(p, room)
    p.network.cut()
    await all_read()  # a heartbeat that comes after the silence is still heard
    p.clock(p.decode).advance(p.timing.lost_after_s + 1)
    assert await code_of(target.landed()) is Code.PEER_LOST
    assert not source.ended
    assert p.decode.quarantined_pages == 5


def no_abort_of_7(frame: Frame) -> Fate | None:
    return LOST if isinstance(frame.message, Abort) and frame.message.room == 7 else None


@pytest.mark.parametrize("limit", [4, 5])
async def test_no_room_is_opened_above_the_limit(p: Pair, limit: int) -> None:
    ledger(p.decode).quarantine_limit = (limit,)
    other = await p.add_decode()
    assert other.quarantine_limit == 32  # half of 64 pages
    await silent(p)
    p.network.mend()
    # prefill is back, and does not hear that the room is over.
    p.network.rules.append(no_abort_of_7)
    await until(lambda: [peer["phase"] for peer in p.decode.peers()] == ["up"])
    source = p.prefill.room(8, PROMPT)
    if limit == 5:
        (await p.decode.room(8, "sim", PROMPT)).close()
    else:
        with pytest.raises(
            QuarantineError, match="5 pages are in quarantine, more than 4"
        ) as caught:
            await p.decode.room(8, "sim", PROMPT)
        assert caught.value.code is Code.CAPACITY
        assert await code_of(source.matched()) is Code.CAPACITY
    p.network.mend()
    p.plane(p.prefill).release()
    await p.rest()
    await success(p, 9)


async def test_a_declared_death_ends_rooms_and_loans(caplog: pytest.LogCaptureFixture) -> None:
    async with pair() as p:
        await silent(p)
        [line] = p.decode.peers()
        assert (line["phase"], line["loans"], line["quarantine_pages"]) == ("silent", 1, 5)
        assert line["heard_ago_s"] > p.timing.lost_after_s
        assert p.decode.peers_by_phase() == {"silent": 1}
        [target] = p.prefill.peers()
        assert (target["phase"], target["rooms"]) == ("up", 1)
        with pytest.raises(MisuseError, match="is linked here"):
            p.decode.declare_dead(p.prefill.incarnation + 1, "a slip")
        assert p.decode.quarantined_pages == 5
        with caplog.at_level(logging.WARNING, "kvflow"):
            p.decode.declare_dead(
                int(line["incarnation"], 16), "operator at 10.0.0.1: its machine is off"
            )
        assert f"{p.prefill.incarnation:016x}" in caplog.text
        assert "operator at 10.0.0.1: its machine is off" in caplog.text
        assert p.decode.pool.pages.at_rest()
        assert not p.decode.quarantined_pages
        assert p.decode.counts.declared_dead == 1
        await until(lambda: not links(p.decode))
        p.network.mend()
        with pytest.raises(LostError, match="declared dead"):
            await p.decode.room(8, "sim", PROMPT)
        with pytest.raises(MisuseError):
            p.decode.declare_dead(p.prefill.incarnation, "again")
        p.plane(p.prefill).release()


async def test_a_declared_death_of_a_living_prefill_tells_the_rooms_that_run() -> None:
    async with pair() as p:
        source, target = await midway(p)
        waiting = asyncio.ensure_future(target.landed())
        await asyncio.sleep(0)
        p.decode.declare_dead(p.prefill.incarnation, "wrong, but said")
        assert await code_of(waiting) is Code.PEER_LOST
        assert p.decode.pool.pages.at_rest() and not p.decode.shell.endpoint.rooms
        p.plane(p.prefill).release()
        assert await code_of(source.done()) is Code.PEER_LOST  # what is alive is told to stop


async def test_rooms_that_drain_count(p: Pair) -> None:
    ledger(p.decode).quarantine_limit = (9,)
    p.plane(p.prefill).script(Fault.STUCK, Fault.STUCK)
    for room in (1, 2):
        assert p.decode.unavailable_reason == ""
        _, target = await sending(p, room=room)
        target.close()
        assert target.phase.name == "DRAINING" and p.decode.quarantined_pages == 5 * room
    await until(lambda: ledger(p.decode).overdue_pages == 10)  # their Aborts have been repeated
    assert p.decode.unavailable_reason.startswith("10 pages are in quarantine, more than 9")
    waiting = p.prefill.room(3, PROMPT)
    with pytest.raises(QuarantineError, match="10 pages are in quarantine, more than 9"):
        await p.decode.room(3, "sim", PROMPT)
    assert await code_of(waiting.matched()) is Code.CAPACITY
    p.plane(p.prefill).release()
    await p.rest()
    assert p.decode.quarantined_pages == 0 and p.decode.unavailable_reason == ""
    await success(p, 4)
