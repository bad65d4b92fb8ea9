"""The control link over real ZMQ."""

from __future__ import annotations

import asyncio
import functools
import select
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import pytest
import zmq

from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import Cause, Code, KvflowError, LostError, MisuseError
from kvflow.protocols.wire.codec import routing_id
from kvflow.protocols.wire.messages import MAX_FRAME_BYTES, Incarnation
from kvflow.testing.pair import QUICK, small_layout, until
from kvflow.transports.control import tcp_connections
from kvflow.transports.control.packing import MAX_PARTS, PACKED_BYTES, PACKED_FRAMES
from kvflow.transports.control.tcp_connections import TcpConnections
from kvflow.transports.control.zmq import (
    BURST_FRAMES,
    PACKED_TURNS,
    QUEUE_MESSAGES,
    ZmqSocket,
    bind_router,
    connect_dealer,
)
from kvflow.transports.data.fake import FakeNetwork, FakePlane
from tests.ipv6 import needs_ipv6

pytest_plugins = ["kvflow.testing.fixtures"]
pytestmark = pytest.mark.usefixtures("kvflow_clean_loop")
Frames = list[tuple[bytes, bytes]]

FIVE = routing_id(Incarnation(5))


@pytest.fixture
async def ends() -> AsyncIterator[tuple[ZmqSocket, ZmqSocket]]:
    async with link() as made:
        yield made


@pytest.fixture
def router(ends: tuple[ZmqSocket, ZmqSocket]) -> ZmqSocket:
    return ends[0]


@pytest.fixture
def dealer(ends: tuple[ZmqSocket, ZmqSocket]) -> ZmqSocket:
    return ends[1]


@asynccontextmanager
async def link(host: str = "127.0.0.1") -> AsyncIterator[tuple[ZmqSocket, ZmqSocket]]:
    router, port = bind_router(host, 0)
    dealer = connect_dealer(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}", 5)
    try:
        yield router, dealer
    finally:
        dealer.close()
        router.close()


async def take(socket: ZmqSocket, count: int) -> Frames:
    found: Frames = []
    async with asyncio.timeout(60):
        while len(found) < count:
            burst = await socket.receive()
            assert 1 <= len(burst) <= BURST_FRAMES
            found += burst
    return found


async def test_what_waits_at_either_end_is_bounded_and_more_than_zmq_lets_wait() -> None:
    async with link() as ends:
        for end in ends:
            limits = [end._socket.get(option) for option in (zmq.SNDHWM, zmq.RCVHWM)]
            assert limits == [QUEUE_MESSAGES] * 2 and QUEUE_MESSAGES > 10_000
            assert end._socket.get(zmq.MAXMSGSIZE) == MAX_FRAME_BYTES


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
async def test_both_ways_in_order_by_routing_id(host: str) -> None:
    async with link(host) as (router, dealer):
        assert not dealer.lockout_reason
        frames = [str(i).encode() for i in range(10 * BURST_FRAMES)]
        for frame in frames:
            assert dealer.send(frame)
        assert await take(router, len(frames)) == [(FIVE, frame) for frame in frames]
        for frame in frames:
            assert router.send(frame, FIVE)
        assert await take(dealer, len(frames)) == [(b"", frame) for frame in frames]


async def test_a_turn_that_sends_wakes_who_waits_for_what_came_in_it(
    router: ZmqSocket, dealer: ZmqSocket
) -> None:
    """The descriptor tells once that something came, and sending takes the news away."""
    dealer.send(b"hello")
    await take(router, 1)
    receiving = asyncio.create_task(router.receive())
    await until(lambda: router._waiting is not None)
    dealer.send(b"news", at_once=True)
    # In one turn of the loop, which has not looked yet. ZMQ takes the news at a send, but not
    # at each.
    assert select.select([router._socket.fileno()], [], [], 10)[0]
    while select.select([router._socket.fileno()], [], [], 0)[0]:
        router.send(b"answer", FIVE, at_once=True)
    for _ in range(4):
        await asyncio.sleep(0)
    assert receiving.done(), "it waits until connections are looked at, a moment later"
    assert receiving.result() == [(FIVE, b"news")]


@pytest.mark.parametrize("at_once", [False, True], ids=["packed", "one by one"])
async def test_a_flood_leaves_the_loop_to_others(
    router: ZmqSocket, dealer: ZmqSocket, at_once: bool
) -> None:
    count, turns = 2_000, 0
    for _ in range(count):
        dealer.send(b"x", at_once=at_once)

    async def ticker() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    ticking = asyncio.ensure_future(ticker())
    await take(router, count)
    ticking.cancel()
    assert turns >= count / BURST_FRAMES / 2
    await asyncio.gather(ticking, return_exceptions=True)


