"""`bench rooms --open` in small: rooms stay open and end with their peer."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kvflow.bench.child import StallTicker
from kvflow.bench.growth import MUST_ROOMS, MUST_STALL_MS, Growth, bench_growth, judge

ROOT = Path(__file__).parents[2]
ROOMS, LINKS = 40, 3
BLOCKED_S = 0.03


@pytest.mark.slow
async def test_rooms_stay_open_and_end_with_their_peer() -> None:
    plan = Growth(rest_s=1.5, links=LINKS, losses=("killed prefill", "killed decode"))
    report = await bench_growth((ROOMS,), plan, print)
    seen = report[str(ROOMS)]
    for side in ("prefill", "decode"):
        assert seen["rest"][side]["open"] == ROOMS
        assert seen[f"rest over {LINKS} links"][side]["open"] == ROOMS + LINKS - 1
        assert seen["rest"][side]["sent_per_s"] > 0  # heartbeats at the least
        assert seen["collection"][side]["full_ms"] > seen["collection"][side]["frozen_ms"] > 0
    for loss in plan.losses:
        assert seen[loss]["rooms"] == ROOMS
        assert 0 < seen[loss]["noticed_ms"] <= seen[loss]["ended_ms"]
    assert seen["killed prefill"]["pages_free_ms"] >= seen["killed prefill"]["ended_ms"]


async def test_the_library_of_a_checkout_is_measured_by_this_bench() -> None:
    report = await bench_growth(
        (ROOMS,), Growth(rest_s=0.5, links=1, losses=(), tree=str(ROOT)), print
    )
    assert report[str(ROOMS)]["rest"]["decode"]["open"] == ROOMS


def test_a_stall_is_a_must_up_to_a_number_of_rooms() -> None:
    figures = {"killed decode": {"stall_max_ms": MUST_STALL_MS + 1}}
    (must,) = judge(MUST_ROOMS, figures)
    (aim,) = judge(MUST_ROOMS + 1, figures)
    assert (must["kind"], must["ok"], aim["kind"]) == ("must", False, "aim")
    assert judge(1, {"killed decode": {"stall_max_ms": MUST_STALL_MS}})[0]["ok"]


@pytest.mark.parametrize("computes", [True, False])
async def test_a_loop_that_computes_stalls_and_one_that_is_put_to_sleep_is_late(
    computes: bool,
) -> None:
    ticker = StallTicker()
    await asyncio.sleep(0.01)
    if computes:
        until_s = time.thread_time() + BLOCKED_S
        while time.thread_time() < until_s:
            pass
    else:
        time.sleep(BLOCKED_S)
    await asyncio.sleep(0.01)
    found = ticker.stalls()
    assert found["late_max_ms"] > BLOCKED_S * 1e3 / 2
    assert (found["stall_max_ms"] > BLOCKED_S * 1e3 / 2) is computes
