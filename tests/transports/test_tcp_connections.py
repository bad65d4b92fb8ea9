"""Messages that never end: their sender is cut, at either end of the control link."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest
import zmq

from kvflow.testing.pair import until
from kvflow.transports.control import tcp_connections
from kvflow.transports.control.curve import ControlKey
from kvflow.transports.control.packing import PACKED_BYTES
from kvflow.transports.control.tcp_connections import TcpConnection
from kvflow.transports.control.zmq import ZmqSocket, bind_router, connect_dealer
from kvflow.transports.host.descriptors import descriptors_for

pytest_plugins = ["kvflow.testing.fixtures"]
pytestmark = pytest.mark.usefixtures("kvflow_clean_loop")

MIB = 1 << 20
GREETING = b"\xff" + bytes(8) + b"\x7f\3\0NULL" + bytes(48)
CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f\3\0CURVE" + bytes(47)


@pytest.fixture
async def router() -> AsyncIterator[ZmqSocket]:
    router, _ = bind_router("127.0.0.1", 0)
    yield router
    router.close()


@pytest.fixture
def port(router: ZmqSocket) -> int:
    return router.connections._port


@pytest.fixture
async def dealer(port: int) -> AsyncIterator[ZmqSocket]:
    dealer = connect_dealer(f"tcp://127.0.0.1:{port}", 5)
    yield dealer
    dealer.close()


def ready(kind: bytes, name: bytes) -> bytes:
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    if name:
        body += b"\x08Identity" + struct.pack(">I", len(name)) + name
    return b"\4" + bytes([len(body)]) + body


def part(size: int) -> bytes:
    """One that others follow."""
    return (
        b"\3" + struct.pack(">Q", size) + bytes(size)
        if size > 255
        else b"\1" + bytes([size]) + bytes(size)
    )


def shake_hands(raw: socket.socket, kind: bytes = b"DEALER", name: bytes = b"") -> None:
    raw.settimeout(10)
    raw.sendall(GREETING)
    received = b""
    while len(received) < len(GREETING):
        received += raw.recv(len(GREETING) - len(received))
    raw.sendall(ready(kind, name))


def pour(raw: socket.socket, data: bytes, most_bytes: int) -> int:
    """Send `data` until the other end takes no more, in a thread; return how much was sent."""
    # The kernel does not tell a sender that waits for a window that the other end has closed.
    raw.settimeout(1)
    sent = 0
    try:
        while sent < most_bytes:
            raw.sendall(data)
            sent += len(data)
    except OSError:
        pass
    return sent


def connected(port: int, name: bytes = b"") -> socket.socket:
    raw = socket.create_connection(("127.0.0.1", port), 10)
    shake_hands(raw, name=name)
    return raw


async def echo(router: ZmqSocket, dealer: ZmqSocket, frame: bytes = b"hello") -> None:
    """One good message gets through; malformed ones may come before it."""
    assert dealer.send(frame)
    async with asyncio.timeout(20):
        while not any(found == frame for _, found in await router.receive()):
            pass


async def test_a_look_leaves_no_message_unread(router: ZmqSocket, dealer: ZmqSocket) -> None:
    """ZMQ's descriptor says once that messages wait, and the look may be what it says it to."""
    await echo(router, dealer)
    for number in range(20):
        reading = asyncio.ensure_future(router.receive())
        # The reader waits, and has looked as the turn in which it began to wait ended.
        for _ in range(2):
            await asyncio.sleep(0)
        assert not router._turn_ends
        assert dealer.send(b"%d" % number, at_once=True)
        # The loop has not seen it yet.
        assert select.select([router._socket.fileno()], [], [], 10)[0]
        router.connections._look()
        assert [frame for _, frame in await asyncio.wait_for(reading, 20)] == [b"%d" % number]


async def test_nobody_looks_at_what_is_closed(router: ZmqSocket, dealer: ZmqSocket) -> None:
    await echo(router, dealer)
    router.connections._look()
    looks = [router.connections._timer, router.connections._turn]
    dealer.close()
    router.close()
    assert looks[0] is not None
    assert all(handle.cancelled() for handle in looks if handle is not None)


async def until_cut(end: ZmqSocket, count: int) -> None:
    await until(lambda: end.connections.cut >= count, 20)


