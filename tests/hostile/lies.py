"""Valid messages that are false, to both ends of the link of two live nodes: every field of every
message, by strangers that registered well or badly, under the honest decode's name, and by a
prefill that is none.

    python -m tests.hostile lies --messages 10000
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import secrets
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import msgspec
import psutil
import zmq
import zmq.asyncio

from kvflow.protocols.arguments import pack_pages, prompt_digest
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.pages.coverage import served_of
from kvflow.protocols.ports import PlaneAddress
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.codec import (
    encode,
    parse_at_decode,
    parse_at_prefill,
    routing_id,
)
from kvflow.protocols.wire.messages import WIRE_VERSION, Incarnation
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.testing.conformance.bench import POOLED_THREADS
from kvflow.testing.pair import until
from kvflow.transports.host.identity import own_identity
from tests.hostile.falsehoods import lie, name_of, paths
from tests.hostile.nodes import PROMPT, Nodes, Report, nodes, register
from tests.hostile.wire import compared

SESSION = 16  # lies by one stranger
ENDING = (
    "grant",
    "fresh_from",
    "settled_below",
    "settled",
    "unproven",
)  # in a decode's name: with these its numbers are used up, or it has parted (SECURITY.md)
ROOMS = 4  # open rooms that a session's messages are about
GONE = Cause(Code.CLIENT_GONE, "gone")


class Liar:
    """Tells lies about what is true now, each field in its turn."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.told: Counter[str] = Counter()

    def about(
        self, truth: list[Any], known: tuple[int, ...], parse: Any, but: tuple[str, ...] = ()
    ) -> bytes:
        """The field that was lied about least, of one of these messages; none that is called as in
        `but`.
        """
        choices = [
            (message, path) for message in truth for path in paths(message) if path[-1] not in but
        ]
        self.rng.shuffle(choices)
        message, path = min(choices, key=lambda choice: self.told[name_of(*choice)])
        self.told[name_of(message, path)] += 1
        return encode(lie(self.rng, message, path, parse, known))


def of_decode(n: Nodes, me: Incarnation, room: int, grant: int) -> list[Any]:
    """What a decode `me` could truly say of a room, and of itself."""
    lives: dict[str, Any] = {"source": n.prefill.incarnation, "target": me}
    header: dict[str, Any] = {"room": room, "grant": grant, **lives}
    pages = n.decode.pages.take(2, "to be named by a liar")
    n.decode.pages.give_back(pages, "to be named by a liar")
    return [
        register(n.prefill.incarnation, me, *n.decode.exported),
        wire.Announce(**header),
        wire.Bootstrap(
            pages=pack_pages(pages),
            prompt_tokens=len(PROMPT),
            prompt_digest=prompt_digest(PROMPT),
            **header,
        ),
        wire.Abort(cause=GONE, **header),
        wire.Resync(rooms=(wire.Belief(wire.RoomId(room), wire.GrantId(grant), 0),), **lives),
        wire.Heartbeat(settled=((wire.GrantId(1), wire.GrantId(2)),), **lives),
        wire.Goodbye(unproven=(wire.GrantId(grant),), **lives),
        wire.GoodbyeAck(**lives),
    ]


def of_prefill(
    n: Nodes, me: Incarnation, address: PlaneAddress, room: int, grant: int
) -> list[Any]:
    """What a prefill `me` at `address` could truly say."""
    lives: dict[str, Any] = {"source": me, "target": n.decode.incarnation}
    header: dict[str, Any] = {"room": room, "grant": grant, "rank": 0, **lives}
    accepted: dict[str, Any] = {"wire_version": WIRE_VERSION, "rank": 0, "refusal": "", "asked": me}
    return [
        wire.Registered(
            served=served_of(n.decode.pool.layout), address=address, **accepted, **lives
        ),
        wire.Begun(**header),
        wire.ChunkDone(seq=0, pages=(2,), last=True, handoff=b"h", **header),
        wire.RoomFailed(cause=GONE, **header),
        wire.AbortAck(drained=False, **header),
        wire.Resync(rooms=(wire.Belief(wire.RoomId(room), wire.GrantId(grant), 0),), **lives),
        wire.Heartbeat(settled=((wire.GrantId(1), wire.GrantId(2)),), **lives),
        wire.Goodbye(unproven=(wire.GrantId(grant),), **lives),
        wire.GoodbyeAck(**lives),
    ]


def start_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


async def as_decode(n: Nodes, liar: Liar, me: Incarnation, count: int, *, says_hello: bool) -> None:
    """One connection under the name of `me`, about rooms whose engine waits for a decode."""
    numbers = [n.number() for _ in range(ROOMS)]
    waiting = [n.prefill.room(number, PROMPT, rendezvous_s=30) for number in numbers]
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.ROUTING_ID, routing_id(me))
        dealer.setsockopt(zmq.LINGER, 2_000)
        dealer.connect(n.prefill.control)
        if says_hello:
            await dealer.send(encode(of_decode(n, me, 0, 1)[0]))
            await dealer.poll(5_000)
        for i in range(count):
            room, grant = liar.rng.choice(numbers), liar.rng.randint(1, ROOMS) + i
            known = (*numbers, grant, n.prefill.incarnation, n.decode.incarnation, me, os.getpid())
            but = ENDING if me == n.decode.incarnation else ()
            await dealer.send(
                liar.about(of_decode(n, me, room, grant), known, parse_at_prefill, but)
            )
            if i % 4 == 3:
                await asyncio.sleep(0)
        with suppress(TimeoutError):
            # Something was answered: what was sent has been read.
            await until(lambda: dealer.poll(0), 0.2)
    for opened in waiting:
        opened.close()
        await opened.released()


