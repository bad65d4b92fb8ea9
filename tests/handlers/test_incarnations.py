"""Other incarnations of a peer, other versions, silence that is not death (I6)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvflow.protocols.errors import Code, LostError
from kvflow.protocols.limits import Bounds
from kvflow.protocols.machines.peer import PeerPhase
from kvflow.protocols.wire.codec import encode, routing_id
from kvflow.protocols.wire.messages import (
    WIRE_VERSION,
    Abort,
    AbortAck,
    Bootstrap,
    ChunkDone,
    Heartbeat,
    Message,
    Register,
    Registered,
    Resync,
    RoomFailed,
)
from kvflow.testing.pair import Pair, until
from kvflow.transports.control.memory import LOST, Frame
from tests.handlers.scenes import (
    PROMPT,
    WHY,
    all_read,
    code_of,
    finish,
    header,
    known,
    ledger,
    links,
    matched,
    midway,
    more,
    success,
    to_decode,
    to_prefill,
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


async def test_a_forgotten_decode_that_registers_again_and_a_bootstrap_of_its_past(p: Pair) -> None:
    first, core = p.decode, p.prefill.shell.endpoint.core
    past: list[Frame] = []
    p.network.rules.append(lambda f: past.append(f) if isinstance(f.message, Bootstrap) else None)
    target = await first.room(7, "sim", PROMPT)
    await until(lambda: bool(past))
    target.close()
    await until(lambda: target.ended and not len(ledger(first)))
    p.network.rules.append(
        lambda frame: LOST if frame.peer == routing_id(first.incarnation) else None
    )
    peer = core.peers[first.incarnation]
    await all_read()  # a heartbeat that came after the silence would end it
    p.clock(first).advance(p.timing.lost_after_s + 1)
    await until(lambda: not links(first))
    p.clock(p.prefill).advance(p.timing.lost_after_s + 1)
    await until(lambda: peer.phase is PeerPhase.SILENT)
    core.bounds, bounds = Bounds(targets=1), core.bounds
    other = await p.add_decode()
    (await other.room(30, "sim", PROMPT)).close()
    assert set(core.peers) == {other.incarnation}
    core.bounds = bounds
    p.network.mend()
    p.network.drop(Heartbeat, times=1 << 30)
    (await first.room(31, "sim", PROMPT)).close()
    p.network.inject(past[0])
    await more(p, "RoomFailed")
    assert core.peers[first.incarnation] is not peer
    assert all(record.room != 7 for record in core.rooms.values())
    p.network.mend()
    await p.rest()


async def test_a_loaded_peer_is_not_a_dead_one(p: Pair) -> None:
    source, target = await matched(p)
    for _ in range(5):
        for node in (p.prefill, p.decode):
            p.clock(node).advance(p.timing.lost_after_s / 2)
        await more(p, "Heartbeat", 4)
    assert not (source.ended or target.ended)
    await finish(p, source, target)


async def test_messages_of_other_lives_are_counted_and_change_nothing(p: Pair) -> None:
    source, target = await midway(p)
    me, them, grant = p.decode.incarnation, p.prefill.incarnation, target.grant
    await until(lambda: target.record.state.filled == (2,))
    before = target.record.state
    foreign = [{"source": them, "target": me + 2}, {"source": them + 2, "target": me}]
    ours = {"source": them, "target": me}
    last: dict[str, Any] = {"rank": 0, "seq": 1, "pages": 3, "last": True}
    room: dict[str, Any] = {"room": 7, "grant": grant}
    to_us: list[Message] = [
        message
        for lives in foreign
        for message in (
            ChunkDone(**last, **room, **lives),
            RoomFailed(rank=0, cause=WHY, **room, **lives),
            AbortAck(rank=0, drained=True, **room, **lives),
            Resync(rooms=(), **lives),
            Heartbeat(**lives),
        )
    ] + [
        ChunkDone(**last, **header(p, 8, grant)),  # another room
        ChunkDone(**last, **header(p, 7, grant + 1)),  # another grant
        RoomFailed(rank=0, cause=WHY, **header(p, 7, grant + 1)),
        AbortAck(rank=0, drained=True, **header(p, 7, grant + 1)),
        ChunkDone(**{**last, "rank": 77}, **room, **ours),  # another rank
        RoomFailed(rank=77, cause=WHY, **room, **ours),
        AbortAck(rank=77, drained=True, **room, **ours),
    ]
    counted = p.decode.counts
    seen = counted.stale + counted.foreign
    to_decode(p, *to_us)
    await until(lambda: counted.stale + counted.foreign == seen + len(to_us))
    assert target.record.state == before and len(ledger(p.decode)) == 1
    dropped = p.prefill.counts.foreign
    other = {"source": them, "target": me + 2}
    to_prefill(p, Abort(cause=WHY, **room, **other), Heartbeat(settled_below=1 << 40, **other))
    await until(lambda: p.prefill.counts.foreign == dropped + 2)
    assert not source.ended
    target.close()


async def test_an_unknown_peer_gets_no_answer(p: Pair) -> None:
    stranger = p.network.connect(p.prefill.info.control, 99)
    stale = p.prefill.counts.stale
    lives = {"source": p.prefill.incarnation, "target": 99}
    stranger.send(encode(Abort(room=7, grant=1, cause=WHY, **lives)))
    stranger.send(encode(Heartbeat(**lives)))
    await until(lambda: p.prefill.counts.stale == stale + 2)
    assert not known(p.prefill)
    stranger.close()


async def test_another_wire_version_is_refused_with_both_numbers(p: Pair) -> None:
    stranger = p.network.connect(p.prefill.info.control, 99)
    address, layout = p.decode.exported
    register = Register(
        source=p.prefill.incarnation,
        target=99,
        wire_version=WIRE_VERSION + 6,
        layout=layout,
        address=address,
        fresh_from=1,
    )
    stranger.send(encode(register))
    ((_, frame),) = await asyncio.wait_for(stranger.receive(), 5)
    answer = Frame("", b"", False, frame).message
    assert isinstance(answer, Registered) and answer.wire_version == WIRE_VERSION
    assert str(WIRE_VERSION) in answer.refusal and str(WIRE_VERSION + 6) in answer.refusal
    assert not known(p.prefill)
    stranger.close()


async def test_decodes_are_bounded(p: Pair) -> None:
    await success(p)
    p.prefill.shell.endpoint.core.bounds = Bounds(targets=1)
    other = await p.add_decode()
    with pytest.raises(Exception, match="registered already"):
        await other.room(8, "sim", PROMPT)


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\0", b"\xc1" * 100, b"\x93\x03\x01\x02", encode(Heartbeat(source=1, target=2))[:-1]],
)
async def test_bad_bytes_are_counted_and_the_next_room_works(p: Pair, garbage: bytes) -> None:
    await success(p, 1)
    control, peer = p.prefill.info.control, routing_id(p.decode.incarnation)
    for upwards, counts in ((True, p.prefill.counts), (False, p.decode.counts)):
        for _ in range(40):
            p.network.inject(Frame(control, peer, upwards, garbage))
        await until(lambda counts=counts: counts.malformed == 40)
        assert not counts.handler_errors
    await success(p, 2)
