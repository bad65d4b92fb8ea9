"""Messages for rooms that never open: late, repeated and foreign ones, by the hundred thousand, from a registered peer.

    python -m tests.hostile strays --each 100000

What a table may hold is `kvflow.protocols.limits.Bounds`; the peaks are printed beside it.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Callable

import msgspec
import psutil

from kvflow.node import DecodeNode
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.limits import Bounds
from kvflow.protocols.pages.layout import pack_pages
from kvflow.protocols.wire.codec import encode, routing_id
from kvflow.protocols.wire.messages import (
    Abort,
    AbortAck,
    Belief,
    Bootstrap,
    ChunkDone,
    Heartbeat,
    Message,
    Register,
    Registered,
    Resync,
    RoomFailed,
)
from kvflow.testing.pair import QUICK, Pair, pair
from kvflow.transports.control.memory import Frame
from tests.hostile.nodes import Report
from tests.hostile.tables import tables

BURST = 500
WHY = Cause(Code.CLIENT_GONE, "x" * 10_000)  # the longest text a peer may make us keep is cut
Make = Callable[[random.Random, int], Message]


def to_prefill(p: Pair, stranger: DecodeNode) -> dict[str, Make]:
    """What a registered decode may say of rooms that nobody opens. Of every ten one is a repetition, one is foreign."""
    me, you = stranger.incarnation, p.prefill.incarnation
    endpoint, layout = stranger.exported
    pages = pack_pages(p.decode.pages.pages_of("nobody")) + bytes(4)  # page 0, again and again

    def grant(rng: random.Random, i: int) -> int:
        return (1 << 32) + (i if rng.random() < 0.9 else rng.randrange(i + 1))

    def source(rng: random.Random) -> int:
        return you if rng.random() < 0.9 else secrets.randbits(62) | 1

    def room(rng: random.Random, i: int) -> int:
        return (1 << 40) + (i if rng.random() < 0.9 else rng.randrange(i + 1))

    return {
        "Bootstrap": lambda r, i: Bootstrap(room(r, i), grant(r, i), source(r), me, pages, 4, b"d" * 32),
        "Abort": lambda r, i: Abort(room(r, i), (1 << 33) + grant(r, i), source(r), me, WHY),
        "Resync": lambda r, i: Resync(
            source(r), me, tuple(Belief(room(r, i + k), grant(r, i + k), 0) for k in range(3))
        ),
        "Heartbeat": lambda r, i: Heartbeat(source(r), me, 0),
        "Register": lambda r, i: Register(source(r), me, 1, layout, endpoint),
    }


def to_decode(p: Pair) -> dict[str, Make]:
    """The same from a prefill."""
    me, you = p.prefill.incarnation, p.decode.incarnation

    def who(rng: random.Random, i: int) -> tuple[int, int, int, int]:
        rng_source = me if rng.random() < 0.9 else secrets.randbits(62) | 1
        at = i if rng.random() < 0.9 else rng.randrange(i + 1)
        return (1 << 40) + at, (1 << 32) + at, rng_source, you if rng.random() < 0.95 else you + 1

    return {
        "AbortAck": lambda r, i: AbortAck(*who(r, i), 0, i % 2 == 0),
        "ChunkDone": lambda r, i: ChunkDone(*who(r, i), 0, i % 3, 1, True, b"h" * 100),
        "RoomFailed": lambda r, i: RoomFailed(*who(r, i), 0, WHY),
        "Resync": lambda r, i: Resync(me, you, (Belief(i, (1 << 32) + i, 0),)),
        "Registered": lambda r, i: Registered(me, you, 1, 0, "", None),
    }


async def run(each: int = 100_000, seed: int = 0) -> Report:
    """`each` of every kind, both ways at once; then patience runs out, and good rooms go on."""
    rng = random.Random(seed)
    process = psutil.Process()
    async with pair(timing=msgspec.structs.replace(QUICK)) as p:
        stranger = await p.add_decode()
        for number, decode in enumerate((p.decode, stranger)):
            await one_room(p, number, decode)
        said = [
            *((True, make) for make in to_prefill(p, stranger).values()),
            *((False, make) for make in to_decode(p).values()),
        ]
        start, rss = dict(tables(p)), process.memory_info().rss
        peaks: Counter[str] = Counter()
        control = p.prefill.control
        for i in range(each):
            for up, make in said:
                message = make(rng, i)
                peer = routing_id(stranger.incarnation if up else p.decode.incarnation)
                p.network.inject(Frame(control, peer, up, encode(message)))
            if i % BURST == BURST - 1:
                await drained()
                for name, size in tables(p).items():
                    peaks[name] = max(peaks[name], size)
        await drained()
        peak_rss = process.memory_info().rss
        p.clock(p.prefill).advance(QUICK.rendezvous_s + 1)  # nobody came
        for number in range(2, 100):
            await one_room(p, number, p.decode)
        await drained()
        await asyncio.sleep(2 * QUICK.heartbeat_s)
        return {
            "messages": dict.fromkeys((*to_prefill(p, stranger), *to_decode(p)), each),
            "bounds": msgspec.structs.asdict(Bounds()),
            "tables_before": start,
            "peaks": dict(peaks),
            "tables_after": tables(p),
            "dropped": {"prefill": p.prefill.counts.dropped, "decode": p.decode.counts.dropped},
            "endings": {"prefill": p.prefill.counts.endings, "decode": p.decode.counts.endings},
            "rss_mib": {"before": rss >> 20, "peak": peak_rss >> 20},
        }


async def one_room(p: Pair, number: int, decode: DecodeNode) -> None:
    async with p.prefill.room(number, range(4)) as source, await decode.room(number, "sim", range(4)) as target:
        await source.matched()
        p.send_all(source)
        await target.landed()


async def drained() -> None:
    """Everything injected has been handed over and handled: a node reads its inbox empty in one turn of the loop."""
    for _ in range(10):
        await asyncio.sleep(0)


def faults(report: Report) -> list[str]:
    """Tables over their bounds, and what is left at the end beside the memory of a registered peer's ended grants."""
    bounds, peaks, after = report["bounds"], report["peaks"], report["tables_after"]
    limits = {
        "prefill rooms": bounds["rooms"], "open grants": bounds["rooms"], "closed grants": 2 * bounds["closed_grants"],
        "ended halves": bounds["ended_halves"], "targets": 2, "links": 2,
    }  # fmt: skip
    found = [f"{name}: {peaks[name]} at its peak" for name in peaks if peaks[name] > limits.get(name, 0)]
    kept = {"closed grants", "ended halves", "targets", "links"}
    return found + [f"{name}: {count} left" for name, count in after.items() if count and name not in kept]
