"""A decode engine whose only token is the one that prefill hands over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from kvflow.handlers.rooms import DecodeRoom
from kvflow.protocols.errors import KvflowError
from kvflow.serve.engine.scheduler.limits import EngineLimits
from kvflow.serve.engine.scheduler.params import TokenOut


class Engine:
    """Admits requests while `free` is set, and counts those that did not release their places."""

    healthy = True
    limits = EngineLimits(128, 100, 4, 64)

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.refusal: KvflowError | None = None
        self.promised = 0

    async def admit(self, *_: object) -> Any:
        if self.refusal is not None:
            raise self.refusal
        await self.free.wait()
        self.promised += 1
        return SimpleNamespace(release=self._release)

    def _release(self) -> None:
        self.promised -= 1

    async def cached(self, *_: object) -> None:
        return None

    async def generate(self, room: DecodeRoom, *taken: Any) -> AsyncGenerator[TokenOut, None]:
        try:
            yield TokenOut(int(await room.landed()), finish_reason="length")
        finally:
            room.close()
            taken[-2].release()