async def test_answers_while_sending_are_not_missed(router: ZmqSocket, dealer: ZmqSocket) -> None:
    """The descriptor is edge-triggered: a thousand round trips would stall on one miss."""

    async def echo() -> None:
        while True:
            for peer, frame in await router.receive():
                router.send(frame, peer)

    echoing = asyncio.ensure_future(echo())
    for i in range(1_000):
        for _ in range(i % 3 + 1):
            dealer.send(b"x")
        await take(dealer, i % 3 + 1)
    echoing.cancel()
    await asyncio.gather(echoing, return_exceptions=True)


async def test_what_nobody_receives_does_not_keep_the_loop_turning(
    router: ZmqSocket, dealer: ZmqSocket
) -> None:
    woken = 0

    def wake() -> None:
        nonlocal woken
        woken += 1
        router._wake()

    loop = asyncio.get_running_loop()
    loop.remove_reader(router._socket.fileno())
    loop.add_reader(router._socket.fileno(), wake)
    dealer.send(b"hello")
    await until(lambda: woken)
    await asyncio.sleep(0.05)
    assert woken < 20, "the descriptor stays readable until the socket is looked at"
    assert await take(router, 1) == [(FIVE, b"hello")]


async def test_what_is_sent_at_once_waits_for_no_turn_of_the_loop(
    router: ZmqSocket, dealer: ZmqSocket
) -> None:
    dealer.send(b"hello")
    await take(router, 1)
    await packing(router, FIVE)
    await take(dealer, 2)
    assert router.send(b"first", FIVE) and dealer._socket.poll(50) == 0, "it goes as this turn ends"
    assert router.send(b"abort", FIVE, at_once=True) and dealer._socket.poll(20_000)
    assert await take(dealer, 2) == [(b"", b"first"), (b"", b"abort")]
    assert dealer.send(b"alone", at_once=True) and router._socket.poll(20_000)
    assert await take(router, 1) == [(FIVE, b"alone")]


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_peer_nobody_knows_cannot_be_sent_to(
    router: ZmqSocket, dealer: ZmqSocket, at_once: bool
) -> None:
    assert not router.send(b"x", routing_id(Incarnation(6)), at_once)
    dealer.send(b"hello", at_once=at_once)
    await take(router, 1)
    assert router.send(b"x", FIVE, at_once)
    assert await take(dealer, 1) == [(b"", b"x")]


async def test_a_decode_that_connects_again_takes_over_its_routing_id(
    router: ZmqSocket, dealer: ZmqSocket
) -> None:
    dealer.send(b"first")
    await take(router, 1)
    again = connect_dealer(dealer._socket.getsockopt_string(zmq.LAST_ENDPOINT), 5)
    again.send(b"again")
    assert await take(router, 1) == [(FIVE, b"again")]
    router.send(b"answer", FIVE)
    assert await take(again, 1) == [(b"", b"answer")]
    again.close()


async def test_an_unknown_peer_among_known_ones_costs_no_frame_of_theirs(
    router: ZmqSocket, dealer: ZmqSocket
) -> None:
    second = connect_dealer(dealer._socket.getsockopt_string(zmq.LAST_ENDPOINT), 7)
    for socket in (dealer, second):
        socket.send(b"hello")
    await take(router, 2)
    sent = {
        peer: [router.send(str(i).encode(), routing_id(Incarnation(peer))) for i in range(20)]
        for peer in (5, 6, 7)
    }
    sent[5] += [router.send(b"last", routing_id(Incarnation(peer))) for peer in (5, 7, 6, 5)]
    assert all(sent[7]) and not any(sent[6]) and sent[5] == [True] * 22 + [False, True]
    expected = [str(i).encode() for i in range(20)]
    assert [frame for _, frame in await take(dealer, 22)] == [*expected, b"last", b"last"]
    assert [frame for _, frame in await take(second, 21)] == [*expected, b"last"]
    second.close()


@pytest.fixture
async def raw() -> AsyncIterator[zmq.Socket[bytes]]:
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    yield made
    made.close(linger=0)


