"""Cache events over ZMQ: a PUB socket, and a ROUTER that replays batches to subscribers.

PUB sends [topic, seq, payload]. A subscriber's DEALER sends [b"", seq] to request a replay. The
answer is one message [b"", topic, seq, payload] for each batch from that number on, and [b"", b"",
-1, b""] at the end. The request [b"", seq, b"snapshot"] is answered with one batch that contains
everything that is cached, in place of the batches since `seq`. Numbers are 64 bits, big-endian.
`protocols.cache.stream` describes the answer when the requested batches are no longer kept.

**Events are prompts**: they contain the salts and the token ids of all cached pages, and every
client that can connect can read them. So the default address is on the loopback interface, and with
a CURVE key (`kvflow keygen`) only clients that have the key can connect.

Publishing never waits for a subscriber. PUB drops batches that a slow subscriber does not take,
and the number of the next batch reveals the gap. If there are no events, an empty batch is sent
every `heartbeat_s`. Events recorded in one turn of the loop share a batch, unless they are too many
for one (`stream.BATCH_BYTES`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, NamedTuple

import zmq
import zmq.asyncio

from kvflow.aio import all_ended, in_thread, in_turns
from kvflow.protocols.cache.addresses import DEFAULT_ADDRESS, numbered_address
from kvflow.protocols.cache.stream import Batch, EventSource, EventStream, StreamLimits
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.limits import LEAST_WAIT_S, check_time
from kvflow.protocols.wire.kv_events import END, SNAPSHOT, VLLM_MEDIA, BatchEncoder, Media
from kvflow.transports.control.curve import ControlKey

# Batches (60 KB for prompts of 10,000 tokens) that ZMQ queues for a slow subscriber.
QUEUE_BATCHES = 1_000
MAX_REPLAYS = 8  # concurrent replays; further requests wait
# A replay is abandoned, without an end mark, if its client accepts no batch for this long.
STALL_S = 5.0
# ZMQ does not report when a client of a ROUTER can accept more, so `_offer` retries.
RETRY_S = 0.01
LINGER_MS = 200


class PublisherStats(NamedTuple):
    """Counters of one publisher."""

    batches: int  # sent, heartbeats included
    resets: int  # snapshots sent because events came faster than they could be sent
    replays: int  # sent completely, with the end mark
    snapshots: int  # requests answered with a snapshot
    bad_requests: int


class EventPublisher:
    """The publisher of one event source. Create and use it on one event loop, until `close`."""

    def __init__(
        self,
        source: EventSource,
        page_size: int,
        *,
        address: str = DEFAULT_ADDRESS,
        replay_address: str | None = None,
        topic: str = "",
        rank: int = 0,
        positional: bool = False,
        media: Media = VLLM_MEDIA,
        key: ControlKey | None = None,
        limits: StreamLimits | None = None,
        heartbeat_s: float = 5.0,
        first_seq: int = 0,
    ) -> None:
        """Bind the PUB socket to `address`, and the ROUTER to `replay_address` unless it is None.

        `rank` is added to the port of each address (see `numbered_address`). Port 0 or * picks a
        free port. `positional` encodes events as arrays, the older format. `media` has the names of
        the tiers. With a `key`, only subscribers that have it can connect, and the traffic is
        encrypted. Raises: MisuseError.
        """
        self._topic = topic.encode()
        self._heartbeat_s = check_time("heartbeat_s", heartbeat_s, LEAST_WAIT_S)
        self._stream = EventStream(
            source,
            BatchEncoder(page_size, rank, positional=positional, media=media),
            limits,
            first_seq=first_seq,
        )
        self._first_seq, self._loop = first_seq, asyncio.get_running_loop()
        # An authenticator applies to a whole context, so sockets with a key get a separate one.
        context = zmq.Context() if key else zmq.Context.instance()
        self._pub: zmq.Socket[bytes] = context.socket(zmq.PUB)
        self._router: zmq.asyncio.Socket | None = None
        if replay_address is not None:
            self._router = zmq.asyncio.Socket(context, zmq.ROUTER)
            # Without this option, a ROUTER silently drops messages that a client cannot accept.
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._router.setsockopt(zmq.MAXMSGSIZE, 1024)  # largest request, in bytes
        self._authentication = key.arm_server(*self._sockets()) if key else None
        self.replay_address: str | None = None
        try:
            self.address = _bind(self._pub, "address", address, rank)
            if self._router is not None and replay_address is not None:
                self.replay_address = _bind(self._router, "replay_address", replay_address, rank)
        except MisuseError:
            self._close_sockets(0)
            raise
        self._closing = False
        self._turn: asyncio.Handle | None = None
        self._slots = asyncio.Semaphore(MAX_REPLAYS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._replays = self._snapshots = self._bad_requests = 0
        self._sent_s = self._loop.time()
        self._timer = self._loop.call_later(self._heartbeat_s, self._beat)
        if self._router is not None:
            self._spawn(self._serve(self._router))
        self.notify()

    def notify(self) -> None:
        """Publish new events at the end of this turn of the loop. Call this after any change."""
        if self._turn is None and not self._closing:
            self._turn = self._loop.call_soon(self._end_turn)

    def stats(self) -> PublisherStats:
        batches = self._stream.next_seq - self._first_seq
        return PublisherStats(
            batches, self._stream.num_resets, self._replays, self._snapshots, self._bad_requests
        )

    def describe(self) -> dict[str, Any]:
        """Return the counters, `needs_key`, and the addresses by their --kv-events-config names."""
        needs_key = self._authentication is not None
        addresses = {"endpoint": self.address, "replay_endpoint": self.replay_address}
        return {**addresses, "needs_key": needs_key, **self.stats()._asdict()}

    async def close(self) -> None:
        """Send the recorded events, cancel replays and close the sockets. Idempotent."""
        if self._closing:
            return
        self._closing = True
        try:
            await self._settle()
        finally:
            self._timer.cancel()
            if self._turn is not None:
                self._turn.cancel()
            for task in self._tasks:
                task.cancel()
            try:
                await all_ended(self._tasks)
            finally:
                self._close_sockets(LINGER_MS)

    def _sockets(self) -> list[zmq.Socket[Any]]:
        return [self._pub, *([self._router] if self._router is not None else [])]

    def _close_sockets(self, linger_ms: int) -> None:
        if self._authentication is not None:
            self._authentication.close()
        for socket in self._sockets():
            socket.close(linger=linger_ms)

    def _end_turn(self) -> None:
        self._turn = None
        self._publish()
        if self._stream.has_waiting:
            self.notify()

    def _publish(self) -> None:
        batch = self._stream.next_batch(time.time())
        if batch is not None:
            self._send(batch)

    def _send(self, batch: Batch) -> None:
        self._sent_s = self._loop.time()
        # NOBLOCK never raises here: PUB drops a message that a subscriber cannot accept.
        self._pub.send_multipart(self._frames(batch), zmq.NOBLOCK)

    def _frames(self, batch: Batch) -> tuple[bytes, bytes, bytes]:
        return self._topic, batch.seq.to_bytes(8, "big"), batch.payload

    def _beat(self) -> None:
        now = self._loop.time()
        if now >= self._sent_s + self._heartbeat_s:
            self._send(self._stream.heartbeat(time.time()))
        self._timer = self._loop.call_at(self._sent_s + self._heartbeat_s, self._beat)

    async def _settle(self) -> None:
        self._publish()
        while self._stream.has_waiting:
            await asyncio.sleep(0)
            self._publish()

    async def _serve(self, router: zmq.asyncio.Socket) -> None:
        while True:
            # The slot is taken first, so requests beyond MAX_REPLAYS wait in ZMQ's bounded queue.
            await self._slots.acquire()
            request = await router.recv_multipart()
            if not _is_request(request):
                self._bad_requests += 1
                self._slots.release()
                continue
            wants_snapshot = len(request) == 4
            replay = self._replay(
                router, request[0], int.from_bytes(request[2], "big"), wants_snapshot
            )
            self._spawn(replay).add_done_callback(lambda _: self._slots.release())

    async def _replay(
        self, router: zmq.asyncio.Socket, client: bytes, start: int, wants_snapshot: bool
    ) -> None:
        batches = None if wants_snapshot else self._stream.kept_from(start)
        if batches is None:
            batches = await self._snapshot(start)
            self._snapshots += 1
        async for batch in in_turns(batches):
            if not await _offer(router, [client, b"", *self._frames(batch)]):
                return
        if await _offer(router, [client, b"", b"", END, b""]):
            self._replays += 1

    async def _snapshot(self, start: int) -> list[Batch]:
        """Return a batch with everything that is cached, and perhaps an empty batch after it.

        The first batch has the number `start` or the newest number, whichever is lower. If that is
        lower than the newest number, an empty batch with the newest number follows, so that the
        subscriber continues from there.
        """
        # The snapshot includes the changes of recorded events, so these events are sent first.
        await self._settle()
        events, newest = self._stream.snapshot(), self._stream.next_seq - 1
        encoder, parts = self._stream.encoder, list[bytes]()
        async for event in in_turns(events):
            parts.extend(encoder.parts([event]))
        seq = min(start, newest)
        now = time.time()
        # A snapshot of 3 million tokens is 16 MB. Joining its parts here would block the loop.
        batches = [Batch(seq, await in_thread(lambda: encoder.join(parts, now)))]
        if seq < newest:
            batches.append(Batch(newest, encoder.join([], now)))
        return batches

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _offer(router: zmq.asyncio.Socket, frames: list[bytes]) -> bool:
    """Send one message. Return False if the client left, or accepted nothing for STALL_S."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + STALL_S
    while True:
        try:
            await router.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            if loop.time() >= until_s:
                return False
            await asyncio.sleep(RETRY_S)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        else:
            return True


def _is_request(frames: list[bytes]) -> bool:
    """Return True if `frames` are [client, b"", seq] or [client, b"", seq, b"snapshot"]."""
    if len(frames) not in (3, 4) or frames[1] or len(frames[2]) != 8:
        return False
    return len(frames) == 3 or frames[3] == SNAPSHOT


def _bind(socket: zmq.Socket[Any], name: str, address: str, rank: int) -> str:
    own = numbered_address(name, address, rank)
    socket.setsockopt(zmq.IPV6, int("[" in own))
    socket.setsockopt(zmq.SNDHWM, QUEUE_BATCHES)
    try:
        socket.bind(own)
    except zmq.ZMQError as error:
        raise MisuseError(f"{name} {own!r}: {zmq.strerror(error.errno or 0)}") from None
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
