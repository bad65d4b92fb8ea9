"""Hundreds of rooms, aborted from both sides at random moments, between real processes."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.pair import pair
from tests.soak import sized

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

# A machine that stands still for a second is no matter of this test.
PATIENT = {"lost_after_s": 10.0, "rendezvous_s": 10.0}
# Rooms of 3 MiB, as fast as the plane can: an abort finds bytes under way.
ROOMS, LANES, PAGES = sized(200, 500), 24, 96


async def test_an_abort_storm(plane: str, seed: int) -> None:
    print(f"seed {seed}")
    async with pair(plane, pages=LANES * PAGES, timing=PATIENT) as (prefill, decode):
        plan = {"first": 1, "count": ROOMS, "pages": PAGES, "lanes": LANES}
        sent, got = await asyncio.gather(
            prefill.ask("storm", seed=seed, quit_part=0.3, **plan),
            decode.ask("storm", seed=seed + 1, quit_part=0.4, **plan),
        )
        print(plane, sent, got)
        assert sum(sent["outcomes"].values()) == sum(got["outcomes"].values()) == ROOMS
        assert set(got["outcomes"]) <= {"success", "client_gone", "capacity"}
        assert 0 < got["outcomes"]["success"] < ROOMS
        assert got["foreign_bytes"] == 0
        await asyncio.gather(prefill.settled(), decode.settled())
