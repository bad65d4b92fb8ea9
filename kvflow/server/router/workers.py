"""The router's view of its workers: who is up, where its registry listens, who has the least to do."""

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
LOOK_TIMEOUT_S = 3.0


class NoWorkerError(KvflowError):
    """Nobody of a role is up; a retry may find somebody."""

    code = Code.CAPACITY

    def __init__(self, role: str, troubles: list[str]) -> None:
        why = f": {troubles[0]}" if troubles else ""
        super().__init__(f"no {role} worker is up ({len(troubles)} known){why}")


class Worker:
    """One prefill or decode behind the router."""

    def __init__(self, role: str, url: str) -> None:
        self.role = role
        self.url = url.rstrip("/")
        self.up = False
        self.trouble = "not seen yet"
        self.running = 0
        self.served = 0
        self.bootstrap_port: int | None = None
        self.model = ""

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "127.0.0.1"

    def lost(self, why: str) -> None:
        """Out until the next good look."""
        if self.up:
            _log.warning("%s %s is out: %s", self.role, self.url, why)
        self.up, self.trouble = False, why

    def seen(self, info: Any) -> None:
        """In, with what /server_info said."""
        mode = info.get("disaggregation_mode") if isinstance(info, dict) else None
        if mode != self.role:
            self.lost(f"it is no {self.role} worker (disaggregation_mode {mode!r})")
            return
        port = info.get("disaggregation_bootstrap_port")
        self.bootstrap_port = port if isinstance(port, int) else None
        self.model = str(info.get("served_model_name") or info.get("model_path") or "")
        if not self.up:
            _log.info("%s %s is in", self.role, self.url)
        self.up, self.trouble = True, ""

    def line(self) -> dict[str, Any]:
        return {"url": self.url, "role": self.role, "up": self.up, "running": self.running, "trouble": self.trouble}


class Workers:
    """All workers, looked at in the background every `poll_s`."""

    def __init__(
        self, prefill: Iterable[str], decode: Iterable[str], session: aiohttp.ClientSession, poll_s: float
    ) -> None:
        self.all = [*(Worker("prefill", url) for url in prefill), *(Worker("decode", url) for url in decode)]
        self._session = session
        self._poll_s = poll_s
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """A first look at everybody, then one every `poll_s`."""
        await self.look()
        self._looking = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking

    def of(self, role: str) -> list[Worker]:
        return [worker for worker in self.all if worker.role == role]

    def least_loaded(self, role: str, tried: set[Worker]) -> Worker:
        """The worker to use next; among equals, the one that has served least. Raises: NoWorkerError."""
        choices = [worker for worker in self.of(role) if worker.up and worker not in tried]
        if not choices:
            raise NoWorkerError(role, [worker.trouble for worker in self.of(role)])
        return min(choices, key=lambda worker: (worker.running, worker.served))

    def complete(self) -> bool:
        """Whether a request could be served now."""
        return all(any(worker.up for worker in self.of(role)) for role in ("prefill", "decode"))

    async def look(self) -> None:
        await asyncio.gather(*(self._look_at(worker) for worker in self.all))

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self.look()

    async def _look_at(self, worker: Worker) -> None:
        timeout = aiohttp.ClientTimeout(total=LOOK_TIMEOUT_S)
        try:
            async with self._session.get(f"{worker.url}/health", timeout=timeout) as health:
                if health.status != 200:
                    worker.lost(f"/health answered {health.status}: {message_of(await health.read())}")
                    return
            async with self._session.get(f"{worker.url}/server_info", timeout=timeout) as info:
                if info.status != 200:
                    worker.lost(f"/server_info answered {info.status}")
                    return
                worker.seen(msgspec.json.decode(await info.read()))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            worker.lost(str(error) or type(error).__name__)
