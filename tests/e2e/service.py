"""Prefills and decodes as processes that a test starts, stops, kills and starts again, each at its
own address.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvflow.http.authorization import NO_KEYS, Keys
from kvflow.serve.config.catalog import FIELDS_OF_ROLE, flag_of
from kvflow.serve.demo_model import DEMO_MODEL_DIR
from kvflow.serve.launch.child import Child
from tests.ports import free_port

START_S = 120.0


class Service:
    """Prefills and decodes, as many of each, at ports of their own, which they keep when they are
    restarted.
    """

    def __init__(self, pairs: int, **changes: Any) -> None:
        """`keys` are for all of them; other changes are settings of those workers
        that have them.
        """
        common = {
            "model_path": str(DEMO_MODEL_DIR),
            "num_pages": 512,
            "dtype": "float32",
            "drain_timeout_s": 60,
        }
        self.keys: Keys = changes.pop("keys", NO_KEYS)
        given = {"KVFLOW_API_KEY": self.keys.api, "KVFLOW_ADMIN_API_KEY": self.keys.admin}
        self._environment = {**os.environ, **{name: key for name, key in given.items() if key}}
        self._flags = {**common, **changes}
        self._ports: dict[str, tuple[int, int]] = {}
        self._own: dict[str, dict[str, Any]] = {}
        for role in ("prefill", "decode"):
            for _ in range(pairs):
                self.add(role)
        self.workers: dict[str, Child] = {}
        self.router: Child | None = None

    def add(self, role: str, **own: Any) -> str:
        """One more worker, which is still to be started, with settings of its own.

        Returns its name.
        """
        name = f"{role}-{len(self.names(role))}"
        self._ports[name], self._own[name] = (free_port(), free_port()), own
        return name

    def names(self, role: str) -> list[str]:
        return [name for name in self._ports if name.startswith(role)]

    def bootstrap_port(self, name: str) -> int:
        return self._ports[name][1]

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name][0]}"

    async def start(self, name: str) -> None:
        role = name.partition("-")[0]
        port, bootstrap_port = self._ports[name]
        flags = {name: value for name, value in self._flags.items() if name in FIELDS_OF_ROLE[role]}
        flags |= {"port": port, "disaggregation_bootstrap_port": bootstrap_port, **self._own[name]}
        words = [word for flag, value in flags.items() for word in (flag_of(flag), str(value))]
        self.workers[name] = Child(name, role, words, quiet=True)
        await self.workers[name].start(self._environment, START_S)

    async def restart(self, name: str) -> float:
        """SIGTERM, wait for its end, start it again at the same port.

        Returns the seconds that its drain took.
        """
        began = time.monotonic()
        assert await self.workers[name].stop(START_S) == 0
        drained_s = time.monotonic() - began
        await self.start(name)
        return drained_s

    async def kill(self, name: str) -> None:
        """SIGKILL, and return when it is gone."""
        self.workers[name].process.send_signal(signal.SIGKILL)
        await self.workers[name].process.wait()

    async def start_router(self, *, alone: bool = False, **changes: Any) -> str:
        """In front of all of them, or `alone`, for them to join. Returns its URL."""
        names = [] if alone else [*self._ports]
        urls = [word for name in names for word in (f"--{name.partition('-')[0]}", self.url(name))]
        words = [word for flag, value in changes.items() for word in (flag_of(flag), str(value))]
        self.router = Child("router", "router", ["--port", "0", *urls, *words], quiet=True)
        await self.router.start(self._environment, START_S)
        return self.router.url

    async def stop(self) -> None:
        children = [*self.workers.values(), *([self.router] if self.router else [])]
        for child in children:
            child.kill()
        for child in children:
            await child.stop(1.0)


@asynccontextmanager
async def serving(pairs: int = 2, **changes: Any) -> AsyncIterator[Service]:
    """As many prefills and decodes, started; no router."""
    service = Service(pairs, **changes)
    try:
        await asyncio.gather(
            *(service.start(name) for role in ("prefill", "decode") for name in service.names(role))
        )
        yield service
    finally:
        await service.stop()
