"""The router's view of its workers: which are up, where their registries listen, which to use for a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvflow.protocols.errors import Code, KvflowError
from kvflow.server.http.errors import Failure

_log = logging.getLogger("kvflow.router")
CHECK_TIMEOUT_S = 3.0
DOWN_CHECK_S = 0.25  # between two checks of a worker that is down: one that is back should not wait for its requests
LEAST_CHECK_S = 0.05  # between two checks of one worker, however many requests ask for them
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 10.0


class NoWorkerError(KvflowError):
    """No worker of a role is up; a retry may find one."""

    code = Code.CAPACITY

    def __init__(self, role: str, reasons: list[str]) -> None:
        first = f": {reasons[0]}" if reasons else ""
        super().__init__(f"no {role} worker is up ({len(reasons)} known){first}")


class Worker:
    """One prefill or decode behind the router.

    A worker that loses connections although its /health is fine is in backoff: it is used only where there is no other
    worker, for longer after each further loss, until a request succeeds or another process answers at its address.
    """

    def __init__(self, role: str, url: str) -> None:
        self.role = role
        self.url = url.rstrip("/")
        self.up = False
        self.unavailable_reason = "not checked yet"
        self.running = 0
        self.served = 0
        self.bootstrap_port: int | None = None
        self.model = ""
        self.incarnation = ""
        self.check_due = asyncio.Event()
        self._losses = 0  # in a row
        self._backoff_until_s = 0.0

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "127.0.0.1"

    def mark_down(self, reason: str) -> None:
        """Take no more requests until the next successful check."""
        if self.up:
            _log.warning("%s %s is down: %s", self.role, self.url, reason)
        self.up, self.unavailable_reason = False, reason

    def mark_lost(self, reason: str, now: float) -> None:
        """A connection to it failed or ended early: it is down until a check succeeds, and in backoff then."""
        self._backoff_until_s = now + min(FIRST_BACKOFF_S * 2**self._losses, LONGEST_BACKOFF_S)
        self._losses = min(self._losses + 1, 16)
        self.mark_down(reason)
        self.check_due.set()

    def mark_served(self) -> None:
        """A request has got its first token, or an answer that is no fault of its worker's."""
        self._losses, self._backoff_until_s = 0, 0.0

    def mark_up(self, info: Any) -> None:
        """Take requests; `info` is the worker's /server_info. A worker of the other role is marked down."""
        mode = info.get("disaggregation_mode") if isinstance(info, dict) else None
        if mode != self.role:
            self.mark_down(f"it is not a {self.role} worker: its disaggregation_mode is {mode!r}")
            return
        port = info.get("disaggregation_bootstrap_port")
        self.bootstrap_port = port if isinstance(port, int) else None
        self.model = str(info.get("served_model_name") or info.get("model_path") or "")
        incarnation = str(info.get("incarnation", ""))
        if incarnation != self.incarnation:
            self.mark_served()
        if not self.up or incarnation != self.incarnation:
            _log.info("%s %s is up", self.role, self.url)
        self.incarnation = incarnation
        self.up, self.unavailable_reason = True, ""

    def in_backoff(self, now: float) -> bool:
        return now < self._backoff_until_s

    def summary(self) -> dict[str, Any]:
        """The entry in the router's /server_info."""
        reason = self.unavailable_reason
        return {"url": self.url, "role": self.role, "up": self.up, "running": self.running, "trouble": reason}


class Workers:
    """All workers, each checked in the background every `poll_s`, more often while it is down."""

    def __init__(
        self, prefill: Iterable[str], decode: Iterable[str], session: aiohttp.ClientSession, poll_s: float
    ) -> None:
        self.all = [*(Worker("prefill", url) for url in prefill), *(Worker("decode", url) for url in decode)]
        self._session = session
        self._poll_s = poll_s
        self._watches: list[asyncio.Task[None]] = []
        self.came_up = asyncio.Event()  # of the next worker that is down now; another one follows then

    async def start(self) -> None:
        """Return after a first check of all workers; further ones follow."""
        await asyncio.gather(*(self._check(worker) for worker in self.all))
        self._watches = [asyncio.create_task(self._watch(worker)) for worker in self.all]

    async def close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)

    def of(self, role: str) -> list[Worker]:
        return [worker for worker in self.all if worker.role == role]

    def ranked(self, role: str, failed: Mapping[Worker, int]) -> list[Worker]:
        """The workers for the next try of a request, the best one first: by how often they have failed it, then those
        that are not in backoff, then by load. Raises: NoWorkerError."""
        choices = [worker for worker in self.of(role) if worker.up]
        if not choices:
            raise NoWorkerError(role, [worker.unavailable_reason for worker in self.of(role)])
        now = asyncio.get_running_loop().time()
        return sorted(choices, key=lambda w: (failed.get(w, 0), w.in_backoff(now), w.running, w.served))

    def complete(self) -> bool:
        """Whether both roles have a worker that is up."""
        return all(any(worker.up for worker in self.of(role)) for role in ("prefill", "decode"))

    async def _watch(self, worker: Worker) -> None:
        while True:
            await asyncio.sleep(LEAST_CHECK_S)
            wait_s = self._poll_s if worker.up else min(self._poll_s, DOWN_CHECK_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await worker.check_due.wait()
            worker.check_due.clear()
            await self._check(worker)

    async def _check(self, worker: Worker) -> None:
        was_up = worker.up
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                await self._ask(worker)
        except TimeoutError:
            worker.mark_down(f"/health took more than {CHECK_TIMEOUT_S:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            worker.mark_down(str(error) or type(error).__name__)
        if worker.up and not was_up:
            came_up, self.came_up = self.came_up, asyncio.Event()
            came_up.set()

    async def _ask(self, worker: Worker) -> None:
        async with self._session.get(f"{worker.url}/health") as health:
            if health.status != 200:
                reason = Failure.read(health.status, await health.read()).message
                worker.mark_down(f"/health answered {health.status}: {reason}")
                return
        async with self._session.get(f"{worker.url}/server_info") as info:
            if info.status != 200:
                worker.mark_down(f"/server_info answered {info.status}")
                return
            worker.mark_up(msgspec.json.decode(await info.read()))
