"""A prefill whose heads decode takes in slices, which land in staging: aborts, a sender that
freezes, and is killed.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from tests.chaos.pair import begin, in_the_middle, pair, quarantined, station, until
from tests.planes import nixl_unavailable_reason

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

RATE = 40_000_000
NUM_PAGES, PAGES = 320, 256  # of 32 KiB: a room of 0.2 s
ROOMS, LANES, OF_ROOM = 120, 12, 24
SLICES: dict[str, Any] = {
    "widths": (2, 1),
    "staged": True,
    "pages": NUM_PAGES,
    "timing": {"lost_after_s": 2.0, "rendezvous_s": 10.0},
}


@pytest.mark.parametrize("over", ["mooncake", "nixl"])
async def test_what_no_proof_covers_is_neither_brought_nor_lent_again(over: str, seed: int) -> None:
    if over == "mooncake":
        pytest.importorskip("mooncake.engine")
    elif reason := nixl_unavailable_reason():
        pytest.skip(reason)
    async with pair(over, RATE, **SLICES) as (prefill, decode):
        plan = {"first": 1, "count": ROOMS, "pages": OF_ROOM, "lanes": LANES}
        sent, got = await asyncio.gather(
            prefill.ask("storm", seed=seed, quit_part=0.3, **plan),
            decode.ask("storm", seed=seed + 1, quit_part=0.4, **plan),
        )
        print(over, sent, got)
        assert set(got["outcomes"]) <= {"success", "client_gone", "capacity"}
        assert 0 < got["outcomes"]["success"] < ROOMS and got["foreign_bytes"] == 0
        await asyncio.gather(prefill.settled(), decode.settled())

        await begin(1000, PAGES, prefill, decode)
        await in_the_middle(decode, 1000)
        await prefill.freeze()
        await decode.ask("end", room=1000)

        async def room_ended() -> bool:
            return not (await decode.ask("left"))["rooms"]

        await until(room_ended)
        assert await quarantined(decode) == PAGES
        # No rank can reach the pages of the pool, so they need no proof; places of staging do.
        reused = await decode.ask("reuse")
        assert reused["pages"] == NUM_PAGES and reused["staging"] > 0
        prefill.signal(signal.SIGKILL)

        async def proven() -> bool:
            return not await quarantined(decode)

        await until(proven)
        assert await decode.ask("reuse") == {"pages": 0, "staging": PAGES}
        await asyncio.sleep(0.5)  # what could still arrive would arrive now
        assert (await decode.ask("foreign"))["bytes"] == 0
        await decode.ask("let_go")
        await decode.settled()
        async with station("prefill", over, [], **SLICES) as successor:
            await decode.ask("meet", ranks=successor.ranks)
            await begin(2000, 8, successor, decode)
            assert await decode.ask("outcome", room=2000) == {
                "outcome": "success",
                "foreign_bytes": 0,
            }
            await decode.ask("end", room=2000)
            await asyncio.gather(decode.settled(), successor.settled())
