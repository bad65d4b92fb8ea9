"""A link belongs to one incarnation at one address, and requests are bounded (I7)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode
from kvflow.protocols.errors import CapacityError, Code, PeerError
from kvflow.protocols.limits import Bounds
from kvflow.protocols.pages.coverage import served_of
from kvflow.protocols.wire.codec import encode, parse_at_prefill
from kvflow.protocols.wire.messages import (
    WIRE_VERSION,
    Abort,
    AbortAck,
    Bootstrap,
    ChunkDone,
    Register,
    Registered,
)
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.testing.pair import QUICK, Pair, small_layout, until
from kvflow.transports.control.memory import RouterSocket
from kvflow.transports.data.fake import FakePlane
from tests.handlers.scenes import (
    PROMPT,
    assert_same_bytes,
    code_of,
    links,
    matched,
)


async def impersonate(socket: RouterSocket) -> None:
    while True:
        for peer, frame in await socket.receive():
            message = parse_at_prefill(frame)
            lives = {"source": message.source, "target": message.target}
            if isinstance(message, Register):
                answer = Registered(
                    wire_version=WIRE_VERSION,
                    rank=0,
                    refusal="",
                    address=message.address,
                    asked=message.source,
                    fresh_from=message.fresh_from,
                    served=served_of(message.layout),
                    **lives,
                )
                socket.send(encode(answer), peer)
            elif isinstance(message, Bootstrap):
                header = {"room": message.room, "grant": message.grant, "rank": 0, **lives}
                pages = len(message.pages) // 4
                done = ChunkDone(
                    seq=0, pages=pages, last=True, handoff=b"a stranger's token", **header
                )
                socket.send(encode(done), peer)
            elif isinstance(message, Abort):
                header = {"room": message.room, "grant": message.grant, "rank": 0, **lives}
                socket.send(encode(AbortAck(drained=True, **header)), peer)


async def test_a_stranger_under_a_prefills_incarnation_serves_who_asks_at_his_address(
    p: Pair,
) -> None:
    socket, port = p.network.bind("stranger", 0)
    stranger = p.decode.shell.spawn(impersonate(socket), "kvflow-stranger")
    false = RankInfo(0, 1, p.prefill.incarnation, f"tcp://stranger:{port}", "fake", "")
    poisoned = await p.decode.room(1, [false], PROMPT)
    # Whoever names a false registry gets its answers.
    assert await poisoned.landed() == b"a stranger's token"
    poisoned.close()
    source, target = await matched(p, 2)
    pages = p.send_all(source)
    assert await target.landed() == b"handoff"
    assert_same_bytes(p, pages, target)
    target.close()
    assert sorted(peer.key.control for peer in links(p.decode)) == sorted(
        [false.control, p.prefill.info.control]
    )
    stranger.cancel()


@asynccontextmanager
async def bounded(p: Pair, bounds: Bounds) -> AsyncIterator[DecodeNode]:
    pool = PagedPool.allocate(small_layout(), shared=False)
    node = DecodeNode(
        pool, FakePlane(p.planes), connect=p.network.connect, timing=QUICK, bounds=bounds
    )
    async with node:
        p.decodes.append(node)
        yield node
        for room in list(node.shell.rooms.values()):
            room.close()
        p.network.mend()
        await until(lambda: not node.shell.rooms)
        p.decodes.remove(node)
    pool.close()


def nowhere(number: int, rank: int = 0, world_size: int = 1) -> RankInfo:
    return RankInfo(rank, world_size, 1000 + number, f"tcp://10.255.0.1:{number + 1}", "fake", "")


@pytest.mark.parametrize("count", [5, 1024])
async def test_a_request_that_names_too_many_ranks_opens_no_link(p: Pair, count: int) -> None:
    async with bounded(p, Bounds(ranks_per_room=4)) as node:
        ranks = [nowhere(number, number, count) for number in range(count)]
        with pytest.raises(
            PeerError, match=f"has {count} ranks; one room takes 4 at most"
        ) as caught:
            await node.room(1, ranks, PROMPT)
        assert caught.value.code is Code.PROTOCOL_ERROR
        assert not links(node) and node.pool.pages.at_rest()


async def test_links_are_bounded_and_the_longest_idle_one_gives_way(p: Pair) -> None:
    async with bounded(p, Bounds(links=2)) as node:
        await success_at(p, node, 1)
        waiting = [node.room(10 + number, [nowhere(number)], PROMPT) for number in range(2)]
        # The link that served is idle, and has given its place; the others wait for answers, and
        # give none.
        assert sorted(peer.key.incarnation for peer in links(node)) == [1000, 1001]
        with pytest.raises(CapacityError, match="links to prefill ranks: asked for 3, limit 2"):
            await node.room(12, [nowhere(2)], PROMPT)
        assert not any(room.ended for room in waiting) and len(node.shell.endpoint.rooms) == 2
        for room in waiting:
            room.close()
        assert await code_of(waiting[0].landed()) is Code.CLIENT_GONE


async def success_at(p: Pair, node: DecodeNode, room: int) -> None:
    async with p.prefill.room(room, PROMPT) as source, node.room(room, p.ranks, PROMPT) as target:
        await source.matched()
        p.send_all(source)
        await target.landed()
