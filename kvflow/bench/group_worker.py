"""The process of one rank in `kvflow bench group`. `child.py` describes how it takes commands.

    python -m kvflow.bench.group_worker

Rank 0 also has the leader's shell. A room is matched as soon as it opens, and done as soon as the
group starts it, so only the agreement takes time. The CPU time of the group includes a ticker that
wakes up each process a thousand times a second. The bare sockets run without a ticker.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from time import monotonic, perf_counter
from typing import Any, cast

import numpy as np
import uvloop
import zmq

from kvflow.bench.child import StallTicker, cpu_s, serve
from kvflow.handlers.group import LeaderShell, MemberShell
from kvflow.handlers.rooms import PrefillRoom
from kvflow.handlers.shell import Answer
from kvflow.protocols.errors import Cause, Code, room_error
from kvflow.protocols.group.leader import GroupLeader
from kvflow.protocols.group.member import GroupMember
from kvflow.protocols.wire.messages import Incarnation, RoomId
from kvflow.telemetry.counters import Counts
from kvflow.transports.control.zmq import bind_router, connect_dealer
from kvflow.transports.host.identity import own_identity, wait_dead

HOST = "127.0.0.1"
LEADER_LIFE = 1_000
JOIN_S = 30.0
BARE_HEADER = 8  # a bare frame begins with this many bytes, which name its request


class SwiftRoom(PrefillRoom):
    """A rank's room that moves no page and waits only for the group."""

    def __init__(self, room: RoomId) -> None:
        # The base class is not set up: this room belongs to no prefill shell and has no record.
        self._room = room
        self.when_done: Answer[None] = Answer()

    @property
    def room(self) -> RoomId:
        return self._room

    async def matched(self) -> int:
        return 0

    async def done(self) -> None:
        await self.when_done.get()

    async def released(self) -> None:
        return

    def close(self, cause: Cause | None = None) -> None:
        if not self.when_done.given:
            self.when_done.give(None, room_error(cause or Cause(Code.CLIENT_GONE)))


