"""`kvflow bench rooms`: the cost of a room that has only one small page to move."""

from __future__ import annotations

import statistics
from contextlib import AsyncExitStack
from typing import Any

import numpy as np

from kvflow.bench.figures import Row, Say, medians
from kvflow.bench.pair import Process, WorkerPair
from kvflow.bench.peer import POLLS_MS, open_peer

CONCURRENCY = (1, 32, 256)
SHAPE = {"layers": 1, "heads": 1, "dim": 8, "page_size": 16, "pages": 1024}
ROOMS = {1: 400, 32: 3000, 256: 6000}
PEER_ROOMS = {1: 200, 32: 800, 256: 1024}
IDLE_S = 1.0
BARE_ROOMS = 400


def row(
    opened: dict[Any, float], done: dict[Any, float], prefill_cpu_s: float, decode_cpu_s: float
) -> Row:
    """Return a round's figures. `opened` and `done` are the times of each room at decode."""
    latency_ms = np.array([(done[r] - opened[r]) * 1e3 for r in done])
    n = len(done)
    return {
        "rooms_per_s": n / (max(done.values()) - min(opened.values())),
        "p50_ms": float(np.percentile(latency_ms, 50)),
        "p99_ms": float(np.percentile(latency_ms, 99)),
        "cpu_ms_per_room_prefill": prefill_cpu_s / n * 1e3,
        "cpu_ms_per_room_decode": decode_cpu_s / n * 1e3,
    }


async def ours(pair: WorkerPair, concurrency: int, count: int) -> Row:
    prefill, decode = await pair.rooms(count, concurrency, 1, ticking=True)
    found = row(decode["opened"], decode["done"], prefill["cpu_s"], decode["cpu_s"])
    return found | {
        "stall_p99_ms_prefill": prefill["late_p99_ms"],
        "stall_p99_ms_decode": decode["late_p99_ms"],
    }


async def beside_bare(pair: WorkerPair) -> Row:
    """Measure rooms one at a time, and the same messages and writes without kvflow.

    `apart` is for the bare exchanges whose writes have a thread of their own.
    """
    prefill, decode = await pair.rooms(BARE_ROOMS, 1, 1)
    mine = row(decode["opened"], decode["done"], prefill["cpu_s"], decode["cpu_s"])["p50_ms"]
    bare, apart = [
        float(np.median(await pair.bare_rooms(BARE_ROOMS, apart=each))) * 1e3
        for each in (False, True)
    ]
    return {
        "room_p50_ms": mine,
        "bare_p50_ms": bare,
        "ratio": mine / bare,
        "apart_p50_ms": apart,
        "apart_ratio": mine / apart,
    }


async def theirs(peer: Process, concurrency: int, poll_ms: float) -> Row:
    seen = await peer.ask(
        "rooms", count=PEER_ROOMS[concurrency], concurrency=concurrency, pages=1, poll_ms=poll_ms
    )
    return row(seen["opened"], seen["done"], seen["prefill_cpu_s"], seen["decode_cpu_s"])


async def bench_rooms(
    planes: tuple[str, ...], rounds: int, peer_harness: str | None, say: Say
) -> dict[str, Any]:
    """Measure in interleaved rounds. At each concurrency, a round measures every data plane, and
    then the peer with every polling interval. A round begins with rooms beside bare exchanges.

    Returns {"rounds", "idle": {...}, plane: {concurrency: medians, "beside bare": medians},
    "sglang": ..., "ratios": ...}.
    """
    rows: dict[tuple[str, int], list[Row]] = {}
    bare: dict[str, list[Row]] = {plane: [] for plane in planes}
    polled: dict[tuple[float, int], list[Row]] = {}
    async with AsyncExitStack() as stack:
        pairs: dict[str, WorkerPair] = {}
        for plane in planes:
            pair = await WorkerPair.open(plane, order="page_first", **SHAPE)
            pairs[plane] = await stack.enter_async_context(pair)
        peer: Process | None = None
        if peer_harness:
            peer = await open_peer(peer_harness, SHAPE, SHAPE["pages"])
            await stack.enter_async_context(peer)
        idle = {
            plane: await pair.decode.ask("idle", seconds=IDLE_S) for plane, pair in pairs.items()
        }
        # A few rooms run before the clock starts, so that links connect and caches warm up.
        for pair in pairs.values():
            await pair.rooms(200, 8, 1)
            await pair.bare_setup()
        for turn in range(rounds):
            for plane, pair in pairs.items():
                bare[plane].append(await beside_bare(pair))
            for concurrency in CONCURRENCY:
                for plane, pair in pairs.items():
                    rows.setdefault((plane, concurrency), []).append(
                        await ours(pair, concurrency, ROOMS[concurrency])
                    )
                for poll_ms in POLLS_MS if peer else ():
                    assert peer is not None
                    polled.setdefault((poll_ms, concurrency), []).append(
                        await theirs(peer, concurrency, poll_ms)
                    )
            say(f"round {turn + 1} of {rounds}")
        left = {plane: await pair.both("state") for plane, pair in pairs.items()}
    report: dict[str, Any] = {"rounds": rounds, "idle": idle, "left": left}
    for plane in planes:
        report[plane] = {str(c): medians(rows[plane, c]) for c in CONCURRENCY}
        report[plane]["beside bare"] = medians(bare[plane])
    if peer is not None:
        report["sglang"], report["ratios"] = compare(rows, polled, planes)
    return report


def compare(
    rows: dict[tuple[str, int], list[Row]],
    polled: dict[tuple[float, int], list[Row]],
    planes: tuple[str, ...],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the peer's medians, and the medians of kvflow's per-round ratios to the peer.

    Both are for the peer's fastest polling interval, except for the ratio of CPU times: that one is
    for the interval that uses the least CPU. The medians also name this interval and its CPU time.
    """
    best: dict[str, Any] = {}
    ratios: dict[str, Any] = {plane: {} for plane in planes}
    for c in CONCURRENCY:
        fast = max(
            POLLS_MS, key=lambda poll: statistics.median(r["rooms_per_s"] for r in polled[poll, c])
        )
        lean = min(POLLS_MS, key=lambda poll: statistics.median(cpu(r) for r in polled[poll, c]))
        best[str(c)] = {"poll_ms": fast, **medians(polled[fast, c]), "leanest_poll_ms": lean}
        best[str(c)]["cpu_ms_per_room_leanest"] = round(
            statistics.median(cpu(r) for r in polled[lean, c]), 4
        )
        for plane in planes:
            mine = rows[plane, c]
            speed = [
                a["rooms_per_s"] / b["rooms_per_s"]
                for a, b in zip(mine, polled[fast, c], strict=True)
            ]
            share = [cpu(a) / cpu(b) for a, b in zip(mine, polled[lean, c], strict=True)]
            ratios[plane][str(c)] = {
                "rooms_per_s": round(statistics.median(speed), 2),
                "cpu_per_room": round(statistics.median(share), 3),
            }
    return best, ratios


def cpu(r: Row) -> float:
    """Return the CPU time per room, both sides together, in ms."""
    return r["cpu_ms_per_room_prefill"] + r["cpu_ms_per_room_decode"]
