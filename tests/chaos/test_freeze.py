"""One side stands still in mid-transfer, for longer than anybody's patience, and goes on as if
nothing had been.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.chaos.pair import NUM_PAGES, begin, in_the_middle, pair, quarantined, station, until
from tests.chaos.station import TIMING

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

RATE = 4_000_000
PAGES = 64  # 2 MiB: half a second
ENGINES_PATIENCE_S = 5  # the first takes nothing smaller
ENGINES_PATIENCE = (
    "MC_TRANSFER_TIMEOUT",
    "MC_TCP_PROGRESS_TIMEOUT_SEC",
    "MC_TCP_STATUS_TIMEOUT_SEC",
)
REWRITTEN = 0x3333_3333_3333_3333


async def test_a_sender_frozen_in_mid_transfer(plane: str) -> None:
    async with pair(plane, RATE) as (prefill, decode):
        await begin(1, PAGES, prefill, decode)
        await in_the_middle(decode, 1)
        await prefill.freeze()
        await decode.ask("end", room=1)

        async def room_ended() -> bool:
            return not (await decode.ask("left"))["rooms"]

        await until(room_ended)
        assert await quarantined(decode) == PAGES  # counted, and handed out to nobody
        assert (await decode.ask("reuse"))["pages"] == NUM_PAGES - PAGES
        assert (await decode.ask("left"))["loans"] == 1
        prefill.signal(signal.SIGCONT)

        async def proven() -> bool:
            return not await quarantined(decode)

        await until(proven)
        assert (await decode.ask("reuse"))["pages"] == PAGES
        await prefill.settled()
        await asyncio.sleep(0.5)  # what could still arrive would arrive now
        assert (await decode.ask("foreign"))["bytes"] == 0
        assert (await decode.ask("left"))["loans"] == 0


@pytest.mark.parametrize("plane", ["local", "mooncake", "nixl", "nixl over TCP"], indirect=True)
async def test_a_receiver_frozen_for_longer_than_the_engines_patience(plane: str) -> None:
    env = dict.fromkeys(ENGINES_PATIENCE, str(ENGINES_PATIENCE_S))
    async with (
        pair(plane, RATE, env=env) as (prefill, decode),
        station("prefill", plane, [], env) as other,
    ):
        await decode.ask("meet", ranks=other.ranks)
        await begin(1, PAGES, other, decode)
        assert await decode.ask("outcome", room=1) == {"outcome": "success", "foreign_bytes": 0}
        await decode.ask("adopt", room=1)
        await decode.ask("meet", ranks=prefill.ranks)
        # A whole room first, so that the receiver owes no answer to the engine's connection when it
        # is frozen.
        await begin(2, PAGES, prefill, decode)
        assert await decode.ask("outcome", room=2) == {"outcome": "success", "foreign_bytes": 0}
        await begin(3, PAGES, prefill, decode)
        await in_the_middle(decode, 3)
        await decode.freeze()

        # Where the receiver carries a write out, it waits for the thaw; NIXL for as long as that
        # takes.
        waits_on = plane == "nixl" and "UCX_TLS" in os.environ

        # With more under way than one slice, of which the end may be on its way.
        async def stuck() -> bool:
            return (
                not (waits_on or plane == "mooncake")
                or (await prefill.ask("under_way"))["handles"] > 2
            )

        await until(stuck)
        # What is under way ends in error, as late as the engine likes.
        await prefill.ask("end", room=3)

        async def rewritten() -> bool:
            return await prefill.ask("rewrite", word=REWRITTEN) == {"held": 0}

        # Longer than the engine's patience, where it has one.
        await asyncio.sleep(ENGINES_PATIENCE_S + 1 if plane == "mooncake" else TIMING.lost_after_s)
        if waits_on:
            assert (await prefill.ask("rewrite", word=REWRITTEN))["held"]
            decode.signal(signal.SIGCONT)
        await until(rewritten)  # the source pages serve another room by now
        if not waits_on:
            assert not (await prefill.ask("left"))["rooms"]
            decode.signal(signal.SIGCONT)
        assert (await decode.ask("outcome", room=3))["outcome"] == "client_gone"

        # The proof may come a moment after the source pages are free.
        async def settled() -> bool:
            return await quarantined(decode) == (PAGES if plane == "mooncake" else 0)

        await until(settled)
        free = (await decode.ask("reuse"))["pages"]
        assert free + PAGES <= NUM_PAGES - await quarantined(decode)
        await asyncio.sleep(1.5)  # whatever may still arrive
        assert (await decode.ask("foreign"))["bytes"] == 0
        doubtful = await quarantined(decode)
        print(f"{plane}: {doubtful} pages without proof after the thaw")
        assert doubtful == (PAGES if plane == "mooncake" else 0)
        prefill.signal(signal.SIGKILL)  # the proof that is left

        async def proven() -> bool:
            return not await quarantined(decode)

        await until(proven)
        assert (await decode.ask("reuse"))["pages"] == doubtful
        await asyncio.sleep(0.5)
        assert (await decode.ask("foreign"))["bytes"] == 0
