"""Messages for rooms that never open: late, repeated and foreign ones, by the hundred thousand,
from a registered peer.

    python -m tests.hostile strays --each 100000

What a table may hold is `kvflow.protocols.limits.Bounds`; the peaks are printed beside it.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import psutil

from kvflow.node import DecodeNode
from kvflow.protocols.arguments import pack_pages
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.limits import Bounds
from kvflow.protocols.wire.codec import encode, routing_id
from kvflow.protocols.wire.messages import (
    WIRE_VERSION,
    Abort,
    AbortAck,
    Announce,
    Begun,
    Belief,
    Bootstrap,
    ChunkDone,
    Goodbye,
    GoodbyeAck,
    GrantId,
    Heartbeat,
    Incarnation,
    Message,
    Rank,
    Register,
    Registered,
    Resync,
    RoomFailed,
    RoomId,
)
from kvflow.testing.pair import QUICK, Pair, pair, until
from kvflow.transports.control.memory import Frame
from tests.hostile.nodes import Report
from tests.hostile.tables import tables

BURST = 500
WHY = Cause(Code.CLIENT_GONE, "x" * 10_000)  # the longest text a peer may make us keep is cut
Make = Callable[[random.Random, int], Message]


def to_prefill(p: Pair, stranger: DecodeNode) -> dict[str, Make]:
    """What a registered decode may send about rooms that no engine opens.

    Of every ten one is a repetition, one is foreign."""
    me, you = stranger.incarnation, p.prefill.incarnation
    address, layout = stranger.exported
    pages = pack_pages(p.decode.pool.pages.pages_of("nobody")) + bytes(4)  # page 0, again and again

    def grant(rng: random.Random, i: int) -> GrantId:
        return GrantId((1 << 32) + (i if rng.random() < 0.9 else rng.randrange(i + 1)))

    def source(rng: random.Random) -> int:
        return you if rng.random() < 0.9 else secrets.randbits(62) | 1

    def room(rng: random.Random, i: int) -> RoomId:
        return RoomId((1 << 40) + (i if rng.random() < 0.9 else rng.randrange(i + 1)))

    def lives(rng: random.Random) -> dict[str, Any]:
        return {"source": source(rng), "target": me}

    def header(rng: random.Random, i: int, above: int = 0) -> dict[str, Any]:
        return {"room": room(rng, i), "grant": above + grant(rng, i), **lives(rng)}

    offer: dict[str, Any] = {"pages": pages, "prompt_tokens": 4, "prompt_digest": b"d" * 32}
    mine: dict[str, Any] = {
        "wire_version": WIRE_VERSION,
        "layout": layout,
        "address": address,
        "fresh_from": 1,
    }
    return {
        "Announce": lambda r, i: Announce(**{**header(r, i, 1 << 34), "room": (1 << 41) + i}),
        "Bootstrap": lambda r, i: Bootstrap(**offer, **header(r, i)),
        "Abort": lambda r, i: Abort(cause=WHY, **header(r, i, 1 << 33)),
        "Resync": lambda r, i: Resync(
            rooms=tuple(Belief(room(r, i + k), grant(r, i + k), 0) for k in range(3)), **lives(r)
        ),
        "Heartbeat": lambda r, i: Heartbeat(**lives(r)),
        "Register": lambda r, i: Register(**mine, **lives(r)),
        "GoodbyeAck": lambda r, i: GoodbyeAck(**lives(r)),
    }


def to_decode(p: Pair) -> dict[str, Make]:
    """The same from a prefill."""
    me, you = p.prefill.incarnation, p.decode.incarnation

    def header(rng: random.Random, i: int) -> dict[str, Any]:
        at = i if rng.random() < 0.9 else rng.randrange(i + 1)
        return {
            "room": (1 << 40) + at,
            "grant": (1 << 32) + at,
            "source": me if rng.random() < 0.9 else secrets.randbits(62) | 1,
            "target": you if rng.random() < 0.95 else you + 1,
            "rank": 0 if rng.random() < 0.95 else 77,
        }

    lives: dict[str, Any] = {"source": me, "target": you}
    chunk: dict[str, Any] = {"pages": (1,), "last": True, "handoff": b"h" * 100}
    return {
        "AbortAck": lambda r, i: AbortAck(drained=i % 2 == 0, **header(r, i)),
        "Begun": lambda r, i: Begun(**header(r, i)),
        "ChunkDone": lambda r, i: ChunkDone(seq=i % 3, **chunk, **header(r, i)),
        "RoomFailed": lambda r, i: RoomFailed(cause=WHY, **header(r, i)),
        "Resync": lambda r, i: Resync(
            rooms=(Belief(RoomId(i), GrantId((1 << 32) + i), 0),), **lives
        ),
        "Goodbye": lambda r, i: Goodbye(source=Incarnation(secrets.randbits(62) | 1), target=you),
        "GoodbyeAck": lambda r, i: GoodbyeAck(**lives),
        "Registered": lambda r, i: Registered(
            wire_version=WIRE_VERSION, rank=Rank(0), refusal="", asked=me, **lives
        ),
    }


async def run(each: int = 100_000, seed: int = 0) -> Report:
    """`each` of every kind, both ways at once; then patience runs out, and good rooms go on."""
    rng = random.Random(seed)
    process = psutil.Process()
    async with pair(timing=msgspec.structs.replace(QUICK)) as p:
        stranger = await p.add_decode()
        for number, decode in enumerate((p.decode, stranger)):
            await one_room(p, number, decode)
        strays = [
            *((True, make) for make in to_prefill(p, stranger).values()),
            *((False, make) for make in to_decode(p).values()),
        ]
        start, rss = dict(tables(p)), process.memory_info().rss
        peaks: Counter[str] = Counter()
        control = p.prefill.control
        for i in range(each):
            for up, make in strays:
                message = make(rng, i)
                peer = routing_id(stranger.incarnation if up else p.decode.incarnation)
                p.network.inject(Frame(control, peer, up, encode(message)))
            if i % BURST == BURST - 1:
                await inboxes_read()
                for name, size in tables(p).items():
                    peaks[name] = max(peaks[name], size)
        await inboxes_read()
        peak_rss = process.memory_info().rss
        p.clock(p.prefill).advance(QUICK.rendezvous_s + 1)  # no engine came
        # 32,768 rooms: a second of CPU, a few at a time.
        await until(lambda: not p.prefill.shell.endpoint.rooms, 60)
        for number in range(2, 100):
            await one_room(p, number, p.decode)
        await inboxes_read()
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
    async with (
        p.prefill.room(number, range(4)) as source,
        await decode.room(number, "sim", range(4)) as target,
    ):
        await source.matched()
        p.send_all(source)
        await target.landed()


async def inboxes_read() -> None:
    """Everything injected has been handed over and handled: a node reads its inbox empty in one
    turn of the loop.
    """
    for _ in range(10):
        await asyncio.sleep(0)


def faults(report: Report) -> list[str]:
    """Tables over their bounds, and what is left at the end beside the memory of a registered
    peer's ended grants.
    """
    bounds, peaks, after = report["bounds"], report["peaks"], report["tables_after"]
    rooms = bounds["rooms"]
    limits = {
        "prefill rooms": rooms,
        "open grants": rooms,
        "announced rooms": rooms,
        "unsettled grants": 2 * rooms,
        "closed grants": 2 * bounds["closed_grants"],
        "outcomes": bounds["ended_halves"],
        "targets": 2,
        "links": 2,
    }
    found = [
        f"{name}: {peaks[name]} at its peak" for name in peaks if peaks[name] > limits.get(name, 0)
    ]
    kept = {"closed grants", "outcomes", "targets", "links", "announced rooms", "unsettled grants"}
    return found + [
        f"{name}: {count} left" for name, count in after.items() if count and name not in kept
    ]
