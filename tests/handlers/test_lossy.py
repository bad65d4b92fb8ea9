"""Every message lost once, sent twice, or overtaken: the room ends the same way."""

from __future__ import annotations

import random

import pytest

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.protocols.limits import Timing
from kvflow.protocols.machines.loan import LoanPhase
from kvflow.protocols.wire.messages import (
    Abort,
    AbortAck,
    Announce,
    Bootstrap,
    ChunkDone,
    Heartbeat,
    Register,
    Registered,
    Resync,
    RoomFailed,
)
from kvflow.testing.pair import QUICK, Pair, pair, until
from kvflow.transports.control.memory import DELIVERED, LOST, TWICE, Fate, Frame
from tests.handlers.scenes import (
    PROMPT,
    WHY,
    assert_same_bytes,
    code_of,
    matched,
    midway,
    record_of,
)

GOOD = [Register, Registered, Announce, Bootstrap, ChunkDone, Heartbeat, Resync]
ENDED_BY: dict[str, list[type]] = {
    "decode": [Bootstrap, ChunkDone, Abort, AbortAck],
    "prefill": [ChunkDone, RoomFailed, AbortAck],
}
LONG_S = 30.0
"""One room in some 5,000 loses six rounds in a row, and each round waits twice as long as the one
before it.
"""


@pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("fault", ["drop", "duplicate", "drop three"])
async def test_success(p: Pair, kind: type, fault: str) -> None:
    disturb(p, kind, fault)
    source, target = await matched(p)
    pages = p.send_all(source, chunks=3)
    assert await target.landed() == b"handoff"
    assert_same_bytes(p, pages, target)
    target.close()
    await p.rest()
    assert p.decode.counts.endings == {"success": 1}


@pytest.mark.parametrize(
    ("side", "kind"),
    [(side, kind) for side, kinds in ENDED_BY.items() for kind in kinds],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@pytest.mark.parametrize("fault", ["drop", "duplicate", "drop three"])
async def test_one_side_ends_it_in_mid_transfer(p: Pair, side: str, kind: type, fault: str) -> None:
    disturb(p, kind, fault)
    source, target = await midway(p)
    (target if side == "decode" else source).close(WHY)
    assert await code_of(source.done() if side == "decode" else target.landed()) is WHY.code
    await p.rest()
    ending = "aborted" if side == "decode" else "failed"
    assert p.decode.counts.endings == {f"{ending}:{WHY.code}": 1}


@pytest.mark.parametrize("kind", [RoomFailed, AbortAck], ids=lambda kind: kind.__name__)
async def test_a_refusal(p: Pair, kind: type) -> None:
    p.network.drop(kind)
    p.prefill.room(7, PROMPT).close(WHY)
    target = p.decode.room(7, "sim", PROMPT)
    assert await code_of(target.landed()) is WHY.code
    await p.rest()


async def test_an_abort_overtakes_its_bootstrap(p: Pair) -> None:
    source = p.prefill.room(7, PROMPT)
    p.network.hold(Bootstrap)
    target = await p.decode.room(7, "sim", PROMPT)
    target.close(WHY)
    await until(p.decode.pool.pages.at_rest)
    assert await code_of(source.matched()) is WHY.code
    again = p.prefill.room(7, PROMPT)
    assert p.network.release()
    await until(p.decode.pool.pages.at_rest)
    assert not again.ended, "a stale Bootstrap bound it"
    again.close()
    await p.rest()
    assert not p.plane(p.prefill).started


async def test_chunks_out_of_order_wait_for_the_missing_one(p: Pair) -> None:
    p.network.hold(ChunkDone)
    source, target = await matched(p)
    pages = p.send_all(source, chunks=5)
    await source.done()
    await until(lambda: len(p.network.held) >= 5)
    p.network.release(list.reverse)
    assert await target.landed() == b"handoff"
    assert p.decode.counts.stale >= 4, "four came before the one they follow"
    assert_same_bytes(p, pages, target)
    target.close()


async def test_one_of_several_ranks_never_got_its_bootstrap() -> None:
    async with pair(ranks=2) as p:
        sources = [node.room(7, PROMPT) for node in p.prefills]
        second = p.prefills[1].info.control
        lost = iter([LOST])

        def rule(frame: Frame) -> Fate | None:
            return (
                next(lost, None)
                if frame.control == second and isinstance(frame.message, Bootstrap)
                else None
            )

        p.network.rules.append(rule)
        target = await p.decode.room(7, "sim", PROMPT)
        await sources[0].matched()
        p.send_all(sources[0])
        await until(lambda: record_of(target).state.finished == 1)
        await sources[1].matched()
        p.send_all(sources[1], node=p.prefills[1])
        assert await target.landed() == b"handoff"
        target.close()
        await p.rest()


async def ends_somehow(p: Pair, room: int, rng: random.Random) -> None:
    """Run one room, which either side may close before its pages are sent, and after."""
    source, target = await p.open(room, PROMPT)
    sides: list[PrefillRoom | DecodeRoom] = [source, target]
    if rng.random() < 0.2:
        rng.choice(sides).close(WHY)
    await until(lambda: source.bytes_total or source.ended, LONG_S)
    if not source.ended:
        await until(lambda: source.phase.name == "WAITING_FOR_INPUT" or source.ended, LONG_S)
    if not source.ended:
        p.send_all(source, chunks=rng.randint(1, 5))
    if rng.random() < 0.4:
        rng.choice(sides).close(WHY)
    await until(lambda: target.ended, LONG_S)
    target.close()


@pytest.mark.parametrize("turn", range(6))
async def test_everything_at_once(p: Pair, seed: int, turn: int) -> None:
    rng = random.Random(f"{seed} {turn}")

    def rule(_: Frame) -> Fate:
        return rng.choices([DELIVERED, LOST, TWICE, (0.01,), (0.0, 0.02)], [6, 1, 1, 1, 1])[0]

    p.network.rules.append(rule)
    for room in range(12):
        await ends_somehow(p, room, rng)
    p.patience_s = LONG_S
    await p.rest()
    endings = p.decode.counts.endings
    assert sum(endings.values()) == 12, endings


async def test_nothing_is_repeated_when_nothing_is_lost() -> None:
    """The repeats must not be what makes it work."""
    async with pair(timing=Timing(repeat_after_s=30, heartbeat_s=0.02)) as p:
        source, target = await midway(p)
        target.close(WHY)
        await p.rest()
        assert await code_of(source.done()) is WHY.code
        assert (
            p.network.seen["Abort"] == p.network.seen["AbortAck"] == p.network.seen["Register"] == 1
        )
        assert p.network.seen["Resync"] == 0
    assert QUICK.repeat_after_s < 1


def disturb(p: Pair, kind: type, fault: str) -> None:
    if fault == "duplicate":
        p.network.duplicate(kind, times=4)
    else:
        p.network.drop(kind, times=3 if fault == "drop three" else 1)


async def test_a_reason_that_was_lost_is_told_though_its_acknowledgement_was_not(p: Pair) -> None:
    """Nothing of an open room is settled, or its end could not be sent again (I4)."""
    source, target = await matched(p)
    other = await p.decode.room(8, "sim", PROMPT)  # an open loan of a later grant
    p.network.hold(Resync)
    p.network.drop(RoomFailed)
    source.close(WHY)
    await until(lambda: set(record_of(target).lease.loans.values()) == {LoanPhase.PROVEN})
    p.network.seen.clear()
    await until(lambda: p.network.seen["Heartbeat"] > 4)
    p.network.release()
    assert await code_of(target.landed()) is WHY.code
    other.close()