@pytest.fixture
async def ours(raw: zmq.Socket[bytes]) -> AsyncIterator[ZmqSocket]:
    port = raw.bind_to_random_port("tcp://127.0.0.1")
    dealer = connect_dealer(f"tcp://127.0.0.1:{port}", 5)
    yield dealer
    dealer.close()


def message_of(raw: zmq.Socket[bytes]) -> list[bytes]:
    assert raw.poll(10_000), "no message arrived"
    return raw.recv_multipart()


async def packing(socket: ZmqSocket, peer: bytes = b"") -> None:
    """Send two frames in one turn: the frames of the next turns wait for their ends."""
    assert socket.send(b"a", peer) and socket.send(b"b", peer)
    await asyncio.sleep(0)


async def test_a_frame_leaves_at_once_while_turns_send_one_frame_each(
    raw: zmq.Socket[bytes], ours: ZmqSocket
) -> None:
    # `message_of` blocks the loop: no turn ends before it returns.
    for frame in (b"1", b"2"):
        ours.send(frame)
        assert message_of(raw) == [FIVE, frame]
        await asyncio.sleep(0)
    # Only the first of a turn: the others share a message, and so do all of the next turns.
    for frame in (b"3", b"4", b"5"):
        ours.send(frame)
    assert message_of(raw) == [FIVE, b"3"] and not raw.poll(20)
    await asyncio.sleep(0)
    assert message_of(raw) == [FIVE, b"4", b"5"]
    for _ in range(PACKED_TURNS):
        ours.send(b"6")
        assert not raw.poll(5)
        await asyncio.sleep(0)
        assert message_of(raw) == [FIVE, b"6"]
    ours.send(b"7")
    assert message_of(raw) == [FIVE, b"7"]


