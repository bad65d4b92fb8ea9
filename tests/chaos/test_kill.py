"""kill -9 of either side in mid-transfer: what is left has its pages back, with nobody else's bytes
in them.
"""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.chaos.pair import NUM_PAGES, begin, in_the_middle, pair, station, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

RATE = 4_000_000
PAGES = 64
REWRITTEN = 0x3333_3333_3333_3333


async def test_a_killed_sender(plane: str) -> None:
    async with pair(plane, RATE) as (prefill, decode):
        await begin(1, PAGES, prefill, decode)
        await in_the_middle(decode, 1)
        prefill.signal(signal.SIGKILL)
        async with asyncio.timeout(20):
            assert (await decode.ask("outcome", room=1))["outcome"] == "peer_lost"
        await decode.settled()
        assert (await decode.ask("reuse"))["pages"] == NUM_PAGES
        await asyncio.sleep(0.5)  # what could still arrive would arrive now
        assert (await decode.ask("foreign"))["bytes"] == 0
        await decode.ask("let_go")
        async with station("prefill", plane, []) as successor:
            await decode.ask("meet", ranks=successor.ranks)
            await begin(2, PAGES, successor, decode)
            assert await decode.ask("outcome", room=2) == {"outcome": "success", "foreign_bytes": 0}


async def test_a_killed_receiver(plane: str) -> None:
    async with pair(plane, RATE) as (prefill, decode):
        await begin(1, PAGES, prefill, decode)
        await in_the_middle(decode, 1)
        decode.signal(signal.SIGKILL)
        async with asyncio.timeout(20):
            assert (await prefill.ask("outcome", room=1))["outcome"] in (
                "peer_lost",
                "transfer_error",
            )
        await prefill.settled()
        assert await prefill.ask("rewrite", word=REWRITTEN) == {"held": 0}
        async with station("decode", plane, prefill.ranks) as successor:
            await begin(2, PAGES, prefill, successor)
            assert await successor.ask("outcome", room=2) == {
                "outcome": "success",
                "foreign_bytes": 0,
            }
            await successor.ask("end", room=2)
            await asyncio.gather(prefill.settled(), successor.settled())


# Mooncake has its writers' connections to tell apart.
@pytest.mark.parametrize(
    "plane",
    ["mooncake", *(pytest.param(plane, marks=pytest.mark.soak) for plane in ("local", "nixl"))],
    indirect=True,
)
async def test_both_sides_in_turn_while_rooms_run(plane: str, seed: int) -> None:
    """Two prefills feed one decode; one of them is killed: the other's rooms do not notice."""
    patient = {"lost_after_s": 10.0, "rendezvous_s": 10.0}
    async with (
        pair(plane, RATE, timing=patient) as (prefill, decode),
        station("prefill", plane, [], timing=patient) as other,
    ):
        await begin(1, PAGES, prefill, decode)
        await in_the_middle(decode, 1)
        await decode.ask("meet", ranks=other.ranks)
        await begin(2, 8, other, decode)
        assert await decode.ask("outcome", room=2) == {"outcome": "success", "foreign_bytes": 0}
        await decode.ask("end", room=2)

        # Else connections of the one may be the other's, and are waited for.
        async def told_apart() -> bool:
            return not (await decode.ask("unseen"))["writers"]

        await until(told_apart)
        plan = {"first": 100, "count": 40, "pages": 8, "lanes": 4, "seed": seed, "quit_part": 0.0}
        storm = asyncio.gather(*(one.ask("storm", **plan) for one in (other, decode)))
        prefill.signal(signal.SIGKILL)
        for ended in await storm:
            assert ended == {"outcomes": {"success": 40}, "foreign_bytes": 0, "words": {}}
        await decode.ask("end", room=1)
        await asyncio.gather(decode.settled(), other.settled())
