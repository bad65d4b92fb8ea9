"""The process of one role in `kvflow bench abort`.

    python -m kvflow.bench.abort_worker prefill|decode

Commands in addition to those of `worker.py`: reserve, bare_stop, abort (both sides), look (decode).
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import uvloop

from kvflow.bench.canary import CanaryPool
from kvflow.bench.child import serve
from kvflow.bench.worker import Worker, source_slice
from kvflow.handlers.rooms import DecodeRoom
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import AbortedError, KvflowError, TransferError
from kvflow.protocols.machines import prefill_room
from kvflow.protocols.pages.layout import PageIndices
from kvflow.transports.control.zmq import ZmqSocket, bind_router, connect_dealer

# uvloop rounds anything shorter down to 0, and the loop would spin.
POLL_S = 0.001
# Reused pages are watched while this many more rooms run, because late writes show up later.
WATCHED_ROOMS = 3
_SCRATCH = "scratch"


class _Reused(NamedTuple):
    """The pages of an aborted room, which `owner` took. If `whole`, every byte is checked."""

    pages: PageIndices
    whole: bool
    owner: tuple[str, int]
    reusable_at_s: float


class AbortWorker(Worker):
    """A worker that aborts its rooms in mid-transfer, and then watches their pages."""

    def __init__(self, role: str) -> None:
        super().__init__(role)
        self._canary: CanaryPool
        self._bare_socket: ZmqSocket | None = None
        self._watched: deque[_Reused] = deque()
        counted = ("foreign_bytes", "pages_hit", "aborts_hit")
        self._seen = dict.fromkeys((*counted, "marked_pages_checked", "whole_pages_checked"), 0)

    async def setup(self, **shape: Any) -> dict[str, Any]:
        reply = await super().setup(**shape)
        self._canary = CanaryPool(self.pool)
        if self.role == "prefill":
            await asyncio.to_thread(self._canary.fill)
        return reply

    async def reserve(self, *, pages: int) -> dict[str, Any]:
        """Prepare for `bare_stop`.

        Decode takes `pages` pages for the bare writes and marks all others, because tuning the bare
        plane (`raw_setup`) wrote into them. Prefill opens a socket.
        """
        if self.role == "prefill":
            self._bare_socket, port = bind_router("127.0.0.1", 0)
            return {"control": f"tcp://127.0.0.1:{port}"}
        kept, others = self.node.pages.take(pages, _SCRATCH), self.node.pages.free_pages
        left = self.node.pages.take(others, "wipe")
        self._canary.mark(left)
        # The pages go back one by one, in the order of `left`. `take` sorted them if there are
        # at least `MANY_PAGES`. Fewer pages stay in their scattered order.
        for one in left[:, None]:
            self.node.pages.give_back(one, "wipe")
        return {"targets": kept.tolist()}

    async def bare_stop(
        self, *, control: str, targets: list[int], window_pages: int, after_s: float
    ) -> dict[str, Any]:
        """Move windows to `targets` over the bare data plane, until decode asks prefill to stop.

        Decode asks after `after_s`, and returns the seconds until prefill's answer. They cover the
        rest of the window, a change of threads, and two messages over a control socket, without any
        room. Prefill returns the seconds of the last window.
        """
        if self.role == "decode":
            socket = self._bare_socket = self._bare_socket or connect_dealer(
                control, self.node.incarnation
            )
            socket.send(b"")
            # Prefill answers as it starts to move windows, so `after_s` starts at about that time.
            await socket.receive()
            await asyncio.sleep(after_s)
            asked_at_s = time.monotonic()
            socket.send(b"")
            await socket.receive()
            return {"seconds": time.monotonic() - asked_at_s}
        assert self._bare_socket is not None
        sources, where = self.source_pages[: len(targets)], np.array(targets, dtype=np.int32)
        stop = threading.Event()

        def move_on() -> float:
            seconds = 0.0
            for first in itertools.cycle(range(0, len(where) - window_pages + 1, window_pages)):
                window = slice(first, first + window_pages)
                seconds = self.raw_writer.write(sources[window], where[window])
                if stop.is_set():
                    break
            return seconds

        ((peer, _),) = await self._bare_socket.receive()
        moving = asyncio.create_task(asyncio.to_thread(move_on))
        try:
            self._bare_socket.send(b"", peer)
            await self._bare_socket.receive()
        finally:
            stop.set()
            seconds = await moving
        self._bare_socket.send(b"", peer)
        return {"seconds": seconds}

    async def abort(self, *, room: int, pages: int, aim: float, whole: bool) -> dict[str, Any]:
        """Run one room, which decode aborts when the fraction `aim` of its pages has moved."""
        prompt = np.arange(pages * self.pool.layout.page_size, dtype=np.int64)
        if self.role == "prefill":
            return await self._send(room, prompt, pages)
        found = await self._receive(room, prompt, aim, whole)
        while len(self._watched) > WATCHED_ROOMS:
            self._let_go()
        return found

    async def look(self, *, after_s: float) -> dict[str, Any]:
        """Check and free the watched pages after `after_s`; return the totals over all aborts."""
        await asyncio.sleep(after_s)
        while self._watched:
            self._let_go()
        return self._seen

    async def close(self) -> None:
        if self._bare_socket is not None:
            self._bare_socket.close()
        await super().close()

    async def _send(self, number: int, prompt: Any, pages: int) -> dict[str, Any]:
        assert isinstance(self.node, PrefillNode)
        room = self.node.room(number, prompt)
        await room.matched()
        at_end: list[int] = []
        # `on_end` runs when the Abort arrives, so `bytes_after` counts bytes that land later.
        room.on_end(lambda: at_end.append(room.bytes_landed))
        room.send(source_slice(self.source_pages, number, pages), last=True)
        try:
            await room.done()
        except AbortedError:
            # `done` raises when the Abort arrives, but writes may still be draining then.
            while room.state.phase not in prefill_room.TERMINAL:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        told = {line.what: line.at_s for line in room.story()}
        drain_s = told["write_ended"] - told.get("abort_received", told["write_ended"])
        return {"bytes_after": room.bytes_landed - at_end[0], "drain_s": drain_s}

    async def _receive(self, number: int, prompt: Any, aim: float, whole: bool) -> dict[str, Any]:
        assert isinstance(self.node, DecodeNode)
        room = await self.node.room(number, self.ranks, prompt)
        moved = 0.0
        while moved < aim and not room.ended:
            await asyncio.sleep(POLL_S)
            moved = self._canary.moved(room.pages)
        # The transfer ended before decode could abort it, so this attempt does not count.
        if room.ended:
            await room.landed()
            self._canary.mark(room.pages)
            room.close()
            return {"aborted": False}
        home: asyncio.Future[_Reused] = asyncio.get_running_loop().create_future()
        aborted_at_s = time.monotonic()
        room.close()
        room.on_end(lambda: self._reuse(room, whole, home))
        reused = await home
        return {"aborted": True, "moved": moved, "seconds": reused.reusable_at_s - aborted_at_s}

    def _reuse(self, room: DecodeRoom, whole: bool, home: asyncio.Future[_Reused]) -> None:
        """Take the pages of an ended room for an owner that writes into them at once."""
        # The pages of the room came back last, so they are the next ones in the free list.
        owner = ("reused", room.room)
        try:
            pages = self.node.pages.take(len(room.pages), owner)
        except KvflowError as error:
            return home.set_exception(error)
        reused = _Reused(pages, whole, owner, time.monotonic())
        if set(pages.tolist()) != set(room.pages.tolist()):
            self.node.pages.give_back(pages, owner)
            return home.set_exception(
                TransferError(f"room {room.room} ended, its pages have not come back")
            )
        self._canary.mark(pages, whole=whole)
        self._watched.append(reused)
        return home.set_result(reused)

    def _let_go(self) -> None:
        # Only this worker owned and marked the pages, so any other byte comes from a late write.
        reused = self._watched.popleft()
        foreign = self._canary.foreign_bytes(reused.pages, whole=reused.whole)
        self._seen["foreign_bytes"] += int(foreign.sum())
        self._seen["pages_hit"] += int(np.count_nonzero(foreign))
        self._seen["aborts_hit"] += bool(foreign.any())
        self._seen["whole_pages_checked" if reused.whole else "marked_pages_checked"] += len(
            reused.pages
        )
        self._canary.mark(reused.pages)
        self.node.pages.give_back(reused.pages, reused.owner)


if __name__ == "__main__":
    uvloop.run(serve(AbortWorker(sys.argv[1])))