async def test_who_was_woken_by_a_message_runs_before_the_next_is_looked_for(
    router: ZmqSocket, dealer: ZmqSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    looks = router._incoming.take

    def looked(count: int) -> list[tuple[bytes, bytes]]:
        order.append("look")
        return looks(count)

    async def read() -> None:
        while True:
            for _, frame in await router.receive():
                order.append(frame.decode())
                asyncio.get_running_loop().call_soon(order.append, f"after {frame.decode()}")

    monkeypatch.setattr(router._incoming, "take", looked)
    reading = asyncio.create_task(read())
    await until(lambda: router._waiting is not None)
    for frame in ("1", "2", "3"):
        dealer.send(frame.encode())
        await until(functools.partial(order.__contains__, f"after {frame}"))
        assert order[order.index(frame) + 1] == f"after {frame}", order
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_frames_of_one_turn_are_one_message_and_leave_with_it(
    raw: zmq.Socket[bytes], ours: ZmqSocket
) -> None:
    await packing(ours)
    assert [message_of(raw), message_of(raw)] == [[FIVE, b"a"], [FIVE, b"b"]]
    for frame in (b"1", b"2", b"3"):
        assert ours.send(frame)
    await asyncio.sleep(0)  # `message_of` blocks the loop: what has not left by now never does
    assert message_of(raw) == [FIVE, b"1", b"2", b"3"]
    ours.send(b"4")
    await asyncio.sleep(0)
    assert message_of(raw) == [FIVE, b"4"]


async def test_a_message_stops_growing_at_its_bounds(
    raw: zmq.Socket[bytes], ours: ZmqSocket
) -> None:
    await packing(ours)
    assert [message_of(raw), message_of(raw)] == [[FIVE, b"a"], [FIVE, b"b"]]
    for _ in range(2 * PACKED_FRAMES + 1):
        ours.send(b"x")
    # Before the turn has ended.
    assert len(message_of(raw)) == len(message_of(raw)) == 1 + PACKED_FRAMES
    for size in (PACKED_BYTES - 1, 1, 2 * PACKED_BYTES, 1):
        ours.send(b"x" * size)
    ours.close()  # sends what is left
    found = [sum(len(part) for part in message_of(raw)[1:]) for _ in range(4)]
    assert found == [PACKED_BYTES, 1, 2 * PACKED_BYTES, 1]


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_full_queue_refuses_each_frame(at_once: bool) -> None:
    bare: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    bare.setsockopt(zmq.SNDHWM, 2)
    bare.connect("tcp://127.0.0.1:9")  # the discard port, which nothing listens on
    dealer = ZmqSocket(bare, TcpConnections(bare), 9, router=False)
    dealer._packed_turns = PACKED_TURNS
    sent = []
    for _ in range(3):
        sent.append([dealer.send(b"a"), dealer.send(b"b", at_once=at_once)])
        await asyncio.sleep(0)  # the turn ends, and with it the message
    assert not dealer.send(b"c", at_once=at_once)
    assert sent == [[True, True], [True, True], [False, False]]
    dealer.close()


async def test_every_part_is_a_frame_and_an_endless_message_is_one_bad_frame(
    router: ZmqSocket, dealer: ZmqSocket
) -> None:
    for parts in (
        [b"two", b"parts"],
        [b"x"] * MAX_PARTS,
        [b"x"] * (MAX_PARTS + 1),
        [b"x"] * (5 * MAX_PARTS),
        [b"x" * (MAX_FRAME_BYTES // 2)] * 3,
        [b"good"],
    ):
        await asyncio.to_thread(dealer._socket.send_multipart, parts)
    found = [frame for _, frame in await take(router, 2 + MAX_PARTS + 4)]
    assert found == [b"two", b"parts", *[b"x"] * MAX_PARTS, b"", b"", b"", b"good"]


async def test_the_rest_of_an_endless_message_is_read_without_another_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nothing but the message wakes the reader.
    monkeypatch.setattr(tcp_connections, "LOOK_S", 3600.0)
    async with link() as (router, dealer):
        await asyncio.to_thread(dealer._socket.send_multipart, [b"x"] * (12 * MAX_PARTS))
        assert await take(router, 1) == [(FIVE, b"")]
        receiving = asyncio.create_task(router.receive())
        await until(lambda: not router._incoming.skipping)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)


async def test_what_no_message_has_brought_comes_from_nowhere(
    router: ZmqSocket, dealer: ZmqSocket
) -> None:
    assert not router.sender_address()
    dealer.send(b"hello")
    assert await take(router, 1) == [(FIVE, b"hello")]
    assert router.sender_address() == "127.0.0.1"
    receiving = asyncio.create_task(router.receive())
    await until(lambda: router._waiting is not None)
    router._tell_cut()
    assert await receiving == [(b"", b"")] and not router.sender_address()


async def test_an_oversized_frame_ends_the_connection_not_the_node(
    router: ZmqSocket, dealer: ZmqSocket
) -> None:
    dealer.send(b"x" * (MAX_FRAME_BYTES + 1))
    await until(lambda: dealer.send(b"good"))
    assert (await take(router, 1))[0][1] == b"good"


async def test_a_port_that_is_taken_is_one_clear_line() -> None:
    router, port = bind_router("127.0.0.1", 0)
    with pytest.raises(MisuseError, match=f"control port 127.0.0.1:{port}: Address already in use"):
        bind_router("127.0.0.1", port)
    with pytest.raises(MisuseError, match="control endpoint"):
        connect_dealer("tcp://nowhere:not-a-port", 5)
    router.close()
    again = await bound_again(port)
    again.close()
    again.close()


async def test_cancelling_a_receive_loses_nothing(router: ZmqSocket, dealer: ZmqSocket) -> None:
    for _ in range(3):
        waiting = asyncio.ensure_future(router.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    dealer.send(b"x")
    assert await take(router, 1) == [(FIVE, b"x")]


async def test_a_receive_that_is_cancelled_between_two_bursts_loses_nothing(
    router: ZmqSocket, dealer: ZmqSocket
) -> None:
    frames = [str(i).encode() for i in range(3 * BURST_FRAMES)]
    for frame in frames:
        dealer.send(frame)
    found: Frames = []
    async with asyncio.timeout(60):
        while len(found) < len(frames):
            receiving = asyncio.ensure_future(router.receive())
            await asyncio.sleep(0)
            receiving.cancel()  # as it waits for a burst, or lets the loop run between two
            await asyncio.wait([receiving])
            found += [] if receiving.cancelled() else receiving.result()
    assert [frame for _, frame in found] == frames


async def test_a_dealer_finds_the_next_router_at_its_address() -> None:
    router, port = bind_router("127.0.0.1", 0)
    dealer = connect_dealer(f"tcp://127.0.0.1:{port}", 5)
    dealer.send(b"first")
    await take(router, 1)
    router.close()
    router = await bound_again(port)
    heard = asyncio.ensure_future(take(router, 1))
    # The first ones may go into the dead connection.
    await until(lambda: dealer.send(b"again") and heard.done(), 10)
    assert heard.result()[0] == (FIVE, b"again") and router.send(b"x", FIVE)
    assert await take(dealer, 1) == [(b"", b"x")]
    dealer.close()
    router.close()


async def bound_again(port: int) -> ZmqSocket:
    """ZMQ closes in the background: the address is free a moment later."""
    async with asyncio.timeout(20):
        while True:
            try:
                return bind_router("127.0.0.1", port)[0]
            except MisuseError:
                await asyncio.sleep(0.01)


class Nodes:
    def __init__(self) -> None:
        self.network = FakeNetwork()
        self.pools = [PagedPool.allocate(small_layout(), shared=False) for _ in range(2)]
        self.plane = FakePlane(self.network)
        self.prefill = PrefillNode(self.pools[0], self.plane, timing=QUICK)
        self.decode = DecodeNode(self.pools[1], FakePlane(self.network), timing=QUICK)

    async def __aenter__(self) -> Self:
        await self.prefill.start()
        await self.decode.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.plane.release()
        await self.decode.close()
        await self.prefill.close()
        for pool in self.pools:
            pool.close()

    def at_rest(self) -> bool:
        p, d = self.prefill, self.decode
        rooms = (
            len(p.shell.endpoint.rooms)
            + len(d.shell.endpoint.rooms)
            + len(d.shell.endpoint.core.ledger)
        )
        errors = p.counts.handler_errors + d.counts.handler_errors
        return p.pool.pages.at_rest() and d.pool.pages.at_rest() and not rooms + errors

    async def one(self, room: int) -> bytes:
        source = self.prefill.room(room, range(12))
        async with await self.decode.room(room, [self.prefill.info], range(12)) as target:
            await source.matched()
            pages = self.prefill.pages.take(3, room)
            source.on_end(lambda: self.prefill.pages.give_back(pages, room))
            source.send(pages[:1])
            source.send(pages[1:], last=True, handoff=str(room).encode())
            return await target.landed()


@pytest.fixture
async def n() -> AsyncIterator[Nodes]:
    async with Nodes() as made:
        yield made


async def test_rooms_over_zmq(n: Nodes) -> None:
    found = await asyncio.gather(*(n.one(room) for room in range(15)))
    assert found == [str(room).encode() for room in range(15)]
    await until(n.at_rest)


async def test_aborts_and_failures_over_zmq(n: Nodes) -> None:
    n.plane.hold()
    for room, side in enumerate(("prefill", "decode", "both")):
        source = n.prefill.room(room, range(12))
        target = await n.decode.room(room, [n.prefill.info], range(12))
        await source.matched()
        pages = n.prefill.pages.take(3, room)
        source.on_end(functools.partial(n.prefill.pages.give_back, pages, room))
        source.send(pages, last=True)
        n.plane.step(1)
        why = Cause(Code.ENGINE_ERROR, side)
        for session, name in ((source, "prefill"), (target, "decode")):
            if side in (name, "both"):
                session.close(why)
        for waiting in (source.done(), target.landed()):
            with pytest.raises(KvflowError, match=side):
                await asyncio.wait_for(waiting, 20)
    await until(n.at_rest)


async def test_bad_bytes_over_zmq(n: Nodes) -> None:
    await n.one(1)
    stranger = connect_dealer(n.prefill.info.control, 77)
    for garbage in (b"", b"\xc1", b"\x93\x01\x02\x03", b"x" * 1_000):
        stranger.send(garbage)
    stranger._socket.send_multipart([b"a", b"b", b"c"])
    await until(lambda: n.prefill.counts.malformed == 7)
    n.prefill.shell.socket.send(b"\xc1", routing_id(n.decode.incarnation))
    await until(lambda: n.decode.counts.malformed == 1)
    assert await n.one(2) == b"2"
    stranger.close()
    await until(n.at_rest)


async def test_a_prefill_that_restarts_at_the_same_port_over_zmq(n: Nodes) -> None:
    await n.one(1)
    old = n.prefill.info
    port = int(old.control.rsplit(":", 1)[1])
    n.prefill.shell.socket.close()  # the old life is cut off, but nobody saw it die
    bound = await bound_again(port)
    second = PrefillNode(
        n.pools[0], FakePlane(n.network), bind=lambda *_: (bound, port), timing=QUICK
    )
    await second.start()
    await until(lambda: n.decode.shell.endpoint.link_to(old) is None)
    with pytest.raises(LostError):
        await n.decode.room(2, [old], range(12))
    first, n.prefill = n.prefill, second
    assert await n.one(3) == b"3"
    await first.close()
