"""`kvflow bench abort`: the time of an abort in mid-transfer, and the bytes that arrive late."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import numpy as np

from kvflow.bench.abort_worker import WATCHED_ROOMS
from kvflow.bench.figures import Row, Say, places
from kvflow.bench.pair import WorkerPair
from kvflow.bench.peer import open_peer
from kvflow.transports.data.mooncake.route import WINDOW_BYTES
from kvflow.transports.data.transfers import WINDOW_BYTES as TRANSFERS_WINDOW_BYTES
from kvflow.transports.data.write_thread import SLICE_BYTES

WORKER = "kvflow.bench.abort_worker"
SHAPE = {"layers": 32, "heads": 8, "dim": 128, "page_size": 16}  # 2 MiB per page
# Maximum number of bytes that a plane may have under way when it is asked to stop.
WINDOWS = {"local": SLICE_BYTES, "mooncake": WINDOW_BYTES, "nixl": TRANSFERS_WINDOW_BYTES}
# An abort counts only if the fraction of pages that had moved is between these two.
EARLIEST, LATEST = 0.1, 0.9
# Share of the aborts after which whole pages are checked, and not only their marks.
WHOLE_PAGES_IN = 0.1
# Range of the seconds after which the bare plane is asked to stop. In a 512 MiB transfer through a
# room, the abort comes after a similar time.
STOPPED_AFTER_S = (0.01, 0.06)
TRIES = 10  # maximum number of attempts, per abort in the plan
SETTLE_S = 1.0
PEER_TIMES = 20
PEER_AFTER_S = 0.25  # the peer aborts at most this long after its first byte
# SGLang's workers look for an abort only between batches of this size.
PEER_ENV = {"SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES": "16"}
# Selects whether SGLang's decode keeps an aborted request's pages until prefill confirms the end.
DEFERRED = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"


class Plan(NamedTuple):
    """Parameters of one measurement: `times` aborts, each of a room that has `pages` pages."""

    times: int
    pages: int
    seed: int
    worker: str = WORKER
    rate_bytes_per_s: float | None = None


def spread(values: list[float]) -> Row:
    return places(values, median=50, p99=99, max=100)


async def bench_plane(
    plane: str, plan: Plan, say: Say, shape: dict[str, int] = SHAPE
) -> dict[str, Any]:
    """Measure one data plane: aborts in mid-transfer, each followed by a stop of the bare plane."""
    chance = random.Random(plan.seed)
    whole = set(chance.sample(range(plan.times), math.ceil(WHOLE_PAGES_IN * plan.times)))
    pool = {**shape, "order": "page_first", "pages": (WATCHED_ROOMS + 2) * plan.pages}
    rate = plan.rate_bytes_per_s
    rows: list[Row] = []
    tried = 0
    async with await WorkerPair.open(plane, plan.worker, rate_bytes_per_s=rate, **pool) as pair:
        await pair.raw_setup()
        where, kept = await pair.both("reserve", pages=plan.pages)
        bare = {**where, **kept, "window_pages": min(plan.pages, WINDOWS[plane] // pair.page_bytes)}
        while len(rows) < plan.times and tried < TRIES * plan.times:
            tried += 1
            aim, look_at_all = chance.uniform(EARLIEST, LATEST), len(rows) in whole
            sent, got = await pair.both(
                "abort", room=tried, pages=plan.pages, aim=aim, whole=look_at_all
            )
            moved, told = await pair.both(
                "bare_stop", **bare, after_s=chance.uniform(*STOPPED_AFTER_S)
            )
            if got["aborted"] and EARLIEST <= got["moved"] <= LATEST:
                windows = {"window_s": moved["seconds"], "stop_s": told["seconds"]}
                rows.append({**sent, **windows, "moved": got["moved"], "seconds": got["seconds"]})
                if len(rows) % 20 == 0:
                    say(
                        f"{plane}: {len(rows)} aborts, the last after {got['moved']:.0%} of the "
                        "bytes"
                    )
        seen = await pair.decode.ask("look", after_s=SETTLE_S)
        left = dict(zip(("prefill", "decode"), await pair.both("state"), strict=True))
    return {
        "aborts": len(rows),
        "not_counted": tried - len(rows),
        **seen,
        **figures(rows, WINDOWS[plane]),
        "left": left,
    }


def figures(rows: list[Row], window_bytes: int) -> dict[str, Any]:
    """Summarize `rows`; times are in ms.

    `abort_to_reusable_windows` divides the time of each abort by the median bare window of this
    run. `abort_to_reusable_stops` divides the median, the 99th percentile and the maximum of these
    times by those of `bare_stop_ms`, the times in which decode stops the bare plane.
    """
    if not rows:
        return {}
    # Single windows vary with the machine's load, so every abort is divided by their median.
    window_s = float(np.median([r["window_s"] for r in rows]))
    aborts, stops = (spread([r[what] * 1e3 for r in rows]) for what in ("seconds", "stop_s"))
    return {
        "moved": spread([r["moved"] for r in rows]),
        "abort_to_reusable_ms": aborts,
        "prefill_drain_ms": spread([r["drain_s"] * 1e3 for r in rows]),
        "bare_window_ms": spread([r["window_s"] * 1e3 for r in rows]),
        "bare_stop_ms": stops,
        "abort_to_reusable_windows": spread([r["seconds"] / window_s for r in rows]),
        "abort_to_reusable_stops": {at: round(aborts[at] / stops[at], 3) for at in aborts},
        "window_bytes": window_bytes,
        "bytes_after_abort": spread([r["bytes_after"] for r in rows]),
    }


async def bench_peer(harness: str, plan: Plan, deferred: bool, say: Say) -> dict[str, Any]:
    """Measure SGLang's aborts, with its deferred release or with an immediate one."""
    env = {**PEER_ENV, DEFERRED: str(int(deferred))}
    rows: list[dict[str, Any]] = []
    chance, tried = random.Random(plan.seed), 0
    async with await open_peer(harness, SHAPE, plan.pages + 64, env) as peer:
        while len(rows) < min(PEER_TIMES, plan.times) and tried < TRIES * plan.times:
            tried += 1
            after_s = chance.uniform(0, PEER_AFTER_S)
            seen = await peer.ask("abort", pages=plan.pages, after_s=after_s)
            if seen["aborted"]:
                rows.append(seen)
    say(f"sglang, deferred release {deferred}: {len(rows)} aborts")
    return {
        "aborts": len(rows),
        "not_counted": tried - len(rows),
        "aborts_hit": sum(r["pages_hit"] > 0 for r in rows),
        "pages_hit": sum(r["pages_hit"] for r in rows),
        "pages_checked": len(rows) * plan.pages,
        "abort_to_reusable_ms": spread([r["seconds"] * 1e3 for r in rows]),
    }


async def bench_abort(
    planes: tuple[str, ...], times: int, pages: int, seed: int, peer_harness: str | None, say: Say
) -> dict[str, Any]:
    plan = Plan(times, pages, seed)
    report: dict[str, Any] = {"times": times, "pages": pages, "shape": SHAPE, "seed": seed}
    for plane in planes:
        report[plane] = await bench_plane(plane, plan, say)
    if peer_harness:
        report["sglang"] = {
            "deferred_release": await bench_peer(peer_harness, plan, True, say),
            "released_at_once": await bench_peer(peer_harness, plan, False, say),
        }
    return report