async def as_prefill(n: Nodes, liar: Liar, router: Any, port: int, count: int) -> None:
    """A prefill that registers well, is lent pages, and lies about them, until its process ends."""
    process = await asyncio.create_subprocess_exec("sleep", "600")
    identity = msgspec.structs.replace(
        own_identity(), pid=process.pid, start_ticks=start_ticks(process.pid)
    )
    address = PlaneAddress("local", "", identity)
    me = Incarnation(secrets.randbits(62) | 1)
    info = RankInfo(0, 1, me, f"tcp://127.0.0.1:{port}", "local", "")
    peer, core = routing_id(n.decode.incarnation), n.decode.shell.endpoint.core
    rooms = [n.decode.room(n.number(), [info], PROMPT, deadline_s=5) for _ in range(ROOMS)]
    await router.recv_multipart()
    accepted = msgspec.structs.replace(
        of_prefill(n, me, address, 0, 1)[0], fresh_from=core.next_grant
    )
    await router.send_multipart([peer, encode(accepted)])
    await until(
        lambda: all(
            (room.record is not None and room.record.linked) or room.ended for room in rooms
        ),
        10,
    )
    for i in range(count):
        room = liar.rng.choice(rooms)
        lives = (me, n.prefill.incarnation, n.decode.incarnation)
        known = (room.room, room.grant, *lives, os.getpid())
        lied = liar.about(of_prefill(n, me, address, room.room, room.grant), known, parse_at_decode)
        await router.send_multipart([peer, lied])
        if i % 4 == 3:
            await asyncio.sleep(0)
    process.kill()
    await process.wait()
    for room in rooms:
        room.close()
        await room.released()


async def attack(n: Nodes, liar: Liar, messages: int) -> None:
    """Half of them to each end."""
    for i in range(messages // 2 // SESSION):
        me = n.decode.incarnation if i % 8 == 7 else Incarnation(secrets.randbits(62) | 1)
        segment = n.decode.pool.segment
        assert segment is not None
        segment.claim(me)  # what it says of its memory is true, but for the lie
        await as_decode(n, liar, me, SESSION, says_hello=i % 2 == 0)
        segment.disclaim(me)
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        for _ in range(messages // 2 // (4 * SESSION)):
            await as_prefill(n, liar, router, port, 4 * SESSION)


async def held(n: Nodes) -> dict[str, Any]:
    """What both nodes and their process hold when nothing is under way."""
    with suppress(TimeoutError):  # links to what lied are dropped when they have been silent
        await until(lambda: len(list(n.decode.shell.endpoint.peers)) == 1, 30)
    tables = await n.settled()
    gc.collect()
    process = psutil.Process()
    return {
        "tables": tables,
        "rss_mib": round(process.memory_info().rss / 2**20, 1),
        "descriptors": process.num_fds(),
        "threads": threading.active_count(),
        # A pool numbers its threads.
        "threads outside pools": sum(
            not thread.name.rpartition("-")[2].isdigit() for thread in threading.enumerate()
        ),
        "peers": n.prefill.peers_by_phase(),
    }


async def run(messages: int = 10_000, seed: int = 0, rooms: int = 1_000) -> Report:
    """As many lies as that twice, so that growth shows; honest rooms after the first, beside those
    of nodes that were never lied to, in turn: what else the machine does meanwhile slows both."""
    liar = Liar(random.Random(seed))
    async with nodes() as n:
        await n.rooms_per_s(rooms)  # warm
        await attack(n, liar, messages)
        n.number_anew()  # a liar may have announced any number that it could guess
        healed_s = await n.healed()
        before, after = [], []
        async with nodes() as fresh:
            await fresh.rooms_per_s(rooms)  # warm too
            for _ in range(7):
                before.append(await fresh.rooms_per_s(rooms))
                after.append(await n.rooms_per_s(rooms))
        first = await held(n)
        told = dict(sorted(liar.told.items()))
        await attack(n, liar, messages)
        n.number_anew()
        await n.healed()
        second = await held(n)
        return {
            "messages": sum(told.values()),
            "fields": told,
            "healed_s": round(healed_s, 2),
            "first": first,
            "second": second,
            "handler_errors": {
                node.role: node.counts.handler_errors for node in (n.prefill, n.decode)
            },
            "dropped": n.dropped(),
            **{
                name: compared([speeds[i] for speeds in before], [speeds[i] for speeds in after])
                for i, name in enumerate(("rooms_per_s", "rooms_per_cpu_s"))
            },
        }


def faults(report: Report) -> list[str]:
    """What a report must not say; speed is printed, and judged by its reader."""
    found = [f"{role}: {n} handler errors" for role, n in report["handler_errors"].items() if n]
    first, second = report["first"], report["second"]
    # A liar that has said goodbye is forgotten: how many are still known differs from one attack to
    # the next.
    known = max(0, sum(second["peers"].values()) - sum(first["peers"].values()))
    for name, more in (
        ("descriptors", 4 + 3 * known),
        ("threads", POOLED_THREADS),
        ("threads outside pools", 0),
        ("rss_mib", 16),
    ):
        if second[name] > first[name] + more:
            found.append(
                f"{name}: {first[name]} after the first attack, {second[name]} after the second"
            )
    return found
