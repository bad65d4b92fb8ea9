"""An attack on both ends of the control link of two live nodes: bent frames from strangers, from a
registered decode and from a prefill that is none; a stolen routing id, multi-part messages, raw
bytes, connections that say nothing.

    python -m tests.hostile wire --frames 10000
"""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
import statistics
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from kvflow.protocols.errors import WireError
from kvflow.protocols.pages.coverage import served_of
from kvflow.protocols.wire.codec import encode, parse_at_decode, routing_id
from kvflow.protocols.wire.messages import WIRE_VERSION, Goodbye, Incarnation, Register, Registered
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.testing.pair import until
from tests.hostile.frames import bent
from tests.hostile.nodes import END, Nodes, Report, nodes, register, tasks
from tests.protocols.wire import GOOD, to_decode, to_prefill

GREETING = b"\xff" + bytes(7) + b"\1\x7f\3\0NULL" + bytes(48)
READY = GREETING + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\6DEALER"
NO_GREETING = (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\0\1\0", b"\xff" * 100)
GREETED = (b"\x04\x05\x05READY", b"\x02" + b"\xff" * 8)
AFTER_READY = (b"", b"\0\1x" * 50, b"\2" + b"\xff" * 8, b"\1\0" * 50 + b"\0\0")
RAW = (
    *NO_GREETING,
    b"\1\0" * 500,
    *(GREETING[:size] for size in (10, 40, None)),
    *(GREETING + more for more in GREETED),
    READY[:-7],
    *(READY + more for more in AFTER_READY),
)


def messages(kinds: Any, source: int, target: int) -> dict[type, Any]:
    """Good messages of these classes between two incarnations."""
    return {
        kind: msgspec.structs.replace(GOOD[kind], source=source, target=target) for kind in kinds
    }


def parts(rng: random.Random, frame: bytes) -> list[bytes]:
    """Now and then an envelope, an empty part or several parts, as REQ sockets and confused peers
    send them.
    """
    odd = ([b"", frame], [frame, frame], [frame, b""], [b""], [b"", b""], [frame] * 20)
    return rng.choice(odd) if rng.random() < 0.05 else [frame]


def send_all(
    control: str, name: bytes, good: dict[type, Any], count: int, seed: int, first: bytes = b""
) -> None:
    """`count` bent messages from a DEALER called `name` to a ROUTER, as fast as it takes them.

    Runs in a thread.
    """
    rng = random.Random(seed)
    frames = bent(rng, good)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.ROUTING_ID, name)
        dealer.setsockopt(zmq.LINGER, 2_000)
        dealer.setsockopt(zmq.SNDTIMEO, 20_000)
        dealer.connect(control)
        if first:
            dealer.send(first)
            dealer.poll(5_000)  # the answer; never read, nor is anything after it
        for _ in range(count):
            dealer.send_multipart(parts(rng, next(frames)))
        dealer.send(END + name)


