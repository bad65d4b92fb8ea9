"""The control link cut, stalled and swallowed by a proxy in between: every room ends once, and its
pages come home.
"""

from __future__ import annotations

import asyncio
import contextlib
import random

import msgspec
import pytest

from kvflow.protocols.wire.ranks import rank_from_json, rank_to_json
from tests.chaos.pair import begin, in_the_middle, pair, until
from tests.chaos.proxy import FAULTS, Proxy, disturb
from tests.chaos.station import TIMING

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

ROOMS, LANES, PAGES = 160, 16, 8
OTHERS = ("mooncake", "nixl", "nixl over TCP")
# No plane takes part in what is cut, so one of them meets all of it.
on_planes = pytest.mark.parametrize(
    "plane",
    ["local", *(pytest.param(plane, marks=pytest.mark.soak) for plane in OTHERS)],
    indirect=True,
)
RATE = 40_000_000


def through(proxy: Proxy, ranks: list[object]) -> list[object]:
    found = [rank_from_json(rank) for rank in ranks]
    return [
        rank_to_json(msgspec.structs.replace(rank, control=f"tcp://127.0.0.1:{proxy.port}"))
        for rank in found
    ]


def port_of(ranks: list[object]) -> int:
    return int(rank_from_json(ranks[0]).control.rsplit(":", 1)[1])


@on_planes
@pytest.mark.parametrize("longest_s", [0.3, 2.0], ids=["within patience", "longer than patience"])
async def test_rooms_end_whatever_the_link_does(plane: str, longest_s: float, seed: int) -> None:
    chance = random.Random(seed)
    async with pair(plane, RATE) as (prefill, decode), Proxy(port_of(prefill.ranks)) as proxy:
        await decode.ask("meet", ranks=through(proxy, prefill.ranks))
        plan = {"first": 1, "count": ROOMS, "pages": PAGES, "lanes": LANES, "quit_part": 0.1}
        storm = asyncio.gather(*(one.ask("storm", seed=seed, **plan) for one in (prefill, decode)))
        faults = 0
        while not storm.done():
            await asyncio.sleep(chance.uniform(0.02, 0.2))
            fault = FAULTS[faults % len(FAULTS)]
            await disturb(proxy, fault, chance.uniform(0, longest_s))
            faults += 1
        sent, got = await storm
        print(
            f"{plane}: {faults} faults, {proxy.accepted} connections, prefill {sent}, decode {got}"
        )
        assert sum(sent["outcomes"].values()) == sum(got["outcomes"].values()) == ROOMS
        assert faults >= len(FAULTS)
        if longest_s < TIMING.lost_after_s:  # else the first silence may end them all
            assert got["outcomes"]["success"] > 0
        assert got["foreign_bytes"] == 0
        await asyncio.gather(prefill.settled(), decode.settled())

        async def linked() -> bool:
            with contextlib.suppress(RuntimeError):  # as long as decode takes prefill for lost
                await begin(ROOMS + 1, PAGES, decode)
                return True
            return False

        await until(linked)
        await begin(ROOMS + 1, PAGES, prefill)
        assert await decode.ask("outcome", room=ROOMS + 1) == {
            "outcome": "success",
            "foreign_bytes": 0,
        }


@on_planes
@pytest.mark.parametrize("fault", ["stall", "swallow", "restart"])
async def test_an_abort_whose_message_is_lost(plane: str, fault: str) -> None:
    """The pages wait for the answer, however long it takes, and prefill goes on writing into them
    meanwhile.
    """
    async with pair(plane, RATE / 8) as (prefill, decode), Proxy(port_of(prefill.ranks)) as proxy:
        await decode.ask("meet", ranks=through(proxy, prefill.ranks))
        await begin(1, 64, prefill, decode)
        await in_the_middle(decode, 1)
        gone = asyncio.create_task(disturb(proxy, fault, 0.7))
        await asyncio.sleep(0)  # the link is gone before decode speaks
        await decode.ask("end", room=1)

        async def taken() -> bool:
            await decode.ask("reuse")
            return not (await decode.ask("left"))["loans"]

        await until(taken)
        await gone
        await prefill.settled()
        await asyncio.sleep(0.3)
        assert (await decode.ask("foreign"))["bytes"] == 0
        await decode.ask("let_go")
        await decode.settled()
