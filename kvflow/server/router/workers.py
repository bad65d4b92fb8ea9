"""The router's view of its workers: which are up, where their registries listen, which has the least load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvflow.protocols.errors import Code, KvflowError
from kvflow.server.http.errors import message_of

_log = logging.getLogger("kvflow.router")
CHECK_TIMEOUT_S = 3.0


class NoWorkerError(KvflowError):
    """No worker of a role is up; a retry may find one."""

    code = Code.CAPACITY

    def __init__(self, role: str, reasons: list[str]) -> None:
        first = f": {reasons[0]}" if reasons else ""
        super().__init__(f"no {role} worker is up ({len(reasons)} known){first}")


class Worker:
    """One prefill or decode behind the router."""

    def __init__(self, role: str, url: str) -> None:
        self.role = role
        self.url = url.rstrip("/")
        self.up = False
        self.unavailable_reason = "not checked yet"
        self.running = 0
        self.served = 0
        self.bootstrap_port: int | None = None
        self.model = ""

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "127.0.0.1"

    def mark_down(self, reason: str) -> None:
        """Take no more requests until the next successful check."""
        if self.up:
            _log.warning("%s %s is down: %s", self.role, self.url, reason)
        self.up, self.unavailable_reason = False, reason

    def mark_up(self, info: Any) -> None:
        """Take requests; `info` is the worker's /server_info. A worker of the other role is marked down."""
        mode = info.get("disaggregation_mode") if isinstance(info, dict) else None
        if mode != self.role:
            self.mark_down(f"it is not a {self.role} worker: its disaggregation_mode is {mode!r}")
            return
        port = info.get("disaggregation_bootstrap_port")
        self.bootstrap_port = port if isinstance(port, int) else None
        self.model = str(info.get("served_model_name") or info.get("model_path") or "")
        if not self.up:
            _log.info("%s %s is up", self.role, self.url)
        self.up, self.unavailable_reason = True, ""

    def summary(self) -> dict[str, Any]:
        """The entry in the router's /server_info."""
        reason = self.unavailable_reason
        return {"url": self.url, "role": self.role, "up": self.up, "running": self.running, "trouble": reason}


class Workers:
    """All workers, checked in the background every `poll_s`."""

    def __init__(
        self, prefill: Iterable[str], decode: Iterable[str], session: aiohttp.ClientSession, poll_s: float
    ) -> None:
        self.all = [*(Worker("prefill", url) for url in prefill), *(Worker("decode", url) for url in decode)]
        self._session = session
        self._poll_s = poll_s
        self._polling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return after a first check of all workers; further ones follow every `poll_s`."""
        await self.check()
        self._polling = asyncio.create_task(self._poll())

    async def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            with suppress(asyncio.CancelledError):
                await self._polling

    def of(self, role: str) -> list[Worker]:
        return [worker for worker in self.all if worker.role == role]

    def least_loaded(self, role: str, tried: set[Worker]) -> Worker:
        """The worker to use next; of equally loaded ones, the one with the fewest requests. Raises: NoWorkerError."""
        choices = [worker for worker in self.of(role) if worker.up and worker not in tried]
        if not choices:
            raise NoWorkerError(role, [worker.unavailable_reason for worker in self.of(role)])
        return min(choices, key=lambda worker: (worker.running, worker.served))

    def complete(self) -> bool:
        """Whether both roles have a worker that is up."""
        return all(any(worker.up for worker in self.of(role)) for role in ("prefill", "decode"))

    async def check(self) -> None:
        await asyncio.gather(*(self._check(worker) for worker in self.all))

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self.check()

    async def _check(self, worker: Worker) -> None:
        timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
        try:
            async with self._session.get(f"{worker.url}/health", timeout=timeout) as health:
                if health.status != 200:
                    worker.mark_down(f"/health answered {health.status}: {message_of(await health.read())}")
                    return
            async with self._session.get(f"{worker.url}/server_info", timeout=timeout) as info:
                if info.status != 200:
                    worker.mark_down(f"/server_info answered {info.status}")
                    return
                worker.mark_up(msgspec.json.decode(await info.read()))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            worker.mark_down(str(error) or type(error).__name__)
