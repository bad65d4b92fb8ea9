"""`kvflow bench profile`: the function calls of one room on each side, in one or more checkouts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvflow.bench import rooms
from kvflow.bench.figures import Say
from kvflow.bench.pair import START_DELAY_S, WorkerPair

WORKER = "kvflow.bench.profiled_worker"
ROOMS = 3000
FUNCTIONS = 20  # maximum number of functions that a side reports by name


async def bench_profile(trees: Sequence[str], plane: str, at_once: int, say: Say) -> dict[str, Any]:
    """Profile `ROOMS` rooms in each checkout, and return the figures per room by tree and side."""
    report: dict[str, Any] = {"rooms": ROOMS, "at_once": at_once, "plane": plane}
    for tree in trees:
        opened = WorkerPair.open(plane, WORKER, tree, order="page_first", **rooms.SHAPE)
        async with await opened as pair:
            # Warm up with room numbers below those in the profile.
            await pair.rooms(ROOMS // 10, at_once, 1)
            size = {"first": ROOMS, "count": ROOMS, "concurrency": at_once}
            start_at = time.monotonic() + START_DELAY_S
            seen = await pair.both("profile", start_at=start_at, **size)
        report[tree] = {
            side: per_room(found["functions"], ROOMS)
            for side, found in zip(("prefill", "decode"), seen, strict=True)
        }
        for side, figures in report[tree].items():
            say(
                f"{tree} {side}: {figures['calls']} calls, {figures['kvflow_calls']} of them ours, "
                f"{figures['us']} us"
            )
    return report


def per_room(functions: list[list[Any]], count: int) -> dict[str, Any]:
    """Return average calls and microseconds per room, and the functions that take the most time."""
    # `ours` leaves out the bench's functions, because they are not part of the library.
    ours = [row for row in functions if "/kvflow/" in row[0] and "/kvflow/bench/" not in row[0]]
    named = sorted(functions, key=lambda row: float(row[3]), reverse=True)[:FUNCTIONS]
    return {
        "calls": round(sum(row[2] for row in functions) / count, 1),
        "us": round(sum(row[3] for row in functions) / count * 1e6, 1),
        "kvflow_calls": round(sum(row[2] for row in ours) / count, 1),
        "kvflow_us": round(sum(row[3] for row in ours) / count * 1e6, 1),
        "functions": [
            {
                "function": (
                    f"{file.rsplit('/kvflow/', 1)[-1].rsplit('/site-packages/', 1)[-1]} {name}"
                ),
                "calls": round(calls / count, 2),
                "us": round(seconds / count * 1e6, 1),
            }
            for file, name, calls, seconds in named
        ],
    }
