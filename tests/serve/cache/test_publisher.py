"""The publisher over real sockets: what subscribers of vLLM and SGLang get."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from socket import AF_INET6, create_server
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from kvflow.protocols.cache import stream
from kvflow.protocols.cache.addresses import DEFAULT_ADDRESS, is_loopback, numbered_address
from kvflow.protocols.cache.events import Tier
from kvflow.protocols.cache.hashes import token_bytes
from kvflow.protocols.cache.index import PrefixIndex
from kvflow.protocols.cache.stream import Batch, StreamLimits
from kvflow.protocols.errors import MisuseError
from kvflow.serve.cache import publisher as module
from kvflow.serve.cache.publisher import EventPublisher
from kvflow.serve.config.kv_events import KvEvents
from kvflow.testing.cancellation import Steps
from kvflow.transports.control.curve import ControlKey, read_key, write_key
from tests.protocols.cache.decoders import DECODERS, apply
from tests.protocols.cache.subscriber import Subscriber, block_hash, digest_chain
from tests.protocols.cache.test_stream import Knower
from tests.serve.engine.pair import until

WITHIN_S = 20.0  # that a message may take on a busy machine
QUICK_S = 0.02  # a heartbeat: tests learn by it that a subscription has arrived
FREE = "tcp://127.0.0.1:*"
Frames = list[bytes]


class Cache:
    """An index and its publisher, with the sockets of its subscribers."""

    def __init__(self, page_size: int = 1, **keywords: Any) -> None:
        self.index = PrefixIndex(page_size, events=True)
        self.now = 0.0
        given = {"address": FREE, "replay_address": FREE, "heartbeat_s": QUICK_S, **keywords}
        self.publisher = EventPublisher(self.index, page_size, **given)
        self._sockets: list[zmq.asyncio.Socket] = []

    def insert(self, *ids: int) -> None:
        self.now += 1
        count = len(ids) // self.index.page_size
        self.index.insert(token_bytes(ids), np.arange(count, dtype=np.int32), self.now)
        self.publisher.notify()

    def store(self, *ids: int) -> None:
        self.now += 1
        end = self.index.match(token_bytes(ids), self.now).end
        assert end is not None
        write = self.index.begin_write(end, Tier.DEVICE, Tier.STORAGE, count=len(ids))
        self.index.ack(write.number)
        self.publisher.notify()

    def evict(self, count: int) -> None:
        self.index.evict(Tier.DEVICE, count)
        self.publisher.notify()

    async def turn(self) -> None:
        """What was recorded has been sent."""
        await asyncio.sleep(0)

    def sub(self, **options: Any) -> zmq.asyncio.Socket:
        return self._connect(zmq.SUB, self.publisher.address, **options)

    def dealer(self, **options: Any) -> zmq.asyncio.Socket:
        return self._connect(zmq.DEALER, self.publisher.replay_address, **options)

    def _connect(self, kind: int, address: str | None, **options: Any) -> zmq.asyncio.Socket:
        assert address is not None
        socket = zmq.asyncio.Socket(zmq.Context.instance(), kind)
        self._sockets.append(socket)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(address)
        return socket

    async def close(self) -> None:
        await self.publisher.close()
        for socket in self._sockets:
            socket.close(linger=0)


Start = Callable[..., Coroutine[Any, Any, Cache]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    begun: list[Cache] = []

    async def start(**keywords: Any) -> Cache:
        begun.append(Cache(**keywords))
        return begun[-1]

    yield start
    for cache in begun:
        await cache.close()


async def receive(socket: zmq.asyncio.Socket) -> Frames:
    async with asyncio.timeout(WITHIN_S):
        return await socket.recv_multipart()


async def receive_event(socket: zmq.asyncio.Socket) -> Frames:
    while not events_of(frames := await receive(socket)):
        pass
    return frames


async def ask(dealer: zmq.asyncio.Socket, *request: bytes) -> list[tuple[int, bytes]]:
    """A replay: (number, payload) of each message up to the end."""
    await dealer.send_multipart([b"", *request])
    found: list[tuple[int, bytes]] = []
    while True:
        empty, topic, number, payload = await receive(dealer)
        assert empty == b""
        if number == b"\xff" * 8:
            assert (topic, payload) == (b"", b"")
            return found
        found.append((int.from_bytes(number, "big"), payload))


def u64(number: int) -> bytes:
    return number.to_bytes(8, "big")


def number_of(frames: Frames) -> int:
    return int.from_bytes(frames[1], "big")


def events_of(frames: Frames) -> list[Any]:
    events: list[Any] = msgspec.msgpack.decode(frames[-1])[1]
    return events


def content(*payloads: bytes, believed: Subscriber | None = None) -> list[set[int]]:
    """What a subscriber of vLLM has after these messages, per medium."""
    subscriber = believed or Subscriber()
    for payload in payloads:
        apply(subscriber, DECODERS["vllm"][0].decode(payload))
    return subscriber.content()


def names(*ids: int) -> list[int]:
    return [block_hash(digest) for digest in digest_chain(ids, 1)]


@pytest.mark.parametrize("name", DECODERS)
async def test_a_subscriber_follows(name: str, start: Start) -> None:
    decoder, positional = DECODERS[name]
    cache = await start(positional=positional, topic="kv", rank=2)
    sub = cache.sub()
    last = number_of(await receive(sub))
    cache.insert(1, 2, 3, 4)
    cache.store(1, 2, 3, 4)
    cache.insert(1, 2, 5, 6)
    subscriber = Subscriber()
    while len(subscriber.blocks["GPU"]) < 6:
        topic, number, payload = await receive(sub)
        assert (topic, int.from_bytes(number, "big")) == (b"kv", last + 1)
        last += 1
        batch = decoder.decode(payload)
        assert msgspec.structs.astuple(batch)[2] == 2
        apply(subscriber, batch)
    known = set(names(1, 2, 3, 4))
    assert subscriber.content() == [known | set(names(1, 2, 5, 6)), set(), known]
    cache.evict(2)
    apply(subscriber, decoder.decode((await receive_event(sub))[-1]))
    assert len(subscriber.blocks["GPU"]) == 4
    cache.index.flush()
    cache.publisher.notify()
    apply(subscriber, decoder.decode((await receive_event(sub))[-1]))
    assert subscriber.content() == [set(), set(), set()]


async def test_events_of_a_turn_share_a_batch(start: Start) -> None:
    cache = await start()
    sub = cache.sub()
    await receive(sub)
    cache.insert(1, 2)
    cache.insert(3, 4)
    assert len(events_of(await receive_event(sub))) == 2
    cache.insert(5)
    assert len(events_of(await receive_event(sub))) == 1


async def test_a_replay_is_byte_for_byte_what_was_sent(start: Start) -> None:
    cache = await start(topic="kv")
    sub, dealer = cache.sub(), cache.dealer()
    live = [await receive(sub)]
    for token in range(5):
        cache.insert(token)
        live.append(await receive_event(sub))
    first = number_of(live[0])
    again = dict(await ask(dealer, u64(first)))
    assert all(again[number_of(frames)] == frames[2] for frames in live)
    assert sorted(again) == list(range(first, max(again) + 1)), "without a hole"
    whole = [payload for _, payload in await ask(dealer, u64(0))]
    assert content(*whole)[0] == {names(token)[0] for token in range(5)}
    assert await ask(dealer, u64(2**64 - 1)) == []
    await until(lambda: cache.publisher.stats().replays == 3)
    assert cache.publisher.stats().snapshots == 0


async def test_a_request_that_is_none_is_counted_and_the_next_one_answered(start: Start) -> None:
    cache = await start()
    dealer = cache.dealer()
    bad = [[b"", b"short"], [b"x", u64(0)], [u64(0)], [b"", u64(0), b"all"], [b"x"] * 9]
    bad += [[b"", u64(0), b"snapshot", b""]]
    bad *= module.MAX_REPLAYS
    for frames in bad:
        await dealer.send_multipart(frames)
    assert (await ask(dealer, u64(0)))[0][0] == 0
    assert cache.publisher.stats().bad_requests == len(bad)


async def test_a_request_that_is_too_large_is_not_taken_in(start: Start) -> None:
    cache = await start()
    stranger = cache.dealer()
    assert await ask(stranger, u64(2**64 - 1)) == []
    # A plain one, as it is.
    monitor = cast("zmq.Socket[bytes]", stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED))
    await stranger.send_multipart([b"", bytes(2000)])
    assert await asyncio.to_thread(monitor.poll, 20_000), "its connection was kept"
    stranger.disable_monitor()
    monitor.close()
    assert cache.publisher.stats().bad_requests == 0, "it was cut off before it was read"
    assert (await ask(cache.dealer(), u64(0)))[0][0] == 0


async def test_what_is_not_kept_begins_with_a_snapshot(start: Start) -> None:
    cache = await start(limits=StreamLimits(kept_batches=2), heartbeat_s=60.0)
    await cache.turn()
    for token in range(1, 6):
        cache.insert(0, token)
        await cache.turn()
    cache.evict(2)
    await cache.turn()
    dealer = cache.dealer()
    newest = 0
    for start_at in (0, 3):
        (first, snapshot), (newest, nothing) = await ask(dealer, u64(start_at))
        assert (first, newest) == (start_at, cache.publisher.stats().batches - 1)
        assert events_of([nothing]) == []
        subscriber = Subscriber()
        subscriber.stored("GPU", names(99), None)  # what it believed before
        kept = {*names(0), *(names(0, token)[1] for token in (3, 4, 5))}
        assert content(snapshot, believed=subscriber)[0] == kept
    assert cache.publisher.stats().snapshots == 2
    assert len(await ask(dealer, u64(newest - 1))) == 2, "what is kept is sent as it was"


async def test_a_snapshot_on_demand(start: Start) -> None:
    cache = await start(heartbeat_s=60.0)
    cache.insert(1, 2)
    await cache.turn()
    # Recorded, and not sent.
    cache.index.insert(token_bytes([1, 3]), np.arange(2, dtype=np.int32), cache.now)
    dealer = cache.dealer()
    messages = await ask(dealer, u64(2**64 - 1), b"snapshot")
    assert [number for number, _ in messages] == [cache.publisher.stats().batches - 1], (
        "its number is the newest one"
    )
    assert content(messages[0][1])[0] == {*names(1, 2), names(1, 3)[1]}
    cache.publisher.notify()
    await cache.turn()
    assert await ask(dealer, u64(messages[-1][0] + 1)) == [], "what is in it does not come again"


async def test_a_subscriber_that_does_not_read(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE_BATCHES", 10)
    cache = await start(page_size=512, limits=StreamLimits(kept_batches=100))
    sub = cache.sub(RCVHWM=1, RCVBUF=4096)
    dealer = cache.dealer()
    knower = Knower()
    knower.last = number_of(await receive(sub))
    text = list(range(20_480))
    for turn in range(300):  # some 60 KB each: more than the sockets of a machine hold
        cache.insert(*text[: 512 * (turn % 3)], turn, *text[1:])
        cache.evict(30)
        await cache.turn()
    lost = 0
    while knower.last < cache.publisher.stats().batches - 1:
        frames = await receive(sub)
        if number_of(frames) > knower.last + 1:
            lost += 1
            await catch_up(knower, dealer, number_of(frames))
        knower.apply(Batch(number_of(frames), frames[2]))
    assert lost, "nothing was lost: the sockets hold more than was sent"
    expected = Subscriber()
    expected.replay(cache.index.snapshot_events())
    assert knower.content() == expected.content()


async def catch_up(knower: Knower, dealer: zmq.asyncio.Socket, until: int) -> None:
    """Apply what is newer, and stop before the message in hand, as vLLM's example does."""
    done = False
    for number, payload in await ask(dealer, u64(knower.last + 1)):
        if number > knower.last and not done:
            knower.apply(Batch(number, payload))
            done = number >= until - 1


