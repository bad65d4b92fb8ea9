"""Planes that do not conform, each in one way, for the suite to find."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
from functools import partial

from kvflow.memory.pool import PagedPool
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import DataPlane, PlaneAddress, WriteOutcome
from kvflow.testing.conformance.adapter import FakeAdapter, NamedAdapter
from kvflow.transports.data.fake import FakeNetwork, FakePlane, FakeRoute, FakeWrite
from kvflow.transports.data.local import LocalPlane


class _OnFakes(FakeAdapter):
    def __init__(self, plane: type[FakePlane]) -> None:
        super().__init__()
        self._plane = plane

    def open(self, pool: PagedPool, rate_bytes_per_s: float | None) -> DataPlane:
        return self._plane(self._network)


class _Early(FakePlane):
    """Calls a write landed whose last page is not there."""

    def began(self, write: FakeWrite) -> None:
        write.copy(write.total_bytes - write.page_bytes)
        write.landed_bytes = write.total_bytes
        write.end(WriteOutcome.LANDED)


class _Elsewhere(FakePlane):
    """Writes one byte more than it was told to."""

    def ended(self, write: FakeWrite, outcome: WriteOutcome) -> None:
        layout = write.peer._layout
        assert layout is not None
        page = int(write.target_pages[0] + 1) % layout.num_pages
        ctypes.memset(layout.buffers[0].address + page * 64, 0xEE, 1)


class Undrained(FakeAdapter):
    """Says that a write is cancelled, and goes on with it."""

    def open(self, pool: PagedPool, rate_bytes_per_s: float | None) -> DataPlane:
        plane = super().open(pool, rate_bytes_per_s)
        assert isinstance(plane, FakePlane)
        plane.ended = _go_on  # type: ignore[method-assign]
        return plane


def _go_on(write: FakeWrite, outcome: WriteOutcome) -> None:
    if outcome is WriteOutcome.CANCELLED:
        asyncio.get_running_loop().call_later(0.1, write.copy, 1 << 20)


class _OnLocal(NamedAdapter):
    def __init__(self) -> None:
        super().__init__("local")


class Credulous(_OnLocal):
    def open(self, pool: PagedPool, rate_bytes_per_s: float | None) -> DataPlane:
        return _Credulous(pool.segment, rate_bytes_per_s)


class _Credulous(LocalPlane):
    async def fence(self, writer: PlaneAddress) -> None:
        return


class Dying(_OnLocal):
    """Ends every process but that of the checks."""

    def open(self, pool: PagedPool, rate_bytes_per_s: float | None) -> DataPlane:
        if sys.argv[0].endswith("process.py"):
            os._exit(3)
        return super().open(pool, rate_bytes_per_s)


class _Leaking(FakePlane):
    async def connect(self, address: PlaneAddress, layout: PoolLayout) -> FakeRoute:
        os.dup(0)
        return await super().connect(address, layout)


class _Trading(FakePlane):
    """Keeps a thread for each route, and has a descriptor less."""

    def __init__(self, network: FakeNetwork) -> None:
        super().__init__(network)
        self._spare = [os.dup(0) for _ in range(200)]
        self._closed = threading.Event()

    async def connect(self, address: PlaneAddress, layout: PoolLayout) -> FakeRoute:
        os.close(self._spare.pop())
        threading.Thread(target=self._closed.wait, daemon=True).start()
        return await super().connect(address, layout)

    async def close(self) -> None:
        self._closed.set()
        while self._spare:
            os.close(self._spare.pop())
        await super().close()


class _Broken(FakePlane):
    async def connect(self, address: PlaneAddress, layout: PoolLayout) -> FakeRoute:
        raise ValueError("a bug of its own")


class Forgetful(FakeAdapter):
    def under_way(self, plane: DataPlane) -> dict[str, int]:
        assert isinstance(plane, FakePlane)
        return {"writes": len(plane.started)}


class _Hanging(FakePlane):
    """Does not end its writes when it is closed."""

    def began(self, write: FakeWrite) -> None:
        write.move(write.page_bytes)

    async def close(self) -> None:
        return


class _Reopening(FakePlane):
    """Writes through a route that was closed."""

    async def connect(self, address: PlaneAddress, layout: PoolLayout) -> FakeRoute:
        route = await super().connect(address, layout)
        route.close = lambda: None  # type: ignore[method-assign]
        return route


Early, Elsewhere = partial(_OnFakes, _Early), partial(_OnFakes, _Elsewhere)
Leaking, Trading = partial(_OnFakes, _Leaking), partial(_OnFakes, _Trading)
Broken, Hanging = partial(_OnFakes, _Broken), partial(_OnFakes, _Hanging)
Reopening = partial(_OnFakes, _Reopening)
Mute = Hanging  # the docstring of this module answers none of the three questions


def _not_an_adapter() -> int:
    return 7
