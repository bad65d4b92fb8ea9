"""Other incarnations of a peer, other versions, silence that is not death (I6)."""

from __future__ import annotations

import pytest

from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import Code, LostError
from kvflow.protocols.wire.codec import encode, routing_id
from kvflow.protocols.wire.messages import Abort, AbortAck, Heartbeat, Incarnation
from kvflow.testing.pair import Pair, until
from kvflow.transports.control.memory import Frame
from tests.handlers.scenes import (
    PROMPT,
    code_of,
    finish,
    ledger,
    links,
    matched,
    midway,
    more,
    success,
)


async def test_a_restarted_prefill_at_the_same_address(p: Pair) -> None:
    _, target = await midway(p)
    port = int(p.prefill.info.control.rsplit(":", 1)[1])
    first = p.prefill.incarnation
    await p.crash(p.prefill)
    await p.add_prefill(port)
    assert p.prefill.incarnation != first
    assert await code_of(target.landed()) is Code.PEER_LOST
    await success(p, 8)
    await until(
        lambda: [peer.key.incarnation for peer in links(p.decode)] == [p.prefill.incarnation]
    )
    await p.rest()


async def test_another_incarnation_answers_and_nobody_saw_the_old_one_die(p: Pair) -> None:
    """A new incarnation at an address is no proof of the old one's end."""
    source, target = await midway(p)
    port = int(p.prefill.info.control.rsplit(":", 1)[1])
    old = p.prefill
    p.network.leave(old.shell.socket)  # type: ignore[arg-type]
    p.prefills.clear()
    await p.add_prefill(port)
    assert await code_of(target.landed()) is Code.PEER_LOST
    assert target.phase.name == "LOST"
    assert ledger(p.decode).quarantined_pages == 5
    (line,) = (line for line in p.decode.peers() if line["phase"] == "gone")
    assert (line["loans"], line["quarantine_pages"]) == (1, 5)
    await success(p, 8)
    assert ledger(p.decode).quarantined_pages == 5
    p.plane(old).die()
    await until(p.decode.pool.pages.at_rest)
    assert await code_of(source.done()) is not None
    await old.close()
    await p.rest()


async def test_a_silent_prefill_that_comes_back(p: Pair) -> None:
    """Its answer to the recall is proof."""
    source, target = await midway(p)
    p.network.cut()
    p.clock(p.decode).advance(p.timing.lost_after_s + 1)
    assert await code_of(target.landed()) is Code.PEER_LOST
    assert target.phase.name == "LOST" and ledger(p.decode).quarantined_pages == 5
    with pytest.raises(LostError, match="silent"):
        await p.decode.room(8, "sim", PROMPT)
    assert not source.ended, "prefill has seen nothing wrong yet"
    p.network.mend()
    await p.rest()
    assert await code_of(source.done()) is Code.PEER_LOST
    p.plane(p.prefill).release()
    await success(p, 9)


@pytest.mark.parametrize("lost", [Abort, AbortAck], ids=lambda kind: kind.__name__)
async def test_a_silent_prefill_comes_back_and_the_first_word_is_lost(p: Pair, lost: type) -> None:
    _, target = await midway(p)
    p.network.cut()
    p.clock(p.decode).advance(p.timing.lost_after_s + 1)
    assert await code_of(target.landed()) is Code.PEER_LOST
    p.network.mend()
    p.network.drop(lost, times=2)
    await p.rest()


async def test_a_silent_decode_that_comes_back(p: Pair) -> None:
    source, target = await midway(p)
    p.network.cut()
    p.clock(p.prefill).advance(p.timing.lost_after_s + 1)
    assert await code_of(source.done()) is Code.PEER_LOST
    await until(lambda: not p.prefill.pool.pages.held_pages)
    assert not target.ended
    p.network.mend()
    assert await code_of(target.landed()) is Code.PEER_LOST
    await p.rest()
    p.plane(p.prefill).release()
    await success(p, 8)


async def test_a_loaded_peer_is_not_a_dead_one(p: Pair) -> None:
    source, target = await matched(p)
    for _ in range(5):
        for node in (p.prefill, p.decode):
            p.clock(node).advance(p.timing.lost_after_s / 2)
        await more(p, "Heartbeat", 4)
    assert not (source.ended or target.ended)
    await finish(p, source, target)


async def receives(p: Pair, node: PrefillNode | DecodeNode, garbage: bytes, times: int) -> None:
    """Send these bytes to one of the two nodes, and wait until it has counted them all."""
    control, peer = p.prefill.info.control, routing_id(p.decode.incarnation)
    for _ in range(times):
        p.network.inject(Frame(control, peer, node is p.prefill, garbage))
    await until(lambda: node.counts.malformed == times)


SHORTENED = encode(Heartbeat(source=Incarnation(1), target=Incarnation(2)))[:-1]


@pytest.mark.parametrize("garbage", [b"", b"\0", b"\xc1" * 100, b"\x93\x03\x01\x02", SHORTENED])
async def test_bad_bytes_are_counted_and_the_next_room_works(p: Pair, garbage: bytes) -> None:
    await success(p, 1)
    for node in (p.prefill, p.decode):
        await receives(p, node, garbage, times=40)
        assert not node.counts.handler_errors
    await success(p, 2)
