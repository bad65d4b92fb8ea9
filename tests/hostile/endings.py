"""Rooms that end in every way there is, on a network that loses and repeats: flat memory, empty
tables, pages home.

python -m tests.hostile endings --rooms 1000000
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

import msgspec
import psutil

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.testing.pair import QUICK, Pair, pair, small_layout, until
from kvflow.transports.control.memory import DELIVERED, LOST, TWICE, Fate, Frame
from tests.hostile.nodes import Report
from tests.hostile.tables import tables

PROMPT = range(12)  # three pages
WHY = Cause(Code.ENGINE_ERROR, "the engine gave up")
GONE = Cause(Code.CLIENT_GONE, "the client left")
LANES = 64
Scene = Callable[[Pair, int], Awaitable[None]]


async def success(p: Pair, room: int) -> None:
    async with (
        p.prefill.room(room, PROMPT) as source,
        await p.decode.room(room, "sim", PROMPT) as target,
    ):
        await source.matched()
        p.send_all(source, chunks=room % 3 + 1)
        await target.landed()
        if room % 2:
            p.decode.pages.give_back(target.keep(room), room)


async def under_way(p: Pair, room: int) -> tuple[PrefillRoom, DecodeRoom]:
    """Open, matched, or with its chunks sent, by its number."""
    source, target = await p.open(room, PROMPT)
    if room % 3:
        await source.matched()
        if room % 2:
            p.send_all(source, chunks=2)
    return source, target


async def aborted_by_decode(p: Pair, room: int) -> None:
    source, target = await under_way(p, room)
    target.close(GONE)
    await ended(source.done())


async def failed_by_prefill(p: Pair, room: int) -> None:
    source, target = await under_way(p, room)
    source.close(WHY)
    await ended(target.landed())
    target.close()


async def both_at_once(p: Pair, room: int) -> None:
    source, target = await p.open(room, PROMPT)
    await source.matched()
    p.send_all(source)
    source.close(WHY)
    target.close(GONE)


async def mismatched(p: Pair, room: int) -> None:
    source, target = p.prefill.room(room, PROMPT), p.decode.room(room, "sim", range(1, 13))
    await ended(source.matched())
    await ended(target.landed())


async def refused(p: Pair, room: int) -> None:
    if room % 2:
        p.prefill.refuse(room, WHY)
    target = p.decode.room(room, "sim", PROMPT)
    if not room % 2:
        p.prefill.refuse(room, WHY)
    await ended(target.landed())


async def too_large(p: Pair, room: int) -> None:
    source = p.prefill.room(room, PROMPT)
    await ended(p.decode.room(room, "sim", range(100_000)))
    await ended(source.matched())


async def engine_half(p: Pair, room: int) -> None:
    p.prefill.room(room, PROMPT, deadline_s=0.0 if room % 2 else None).close(
        None if room % 2 else WHY
    )


async def decode_half(p: Pair, room: int) -> None:
    target = p.decode.room(room, "sim", PROMPT, deadline_s=0.001 if room % 2 else None)
    if not room % 2:
        target.close(GONE)
    await ended(target.landed())


async def twice(p: Pair, room: int) -> None:
    """Two rooms of one number: the second one is in use.

    Where the first Bootstrap is lost it is the other way round: it comes again when the engine's
    half has ended with the second, and only its own deadline ends that room."""
    first, second = (p.decode.room(room, "sim", PROMPT, deadline_s=1.0) for _ in range(2))
    source = p.prefill.room(room, PROMPT)
    with suppress(KvflowError):
        p.prefill.room(room, PROMPT)
    await ended(source.matched())
    source.close(WHY)
    for target in (first, second):
        await ended(target.landed())
        target.close()


SCENES: tuple[Scene, ...] = (
    success,
    success,
    success,
    aborted_by_decode,
    failed_by_prefill,
    both_at_once,
    mismatched,
    refused,
    too_large,
    engine_half,
    decode_half,
    twice,
)


async def ended(waiting: Awaitable[object]) -> None:
    with suppress(KvflowError):
        await waiting


def weather(rng: random.Random) -> Callable[[Frame], Fate]:
    """Of a thousand frames two are lost and ten arrive twice."""

    def fate(_: Frame) -> Fate:
        luck = rng.random()
        return LOST if luck < 0.002 else TWICE if luck < 0.012 else DELIVERED

    return fate


async def run(rooms: int = 1_000_000, seed: int = 0) -> Report:
    """That many scenes, `LANES` at once, and what is left at each quarter."""
    rng, process = random.Random(seed), psutil.Process()
    scenes: Counter[str] = Counter()
    # No scene waits for a half that does not come: this is longer than a busy machine delays one
    # that does.
    timing = msgspec.structs.replace(QUICK, rendezvous_s=20.0, repeat_after_s=0.05)
    async with pair(
        timing=timing, source_layout=small_layout(1024), target_layout=small_layout(1024)
    ) as p:
        await success(p, 0)
        p.patience_s = 30
        started, quarters = time.perf_counter(), []
        numbers = itertools.count(1)
        plane = p.plane(p.prefill)
        for quarter in range(1, 5):
            p.network.rules.append(weather(rng))
            left = iter(range(rooms // 4))

            async def lane(left: Iterator[int] = left) -> None:
                for _ in left:
                    scene = rng.choice(SCENES)
                    scenes[scene.__name__] += 1
                    await scene(p, next(numbers))
                    plane.started.clear()  # the fake's own diary

            await asyncio.gather(*(lane() for _ in range(LANES)))
            p.network.mend()
            await p.rest()
            # Refusals are remembered for as long as their other half may come.
            p.clock(p.prefill).advance(timing.rendezvous_s + 1)
            with suppress(TimeoutError):
                await until(lambda: not left_in(tables(p)), 30)
            gc.collect()
            quarters.append(
                {
                    "rooms": quarter * (rooms // 4),
                    "rss_mib": round(process.memory_info().rss / 2**20, 2),
                    "objects": len(gc.get_objects()),
                    "tables": tables(p),
                }
            )
        seconds = time.perf_counter() - started
        return {
            "rooms": rooms,
            "rooms_per_s": round(rooms / seconds),
            "scenes": dict(scenes),
            "endings": {"prefill": p.prefill.counts.endings, "decode": p.decode.counts.endings},
            "dropped": {"prefill": p.prefill.counts.dropped, "decode": p.decode.counts.dropped},
            "quarters": quarters,
        }


def left_in(found: dict[str, int]) -> dict[str, int]:
    """What is left where nothing should be: a pair keeps its target and its link."""
    return {name: n for name, n in found.items() if n and name not in ("targets", "links")}


def faults(report: Report) -> list[str]:
    """Something left in a table, or growth between the second quarter and the last."""
    second, last = report["quarters"][1], report["quarters"][3]
    found = [
        f"{name}: {n} left" for q in report["quarters"] for name, n in left_in(q["tables"]).items()
    ]
    for name, most in (("rss_mib", 1.02), ("objects", 1.01)):
        if last[name] > most * second[name]:
            found.append(f"{name}: {second[name]} after two quarters, {last[name]} at the end")
    return found
