"""The abort bench in small, over real data planes; and the eye it has for bytes that come late."""

from __future__ import annotations

from typing import Any

import pytest

from kvflow.bench.abort import EARLIEST, LATEST, Plan, bench_plane, figures
from tests.planes import nixl_unavailable_reason

SHAPE = {"layers": 2, "heads": 4, "dim": 64, "page_size": 16}  # 32 KiB a page
PAGES = 64
RATE = 10_000_000  # a room takes 0.2 s, so its middle can be met
TIMES = 3


@pytest.fixture(
    params=[
        "local",
        pytest.param("mooncake", marks=pytest.mark.slow),
        pytest.param("nixl", marks=[pytest.mark.slow, pytest.mark.soak]),
    ]
)
def plane(request: pytest.FixtureRequest) -> str:
    if request.param == "mooncake":
        pytest.importorskip("mooncake.engine")
    if request.param == "nixl" and (reason := nixl_unavailable_reason()):
        pytest.skip(reason)
    return str(request.param)


async def run(plane: str, seed: int, **changes: Any) -> dict[str, Any]:
    plan = Plan(TIMES, PAGES, seed, rate_bytes_per_s=RATE, **changes)
    return await bench_plane(plane, plan, print, SHAPE)


async def test_no_byte_comes_late(plane: str, seed: int) -> None:
    report = await run(plane, seed)
    assert report["aborts"] == TIMES
    assert EARLIEST <= report["moved"]["median"] <= LATEST
    assert report["foreign_bytes"] == report["pages_hit"] == report["aborts_hit"] == 0
    # An abort that came outside of the middle is not counted, yet its pages are looked at like the
    # others'.
    assert report["marked_pages_checked"] >= (TIMES - 1) * PAGES
    assert report["whole_pages_checked"] >= PAGES
    assert report["bytes_after_abort"]["max"] <= report["window_bytes"]
    assert report["left"]["prefill"]["rooms"] == report["left"]["decode"]["rooms"] == 0


async def test_pages_given_back_early_are_found_out(plane: str, seed: int) -> None:
    report = await run(plane, seed, worker="tests.bench.early_release")
    # Not each: prefill may have written everything before decode marks the pages.
    assert report["foreign_bytes"] >= report["pages_hit"] >= report["aborts_hit"] > 0


def test_ratios_are_to_the_bare_window_and_to_the_bare_stop() -> None:
    times = {"seconds": 0.006, "window_s": 0.002, "stop_s": 0.003, "drain_s": 0.004}
    row = {"moved": 0.5, "bytes_after": 7.0, **times}
    found = figures([row, {**row, "seconds": 0.02}, {**row, "stop_s": 0.01}], 8)
    windows, stops = found["abort_to_reusable_windows"], found["abort_to_reusable_stops"]
    assert (windows["median"], windows["max"]) == (3.0, 10.0)
    assert (stops["median"], stops["max"]) == (2.0, 2.0)
