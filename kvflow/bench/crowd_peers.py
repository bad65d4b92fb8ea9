"""Emulated decodes of `kvflow bench peers`: thousands in one process, each with its own connection.

    python -m kvflow.bench.crowd_peers

Commands: setup, register, beat, beat_once, rooms, figures, vanish, part, quit. Each decode
registers, sends heartbeats, lends pages for rooms and says goodbye in real frames; `local` writes
into real memory. It has no endpoint: it takes every answer as good, so that thousands fit beside
the node on one machine.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import uvloop

from kvflow.bench.child import cpu_s, serve
from kvflow.bench.crowds import allow_many_connections
from kvflow.bench.zmtp import Frames, message, opening
from kvflow.memory.pool import PagedPool
from kvflow.protocols.arguments import prompt_digest
from kvflow.protocols.pages.layout import PoolLayout, build_layout
from kvflow.protocols.ports import PlaneAddress
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.codec import encode, parse_at_decode, routing_id
from kvflow.protocols.wire.messages import GrantId, Incarnation, RoomId
from kvflow.transports.data.local import LocalPlane

PAGE_SIZE = 16
PROMPT = np.arange(PAGE_SIZE, dtype=np.int64)  # one page per room
DECODES_PER_POOL = 500  # a shared segment takes the claims of 512 nodes
CONNECTING = 100  # connections that are made at once
SLICES = 100  # a heartbeat interval is divided into so many turns, each of some decodes
PATIENCE_S = 120.0


def small_layout(num_pages: int) -> PoolLayout:
    return build_layout([("kv", "uint8", (8,))], page_size=PAGE_SIZE, num_pages=num_pages)


class Decode(asyncio.Protocol):
    """One emulated decode."""

    __slots__ = (
        *("beats_at_s", "crowd", "frames", "grant", "incarnation", "pace_s", "register", "settled"),
        *("transport", "up"),
    )

    def __init__(self, crowd: Crowd, incarnation: Incarnation) -> None:
        self.crowd, self.incarnation = crowd, incarnation
        self.frames = Frames()
        self.grant = 0  # the last grant that it used
        self.settled = GrantId(1)
        self.pace_s = self.beats_at_s = 0.0  # the pace that prefill asked for, and the next beat
        self.up = False
        self.register: wire.Register | None = None  # until it is sent
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.transport.write(opening(routing_id(self.incarnation)))
        self.register = self.crowd.register_of(self.incarnation)

    def send(self, sent: wire.Message) -> None:
        self.transport.write(message(encode(sent)))

    def beat(self) -> None:
        self.send(wire.Heartbeat(settled_below=self.settled, **self.between))

    @property
    def between(self) -> dict[str, Any]:
        return {"source": self.crowd.prefill, "target": self.incarnation}

    def lend(self, room: int) -> None:
        self.grant += 1
        self.send(
            wire.Bootstrap(
                room=RoomId(room),
                grant=GrantId(self.grant),
                pages=self.crowd.packed_page,
                prompt_tokens=len(PROMPT),
                prompt_digest=self.crowd.digest,
                **self.between,
            )
        )

    def data_received(self, data: bytes) -> None:
        frames = self.frames.add(data)
        if self.register is not None and self.frames.ready:
            self.send(self.register)
            self.register = None
        for frame in frames:
            self.crowd.received(self, parse_at_decode(frame))

    def connection_lost(self, error: Exception | None) -> None:
        self.crowd.lost(self)


def _itself(decode: Decode) -> Decode:
    return decode


class Crowd:
    """All emulated decodes of this process."""

    def __init__(self) -> None:
        self.decodes: dict[Incarnation, Decode] = {}
        self.digest = prompt_digest(PROMPT)
        self.packed_page = np.zeros(1, np.int32).tobytes()
        self.seen: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.round_trips_s: list[float] = []
        self._pools: list[tuple[PlaneAddress, PoolLayout, PagedPool]] = []
        self._beats: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._awaited: dict[int, float] = {}
        self.answered = 0  # decodes that were accepted or refused

    async def setup(self, *, control: str, incarnation: int, heartbeat_s: float) -> dict[str, Any]:
        allow_many_connections()
        host, _, port = control.removeprefix("tcp://").rpartition(":")
        self._host, self._port = host, int(port)
        self.prefill, self._heartbeat_s = Incarnation(incarnation), heartbeat_s
        return {}

    def register_of(self, incarnation: Incarnation) -> wire.Register:
        address, layout, _ = self._pools[-1]
        return wire.Register(
            source=self.prefill,
            target=incarnation,
            wire_version=wire.WIRE_VERSION,
            layout=layout,
            address=address,
            fresh_from=GrantId(1),
        )

    def _new_pool(self) -> None:
        pool = PagedPool.allocate(small_layout(8))
        assert pool.segment is not None
        self._segment = pool.segment
        address, layout = LocalPlane(pool.segment).export(pool.layout)
        self._pools.append((address, layout, pool))

    # --- commands

    async def register(self, *, count: int) -> dict[str, Any]:
        """Let `count` new decodes register, and return the time until all have an answer."""
        loop, begun = asyncio.get_running_loop(), time.perf_counter()
        answered = self.answered + count
        for first in range(0, count, CONNECTING):
            batch = [
                Decode(self, Incarnation(secrets.randbits(63) | 1))
                for _ in range(min(CONNECTING, count - first))
            ]
            if first % DECODES_PER_POOL == 0:
                self._new_pool()
            for decode in batch:
                self._segment.claim(decode.incarnation)
                self.decodes[decode.incarnation] = decode
            await asyncio.gather(
                *(
                    loop.create_connection(partial(_itself, decode), self._host, self._port)
                    for decode in batch
                )
            )
        await self._until(lambda: self.answered >= answered)
        return {"seconds": round(time.perf_counter() - begun, 3), "refused": dict(self.refusals)}

    async def beat(self, *, on: bool) -> dict[str, Any]:
        if self._beats is not None:
            self._beats.cancel()
            self._beats = None
        if on:
            self._beats = asyncio.create_task(self._beat())
        return {}

    async def beat_once(self) -> dict[str, Any]:
        """Let each decode send one heartbeat, and wait until all are answered."""
        decodes = [decode for decode in self.decodes.values() if decode.up]
        answered = self.seen["Heartbeat"] + len(decodes)
        for number, decode in enumerate(decodes):
            decode.beat()
            if number % 32 == 31:
                await asyncio.sleep(0)
        await self._until(lambda: self.seen["Heartbeat"] >= answered)
        return {"beats": len(decodes)}

    async def rooms(self, *, first: int, count: int) -> dict[str, Any]:
        """Lend pages for `count` rooms, each of the next decode, and wait until all end."""
        begun, decodes = time.perf_counter(), [d for d in self.decodes.values() if d.up]
        for number in range(count):
            self._awaited[first + number] = time.perf_counter()
            decodes[number % len(decodes)].lend(first + number)
            if number % 32 == 31:
                await asyncio.sleep(0)
        await self._until(lambda: not self._awaited)
        return {"seconds": round(time.perf_counter() - begun, 3)}

    async def figures(self) -> dict[str, Any]:
        return {"cpu_s": cpu_s(), "decodes": len(self.decodes), "seen": dict(self.seen)}

    async def vanish(self, *, count: int) -> dict[str, Any]:
        """End `count` decodes without a word, as a rack that loses power does."""
        for incarnation in list(self.decodes)[:count]:
            self.decodes.pop(incarnation).transport.abort()
        return {}

    async def part(self) -> dict[str, Any]:
        """Let every decode say goodbye, and wait for the answers."""
        begun = time.perf_counter()
        for decode in self.decodes.values():
            decode.send(wire.Goodbye(**decode.between))
        await self._until(lambda: self.seen["GoodbyeAck"] >= len(self.decodes))
        for decode in self.decodes.values():
            decode.transport.close()
        self.decodes.clear()
        return {"seconds": round(time.perf_counter() - begun, 3)}

    async def close(self) -> None:
        await self.beat(on=False)
        for decode in self.decodes.values():
            decode.transport.abort()
        for _, _, pool in self._pools:
            pool.close()

    # --- what the decodes do

    def received(self, decode: Decode, got: wire.Message) -> None:
        self.seen[type(got).__name__] += 1
        if type(got) is wire.Registered:
            self.answered += not decode.up
            decode.up = True
            if got.refusal:
                self.refusals[got.refusal] += 1
            self._changed.set()
        elif type(got) is wire.Heartbeat:
            decode.pace_s = got.pace_ms / 1000
            self._changed.set()
        elif type(got) is wire.ChunkDone:
            self.round_trips_s.append(time.perf_counter() - self._awaited.pop(got.room))
            decode.settled, decode.beats_at_s = GrantId(got.grant + 1), 0.0
            self._changed.set()
        elif type(got) is wire.GoodbyeAck:
            self._changed.set()
        elif type(got) is wire.Goodbye:
            decode.send(wire.GoodbyeAck(**decode.between))

    def lost(self, decode: Decode) -> None:
        if self.decodes.get(decode.incarnation) is decode:
            self.seen["connections lost"] += 1

    async def _beat(self) -> None:
        """Send the heartbeats of all decodes, evenly over each interval."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            decodes = list(self.decodes.values())
            for turn in range(SLICES):
                now = loop.time()
                for decode in decodes[turn::SLICES]:
                    if decode.up and decode.beats_at_s <= now:
                        decode.beat()
                        # A little early, because turns are not exact.
                        decode.beats_at_s = now + decode.pace_s - self._heartbeat_s / 2
                due_s += self._heartbeat_s / SLICES
                await asyncio.sleep(max(0.0, due_s - loop.time()))

    async def _until(self, holds: Any) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


if __name__ == "__main__":

    async def main() -> None:
        await serve(Crowd())

    sys.exit(uvloop.run(main()))