class GroupWorker:
    """A rank of a real group, whose rooms wait for no transfer."""

    def __init__(self) -> None:
        self._leader: LeaderShell | None = None
        self._member: MemberShell
        self._engine: asyncio.Task[None]
        self._next_room = 1
        self._bare: zmq.Socket[bytes] | None = None
        self._router: zmq.Socket[bytes] | None = None

    async def setup(self, *, rank: int, ranks: int, port: int) -> dict[str, Any]:
        """Join the group at `port`, which rank 0 chooses and returns."""
        self._rank, self._ranks, process = rank, ranks, own_identity()
        if rank == 0:
            socket, port = bind_router(HOST, 0)
            leader = GroupLeader(Incarnation(LEADER_LIFE), ranks, now=monotonic(), process=process)
            self._leader = LeaderShell(
                leader,
                socket=socket,
                refuse_room=lambda room, cause: None,
                wait_dead=wait_dead,
                counts=Counts(),
                now=monotonic,
            )
        member = GroupMember(Incarnation(rank + 1), rank, ranks, now=monotonic(), process=process)
        self._member = MemberShell(
            member,
            socket=connect_dealer(f"tcp://{HOST}:{port}", rank + 1),
            open_room=lambda _key, room, request: SwiftRoom(room),
            refuse_room=lambda room, cause: None,
            wait_dead=wait_dead,
            counts=Counts(),
            now=monotonic,
        )
        self._engine = asyncio.create_task(self._land())
        return {"port": port}

    async def _land(self) -> None:
        """Act as the engine of this rank: end every room as soon as the group starts it."""
        while True:
            request = await self._member.started()
            cast(SwiftRoom, request.room).when_done.give(None)

    async def joined(self) -> dict[str, Any]:
        """Wait, at rank 0, until every rank is in the group."""
        assert self._leader is not None
        async with asyncio.timeout(JOIN_S):
            # Polling is good enough: it ends before the measurements begin.
            while self._leader.leader.unavailable_reason:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return {}

    # --- the group

    async def begin(self) -> dict[str, Any]:
        self._ticker, self._cpu_before_s = StallTicker(), cpu_s()
        return {}

    async def end(self) -> dict[str, Any]:
        return {"cpu_s": cpu_s() - self._cpu_before_s, **self._ticker.stalls()}

    async def requests(self, *, count: int, concurrency: int, request_bytes: int) -> dict[str, Any]:
        """Run `count` requests through the group, at rank 0, with `concurrency` open at a time."""
        assert self._leader is not None
        shell, request, took_s, left = self._leader, bytes(request_bytes), [], count
        decisions_before = shell.leader.decisions

        async def client() -> None:
            nonlocal left
            while left:
                left -= 1
                self._next_room, room = self._next_room + 1, self._next_room
                opened_s = perf_counter()
                await shell.open(room, request).decided()
                took_s.append(perf_counter() - opened_s)

        begun_s = perf_counter()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        seconds = perf_counter() - begun_s
        return {
            "seconds": seconds,
            "decisions": shell.leader.decisions - decisions_before,
            **_latency(took_s),
        }

    async def rest(self) -> dict[str, Any]:
        """Return how many requests this rank still holds, and how many errors its handlers had."""
        requests = len(self._member.requests) + len(self._member.member.tickets)
        errors = self._member.counts.handler_errors
        if self._leader is not None:
            requests += len(self._leader.requests) + len(self._leader.leader.requests)
            errors += self._leader.counts.handler_errors
        return {"requests": requests, "errors": errors}

    # --- the same frames over bare sockets

    async def bare_setup(self, *, port: int) -> dict[str, Any]:
        """Open a ROUTER at rank 0, and a DEALER at each rank, rank 0 included."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        if self._rank == 0:
            self._router = context.socket(zmq.ROUTER)
            port = self._router.bind_to_random_port(f"tcp://{HOST}")
        self._bare = context.socket(zmq.DEALER)
        self._bare.setsockopt(zmq.ROUTING_ID, b"%d" % self._rank)
        self._bare.connect(f"tcp://{HOST}:{port}")
        # The ROUTER can reach this rank only after it receives this frame.
        self._bare.send(b"")
        return {"port": port}

    async def bare_ready(self) -> dict[str, Any]:
        """Wait, at rank 0, until every rank is connected."""
        assert self._router is not None
        self._peers = [
            (await asyncio.to_thread(self._router.recv_multipart))[0] for _ in range(self._ranks)
        ]
        return {}

    async def bare(
        self, *, count: int, concurrency: int, sizes: list[int], vote_bytes: int
    ) -> dict[str, Any]:
        """Send and receive the frames of `count` requests over the bare sockets, in threads.

        For each request rank 0 sends every rank a frame of each of `sizes` in turn. Every rank,
        rank 0 included, answers each frame but the last with a frame of `vote_bytes` bytes.
        """
        before_s, begun_s = cpu_s(), perf_counter()
        frames, votes = count * len(sizes), count * (len(sizes) - 1)
        work = [asyncio.to_thread(self._answer, frames, votes, vote_bytes)]
        if self._rank == 0:
            work.append(asyncio.to_thread(self._ask, count, concurrency, sizes))
        *_, took_s = await asyncio.gather(*work)
        seconds = perf_counter() - begun_s
        return {"seconds": seconds, "cpu_s": cpu_s() - before_s, **_latency(took_s)}

    def _answer(self, frames: int, votes: int, vote_bytes: int) -> list[float]:
        """Receive `frames` frames, and answer the `votes` frames among them that ask for a vote."""
        # The byte after the header is 1 in a frame that asks for a vote.
        socket, padding = self._bare, bytes(vote_bytes - BARE_HEADER)
        assert socket is not None
        for _ in range(frames):
            frame = socket.recv()
            if frame[BARE_HEADER]:
                socket.send(frame[:BARE_HEADER] + padding)
                votes -= 1
        assert votes == 0
        return []

    def _ask(self, count: int, concurrency: int, sizes: list[int]) -> list[float]:
        router, peers, last = self._router, self._peers, len(sizes) - 1
        assert router is not None
        paddings = [
            bytes([n < last]) + bytes(size - BARE_HEADER - 1) for n, size in enumerate(sizes)
        ]
        answers: Counter[bytes] = Counter()
        begun_s: dict[bytes, float] = {}
        took_s: list[float] = []
        waiting = deque(range(count))

        def send(name: bytes, stage: int) -> None:
            frame = name + paddings[stage]
            for peer in peers:
                router.send_multipart((peer, frame))

        def begin() -> None:
            name = waiting.popleft().to_bytes(BARE_HEADER, "big")
            begun_s[name] = perf_counter()
            send(name, 0)

        for _ in range(min(concurrency, count)):
            begin()
        while begun_s:
            _, frame = router.recv_multipart()
            name = frame[:BARE_HEADER]
            answers[name] += 1
            # The next stage begins once every rank answers this one.
            stage, rest = divmod(answers[name], len(peers))
            if rest:
                continue
            send(name, stage)
            if stage == last:
                del answers[name]
                took_s.append(perf_counter() - begun_s.pop(name))
                if waiting:
                    begin()
        return took_s

    async def close(self) -> None:
        self._engine.cancel()
        await self._member.stop()
        self._member.socket.close()
        if self._leader is not None:
            await self._leader.close()
            self._leader.socket.close()
        for bare in (self._bare, self._router):
            if bare is not None:
                bare.close(linger=0)


def _latency(took_s: list[float]) -> dict[str, float]:
    if not took_s:
        return {}
    p50, p99 = np.percentile(took_s, (50, 99)) * 1e3
    return {"p50_ms": float(p50), "p99_ms": float(p99)}


if __name__ == "__main__":
    uvloop.run(serve(GroupWorker()))