async def test_faster_than_it_can_be_sent(start: Start) -> None:
    cache = await start(limits=StreamLimits(waiting_bytes=200))
    sub = cache.sub()
    await receive(sub)
    for token in range(50):
        cache.insert(token)
    cache.evict(47)
    frames = await receive_event(sub)
    assert events_of(frames)[0] == {"type": "AllBlocksCleared"}
    assert content(frames[-1])[0] == {names(token)[0] for token in (47, 48, 49)}
    assert cache.publisher.stats().resets == 1


async def test_the_loss_of_the_last_batch_shows(start: Start) -> None:
    """An empty batch comes when nothing happens, with the number that follows."""
    cache = await start()
    sub = cache.sub()
    first = await receive(sub)
    cache.insert(1)
    last = await receive_event(sub)
    beat = await receive(sub)
    assert events_of(beat) == [] and number_of(beat) == number_of(last) + 1
    assert number_of(first) < number_of(last)


async def test_close_sends_what_is_left_and_leaves_nothing(start: Start) -> None:
    before = asyncio.all_tasks()
    cache = await start(heartbeat_s=60.0)
    address, replay_address = cache.publisher.address, cache.publisher.replay_address
    sub, dealer = cache.sub(), cache.dealer()
    assert await ask(dealer, u64(0))
    await heard(cache, sub)
    cache.insert(1, 2)
    await cache.publisher.close()
    cache.index.insert(token_bytes([3]), np.arange(1, dtype=np.int32), cache.now)
    await cache.publisher.close()
    assert len(events_of(await receive_event(sub))[0]["block_hashes"]) == 2
    assert asyncio.all_tasks() == before
    cache.publisher.notify()  # too late, and harmless
    async with asyncio.timeout(WITHIN_S):
        again = None
        while again is None:
            try:
                again = await start(address=address, replay_address=replay_address)
            except MisuseError:
                await asyncio.sleep(0.01)  # ZMQ closes sockets in a thread of its own


