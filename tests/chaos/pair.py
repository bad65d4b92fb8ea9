"""Stations in processes that can be frozen, thawed and killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from kvflow.bench.pair import Process
from kvflow.testing.freezing import freeze
from tests.chaos.machines import Machine

WITHIN_S = 20.0
NUM_PAGES = 256


class Station:
    """The test's end of one station."""

    def __init__(self, process: Process, machine: Machine | None) -> None:
        self._process, self._machine = process, machine
        self.ask = process.ask
        self.ranks: list[Any] = []

    @property
    def pid(self) -> int:
        return (
            self._process.pid if self._machine is None else self._machine.inner(self._process.pid)
        )

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def freeze(self) -> None:
        """Stop it; `signal(SIGCONT)` thaws it."""
        await freeze(self.pid)

    async def settled(self, *, within_s: float = WITHIN_S) -> dict[str, Any]:
        """Wait until nothing is left of any room; what there is instead after `within_s` is an
        error.
        """
        left: dict[str, Any] = {}
        try:
            async with asyncio.timeout(within_s):
                while not left or any(left.values()):
                    left = await self.ask("left")
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"{self._process.name}: {left}") from None
        return left


@asynccontextmanager
async def station(
    role: str,
    plane: str,
    ranks: list[Any],
    env: dict[str, str] | None = None,
    *,
    machine: Machine | None = None,
    **shape: Any,
) -> AsyncIterator[Station]:
    """`machine`: where it runs; here by default."""
    argv: tuple[str, ...] = (sys.executable, "-m", "tests.chaos.station", role)
    if machine is not None:
        argv, shape["host"] = machine.command(*argv), machine.address
    process = await Process.spawn(*argv, name=role, env=env)
    made = Station(process, machine)
    try:
        ready = await made.ask("setup", plane=plane, ranks=ranks, **{"pages": NUM_PAGES, **shape})
        made.ranks = ready.get("ranks", [])
        yield made
    finally:
        with suppress(OSError, ValueError):  # it has ended
            made.signal(signal.SIGCONT)
        await process.close()


@asynccontextmanager
async def pair(
    plane: str, rate: float | None = None, **both: Any
) -> AsyncIterator[tuple[Station, Station]]:
    """A prefill that sends at `rate` bytes/s, and a decode that knows it."""
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(
            station("prefill", plane, [], rate_bytes_per_s=rate, **both)
        )
        decode = await stack.enter_async_context(station("decode", plane, prefill.ranks, **both))
        yield prefill, decode


async def begin(room: int, pages: int, *stations: Station) -> None:
    await asyncio.gather(*(one.ask("begin", room=room, pages=pages) for one in stations))


async def until(seen: Callable[[], Awaitable[bool]], *, within_s: float = WITHIN_S) -> None:
    """Wait for what another process has to show; a test that never sees it fails."""
    async with asyncio.timeout(within_s):
        while not await seen():
            await asyncio.sleep(0.005)


async def in_the_middle(decode: Station, room: int) -> None:
    """Wait until some, and not all, of a room has arrived."""
    moved = 0.0
    async with asyncio.timeout(WITHIN_S):
        while moved < 0.2:
            moved = (await decode.ask("moved", room=room))["moved"]
    assert moved < 0.9


async def quarantined(decode: Station) -> int:
    return int((await decode.ask("left"))["quarantined"])