async def malformed(router: ZmqSocket, count: int) -> None:
    """So many cut connections are told of."""
    async with asyncio.timeout(60):
        while count > 0:
            found = await router.receive()
            assert set(found) == {(b"", b"")}
            count -= len(found)
    assert count == 0


def rss_mib() -> float:
    return float(psutil.Process().memory_info().rss) / MIB


@pytest.mark.parametrize(("size", "kept_mib"), [(4 * MIB, 100), (200, 400), (0, 400)])
async def test_an_endless_message_takes_no_memory_for_long(
    router: ZmqSocket, port: int, dealer: ZmqSocket, size: int, kept_mib: int
) -> None:
    """What malloc keeps of many small frames is used again by the next attack."""
    await echo(router, dealer)
    before = rss_mib()
    for attack in range(1, 4):
        with await asyncio.to_thread(connected, port, b"a stranger") as raw:
            data = part(size) * max(1, MIB // (size + 2))
            assert await asyncio.to_thread(pour, raw, data, 2048 * MIB) < 2048 * MIB
            await until_cut(router, attack)
        await echo(router, dealer)
    await until(lambda: rss_mib() <= before + kept_mib, 20)


async def test_a_prefill_that_never_ends_a_message_is_cut_by_decode() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dealer = connect_dealer(f"tcp://127.0.0.1:{listening.getsockname()[1]}", 5)
        raw, _ = await asyncio.to_thread(listening.accept)
        with raw:
            await asyncio.to_thread(shake_hands, raw, b"ROUTER")
            assert await asyncio.to_thread(pour, raw, part(4 * MIB), 2048 * MIB) < 2048 * MIB
            await until_cut(dealer, 1)
        dealer.close()


async def test_beside_many_good_messages_too(router: ZmqSocket, port: int) -> None:
    """ZMQ always has a whole message of somebody's to read."""
    stop = threading.Event()

    def flood() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"tcp://127.0.0.1:{port}")
            while not stop.is_set():
                dealer.send(b"good")

    async def read() -> None:
        while True:
            await router.receive()

    flooding, reading = asyncio.create_task(asyncio.to_thread(flood)), asyncio.create_task(read())
    with await asyncio.to_thread(connected, port) as raw:
        assert await asyncio.to_thread(pour, raw, part(4 * MIB), 2048 * MIB) < 2048 * MIB
        await until_cut(router, 1)
    stop.set()
    await flooding
    reading.cancel()


async def test_many_connections_share_one_limit(
    router: ZmqSocket, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_connections, "ALL_UNFINISHED_BYTES", 13 * MIB)
    raws = await asyncio.gather(*(asyncio.to_thread(connected, port, b"%d" % i) for i in range(4)))
    for raw in raws:
        await asyncio.to_thread(raw.sendall, part(4 * MIB))  # none is above its own limit
    await malformed(router, 1)
    kept = router.connections.open
    await until(lambda: sum(c.unfinished_bytes for c in kept.values()) >= 8 * MIB, 10)
    await asyncio.sleep(2 * tcp_connections.LOOK_S)
    assert router.connections.cut == 1 and len(router.connections.open) == 3
    for raw in raws:
        raw.close()


