"""A pool and a plane that run a check's commands, in this process or another (see `process`)."""

from __future__ import annotations

import asyncio
import base64
import ctypes
import hashlib
import os
import select
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from kvflow.memory.pool import PagedPool
from kvflow.protocols.pages.layout import Order, PageIndices, PoolLayout, build_layout
from kvflow.protocols.ports import DataPlane, PlaneAddress, Route, Write, WriteOutcome

STREAMS: list[tuple[str, str, tuple[int, ...]]] = [
    ("0.k", "bfloat16", (4, 64)),
    ("0.v", "bfloat16", (4, 32)),
    ("1.k", "bfloat16", (4, 64)),
    ("1.v", "uint8", (8,)),
]
NUM_PAGES, PAGE_SIZE = 512, 16  # a page has 20,608 bytes
Open = Callable[[PagedPool, float | None], DataPlane]


def pages(*indices: int) -> PageIndices:
    return np.array(indices, dtype=np.int32)


class Side:
    """A pool, and the plane that exports it."""

    def __init__(
        self, open_plane: Open, order: Order = "page_first", rate: float | None = None
    ) -> None:
        layout = build_layout(STREAMS, page_size=PAGE_SIZE, num_pages=NUM_PAGES, order=order)
        self.pool = PagedPool.allocate(layout)
        self.plane = open_plane(self.pool, rate)
        self.address, self.layout = self.plane.export(self.pool.layout)
        self.memory = [
            np.ctypeslib.as_array((ctypes.c_uint8 * b.size_bytes).from_address(b.address))
            for b in self.pool.layout.buffers
        ]

    def fill(self, seed: int) -> None:
        """Fill the pool with random bytes above 0: at the target, a 0 marks a missing byte."""
        for column in self.memory:
            column[:] = np.random.default_rng(seed).integers(1, 256, column.size, dtype=np.uint8)

    def wipe(self, value: int = 0) -> None:
        for column in self.memory:
            column[:] = value

    def landed_bytes(self) -> int:
        return sum(int(np.count_nonzero(column)) for column in self.memory)

    def foreign_bytes(self, value: int) -> int:
        return sum(int(np.count_nonzero(column != value)) for column in self.memory)

    async def close(self) -> None:
        await self.plane.close()
        self.pool.close()


class Station:
    """Executes commands on one side. Each result can be encoded as JSON."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self._route: Route
        self._write: Write
        self.children: list[int] = []

    async def do(self, command: str, *arguments: Any) -> Any:
        return await getattr(self, f"do_{command}")(*arguments)

    async def do_fill(self, seed: int) -> str:
        self.side.fill(seed)
        return "filled"

    async def do_read(self, which: list[int]) -> str:
        return base64.b64encode(self.side.pool.pages_bytes(pages(*which)).tobytes()).decode()

    async def do_digest(self, which: list[int]) -> str:
        """Return a digest of these pages' bytes, in the given order."""
        return hashlib.sha256(self.side.pool.pages_bytes(pages(*which)).tobytes()).hexdigest()

    async def do_landed(self) -> int:
        return self.side.landed_bytes()

    async def do_connect(self, told: Any) -> str:
        address, layout = msgspec.convert(told, tuple[PlaneAddress, PoolLayout])
        self._route = await self.side.plane.connect(address, layout)
        return "connected"

    async def do_write(self, source: list[int], target: list[int]) -> str:
        self._write = self._route.write(pages(*source), pages(*target))
        return "started"

    async def do_done(self) -> list[Any]:
        # The future belongs to the plane, so cancelling this command must not cancel it.
        outcome: WriteOutcome = await asyncio.shield(self._write.done)
        return [outcome.value, self._write.landed_bytes]

    async def do_descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    async def do_fork(self) -> int:
        """Fork a child that lives until our standard input ends, even if we are killed.

        The plane must keep our mappings out of the child. Otherwise the child could still write
        into the peer's pool after our death.
        """
        if child := os.fork():
            self.children.append(child)
            return child
        # The reader of our output waits for its end, so the child must not keep the output open.
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        hang_up = select.poll()
        # The child polls only for the end of the input, because the commands are for its parent.
        hang_up.register(0, 0)
        hang_up.poll()
        os._exit(0)
