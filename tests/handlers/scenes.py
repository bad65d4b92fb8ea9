"""Situations in which many of these tests begin, and messages that they put on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import numpy as np

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.decode.links import PrefillPeer
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.machines.ledger import Ledger
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import PlaneAddress
from kvflow.protocols.prefill.peers import DecodePeer
from kvflow.protocols.wire.codec import encode, routing_id
from kvflow.protocols.wire.messages import WIRE_VERSION, Bootstrap, Message, Registered
from kvflow.testing.pair import PAGE_SIZE, Pair, until
from kvflow.transports.control.memory import Frame
from kvflow.transports.data.fake import FakeRoute, Fault

PROMPT = range(5 * PAGE_SIZE)  # five pages
WHY = Cause(Code.ENGINE_ERROR, "the engine gave up")


def ledger(node: DecodeNode) -> Ledger[PrefillPeer]:
    return node.shell.endpoint.core.ledger


def links(node: DecodeNode) -> list[PrefillPeer]:
    return list(node.shell.endpoint.peers)


def record_of(room: DecodeRoom) -> DecodeRoomRecord:
    """Return what the endpoint knows about a room that has reached it."""
    assert room.record is not None
    return room.record


def known(node: PrefillNode) -> list[DecodePeer]:
    return list(node.shell.endpoint.peers)


def header(p: Pair, room: int, grant: int, **fields: Any) -> dict[str, Any]:
    """What every message about a room begins with, between the two nodes."""
    return {"room": room, "grant": grant, **between(p), **fields}


def between(p: Pair) -> dict[str, Any]:
    return {"source": p.prefill.incarnation, "target": p.decode.incarnation}


def to_prefill(p: Pair, *messages: Message) -> None:
    for message in messages:
        p.network.inject(
            Frame(p.prefill.info.control, routing_id(p.decode.incarnation), True, encode(message))
        )


def to_decode(p: Pair, *messages: Message) -> None:
    for message in messages:
        p.network.inject(
            Frame(p.prefill.info.control, routing_id(p.decode.incarnation), False, encode(message))
        )


def offer(p: Pair, room: int, grant: int) -> Bootstrap:
    """One page for a prompt of its size."""
    return Bootstrap(
        pages=b"\0\0\0\0", prompt_tokens=4, prompt_digest=b"d" * 32, **header(p, room, grant)
    )


def registered(p: Pair, **fields: Any) -> Registered:
    """Prefill's acceptance of decode, or what `fields` make of it."""
    given = {"rank": 0, "refusal": "", "asked": p.prefill.incarnation, **between(p), **fields}
    return Registered(wire_version=WIRE_VERSION, **given)


async def more(p: Pair, kind: str, times: int = 1) -> None:
    before = p.network.seen[kind]
    await until(lambda: p.network.seen[kind] >= before + times)


def slow_way(p: Pair) -> asyncio.Event:
    """Prefill's ways to a decode's memory open only when that is set."""
    plane, go_on = p.plane(p.prefill), asyncio.Event()
    connect = plane.connect

    async def slow(address: PlaneAddress, layout: PoolLayout) -> FakeRoute:
        await go_on.wait()
        return await connect(address, layout)

    plane.connect = slow  # type: ignore[method-assign]
    return go_on


async def all_read() -> None:
    """Let what is on its way be read: a frame takes one turn of the loop, its reader another."""
    for _ in range(5):
        await asyncio.sleep(0)


async def code_of(waiting: Awaitable[object]) -> Code:
    try:
        await waiting
    except KvflowError as error:
        return error.code
    raise AssertionError("it succeeded")


async def announced(p: Pair, room: int = 7, **options: Any) -> tuple[PrefillRoom, DecodeRoom]:
    """The engine's half waits, and knows that a decode will come; no page is taken yet."""
    source = p.prefill.room(room, PROMPT)
    target = p.decode.announce(room, "sim", PROMPT, **options)
    await until(lambda: source.phase.name == "ANNOUNCED")
    return source, target


async def offered(p: Pair, room: int = 7) -> DecodeRoom:
    """Decode's half alone: its pages are lent, and no engine has asked for them."""
    target = await p.decode.room(room, "sim", PROMPT)
    await until(lambda: room in p.prefill.shell.endpoint.rooms)
    return target


async def matched(p: Pair, room: int = 7) -> tuple[PrefillRoom, DecodeRoom]:
    """Both halves know of each other; nothing is written."""
    source, target = await p.open(room, PROMPT)
    assert await source.matched() == 0
    return source, target


async def sending(
    p: Pair, *faults: Fault, room: int = 7, chunks: int = 1
) -> tuple[PrefillRoom, DecodeRoom]:
    """The whole room is handed to prefill's data plane, whose next writes end as scripted."""
    p.plane(p.prefill).script(*faults)
    source, target = await matched(p, room)
    p.send_all(source, chunks=chunks)
    return source, target


async def midway(p: Pair, room: int = 7) -> tuple[PrefillRoom, DecodeRoom]:
    """Two of five pages landed as chunk 0, and one of the three pages of chunk 1, which runs."""
    source, target = await matched(p, room)
    plane = p.plane(p.prefill)
    plane.hold()
    store = p.prefill.pool.pages
    pages = store.take(5, ("engine", room))
    source.on_end(lambda: store.give_back(pages, ("engine", room)))
    source.send(pages[:2])
    source.send(pages[2:], last=True, handoff=b"h")
    assert plane.step(2) and plane.step(1)
    assert source.bytes_landed * 5 == source.bytes_total * 3
    return source, target


async def every_rank_writes(p: Pair, room: int = 7) -> tuple[list[PrefillRoom], DecodeRoom]:
    """Of every rank one write of the whole room runs, and nothing of it has landed."""
    sources = [node.room(room, PROMPT) for node in p.prefills]
    target = await p.decode.room(room, "sim", PROMPT)
    for node, source in zip(p.prefills, sources, strict=True):
        await source.matched()
        p.plane(node).hold()
        p.send_all(source, node=node)
    return sources, target


async def finish(p: Pair, source: PrefillRoom, target: DecodeRoom, *, chunks: int = 1) -> None:
    await source.matched()
    p.send_all(source, chunks=chunks)
    assert await target.landed() == b"handoff"
    target.close()


async def prove(p: Pair) -> None:
    """The process of prefill ends: that is the proof on which decode's pages come home."""
    await p.crash(p.prefill)
    await until(p.decode.pool.pages.at_rest)


async def success(p: Pair, room: int = 7, *, chunks: int = 2) -> None:
    source, target = await matched(p, room)
    pages = p.send_all(source, chunks=chunks)
    assert await target.landed() == b"handoff"
    await source.done()
    assert_same_bytes(p, pages, target)
    target.close()


def assert_same_bytes(p: Pair, source_pages: np.ndarray, target: DecodeRoom) -> None:
    sent, got = p.prefill.pool.pages_bytes(source_pages), p.decode.pool.pages_bytes(target.pages)
    assert (sent == got).all() and sent.all()