class Size(int):
    """A number of bytes that counts its comparisons."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        Size.compared += 1
        return int(self) < int(other)

    def __gt__(self, other: int) -> bool:
        Size.compared += 1
        return int(self) > int(other)


async def test_to_cut_a_thousand_connections_takes_no_million_comparisons(
    router: ZmqSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_connections, "ALL_UNFINISHED_BYTES", 10_500)
    monkeypatch.setattr(Size, "compared", 0)
    beyond = 1 << 30
    for place in range(1000):
        # No file has such a descriptor, so a cut finds that the connection was closed meanwhile.
        connection = router.connections.open[beyond + place] = TcpConnection(time.monotonic())
        connection.unfinished_bytes = Size(6000 - place)
        router.connections._unfinished.add(beyond + place)
    router.connections._enforce()
    assert sorted(router.connections.open) == [beyond + 998, beyond + 999]
    assert Size.compared < 20_000


async def test_a_message_may_not_take_for_ever(
    router: ZmqSocket, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_connections, "UNFINISHED_S", 0.3)
    with await asyncio.to_thread(connected, port) as raw:
        raw.sendall(part(tcp_connections.LATE_BYTES + 1))
        await malformed(router, 1)


async def test_a_large_message_after_a_long_silence_is_not_late(
    router: ZmqSocket, port: int
) -> None:
    with await asyncio.to_thread(connected, port) as raw:
        await until(lambda: len(router.connections.open) == 1)
        (connection,) = router.connections.open.values()
        silent_s = connection.since_s = connection.since_s - 60
        await until(lambda: connection.since_s > silent_s)
        raw.sendall(part(tcp_connections.LATE_BYTES + 1))
        await until(lambda: connection.unfinished_bytes > tcp_connections.LATE_BYTES)
        raw.sendall(b"\0\5hello")
        async with asyncio.timeout(20):
            while not any(found == b"hello" for _, found in await router.receive()):
                pass
        assert router.connections.cut == 0


async def test_too_many_connections_end_the_oldest_that_has_said_nothing(
    router: ZmqSocket, port: int, dealer: ZmqSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_connections, "MAX_CONNECTIONS", 3)
    await echo(router, dealer)
    raws = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(4)]
    await malformed(router, 2)
    for raw in raws[:2]:
        raw.settimeout(10)
        while await asyncio.to_thread(raw.recv, 100):  # ZMQ's greeting, then the end
            pass
    await echo(router, dealer)
    assert router.connections.cut == 2
    for raw in raws:
        raw.close()


async def test_a_peer_of_zmtp_1_is_read_and_soon_cut(
    router: ZmqSocket, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which connection its messages come from is not known."""
    monkeypatch.setattr(tcp_connections, "UNFINISHED_BYTES", 1000)
    with socket.create_connection(("127.0.0.1", port), 10) as raw:
        raw.sendall(b"\1\0" + b"\6\0hello" * 200)  # an empty name, then messages
        async with asyncio.timeout(60):
            assert (await router.receive())[0][1] == b"hello"
            while (b"", b"") not in await router.receive():
                pass
    assert router.connections.cut == 1


async def test_whole_messages_that_wait_for_a_slow_reader_are_not_unfinished(
    router: ZmqSocket, dealer: ZmqSocket
) -> None:
    count, frame = 200, bytes(PACKED_BYTES)  # 50 MiB
    for _ in range(count):
        assert dealer.send(frame)
    await asyncio.sleep(0.3)
    time.sleep(2 * tcp_connections.LOOK_S)  # the loop stands still
    seen = 0
    async with asyncio.timeout(30):
        while seen < count:
            for _, found in await router.receive():
                assert found == frame
                seen += 1
            await asyncio.sleep(0.005)
    await asyncio.sleep(3 * tcp_connections.LOOK_S)
    assert router.connections.cut == 0


async def test_without_the_key_nothing_is_kept() -> None:
    public, secret = zmq.curve_keypair()
    router, port = bind_router("127.0.0.1", 0, ControlKey(public, secret))
    before = rss_mib()
    for greeting in (GREETING, CURVE_GREETING):
        with socket.create_connection(("127.0.0.1", port), 10) as raw:
            raw.sendall(greeting + ready(b"DEALER", b"x"))
            await asyncio.to_thread(pour, raw, part(4 * MIB), 256 * MIB)
    assert rss_mib() < before + 50
    router.close()


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.open(os.devnull, os.O_RDONLY)
    os.close(spare)
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, before[1]))
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_without_a_descriptor_left_a_message_that_does_not_end_is_cut(
    router: ZmqSocket, port: int
) -> None:
    with connected(port) as raw:
        await until(lambda: router.connections.open)
        pouring = asyncio.create_task(asyncio.to_thread(pour, raw, part(MIB), 4096 * MIB))
        await asyncio.sleep(0)
        with no_descriptor_left():
            with pytest.raises(OSError, match="Too many open files"):
                os.open(os.devnull, os.O_RDONLY)
            await until_cut(router, 1)
        assert await pouring < 4096 * MIB


