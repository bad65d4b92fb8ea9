"""A prefill and a decode over real ZMQ, real shared memory and one uvloop, with their sockets
tapped.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import KvflowError, WireError
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machines.peer import PeerPhase
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import ControlSocket, PlaneAddress
from kvflow.protocols.wire.codec import parse_at_decode, parse_at_prefill, routing_id
from kvflow.protocols.wire.messages import (
    WIRE_VERSION,
    Abort,
    AbortAck,
    Announce,
    Begun,
    ChunkDone,
    Goodbye,
    GoodbyeAck,
    GrantId,
    Heartbeat,
    Incarnation,
    Register,
    Registered,
    RoomFailed,
    ToPrefill,
)
from kvflow.testing.pair import small_layout, until
from kvflow.transports.control.zmq import bind_router, connect_dealer
from kvflow.transports.data.local import LocalPlane
from tests.hostile.tables import tables

TIMING = Timing(heartbeat_s=0.2, lost_after_s=2.0, repeat_after_s=0.2, rendezvous_s=3.0)
PROMPT = range(8)
END = b"the end of an attack "


def register(prefill: int, me: int, address: PlaneAddress, layout: PoolLayout) -> Register:
    """What a decode that calls itself `me`, and this memory its own, says first."""
    return Register(
        source=Incarnation(prefill),
        target=Incarnation(me),
        wire_version=WIRE_VERSION,
        layout=layout,
        address=address,
        fresh_from=GrantId(1),
    )


class Tap:
    """A control socket that says, of every frame it hands over, which counter it must raise."""

    def __init__(self, socket: ControlSocket, judge: Callable[[bytes, bytes], str]) -> None:
        self._socket, self._judge = socket, judge
        self.seen: Counter[str] = Counter()
        self.ends: set[bytes] = set()
        self._unread: deque[tuple[bytes, bytes]] = deque()

    @property
    def lockout_reason(self) -> str:
        return self._socket.lockout_reason

    def send(self, frame: bytes, peer: bytes = b"", at_once: bool = False) -> bool:
        return self._socket.send(frame, peer, at_once)

    async def receive(self) -> list[tuple[bytes, bytes]]:
        """One at a time: what a frame must raise depends on what the one before it has changed."""
        if not self._unread:
            self._unread += await self._socket.receive()
        peer, frame = self._unread.popleft()
        self.seen[self._judge(peer, frame)] += 1
        if frame.startswith(END):
            self.ends.add(frame)
        return [(peer, frame)]

    def sender_address(self) -> str:
        return self._socket.sender_address()

    def close(self) -> None:
        self._socket.close()


class Nodes:
    """Both nodes, and what is left in them."""

    def __init__(self) -> None:
        layout = small_layout(512)
        self.pools = [PagedPool.allocate(layout) for _ in range(2)]
        source, target = self.pools
        self.taps: dict[str, Tap] = {}  # by role
        bounds = Bounds(decodes_per_process=8)
        self.prefill = PrefillNode(
            source, LocalPlane(source.segment), timing=TIMING, bounds=bounds, bind=self._bind
        )
        self.decode = DecodeNode(
            target, LocalPlane(target.segment), timing=TIMING, connect=self._connect
        )
        self.prefills, self.decodes = [self.prefill], [self.decode]
        self._next_room = 1

    def _bind(self, host: str, port: int) -> tuple[Tap, int]:
        socket, port = bind_router(host, port)
        self.taps["prefill"] = Tap(socket, self._judge_to_prefill)
        return self.taps["prefill"], port

    def _connect(self, control: str, incarnation: int) -> ControlSocket:
        socket = connect_dealer(control, incarnation)
        if control == self.prefill.control:
            return socket
        # The link to a prefill that is none.
        self.taps["decode"] = Tap(socket, self._judge_to_decode)
        return self.taps["decode"]

    def _judge_to_prefill(self, peer: bytes, frame: bytes) -> str:
        try:
            message = parse_at_prefill(frame)
        except WireError:
            return "malformed"
        if peer != routing_id(message.target):
            return "foreign"
        if message.source != self.prefill.incarnation:
            return "stale"
        if isinstance(message, Goodbye):
            return "taken"  # it is answered, whether prefill knows the decode or not
        if isinstance(message, Register):
            return (
                "stale"
                if message.target in self.prefill.shell.endpoint.core.former.parted
                else "taken"
            )
        # This prefill has not said goodbye.
        if self._unknown(message) or isinstance(message, GoodbyeAck):
            return "stale"
        return (
            "foreign"
            if isinstance(message, Heartbeat) and self._settles_unseen(message)
            else "taken"
        )

    def _settles_unseen(self, message: Heartbeat) -> bool:
        """It claims to have done with grants that were never offered here."""
        seen = self.prefill.shell.endpoint.core.peers[message.target].grants.seen_below
        return message.settled_below > seen or any(
            not start < end <= seen for start, end in message.settled
        )

    def _unknown(self, message: ToPrefill) -> bool:
        """Of a decode that is not registered, or whose way in is still being opened."""
        known = self.prefill.shell.endpoint.core.peers.get(message.target)
        opening = known is not None and known.phase is PeerPhase.OPENING
        return known is None or (opening and not isinstance(message, Announce | Abort | Heartbeat))

    def _judge_to_decode(self, _: bytes, frame: bytes) -> str:
        """On a link without rooms."""
        try:
            message = parse_at_decode(frame)
        except WireError:
            return "malformed"
        if message.target != self.decode.incarnation:
            return "foreign"
        if isinstance(message, Registered):
            return "taken"
        peers = {peer.key.incarnation: peer for peer in self.decode.shell.endpoint.peers}
        peer = peers.get(message.source)
        if peer is None or getattr(message, "rank", peer.info.rank) != peer.info.rank:
            return "foreign"
        return (
            "stale" if isinstance(message, Begun | ChunkDone | RoomFailed | AbortAck) else "taken"
        )

    def number(self) -> int:
        """Of a room that nobody has had."""
        self._next_room += 1
        return self._next_room

    def number_anew(self) -> None:
        """From here on rooms have numbers that nobody can have guessed, as those of routers."""
        self._next_room = secrets.randbits(62)

    async def room(self, number: int) -> None:
        target = await self.decode.room(number, [self.prefill.info], PROMPT)
        source = self.prefill.room(number, PROMPT)
        async with source, target:
            await source.matched()
            pages = self.prefill.pages.take(2, number)
            source.on_end(lambda: self.prefill.pages.give_back(pages, number))
            source.send(pages, last=True, handoff=b"h")
            assert await target.landed() == b"h"

    async def rooms_per_s(self, count: int, lanes: int = 32) -> tuple[float, float]:
        """`count` good rooms, `lanes` at a time: per second,
        and per second of this process's CPU.
        """
        numbers = iter(range(self._next_room, self._next_room + count))
        self._next_room += count

        async def lane() -> None:
            for number in numbers:
                await self.room(number)

        started, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(lane() for _ in range(lanes)))
        return count / (time.perf_counter() - started), count / (time.process_time() - cpu)

    def dropped(self) -> dict[str, dict[str, int]]:
        return {node.role: dict(node.counts.dropped) for node in (self.prefill, self.decode)}

    async def healed(self) -> float:
        """Seconds until rooms go well again: a link whose name was stolen dials anew once it is
        found silent.
        """
        started = time.perf_counter()
        while True:
            self._next_room += 1
            try:
                await self.room(self._next_room)
                return time.perf_counter() - started
            except KvflowError:
                assert time.perf_counter() - started < 30
                await asyncio.sleep(0.1)

    async def settled(self) -> dict[str, int]:
        """The tables once no room, grant, loan or page of anybody is open any more."""
        names = (
            "prefill rooms",
            "open grants",
            "decode rooms",
            "loans",
            "quarantined pages",
            "pages away",
        )

        def idle() -> bool:
            found = tables(self)
            return not any(found[name] for name in names)

        try:
            await until(idle, 30)
        except TimeoutError:
            raise AssertionError(f"not at rest: {tables(self)}") from None
        return tables(self)


@asynccontextmanager
async def nodes() -> AsyncIterator[Nodes]:
    made = Nodes()
    await made.prefill.start()
    await made.decode.start()
    try:
        yield made
    finally:
        await made.decode.close()
        await made.prefill.close()
        for pool in made.pools:
            pool.close()


def tasks() -> set[str]:
    """Names of kvflow's own tasks: none may die."""
    return {task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("kvflow")}


Report = dict[str, Any]
