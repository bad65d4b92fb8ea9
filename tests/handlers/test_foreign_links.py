"""A link belongs to one incarnation at one address (I7)."""

from __future__ import annotations

from kvflow.protocols.pages.coverage import served_of
from kvflow.protocols.wire.codec import encode, parse_at_prefill
from kvflow.protocols.wire.messages import (
    WIRE_VERSION,
    Abort,
    AbortAck,
    Bootstrap,
    ChunkDone,
    Rank,
    Register,
    Registered,
)
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.testing.pair import Pair
from kvflow.transports.control.memory import RouterSocket
from tests.handlers.scenes import PROMPT, assert_same_bytes, links, matched


async def impersonate(socket: RouterSocket) -> None:
    while True:
        for peer, frame in await socket.receive():
            message = parse_at_prefill(frame)
            if isinstance(message, Register):
                answer = Registered(
                    wire_version=WIRE_VERSION,
                    source=message.source,
                    target=message.target,
                    rank=Rank(0),
                    refusal="",
                    address=message.address,
                    asked=message.source,
                    fresh_from=message.fresh_from,
                    served=served_of(message.layout),
                )
                socket.send(encode(answer), peer)
            elif isinstance(message, Bootstrap):
                done = ChunkDone(
                    room=message.room,
                    grant=message.grant,
                    source=message.source,
                    target=message.target,
                    rank=Rank(0),
                    seq=0,
                    pages=(len(message.pages) // 4,),
                    last=True,
                    handoff=b"a stranger's token",
                )
                socket.send(encode(done), peer)
            elif isinstance(message, Abort):
                acknowledged = AbortAck(
                    room=message.room,
                    grant=message.grant,
                    source=message.source,
                    target=message.target,
                    rank=Rank(0),
                    drained=True,
                )
                socket.send(encode(acknowledged), peer)


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
