"""Planes that do not conform, each in one way, for the suite to find."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
from typing import ClassVar

from kvflow.memory.pool import PagedPool
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import DataPlane, PlaneAddress, WriteOutcome
from kvflow.testing.conformance.adapter import FakeAdapter, NamedAdapter
from kvflow.transports.data.fake import FakeNetwork, FakePlane, FakeRoute, FakeWrite
from kvflow.transports.data.local import LocalPlane


class Early(FakeAdapter):
    """Calls a write landed whose last page is not there."""

    def open(self, pool: PagedPool, rate_bytes_per_s: float | None) -> DataPlane:
        plane = super().open(pool, rate_bytes_per_s)
        assert isinstance(plane, FakePlane)
        plane.began = _lie  # type: ignore[method-assign]
        return plane


def _lie(write: FakeWrite) -> None:
    write.copy(write.total_bytes - write.page_bytes)
    write.landed_bytes = write.total_bytes
    write.end(WriteOutcome.LANDED)


class Elsewhere(FakeAdapter):
    """Writes one byte more than it was told to."""

    def open(self, pool: PagedPool, rate_bytes_per_s: float | None) -> DataPlane:
        plane = super().open(pool, rate_bytes_per_s)
        assert isinstance(plane, FakePlane)
        plane.ended = _overrun  # type: ignore[method-assign]
        return plane


def _overrun(write: FakeWrite, outcome: WriteOutcome) -> None:
    layout = write.peer._layout
    assert layout is not None
    ctypes.memset(
        layout.buffers[0].address + int(write.target_pages[0] + 1) % layout.num_pages * 64, 0xEE, 1
    )


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


class Credulous(NamedAdapter):
    """Fences any writer that it is asked to."""

    def __init__(self) -> None:
        super().__init__("local")

    def open(self, pool: PagedPool, rate_bytes_per_s: float | None) -> DataPlane:
        return _Credulous(pool.segment, rate_bytes_per_s)


class _Credulous(LocalPlane):
    async def fence(self, writer: PlaneAddress) -> None:
        return


class Dying(NamedAdapter):
    """Ends every process but that of the checks."""

    def __init__(self) -> None:
        super().__init__("local")

    def open(self, pool: PagedPool, rate_bytes_per_s: float | None) -> DataPlane:
        if sys.argv[0].endswith("process.py"):
            os._exit(3)
        return super().open(pool, rate_bytes_per_s)


class _OnFakes(FakeAdapter):
    """Opens planes of a class of its own, in which one thing is wrong."""

    plane: ClassVar[type[FakePlane]]

    def open(self, pool: PagedPool, rate_bytes_per_s: float | None) -> DataPlane:
        return self.plane(self._network)


class _Leaking(FakePlane):
    async def connect(self, address: PlaneAddress, layout: PoolLayout) -> FakeRoute:
        os.dup(0)
        return await super().connect(address, layout)


class Leaking(_OnFakes):
    """Keeps a descriptor for each route."""

    plane = _Leaking


class _Trading(FakePlane):
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


class Trading(_OnFakes):
    """Keeps a thread for each route, and has a descriptor less."""

    plane = _Trading


class _Broken(FakePlane):
    async def connect(self, address: PlaneAddress, layout: PoolLayout) -> FakeRoute:
        raise ValueError("a bug of its own")


class Broken(_OnFakes):
    """Raises what no plane may."""

    plane = _Broken


class Forgetful(FakeAdapter):
    """Never forgets a write."""

    def under_way(self, plane: DataPlane) -> dict[str, int]:
        assert isinstance(plane, FakePlane)
        return {"writes": len(plane.started)}


class _Hanging(FakePlane):
    def began(self, write: FakeWrite) -> None:
        write.move(write.page_bytes)

    async def close(self) -> None:
        return


class Hanging(_OnFakes):
    """Does not end its writes when it is closed."""

    plane = _Hanging


class _Reopening(FakePlane):
    async def connect(self, address: PlaneAddress, layout: PoolLayout) -> FakeRoute:
        route = await super().connect(address, layout)
        route.close = lambda: None  # type: ignore[method-assign]
        return route


class Reopening(_OnFakes):
    """Writes through a route that was closed."""

    plane = _Reopening


class Mute(_OnFakes):
    """Answers none of the three questions: they are not in this module's docstring."""

    plane = _Hanging


def _not_an_adapter() -> int:
    return 7