async def attack_prefill(n: Nodes, count: int, rng: random.Random) -> None:
    """By strangers, by a registered decode, and under the honest decode's name."""
    me, insider = (Incarnation(secrets.randbits(62) | 1) for _ in range(2))
    source, honest = n.prefill.incarnation, n.decode.incarnation
    assert n.pools[1].segment is not None
    n.pools[1].segment.claim(insider)  # so that it is let in
    hello = encode(register(source, insider, *n.decode.exported))
    strangers = [kind for kind in to_prefill if kind is not Register]
    waves: list[tuple[bytes, dict[type, Any], int, bytes]] = [
        (routing_id(me), messages(strangers, source, me), count // 4, b""),
        (routing_id(Incarnation(me + 2)), messages(strangers, source + 1, me + 2), count // 8, b""),
        (b"somebody else", messages(to_prefill, source, honest), count // 4, b""),
        (routing_id(insider), messages(strangers, source, insider), count // 4, hello),
        # A stolen name.
        (routing_id(honest), {Registered: GOOD[Registered]}, count - 7 * (count // 8), b""),
    ]
    for name, good, share, first in waves:
        await asyncio.to_thread(
            send_all, n.prefill.control, name, good, share, rng.getrandbits(32), first
        )
        await delivered(n, "prefill", name)


async def delivered(n: Nodes, role: str, name: bytes) -> None:
    """What was sent before the end has been handed over, or was lost with its connection (over 8
    MiB ends one).
    """

    def again() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.ROUTING_ID, name)
            dealer.setsockopt(zmq.LINGER, 2_000)
            dealer.connect(n.prefill.control)
            dealer.send(END + name)

    if END + name not in n.taps[role].ends and role == "prefill":
        try:
            await until(lambda: END + name in n.taps[role].ends, 5)
        except TimeoutError:
            await asyncio.to_thread(again)
    await until(lambda: END + name in n.taps[role].ends, 10)


async def attack_decode(n: Nodes, count: int, rng: random.Random) -> None:
    """By a prefill that registers well and then talks nonsense."""
    source = Incarnation(secrets.randbits(62) | 1)
    # A good one ends the link: that is its meaning.
    kinds = [kind for kind in to_decode if kind is not Registered]
    good = messages(kinds, source, n.decode.incarnation)
    frames = (frame for frame in bent(rng, good) if not says_goodbye(frame, source))
    peer = routing_id(n.decode.incarnation)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.SNDTIMEO, 20_000)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        info = RankInfo(0, 1, source, f"tcp://127.0.0.1:{port}", "local", "")
        room = n.decode.announce(1 << 40, [info], [1])
        await asyncio.to_thread(router.recv_multipart)
        answer: dict[str, Any] = {
            "wire_version": WIRE_VERSION,
            "rank": 0,
            "refusal": "",
            "asked": source,
        }
        answer["served"] = served_of(n.decode.pool.layout)
        answer["fresh_from"] = n.decode.shell.endpoint.core.next_grant
        accepted = Registered(
            source=source, target=n.decode.incarnation, address=n.prefill.exported[0], **answer
        )
        router.send_multipart([peer, encode(accepted)])
        link_to, record = n.decode.shell.endpoint.link_to, room.record
        assert record is not None
        await until(lambda: record.linked, 20)
        room.close()  # nothing was lent: the link is up, and has no room
        await asyncio.to_thread(_send_frames, router, peer, frames, count, rng)
        await until(lambda: END in n.taps["decode"].ends or link_to(info) is None, 20)


def says_goodbye(frame: bytes, source: int) -> bool:
    """True for a whole Goodbye of `source`, also one that another message was bent into: it ends
    the link.
    """
    try:
        message = parse_at_decode(frame)
    except WireError:
        return False
    return isinstance(message, Goodbye) and message.source == source


def _send_frames(
    router: Any, peer: bytes, frames: Iterator[bytes], count: int, rng: random.Random
) -> None:
    for _ in range(count):
        frame = next(frames)
        # A frame over the limit ends the connection, and the one who accepts cannot reconnect.
        if len(frame) < 1 << 20:
            router.send_multipart([peer, *parts(rng, frame)])
    router.send_multipart([peer, END])


def connect_raw(control: str, rng: random.Random, count: int) -> list[socket.socket]:
    """Connections that speak no ZMTP, or begin and stop; they stay open."""
    host, port = control.removeprefix("tcp://").rsplit(":", 1)
    made = []
    for i in range(count):
        raw = socket.create_connection((host, int(port)), 5)
        raw.sendall(RAW[i % len(RAW)] if i < 5 * len(RAW) else rng.randbytes(rng.randint(1, 2_000)))
        made.append(raw)
    return made


def compared(before: list[float], after: list[float]) -> dict[str, float]:
    """Medians, and what became of them."""
    b, a = statistics.median(before), statistics.median(after)
    return {"before": round(b), "after": round(a), "ratio": round(a / b, 3)}


async def run(frames: int = 10_000, seed: int = 0, rooms: int = 2_000, raw: int = 300) -> Report:
    """The attack, and what it changed."""
    rng = random.Random(seed)
    async with nodes() as n:
        await n.rooms_per_s(rooms)  # warm
        before = [await n.rooms_per_s(rooms) for _ in range(5)]
        running, start, tables = tasks(), n.dropped(), await n.settled()
        silent = await asyncio.to_thread(connect_raw, n.prefill.control, rng, raw)
        await attack_prefill(n, frames, rng)
        await attack_decode(n, frames, rng)
        attacked, seen = n.dropped(), {role: dict(tap.seen) for role, tap in n.taps.items()}
        healed_s = await n.healed()
        await n.rooms_per_s(rooms)
        after = [await n.rooms_per_s(rooms) for _ in range(5)]
        # The false prefill has gone silent.
        await until(lambda: len(list(n.decode.shell.endpoint.peers)) == 1, 30)
        left = await n.settled()
        report = {
            "frames_sent": {"prefill": frames, "decode": frames},
            "raw_connections": len(silent),
            "delivered": {
                role: sum(found.values()) - found["taken"] for role, found in seen.items()
            },
            "expected": seen,
            "counted": {
                r: {why: attacked[r][why] - start[r][why] for why in attacked[r]} for r in attacked
            },
            "healed_s": round(healed_s, 2),
            "dead_tasks": sorted(running - tasks()),
            "tables_before": tables,
            "tables_after": left,
            **{
                name: compared([speeds[i] for speeds in before], [speeds[i] for speeds in after])
                for i, name in enumerate(("rooms_per_s", "rooms_per_cpu_s"))
            },
        }
        for connection in silent:
            connection.close()
    return report


def faults(report: Report) -> list[str]:
    """What a report must not say."""
    found = [f"dead task {name}" for name in report["dead_tasks"]]
    for role in ("prefill", "decode"):
        for why in ("malformed", "foreign", "stale"):
            counted, expected = report["counted"][role][why], report["expected"][role].get(why, 0)
            if counted != expected:
                found.append(f"{role}: {counted} {why} counted, {expected} delivered")
        if report["delivered"][role] < 0.9 * report["frames_sent"][role]:
            found.append(f"{role}: only {report['delivered'][role]} frames were delivered")
    grown = {
        "closed grants",
        "outcomes",
        "targets",
        "announced rooms",
        "unsettled grants",
    }  # a registered decode's: bounded, and gone with it
    for name, count in report["tables_after"].items():
        if count > report["tables_before"][name] and name not in grown:
            found.append(f"{name}: {report['tables_before'][name]} before, {count} after")
    return found