def test_connections_and_sessions_take_half_of_the_descriptors_at_most() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for soft, most in (
            (256, 128),
            (before[1], min(tcp_connections.MAX_CONNECTIONS, before[1] // 2)),
        ):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
            assert descriptors_for(tcp_connections.MAX_CONNECTIONS) == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_many_connections_are_looked_at_some_at_a_time(
    router: ZmqSocket, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_connections, "LOOK_WORK", 8)
    connections = router.connections
    turns: list[list[int]] = []
    look_at, received = connections._look_at, connections._received

    def counted(found: tcp_connections._Round) -> None:
        turns.append([])
        look_at(found)

    def noted(descriptor: int) -> int | None:
        turns[-1].append(descriptor)
        return received(descriptor)

    monkeypatch.setattr(connections, "_look_at", counted)
    monkeypatch.setattr(connections, "_received", noted)
    strangers = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(33)]
    await until(lambda: len(connections.open) == 33)
    turns.clear()
    await until(lambda: sum(map(len, turns)) >= 2 * 33)
    assert max(map(len, turns)) == 8
    assert {descriptor for turn in turns for descriptor in turn} == set(connections.open)
    for raw in strangers:
        raw.close()


async def test_in_a_crowd_only_what_was_just_inspected_is_cut(
    router: ZmqSocket, port: int, dealer: ZmqSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a connection that delivered since its last inspection, nor for bytes of then."""
    await echo(router, dealer)
    connections = router.connections
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        await until(lambda: len(connections.open) == 5 and len(connections._silent) == 4)
        cut: list[int] = []
        monkeypatch.setattr(connections, "_cut", lambda descriptor, why: cut.append(descriptor))
        first, second, *_ = connections._silent
        router._incoming.delivered.add(first)
        monkeypatch.setattr(tcp_connections, "descriptors_for", lambda most: 4)
        connections._enforce()
        assert cut == [second]
        cut.clear()
        monkeypatch.setattr(tcp_connections, "descriptors_for", lambda most: 10)
        monkeypatch.setattr(tcp_connections, "ALL_UNFINISHED_BYTES", 10)
        connections.open[second].unfinished_bytes = 11
        connections._unfinished.add(second)
        connections._looks_at_all = False
        connections._enforce()
        assert not cut and connections._must_look_at_all
        connections._looks_at_all = True
        connections._enforce()
        assert cut == [second]


async def test_of_a_crowd_a_round_looks_at_some_and_at_all_when_memory_grows(
    router: ZmqSocket, port: int, dealer: ZmqSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = 0
    monkeypatch.setattr(tcp_connections, "LOOK_AT_ALL", 8)
    monkeypatch.setattr(tcp_connections, "LOOK_AT_SOME", 3)
    monkeypatch.setattr(tcp_connections, "_resident_bytes", lambda: resident)
    connections = router.connections
    rounds: list[set[int]] = []
    chosen = connections._chosen

    def noted() -> list[int]:
        found = list(chosen())
        rounds.append(set(found))
        return found

    monkeypatch.setattr(connections, "_chosen", noted)
    await echo(router, dealer)
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        await until(lambda: len(connections.open) == 13)
        every = set(connections.open)
        rounds.clear()
        await until(lambda: len(rounds) >= 6)
        assert {len(found) for found in rounds} <= {1, 2, 3}
        assert set().union(*rounds) == every, "each has its turn"
        resident = tcp_connections.GROWN_BYTES + 1
        await until(lambda: rounds[-1] == every)
        await until(lambda: rounds[-1] != every)
        # One with a long message is looked at in every round, and its time begins now.
        raw = stack.enter_context(await asyncio.to_thread(connected, port))
        await until(lambda: len(connections.open) == 14)
        (descriptor,) = set(connections.open) - every
        connections.open[descriptor].since_s -= 60
        raw.sendall(part(tcp_connections.LATE_BYTES + 1))
        await until(
            lambda: connections.open[descriptor].unfinished_bytes > tcp_connections.LATE_BYTES
        )
        rounds.clear()
        await until(lambda: len(rounds) >= 4)
        assert all(descriptor in found for found in rounds) and connections.cut == 0
        monkeypatch.setattr(tcp_connections, "UNFINISHED_S", 0.0)
        await until_cut(router, 1)
        assert descriptor not in connections.open
    await until(lambda: len(connections.open) == 1)
    assert not connections._silent and not connections._unfinished


def test_the_number_under_which_a_connection_is_cut_is_never_inherited() -> None:
    spare = tcp_connections._Spare()
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(2):
            with spare.borrow(server.fileno()) as tcp:
                assert tcp.getsockname() == server.getsockname()
                assert not os.get_inheritable(tcp.fileno())
            assert not os.get_inheritable(spare._descriptor)
            assert os.readlink(f"/proc/self/fd/{spare._descriptor}") == os.devnull
    for descriptor in (spare._descriptor, spare._nothing):
        os.close(descriptor)
