"""Decodes that register all at once: prefill lets a few in per turn of its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kvflow.handlers import prefill
from kvflow.node import PrefillNode
from kvflow.protocols.machines.peer import PeerPhase
from kvflow.protocols.wire.codec import encode, routing_id
from kvflow.protocols.wire.messages import WIRE_VERSION, Goodbye, GrantId, Incarnation, Register
from kvflow.testing.pair import Pair, pair, until
from kvflow.transports.control.memory import Frame
from tests.handlers.scenes import known, success

CROWD = [Incarnation(1000 + number) for number in range(20)]


def register_all(p: Pair) -> None:
    identity = p.decode.shell.endpoint.core.identity
    for incarnation in CROWD:
        register = Register(
            source=p.prefill.incarnation,
            target=incarnation,
            wire_version=WIRE_VERSION,
            layout=identity.layout,
            address=identity.address,
            fresh_from=GrantId(1),
        )
        where = p.prefill.control, routing_id(incarnation), True
        p.network.inject(Frame(*where, encode(register)))


def phases(node: PrefillNode) -> list[PeerPhase]:
    return [peer.phase for peer in known(node) if peer.incarnation in CROWD]


def counted(p: Pair, name: str, by_turn: list[int]) -> None:
    """Let calls of a method of prefill's plane add to the last number of `by_turn`."""
    method: Callable[..., Awaitable[Any]] = getattr(p.plane(p.prefill), name)

    async def call(*arguments: Any) -> Any:
        by_turn[-1] += 1
        return await method(*arguments)

    setattr(p.plane(p.prefill), name, call)


async def test_a_crowd_is_let_in_a_few_per_turn_of_the_loop(p: Pair) -> None:
    connects, fences = [0], [0]
    counted(p, "connect", connects)
    counted(p, "fence", fences)
    register_all(p)
    async with asyncio.timeout(20):
        while sum(fences) < len(CROWD):
            await asyncio.sleep(0)
            connects.append(0)
            fences.append(0)
    assert phases(p.prefill) == [PeerPhase.UP] * len(CROWD)
    for by_turn in (connects, fences):
        assert sum(by_turn) == len(CROWD) and max(by_turn) == prefill.BEGUN_PER_TURN
    await success(p)


async def test_decodes_that_leave_before_they_are_let_in_keep_no_others_waiting(p: Pair) -> None:
    """Strangers could otherwise fill the queue, because the bounds count only decodes it knows."""
    connects = [0]
    counted(p, "connect", connects)
    register_all(p)
    for incarnation in CROWD:
        goodbye = Goodbye(source=p.prefill.incarnation, target=incarnation, unproven=())
        p.network.inject(Frame(p.prefill.control, routing_id(incarnation), True, encode(goodbye)))
    await until(lambda: not phases(p.prefill))
    assert not p.prefill.shell._queued
    await success(p)
    assert sum(connects) < len(CROWD) // 2


async def test_prefill_closes_while_a_crowd_waits_to_be_let_in() -> None:
    async with pair() as p:
        register_all(p)
        await until(lambda: len(phases(p.prefill)) == len(CROWD))
        assert PeerPhase.OPENING in phases(p.prefill)
        routes = p.prefill.shell.routes
        await p.prefill.close()
        assert not routes