async def test_a_close_that_is_cancelled_in_its_clean_up_closes_the_sockets_too(
    start: Start,
) -> None:
    for at in itertools.count():
        cache = await start(heartbeat_s=60.0)
        await cache.turn()
        steps = Steps(cache.publisher.close(), at, at + 1)
        await asyncio.gather(steps.task(), return_exceptions=True)
        assert all(socket.closed for socket in cache.publisher._sockets())
        if steps.waits <= at:
            break
    assert at, "it waits for its tasks"


async def test_close_sends_more_than_a_batch(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = await start(heartbeat_s=60.0)
    sub = cache.sub()
    await heard(cache, sub)
    monkeypatch.setattr(stream, "BATCH_BYTES", 1)
    for token in range(3):
        cache.insert(token)
    await cache.publisher.close()
    for n in range(3):
        assert events_of(await receive_event(sub))[0]["block_hashes"] == names(n)


class Router:
    """A ROUTER whose client takes nothing, or has gone, for some sends."""

    def __init__(self, *errors: int) -> None:
        self.errors = list(errors)

    async def send_multipart(self, frames: Frames, flags: int, *, copy: bool) -> None:
        if self.errors:
            number = self.errors.pop(0)
            raise zmq.Again() if number == zmq.EAGAIN else zmq.ZMQError(number)


@pytest.mark.parametrize(
    ("errors", "stall_s", "sent"),
    [
        ((), 0.0, True),
        ((zmq.EAGAIN, zmq.EAGAIN), 20.0, True),
        ((zmq.EAGAIN,), 0.0, False),
        ((zmq.EHOSTUNREACH,), 20.0, False),
    ],
)
async def test_a_replay_waits_for_a_client_for_a_while(
    errors: tuple[int, ...], stall_s: float, sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALL_S", stall_s)
    router: Any = Router(*errors)
    assert await module._offer(router, [b""]) is sent
    with pytest.raises(zmq.ZMQError):
        await module._offer(cast("Any", Router(zmq.ENOTSOCK)), [b""])


async def heard(cache: Cache, sub: zmq.asyncio.Socket) -> None:
    token = 1_000
    while not await sub.poll(20):
        token += 1
        cache.insert(token)
    cache.insert(999)
    while events_of(await receive(sub))[-1].get("block_hashes") != names(999):
        pass


async def test_a_later_process_on_the_same_address_begins_by_clearing(start: Start) -> None:
    cache = await start()
    dealer = cache.dealer()
    number, payload = (await ask(dealer, u64(0)))[0]
    assert (number, events_of([payload])) == (0, [{"type": "AllBlocksCleared"}])
    later = await start(first_seq=10**12)
    dealer = later.dealer()
    (number, payload), *_ = await ask(dealer, u64(7))
    assert (number, events_of([payload])[0]) == (7, {"type": "AllBlocksCleared"}), (
        "numbers before it are a gap"
    )


async def test_many_replays_at_once(start: Start) -> None:
    """More than are served at a time, with one that never reads."""
    cache = await start(heartbeat_s=60.0)
    for token in range(50):
        cache.insert(token)
        await cache.turn()
    cache.insert(99)
    silent = cache.dealer()
    await silent.send_multipart([b"", u64(0)])
    dealers = [cache.dealer() for _ in range(2 * module.MAX_REPLAYS)]
    answers = await asyncio.gather(*(ask(dealer, u64(1)) for dealer in dealers))
    assert all(answer == answers[0] for answer in answers) and len(answers[0]) == 50


@pytest.mark.parametrize(
    ("address", "rank", "own"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://127.0.0.1:0", 3, "tcp://127.0.0.1:*"),
        ("inproc://kv", 0, "inproc://kv"),
        ("inproc://kv", 2, "inproc://kv_dp2"),
    ],
)
def test_addresses_of_ranks(address: str, rank: int, own: str) -> None:
    assert numbered_address("address", address, rank) == own


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"address": "5557"}, "address '5557' is not tcp://"),
        ({"address": "tcp://*"}, "address 'tcp://[*]' is not tcp://host:port"),
        ({"address": "tcp://*:x"}, "is not tcp://host:port"),
        (
            {"address": "tcp://*:65535", "rank": 1},
            "the last port is 65535, and number 1 would take 65536",
        ),
        ({"rank": -1}, "rank -1 is negative"),
        ({"replay_address": "udp://*:5558"}, "replay_address 'udp://[*]:5558' is not"),
        ({"heartbeat_s": 0.0}, "heartbeat_s 0.0 is not"),
        ({"limits": StreamLimits(kept_batches=0)}, "kept_batches 0: at least 1"),
    ],
)
async def test_what_cannot_be(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        Cache(**keywords)


async def test_events_and_replays_over_ipv6(start: Start) -> None:
    try:
        create_server(("::1", 0), family=AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    cache = await start(address="tcp://[::1]:*", replay_address="tcp://[::1]:*")
    sub = cache.sub(IPV6=1)
    dealer = cache.dealer(IPV6=1)
    assert (await ask(dealer, u64(0)))[0][0] == 0
    await receive(sub)


async def test_a_port_that_is_taken(start: Start) -> None:
    cache = await start()
    with pytest.raises(
        MisuseError, match=f"replay_address '{cache.publisher.address}': Address already in use"
    ):
        Cache(replay_address=cache.publisher.address)


async def test_who_has_the_key_is_sent_events_and_nobody_else(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    for name in ("ours", "other"):
        write_key(str(tmp_path / name))
        keys.append(read_key(str(tmp_path / name)))
    ours, other = keys
    assert ours is not None and other is not None
    cache = await start(key=ours)
    assert cache.publisher.describe()["needs_key"] is True

    def curve(key: ControlKey) -> dict[str, Any]:
        return {
            "CURVE_SERVERKEY": key.public,
            "CURVE_PUBLICKEY": key.public,
            "CURVE_SECRETKEY": key.secret,
        }

    strangers = [
        ask_for(**options)
        for options in ({}, curve(other), curve(other) | {"CURVE_SERVERKEY": ours.public})
        for ask_for in (cache.sub, cache.dealer)
    ]
    for socket in strangers[1::2]:
        await socket.send_multipart([b"", u64(0), b"snapshot"])
    sub = cache.sub(**curve(ours))
    dealer = cache.dealer(**curve(ours))
    await receive(sub)
    cache.insert(1, 2)
    assert [event["token_ids"] for event in events_of(await receive_event(sub))] == [[1, 2]]
    assert await ask(dealer, u64(0), b"snapshot")
    for _ in range(5):
        await receive(sub)
    assert cache.publisher.stats().snapshots == 1, "the replays of strangers were answered"
    assert not any([await socket.poll(0) for socket in strangers])


async def test_a_publisher_with_a_key_whose_port_is_taken_leaves_nothing(
    start: Start, tmp_path: Path
) -> None:
    taken = await start()
    write_key(str(tmp_path / "key"))
    with pytest.raises(MisuseError, match="replay_address"):
        await start(replay_address=taken.publisher.address, key=read_key(str(tmp_path / "key")))


LOOPBACK = (
    "tcp://127.0.0.1:5557",
    "tcp://127.8.0.1:*",
    "tcp://[::1]:5557",
    "tcp://localhost:1",
    "tcp://lo:1",
)
ELSEWHERE = (
    "tcp://*:1",
    "tcp://0.0.0.0:1",
    "tcp://[::]:1",
    "tcp://10.0.0.1:1",
    "tcp://eth0:1",
    "tcp://worker:1",
)


@pytest.mark.parametrize("address", [*LOOPBACK, *ELSEWHERE])
def test_which_addresses_other_machines_reach(address: str) -> None:
    assert is_loopback(address) is (address in LOOPBACK)


def test_without_an_address_events_stay_on_the_machine() -> None:
    config = KvEvents.parse("{}")
    assert config is not None and is_loopback(config.endpoint) and config.replay_endpoint is None
    assert is_loopback(DEFAULT_ADDRESS)
