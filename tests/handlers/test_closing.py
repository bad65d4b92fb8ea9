"""Closing is idempotent from every phase and by every path; the first cause stands (I4, I5)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.protocols.commands import PeerKey
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.machinery import Timer
from kvflow.protocols.machines.decode_room import DecodePhase
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.protocols.wire.codec import encode, routing_id
from kvflow.protocols.wire.messages import Abort, Rank, RoomFailed, RoomId
from kvflow.testing.pair import Pair, pair, until
from kvflow.transports.data.fake import Fault
from tests.handlers.scenes import PROMPT, WHY, announced, header, matched, midway, offered, sending

Both = tuple[PrefillRoom | None, DecodeRoom | None]
OTHER = Cause(Code.SHUTDOWN, "another cause, later")


async def expected(p: Pair) -> Both:
    return p.prefill.room(7, PROMPT), None


async def bootstrapped(p: Pair) -> Both:
    target = await offered(p)
    return PrefillRoom(p.prefill.shell, p.prefill.shell.endpoint.rooms[RoomId(7)]), target


async def transferring(p: Pair) -> Both:
    source, target = await midway(p)
    await until(lambda: target.phase is DecodePhase.TRANSFERRING)
    return source, target


async def prefill_draining(p: Pair) -> Both:
    source, target = await sending(p, Fault.STUCK)
    source.close(WHY)
    return source, target


async def decode_draining(p: Pair) -> Both:
    source, target = await sending(p, Fault.STUCK)
    target.close(WHY)
    return source, target


async def landed(p: Pair) -> Both:
    source, target = await sending(p)
    await target.landed()
    await source.done()
    return source, target


async def failed(p: Pair) -> Both:
    source, target = await matched(p)
    source.close(WHY)
    await until(lambda: target.ended)
    return source, target


async def aborted(p: Pair) -> Both:
    source, target = await midway(p)
    target.close(WHY)
    await until(lambda: source.phase is PrefillPhase.ABORTED and target.ended)
    return source, target


async def lost(p: Pair) -> Both:
    source, target = await sending(p, Fault.ERROR)
    await until(lambda: source.phase is PrefillPhase.LOST and target.ended)
    return source, target


async def lost_by_both(p: Pair) -> Both:
    plane = p.plane(p.prefill)
    plane.script(Fault.ERROR)
    plane.hold()
    source, target = await matched(p)
    p.send_all(source)
    for word in (Abort, RoomFailed):
        p.network.drop(word, 1 << 30)
    target.close(WHY)
    plane.release()
    await until(lambda: target.phase is DecodePhase.LOST and source.ended)
    return source, target


async def by_itself(p: Pair, session: Any) -> None:
    session.close(OTHER)


async def by_its_context(p: Pair, session: Any) -> None:
    """Enter and leave the room; where it cannot be entered, that ends it."""

    async def use() -> None:
        with contextlib.suppress(KvflowError):
            async with session:
                pass

    using = asyncio.create_task(use())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    using.cancel()
    await asyncio.wait([using])


async def by_its_deadline(p: Pair, session: Any) -> None:
    if isinstance(session, PrefillRoom):
        core = p.prefill.shell.endpoint.core
        session.record.own_deadline_at_s = 0.0
        if session.room in core.rooms:
            core.set_deadline(session.record)
    elif session.grant in p.decode.shell.endpoint.rooms:
        p.decode.shell.endpoint.core.deadlines.set(Timer("deadline", session.grant), 0.0)
    for node in (p.prefill, p.decode):
        node.shell.tick(p.clock(node).now())
        node.shell.run()


async def by_the_peer(p: Pair, session: Any) -> None:
    """Feed the message at once, so that the phase is still the one meant."""
    if isinstance(session, PrefillRoom):
        abort = Abort(cause=OTHER, **header(p, session.room, session.record.grant or 1 << 39))
        p.prefill.shell.endpoint.receive(
            routing_id(p.decode.incarnation), encode(abort), p.clock(p.prefill).now()
        )
        p.prefill.shell.run()
    else:
        failed = RoomFailed(rank=Rank(0), cause=OTHER, **header(p, session.room, session.grant))
        key = PeerKey(p.prefill.incarnation, p.prefill.info.control)
        p.decode.shell.endpoint.receive(key, encode(failed), p.clock(p.decode).now())
        p.decode.shell.run()


PATHS = (by_itself, by_its_context, by_its_deadline, by_the_peer)
P, D = PrefillPhase, DecodePhase
SCENES: list[tuple[Callable[[Pair], Awaitable[Both]], Any]] = [
    *(
        (expected, P.EXPECTED),
        (announced, P.ANNOUNCED),
        (bootstrapped, P.BOOTSTRAPPED),
        (matched, P.WAITING_FOR_INPUT),
    ),
    *((transferring, P.TRANSFERRING), (prefill_draining, P.DRAINING), (landed, P.SUCCESS)),
    *((failed, P.FAILED), (aborted, P.ABORTED), (lost, P.LOST)),
    *(
        (announced, D.BOOTSTRAPPING),
        (bootstrapped, D.WAITING_FOR_INPUT),
        (transferring, D.TRANSFERRING),
        (decode_draining, D.DRAINING),
    ),
    *((landed, D.SUCCESS), (failed, D.FAILED), (aborted, D.ABORTED), (lost_by_both, D.LOST)),
]


def test_every_phase_is_here() -> None:
    assert {phase for _, phase in SCENES if isinstance(phase, P)} == set(P)
    assert {phase for _, phase in SCENES if isinstance(phase, D)} == set(D)


@pytest.mark.parametrize("first", range(len(PATHS)), ids=[path.__name__ for path in PATHS])
@pytest.mark.parametrize(
    ("scene", "phase"), SCENES, ids=[f"{type(phase).__name__}-{phase.name}" for _, phase in SCENES]
)
async def test_closing_again_changes_nothing(scene: Any, phase: Any, first: int) -> None:
    async with pair() as p:
        source, target = await scene(p)
        session = source if isinstance(phase, P) else target
        assert session.phase is phase
        called: list[str] = []
        session.on_end(lambda: called.append("once"))
        p.network.mend()
        paths = [*PATHS[first:], *PATHS[:first]]
        await paths[0](p, session)
        cause = session.cause
        for path in paths * 3:
            await path(p, session)
            assert session.cause == cause or cause is None, "the first cause stands"
        p.plane(p.prefill).release()
        for other in (source, target):
            if other is not None:
                other.close()
        if phase.name == "LOST":
            await p.crash(p.prefill)
        for path in paths:
            if p.prefills:
                await path(p, session)
        await until(lambda: not p.left())
        assert called == ([] if phase is P.BOOTSTRAPPED else ["once"])  # that half has no user
        for node in p.nodes:
            assert sum(node.counts.endings.values()) == node.counts.rooms_opened <= 1
