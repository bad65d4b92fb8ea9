"""A follower of one worker's cache events.

It reads a snapshot, then one batch after another, and asks for a replay of batches that were lost.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from kvflow.aio import in_turns
from kvflow.http.bodies import whole_number
from kvflow.protocols.wire.kv_events import END, SNAPSHOT, read_batch
from kvflow.router.blocks import KnownBlocks
from kvflow.transports.control.curve import ControlKey

_log = logging.getLogger("kvflow.router")
SILENCE_S = 20.0  # four heartbeat intervals of a publisher
REPLAY_S = 10.0  # longest wait between two messages of a replay
PAUSE_S = 2.0  # pause before the next try after a failure
MAX_MESSAGE_BYTES = 256 << 20
_OTHER_KEY = ", as where it has another key (--kv-events-key-file)"


class Source(NamedTuple):
    """The ZMQ addresses of a worker's events, its block size in tokens, and its key."""

    endpoint: str
    replay_endpoint: str | None
    block_size: int
    needs_key: bool = False
    key: ControlKey | None = None


class FeedError(Exception):
    """A failure to follow a worker's events, such as a malformed message."""


class BlockFeed:
    """A task that keeps `blocks` equal to what the worker's events report.

    It needs a running loop, and runs until `stop` or `close`. `live` is True while `blocks` is up
    to date. After a silence or a malformed message, `live` becomes False, and the feed starts again
    from a snapshot.
    """

    def __init__(self, name: str, source: Source) -> None:
        """Start to follow `source`. `name` is the worker's name in the log."""
        self.source = source
        self.blocks = KnownBlocks()
        self.live = False
        self.gaps = 0  # number of gaps in the batch numbers; a gap may span several batches
        self._name = name
        self._next_seq: int | None = None
        self._last_live = -1  # number of the last batch received live, not by replay
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Stop following, without waiting for the task to end."""
        self.live = False
        self._task.cancel()

    async def close(self) -> None:
        self.stop()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        logged = ""
        while True:
            try:
                await self._follow()
            except (TimeoutError, FeedError, zmq.ZMQError) as error:
                reason = (
                    str(error)
                    or "nothing has come for too long" + self.source.needs_key * _OTHER_KEY
                )
                if self.live or reason != logged:
                    _log.warning("cache events of %s are not followed: %s", self._name, reason)
                logged = reason
            except Exception:  # noqa: BLE001
                # The task must survive any error, or the known blocks would soon be wrong.
                _log.exception(
                    "following the cache events of %s failed; it is tried again", self._name
                )
            self._forget()
            await asyncio.sleep(PAUSE_S)

    def _forget(self) -> None:
        self.live, self._next_seq, self._last_live = False, None, -1
        self.blocks.clear()

    async def _follow(self) -> None:
        if self.source.needs_key and self.source.key is None:
            raise FeedError("it sends them to holders of a key (--kv-events-key-file) alone")
        with self._connected(zmq.SUB, self.source.endpoint) as subscriber:
            # Subscribe first: a batch published between snapshot and subscription would be lost.
            if self.source.replay_endpoint is not None:
                await self._catch_up(0, SNAPSHOT)
                self._live()
            while True:
                async with asyncio.timeout(SILENCE_S):
                    frames = await subscriber.recv_multipart()
                seq, payload = _numbered(frames)
                if seq <= self._last_live:
                    raise FeedError("its publisher has begun anew")
                self._last_live = seq
                if self._next_seq is not None and seq > self._next_seq:
                    await self._mend(seq)
                # Otherwise the replay has already applied this batch.
                if self._next_seq is None or seq >= self._next_seq:
                    await self._apply(seq, payload)
                self._live()

    def _live(self) -> None:
        if not self.live:
            _log.info(
                "cache events of %s are followed; it has %d blocks", self._name, len(self.blocks)
            )
        self.live = True

    async def _mend(self, seq: int) -> None:
        """Recover the batches that were lost before batch `seq`."""
        assert self._next_seq is not None
        self.gaps += 1
        if self.source.replay_endpoint is None:
            # A lost batch may have removed any known block, and this worker cannot replay it.
            self.blocks.clear()
            self._next_seq = seq
        else:
            await self._catch_up(self._next_seq)

    async def _catch_up(self, start: int, *kind: bytes) -> None:
        """Apply every batch from number `start` on, or a snapshot if `kind` is SNAPSHOT."""
        assert self.source.replay_endpoint is not None
        with self._connected(zmq.DEALER, self.source.replay_endpoint) as dealer:
            await dealer.send_multipart([b"", start.to_bytes(8, "big"), *kind])
            while True:
                async with asyncio.timeout(REPLAY_S):
                    frames = await dealer.recv_multipart()
                if not frames or frames[0]:
                    raise FeedError("a replay that is none")
                if len(frames) == 4 and frames[2] == END:
                    return
                await self._apply(*_numbered(frames[1:]))

    async def _apply(self, seq: int, payload: bytes) -> None:
        try:
            events = read_batch(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FeedError(f"batch {seq}: {error}") from None
        async for event in in_turns(events):
            self.blocks.apply(event)
        self._next_seq = seq + 1

    def _connected(self, kind: int, address: str) -> zmq.asyncio.Socket:
        socket = zmq.asyncio.Socket(zmq.Context.instance(), kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # libzmq resolves and accepts IPv6 addresses only with this option.
        socket.setsockopt(zmq.IPV6, int("[" in address))
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        if self.source.key is not None:
            self.source.key.arm_client(socket)
        socket.connect(address)
        return socket


def _numbered(frames: list[bytes]) -> tuple[int, bytes]:
    if len(frames) != 3 or len(frames[1]) != 8:
        raise FeedError(f"a message of {len(frames)} frames that is no batch of events")
    return int.from_bytes(frames[1], "big"), frames[2]


def source_of(
    url: str, events: object, block_size: object, key: ControlKey | None = None
) -> Source | None:
    """Return the event source of the worker at `url`, or None if it publishes no events.

    `events` and `block_size` are `kv_events` and `page_size` of its /server_info. `key` is the key
    of all workers that need one.
    """
    tokens = whole_number(block_size)
    if not isinstance(events, dict) or tokens is None or tokens < 1:
        return None
    host = urlsplit(url).hostname or "127.0.0.1"
    endpoint, replay = (
        _reached(events.get(name), host) for name in ("endpoint", "replay_endpoint")
    )
    needs_key = events.get("needs_key") is True
    if endpoint is None:
        return None
    return Source(endpoint, replay, tokens, needs_key, key if needs_key else None)


def _reached(address: object, host: str) -> str | None:
    """Return a bound TCP address as other machines reach it, or None for any other address."""
    if not isinstance(address, str) or not address.startswith("tcp://"):
        return None
    bound, _, port = address.removeprefix("tcp://").rpartition(":")
    if not port.isdecimal():
        return None
    if bound in ("0.0.0.0", "*", "[::]", "::"):
        bound = f"[{host}]" if ":" in host else host
    return f"tcp://{bound}:{port}"
