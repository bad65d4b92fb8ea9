"""A room's deadline covers all of it: registry, link, pages and transfer."""

from __future__ import annotations

import asyncio

import pytest

from kvflow.protocols.errors import AbortedError, Code
from kvflow.testing.pair import Pair, until
from tests.handlers.scenes import PROMPT, code_of, links, slow_way, success

# The error gives what is left of the deadline when the room opens, which is less on a busy machine.
ABOUT_30_S = r"deadline of (30|29\.\d+) s"


async def test_while_prefill_does_not_answer(p: Pair) -> None:
    p.network.cut()
    room = p.decode.room(7, "sim", PROMPT, deadline_s=30)
    opening = asyncio.ensure_future(room.opened())
    await until(lambda: links(p.decode))
    p.clock(p.decode).advance(29)
    assert not room.ended
    p.clock(p.decode).advance(2)
    with pytest.raises(AbortedError, match=rf"room 7: {ABOUT_30_S} has passed"):
        await opening
    assert await code_of(room.landed()) is Code.DEADLINE
    await room.released()
    p.network.mend()
    await success(p, 8)


async def test_while_prefill_cannot_reach_our_memory(p: Pair) -> None:
    go_on = slow_way(p)
    source = p.prefill.room(7, PROMPT)
    room = p.decode.room(7, "sim", PROMPT, deadline_s=30)
    opening = asyncio.ensure_future(room.opened())
    await until(lambda: source.phase.name == "ANNOUNCED")
    p.clock(p.decode).advance(31)
    with pytest.raises(AbortedError, match=ABOUT_30_S):
        await opening
    assert await code_of(source.matched()) is Code.DEADLINE
    go_on.set()
    await p.rest()
    await success(p, 8)


async def test_while_the_registry_is_asked(p: Pair) -> None:
    asked = asyncio.Event()

    async def resolve(_: str) -> list[object]:
        asked.set()
        await asyncio.Event().wait()
        return []

    p.decode._resolve = resolve  # type: ignore[assignment]
    room = p.decode.room(7, "elsewhere", PROMPT, deadline_s=0.05)
    await asked.wait()
    with pytest.raises(
        AbortedError, match="its deadline passed while the ranks of its prefill were asked for"
    ):
        await room
    await room.released()


async def test_while_its_pages_are_waited_for(p: Pair) -> None:
    source = p.prefill.room(7, PROMPT)
    room = p.decode.announce(7, "sim", PROMPT, deadline_s=30)
    await until(lambda: source.phase.name == "ANNOUNCED")
    p.clock(p.decode).advance(31)
    assert await code_of(room.opened()) is await code_of(source.matched()) is Code.DEADLINE
    room.offer()  # too late, and without effect
    assert p.decode.pool.pages.at_rest()
