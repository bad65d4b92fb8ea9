"""Gathers the overview: one look at all workers per interval, shared by everybody who looks.

While nobody looks, no worker is asked. A worker that does not answer delays no one: its last
figures stay, with their age, and it has one question at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager

import aiohttp
import msgspec

from kvflow.http.authorization import Keys, bearer
from kvflow.http.errors import Failure
from kvflow.router.identity import read_at_most
from kvflow.router.overview.answers import Info, Peer, Room, read_info, read_peers, read_rooms
from kvflow.router.overview.document import (
    MAX_SHOWN_ROOMS,
    Point,
    RouterView,
    Seen,
    Snapshot,
    merged_rooms,
    point,
    worker_view,
)
from kvflow.router.overview.rates import WINDOW_S, Window
from kvflow.router.workers import Worker, Workers

INTERVAL_S = 1.0
# Share of an interval in which workers may answer. A later answer belongs to the next look.
PATIENCE = 0.6
WORKER_TIMEOUT_S = 3.0
MAX_ANSWER_BYTES = 512 << 10
MAX_SHOWN_WORKERS = 64
REMEMBERED_POINTS = 300
ENDED_ROOMS = MAX_SHOWN_ROOMS  # ended rooms that a worker tells of; open ones always
# Without an answer for so many intervals, an average would hide what happened meanwhile.
LONGEST_GAP = 5
_log = logging.getLogger("kvflow.router")


class Overview:
    """The overview of one router."""

    def __init__(
        self,
        workers: Workers,
        session: aiohttp.ClientSession,
        keys: Keys,
        own: Callable[[], RouterView],
        *,
        asks: bool,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """`own` returns the router's state. `asks` is False for workers without kvflow's routes."""
        self._workers, self._session, self._keys, self._own = workers, session, keys, own
        self._asks, self._interval_s = asks, interval_s
        self.looks = 0
        self.viewers = 0
        self.points: deque[Point] = deque(maxlen=REMEMBERED_POINTS)
        self._seen: dict[Worker, Seen] = {}
        self._windows: dict[Worker, Window] = {}
        self._asking: dict[Worker, asyncio.Task[None]] = {}
        self._began_s: float | None = None
        self._latest = b""
        self._look: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        # Set, and replaced by a new event, at each look.
        self._changed = asyncio.Event()
        self._closed = False

    async def close(self) -> None:
        """Stop asking, and end the streams of all viewers. Idempotent."""
        self._closed = True
        self._changed.set()
        tasks = [task for task in (self._watch, self._look, *self._asking.values()) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def latest(self) -> bytes:
        """Return a snapshot as JSON, at most one interval old."""
        await self._looked()
        return self._latest

    @contextmanager
    def viewing(self) -> Iterator[None]:
        """Count one more viewer until the block ends. Workers are asked while there are any."""
        self.viewers += 1
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._look_on(), name="kvflow-overview")
        try:
            yield
        finally:
            self.viewers -= 1

    async def snapshots(self) -> AsyncGenerator[bytes, None]:
        """Yield each new snapshot as JSON, until `close`. A slow reader misses some."""
        await self._looked()
        while not self._closed:
            sent = self.looks
            yield self._latest
            while self.looks == sent and not self._closed:
                await self._changed.wait()

    def history(self) -> bytes:
        """Return the points of the last looks as JSON, the oldest first."""
        return msgspec.json.encode({"points": list(self.points)})

    async def _look_on(self) -> None:
        loop = asyncio.get_running_loop()
        while self.viewers and not self._closed:
            await self._looked()
            assert self._began_s is not None
            await asyncio.sleep(max(0.0, self._began_s + self._interval_s - loop.time()))

    async def _looked(self) -> None:
        """Return when a look has ended that began at most one interval ago."""
        now_s = asyncio.get_running_loop().time()
        if self._look is not None and not self._look.done():
            # A viewer who leaves must not end the look for the others.
            await asyncio.shield(self._look)
        elif self._began_s is None or now_s - self._began_s >= self._interval_s:
            self._began_s = now_s
            self._look = asyncio.create_task(self._look_once())
            await asyncio.shield(self._look)

    async def _look_once(self) -> None:
        known = self._workers.all[:MAX_SHOWN_WORKERS]
        for worker in [worker for worker in self._seen if worker not in known]:
            del self._seen[worker], self._windows[worker]
        for worker in known:
            self._seen.setdefault(worker, Seen())
            self._windows.setdefault(worker, Window())
            if self._asks and worker not in self._asking:
                self._asking[worker] = asyncio.create_task(self._ask(worker))
        if self._asking:
            await asyncio.wait(self._asking.values(), timeout=self._interval_s * PATIENCE)
        for worker, task in list(self._asking.items()):
            if task.done():
                del self._asking[worker]
        self._publish(known)

    async def _ask(self, worker: Worker) -> None:
        """Ask one worker for everything, and keep what it answers."""
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(WORKER_TIMEOUT_S):
                answers = await self._answers(worker)
        except TimeoutError:
            text = f"no answer within {WORKER_TIMEOUT_S:g} s"
        except (_RefusedError, aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            text = str(error)[:200] or type(error).__name__
        except Exception as error:  # noqa: BLE001 - the other workers are shown; logged
            _log.exception("asking %s for the overview failed", worker.url)
            text = f"asking it failed: {type(error).__name__}"
        else:
            self._take(worker, began_s, *answers)
            return
        if (seen := self._seen.get(worker)) is not None:
            seen.trouble, seen.change = text, None

    async def _answers(self, worker: Worker) -> tuple[Info, tuple[Room, ...], tuple[Peer, ...]]:
        operator = self._keys.of_operator
        # One after the other over one connection: this is never urgent, and requests may be.
        info = read_info(await self._read(worker, "/server_info", self._keys.api or operator))
        rooms = read_rooms(await self._read(worker, f"/rooms?ended={ENDED_ROOMS}", operator))
        return info, rooms, read_peers(await self._read(worker, "/peers", operator))

    async def _read(self, worker: Worker, path: str, key: str) -> bytes:
        url = f"{worker.url}{path}"
        async with self._session.get(url, headers=bearer(key), allow_redirects=False) as answer:
            raw = await read_at_most(answer, MAX_ANSWER_BYTES)
        if raw is None:
            raise _RefusedError(f"{path} is larger than {MAX_ANSWER_BYTES >> 10} KiB")
        if answer.status != 200:
            reason = Failure.read(answer.status, raw).message
            raise _RefusedError(f"{path} answered {answer.status}: {reason}")
        return raw

    def _take(
        self,
        worker: Worker,
        at_s: float,
        info: Info,
        rooms: tuple[Room, ...],
        peers: tuple[Peer, ...],
    ) -> None:
        # A worker that has left meanwhile is shown no more.
        if (window := self._windows.get(worker)) is None:
            return
        window.add(at_s, info, LONGEST_GAP * self._interval_s)
        self._seen[worker] = Seen(info, rooms, peers, at_s, "", window.change())

    def _publish(self, known: list[Worker]) -> None:
        now_s, own, troubles = (
            asyncio.get_running_loop().time(),
            self._own(),
            self._workers.troubles(),
        )
        # A worker can leave during the look.
        shown = [worker for worker in known if worker in troubles]
        seen = {worker: self._seen[worker] for worker in shown}
        now = point(seen, time.time(), own.running, own.waiting)
        rooms, rooms_left_out = merged_rooms(seen)
        snapshot = Snapshot(
            interval_s=self._interval_s,
            window_s=WINDOW_S,
            router=own,
            now=now,
            workers=tuple(
                worker_view(worker, troubles[worker], one, now_s) for worker, one in seen.items()
            ),
            workers_left_out=max(0, len(troubles) - len(shown)),
            rooms=rooms,
            rooms_left_out=rooms_left_out,
        )
        self.looks += 1
        self.points.append(now)
        self._latest = msgspec.json.encode(snapshot)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class _RefusedError(Exception):
    """A worker's answer that cannot be used. The text says why."""
