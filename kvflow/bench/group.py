"""`kvflow bench group`: the cost of agreement between ranks, compared with bare ZeroMQ sockets.

Each rank is a process with real shells and sockets. Its rooms move no pages, so that the agreement
alone is measured. A request takes three decisions (open, start, succeed), which go to every rank,
and two votes from every rank. The bare sockets carry frames of the same sizes in the same order, in
a thread that has no other work.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from kvflow.bench.figures import Row, Say, medians
from kvflow.bench.pair import Process
from kvflow.protocols.wire import group as wire
from kvflow.protocols.wire.codec import encode
from kvflow.protocols.wire.group import Ruling, Ticket, Vote
from kvflow.protocols.wire.messages import Incarnation, RoomId

WORKER = "kvflow.bench.group_worker"
CONCURRENCY = (1, 32)
DECISIONS = 3  # decisions for a request that succeeds
REQUEST_BYTES = 1_024  # size of a request with a short prompt, as rank 0 sends it to the engines


def frame_sizes() -> tuple[list[int], int]:
    """Return the size in bytes of each decision about one request, and of one vote."""
    # A group that has run for some time has such numbers. Smaller ones encode in fewer bytes.
    ends: dict[str, Any] = {
        "leader": Incarnation(1 << 62),
        "member": Incarnation(1 << 61),
        "session": 1,
        "seq": 1_000,
        "ticket": Ticket(1_000),
    }
    start, succeed = (
        wire.Decision(**ends, number=1_000, ruling=ruling)
        for ruling in (Ruling.START, Ruling.SUCCEED)
    )
    opened = msgspec.structs.replace(
        start, ruling=Ruling.OPEN, room=RoomId(1_000), request=bytes(REQUEST_BYTES)
    )
    sizes = [len(encode(decision)) for decision in (opened, start, succeed)]
    return sizes, len(encode(wire.RankVote(**ends, vote=Vote.READY)))


class Ranks:
    """The processes of one group, in the order of their ranks."""

    def __init__(self, processes: list[Process]) -> None:
        self.processes = processes

    async def every(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        return await asyncio.gather(*(process.ask(do, **arguments) for process in self.processes))

    async def setup(self) -> None:
        first, *others = self.processes
        count = len(self.processes)
        port = (await first.ask("setup", rank=0, ranks=count, port=0))["port"]
        for rank, process in enumerate(others, 1):
            await process.ask("setup", rank=rank, ranks=count, port=port)
        await first.ask("joined")
        port = (await first.ask("bare_setup", port=0))["port"]
        for process in others:
            await process.ask("bare_setup", port=port)
        await first.ask("bare_ready")

    async def agree(self, count: int, concurrency: int) -> Row:
        """Run `count` requests through the group, `concurrency` at a time; return the figures."""
        await self.every("begin")
        arguments = {"count": count, "concurrency": concurrency, "request_bytes": REQUEST_BYTES}
        seen = await self.processes[0].ask("requests", **arguments)
        first, *others = await self.every("end")
        if seen["decisions"] != DECISIONS * count:
            raise RuntimeError(
                f"{count} requests took {seen['decisions']} decisions, not {DECISIONS * count}"
            )
        return {
            "requests_per_s": count / seen["seconds"],
            "decisions_per_s": seen["decisions"] / seen["seconds"],
            "p50_ms": seen["p50_ms"],
            "p99_ms": seen["p99_ms"],
            "cpu_ms_per_room": (first["cpu_s"] + sum(one["cpu_s"] for one in others)) / count * 1e3,
            "cpu_ms_per_room_rank_0": first["cpu_s"] / count * 1e3,
            "cpu_ms_per_room_other_rank": statistics.mean([one["cpu_s"] for one in others] or [0.0])
            / count
            * 1e3,
            "stall_p99_ms_rank_0": first["stall_p99_ms"],
            "stall_max_ms_rank_0": first["stall_max_ms"],
            "stall_max_ms_other_rank": max([one["stall_max_ms"] for one in others] or [0.0]),
        }

    async def bare(self, count: int, concurrency: int) -> Row:
        sizes, vote_bytes = frame_sizes()
        seen = await self.every(
            "bare", count=count, concurrency=concurrency, sizes=sizes, vote_bytes=vote_bytes
        )
        first = seen[0]
        return {
            "requests_per_s": count / first["seconds"],
            "p50_ms": first["p50_ms"],
            "p99_ms": first["p99_ms"],
            "cpu_ms_per_room": sum(one["cpu_s"] for one in seen) / count * 1e3,
        }

    async def at_rest(self) -> dict[str, int]:
        """Return the number of requests left, and of errors so far, summed over all ranks."""
        # The last decision may still be on its way to the other ranks.
        await asyncio.sleep(0.2)
        left = await self.every("rest")
        return {name: sum(one[name] for one in left) for name in ("requests", "errors")}


@asynccontextmanager
async def group_of(ranks: int) -> AsyncIterator[Ranks]:
    async with AsyncExitStack() as stack:
        group = Ranks([])
        for rank in range(ranks):
            process = await Process.run_module(WORKER, name=f"rank {rank}")
            group.processes.append(await stack.enter_async_context(process))
        await group.setup()
        yield group


async def bench_group(sizes: tuple[int, ...], rounds: int, count: int, say: Say) -> dict[str, Any]:
    """Measure groups of each size in turn, with rounds over bare sockets interleaved.

    Returns {"rounds", "requests", "frame_bytes", "groups": {ranks: {concurrency: {"group", "bare",
    "ratios"}, "left"}}, "growth": {concurrency: ...}}. Figures are medians over the rounds; ratios
    are medians of the ratios within each round.
    """
    decisions, vote = frame_sizes()
    groups: dict[str, dict[str, Any]] = {}
    for ranks in sizes:
        async with group_of(ranks) as group:
            groups[str(ranks)] = await _measure(group, rounds, count)
        for concurrency in CONCURRENCY:
            row = groups[str(ranks)][str(concurrency)]["group"]
            rate, cpu_ms = row["decisions_per_s"], row["cpu_ms_per_room"]
            say(
                f"{ranks} ranks, {concurrency} at once: {rate:.0f} decisions/s, {cpu_ms:.3f} ms of "
                "CPU a room"
            )
    growth = {
        str(c): growth_of({ranks: groups[str(ranks)][str(c)] for ranks in sizes})
        for c in CONCURRENCY
    }
    frames = {"decisions": decisions, "vote": vote}
    plan = {"rounds": rounds, "requests": count, "frame_bytes": frames}
    return {**plan, "groups": groups, "growth": growth}


async def _measure(group: Ranks, rounds: int, count: int) -> dict[str, Any]:
    # One run of each kind warms up connections, allocators and caches.
    await group.agree(count // 10 + 1, 8)
    await group.bare(count // 10 + 1, 8)
    found: dict[str, Any] = {}
    for concurrency in CONCURRENCY:
        ours, bare = [], []
        for _ in range(rounds):
            ours.append(await group.agree(count, concurrency))
            bare.append(await group.bare(count, concurrency))
        pairs = list(zip(ours, bare, strict=True))
        found[str(concurrency)] = {
            "group": medians(ours),
            "bare": medians(bare),
            "ratios": medians(
                [{name: mine[name] / its[name] for name in its} for mine, its in pairs]
            ),
        }
    return found | {"left": await group.at_rest()}


def growth_of(rows: dict[int, dict[str, Row]]) -> dict[str, Row]:
    """Return the CPU ms that each further rank adds to one room, over all processes."""
    fewest, most = min(rows), max(rows)
    if fewest == most:
        return {}
    found: dict[str, Row] = {}
    for kind in ("group", "bare"):
        less, more = (rows[ranks][kind]["cpu_ms_per_room"] for ranks in (fewest, most))
        found[kind] = {"cpu_ms_per_room_and_rank": round((more - less) / (most - fewest), 4)}
    return found
