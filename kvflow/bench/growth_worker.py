"""The process of one role in `kvflow bench rooms --open`. It takes commands as in `child.py`.

    python -m kvflow.bench.growth_worker prefill|decode

It uses only the library's nodes and rooms, as an engine would, so that it also runs over other
versions of the library (`elsewhere.py`).
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import uvloop

from kvflow.bench.child import StallTicker, cpu_s, rss_kib, serve
from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import KvflowError
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.ports import ControlSocket
from kvflow.protocols.wire.ranks import RankInfo, rank_from_json, rank_to_json
from kvflow.transports.control.zmq import bind_router, connect_dealer
from kvflow.transports.data.select import open_plane

PAGE_SIZE = 16
PROMPT = np.arange(PAGE_SIZE, dtype=np.int64)  # one page per room
# The watch goes on after all rooms end, while messages are repeated and loans await proof.
AFTERMATH_S = 1.0


class CountedSocket:
    """A `protocols.ports.ControlSocket` that wraps another one, and counts frames and bytes."""

    def __init__(self, socket: ControlSocket, traffic: dict[str, int]) -> None:
        self._socket, self._traffic = socket, traffic

    @property
    def lockout_reason(self) -> str:
        return self._socket.lockout_reason

    def send(self, frame: bytes, peer: bytes = b"", at_once: bool = False) -> bool:
        self._traffic["sent"] += 1
        self._traffic["sent_bytes"] += len(frame)
        return self._socket.send(frame, peer, at_once)

    async def receive(self) -> list[tuple[bytes, bytes]]:
        burst = await self._socket.receive()
        self._traffic["received"] += len(burst)
        return burst

    def sender_address(self) -> str:
        return self._socket.sender_address()

    def close(self) -> None:
        self._socket.close()


class GrowthWorker:
    """The commands of one role. They open rooms, await each room's end in a task, and measure."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._pool: PagedPool
        self._prefills: list[PrefillNode] = []
        self._decode: DecodeNode
        self._ranks: list[RankInfo] = []
        self._waiting: set[asyncio.Task[None]] = set()
        self._ended_at_s: list[float] = []
        self._all_ended = asyncio.Event()
        self._traffic = {"sent": 0, "sent_bytes": 0, "received": 0}

    async def setup(self, *, plane: str, pages: int, ranks: list[Any]) -> dict[str, Any]:
        layout = build_layout([("kv", "bfloat16", (1, 8))], page_size=PAGE_SIZE, num_pages=pages)
        self._pool = PagedPool.allocate(layout)
        if self._role == "prefill":
            return await self.link(plane=plane, links=1, ranks=[])
        data_plane = await asyncio.to_thread(open_plane, plane, self._pool.segment)
        self._decode = DecodeNode(self._pool, data_plane, connect=self._connect)
        await self._decode.start()
        return await self.link(plane=plane, links=1, ranks=ranks)

    async def link(self, *, plane: str, links: int, ranks: list[Any]) -> dict[str, Any]:
        """At prefill, start nodes until there are `links`. At decode, store prefill's `ranks`."""
        while self._role == "prefill" and len(self._prefills) < links:
            data_plane = await asyncio.to_thread(open_plane, plane, self._pool.segment)
            node = PrefillNode(self._pool, data_plane, bind=self._bind)
            await node.start()
            self._prefills.append(node)
        self._ranks = [rank_from_json(rank) for rank in ranks]
        return {"ranks": [rank_to_json(node.info) for node in self._prefills]}

    async def open(
        self, *, first: int, count: int, first_link: int = 0, links: int = 1
    ) -> dict[str, Any]:
        """Open `count` rooms over `links` links. At prefill, wait until all are matched."""
        opened: list[Callable[[], Awaitable[Any]]] = []
        halves = []
        for number in range(first, first + count):
            at = first_link + (number - first) % links
            if self._role == "prefill":
                half = self._prefills[at].room(number, PROMPT)
                halves.append(half)
                opened.append(half.done)
            else:
                opened.append((await self._decode.room(number, [self._ranks[at]], PROMPT)).landed)
            # An engine receives requests one by one, and not all in one turn of the loop.
            await asyncio.sleep(0)
        await asyncio.gather(*(half.matched() for half in halves))
        self._all_ended.clear()
        self._waiting |= {asyncio.create_task(self._wait(ended)) for ended in opened}
        # One turn of the loop starts every task, so all of them wait before the driver continues.
        await asyncio.sleep(0)
        return {}

    async def opening(self, *, on: bool) -> dict[str, Any]:
        """If `on`, begin to measure. Otherwise end, and return the stalls and memory per room."""
        if on:
            self._ticker, self._rss_before = StallTicker(), rss_kib()
            return {}
        grown_kib = (rss_kib() - self._rss_before) / max(1, len(self._waiting))
        return {**self._ticker.stalls(), "memory_kib_per_room": round(grown_kib, 2)}

    async def freeze(self) -> dict[str, Any]:
        """Exempt all live objects from garbage collection, as the roles do."""
        gc.freeze()
        return {}

    async def collect(self, *, frozen: bool) -> dict[str, Any]:
        """Measure the pauses of two full collections: after `gc.freeze`, and over all objects."""
        gc.freeze()
        frozen_ms = _full_collection_ms()
        gc.unfreeze()
        full_ms, objects = _full_collection_ms(), len(gc.get_objects())
        if frozen:
            gc.freeze()
        return {"full_ms": full_ms, "frozen_ms": frozen_ms, "objects": objects}

    async def rest(self, *, seconds: float) -> dict[str, Any]:
        """Measure CPU time, traffic and stalls for `seconds` in which no room changes."""
        ticker, cpu_before, before = StallTicker(), cpu_s(), dict(self._traffic)
        await asyncio.sleep(seconds)
        cpu = cpu_s() - cpu_before
        rates = {
            f"{name}_per_s": round((self._traffic[name] - before[name]) / seconds, 1)
            for name in before
        }
        # `cpu_percent` includes about a percent for the ticker's wake-ups.
        percent = round(cpu / seconds * 100, 2)
        return {**ticker.stalls(), "cpu_percent": percent, **rates, "open": len(self._waiting)}

    async def ending(self, *, within_s: float, pages_return: bool) -> dict[str, Any]:
        """Wait until every room ends, and if `pages_return`, until decode's pages are free.

        The returned times come from `time.monotonic`, which all processes of a machine share.
        """
        ticker = StallTicker()
        async with asyncio.timeout(within_s):
            await self._all_ended.wait()
            num_pages = self._pool.layout.num_pages
            while pages_return and self._decode.pages.free_pages < num_pages:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        pages_at_s = time.monotonic()
        await asyncio.sleep(AFTERMATH_S)
        first_s, last_s = min(self._ended_at_s), max(self._ended_at_s)
        times = {"first_at_s": first_s, "last_at_s": last_s, "pages_at_s": pages_at_s}
        return {**ticker.stalls(), "rooms": len(self._ended_at_s), **times}

    async def close(self) -> None:
        for node in self._prefills if self._role == "prefill" else [self._decode]:
            await node.close()

    async def _wait(self, ended: Callable[[], Awaitable[Any]]) -> None:
        try:
            await ended()
        except KvflowError:
            self._ended_at_s.append(time.monotonic())
        task = asyncio.current_task()
        assert task is not None
        self._waiting.discard(task)
        if not self._waiting:
            self._all_ended.set()

    def _bind(self, host: str, port: int) -> tuple[ControlSocket, int]:
        socket, bound = bind_router(host, port)
        return CountedSocket(socket, self._traffic), bound

    def _connect(self, control: str, incarnation: int) -> ControlSocket:
        return CountedSocket(connect_dealer(control, incarnation), self._traffic)


def _full_collection_ms() -> float:
    # Like `StallTicker`, this measures the thread's CPU time, so other processes do not count.
    begun = time.thread_time()
    gc.collect()
    return round((time.thread_time() - begun) * 1e3, 3)


if __name__ == "__main__":
    uvloop.run(serve(GrowthWorker(sys.argv[1])))
