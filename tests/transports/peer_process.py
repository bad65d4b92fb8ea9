"""A second process with a pool and a data plane, told line by line what to do."""

from __future__ import annotations

import asyncio
import base64
import ctypes
import gc
import json
import os
import select
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvflow.memory.pool import PagedPool
from kvflow.protocols.pages.layout import PageIndices, PoolLayout, build_layout
from kvflow.protocols.ports import DataPlane, PlaneAddress, Route, Write, WriteOutcome
from kvflow.transports.data.select import open_plane

STREAMS = [
    ("0.k", "bfloat16", (4, 64)),
    ("0.v", "bfloat16", (4, 32)),
    ("1.k", "bfloat16", (4, 64)),
    ("1.v", "uint8", (8,)),
]
NUM_PAGES = 512
PAGE_SIZE = 16


def pages(*indices: int) -> PageIndices:
    return np.array(indices, dtype=np.int32)


class Side:
    """A pool and a plane, exported."""

    def __init__(self, backend: str, order: str, rate: float | None, host: str = "127.0.0.1") -> None:
        layout = build_layout(STREAMS, page_size=PAGE_SIZE, num_pages=NUM_PAGES, order=order)  # type: ignore[arg-type]
        self.pool = PagedPool.allocate(layout)
        self.plane: DataPlane = open_plane(backend, self.pool.segment, rate, host)
        self.address, self.layout = self.plane.export(self.pool.layout)
        self.memory = [
            np.ctypeslib.as_array((ctypes.c_uint8 * b.size_bytes).from_address(b.address))
            for b in self.pool.layout.buffers
        ]

    def fill(self, seed: int) -> None:
        """Bytes 1..255: a zero is a byte that never arrived."""
        for column in self.memory:
            column[:] = np.random.default_rng(seed).integers(1, 256, column.size, dtype=np.uint8)

    def landed_bytes(self) -> int:
        """Bytes that are not 0."""
        return sum(int(np.count_nonzero(column)) for column in self.memory)

    async def close(self) -> None:
        await self.plane.close()
        self.pool.close()


class Peer:
    """The other process, as a test sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.address: PlaneAddress
        self.layout: PoolLayout

    async def ask(self, *command: object) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        return json.loads(await self.process.stdout.readline())

    async def bytes_of(self, which: PageIndices) -> bytes:
        return base64.b64decode(await self.ask("read", which.tolist()))

    async def connect(self, side: Side) -> None:
        """Let it write into our pool."""
        told = msgspec.to_builtins((side.address, side.layout))
        assert await self.ask("connect", told) == "connected"


@asynccontextmanager
async def spawned(
    backend: str,
    order: str = "page_first",
    rate: float | None = None,
    *,
    prefix: Sequence[str] = (),
    host: str = "127.0.0.1",
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[Peer]:
    """`prefix` is a command that runs the peer; `host` the address others reach it at."""
    gc.collect()  # an engine that is garbage cannot be freed by a forked child, which has none of its threads
    process = await asyncio.create_subprocess_exec(
        *(*prefix, sys.executable, "-m", "tests.transports.peer_process", backend, order, str(rate or 0), host),
        env={**os.environ, **(env or {})},
        cwd=Path(__file__).parents[2],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 26,
    )
    try:
        peer = Peer(process)
        assert process.stdout is not None
        line = await process.stdout.readline()
        peer.address, peer.layout = msgspec.json.decode(line, type=tuple[PlaneAddress, PoolLayout])
        yield peer
    finally:
        assert process.stdin is not None
        process.stdin.close()  # also ends a child it may have forked
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # or uvloop warns, when a child still holds a pipe


async def until(condition: Callable[[], bool], *, within_s: float = 20.0) -> None:
    """Wait for `condition`; a test that never gets there fails."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is observed is another process
            await asyncio.sleep(0.001)


async def _serve(backend: str, order: str, rate: float, host: str) -> None:
    side = Side(backend, order, rate or None, host)
    print(msgspec.json.encode((side.address, side.layout)).decode(), flush=True)
    route: Route
    write: Write
    while line := await asyncio.to_thread(sys.stdin.readline):
        reply: object
        match json.loads(line):
            case ["fill", seed]:
                side.fill(seed)
                reply = "filled"
            case ["read", which]:
                reply = base64.b64encode(side.pool.pages_bytes(pages(*which)).tobytes()).decode()
            case ["landed"]:
                reply = side.landed_bytes()
            case ["connect", told]:
                address, layout = msgspec.convert(told, tuple[PlaneAddress, PoolLayout])
                route, reply = await side.plane.connect(address, layout), "connected"
            case ["write", source, target]:
                write, reply = route.write(pages(*source), pages(*target)), "started"
            case ["done"]:
                outcome: WriteOutcome = await asyncio.shield(write.done)
                reply = [outcome.value, write.landed_bytes]
            case ["fork"]:  # a child that outlives us: what we mapped must not be mapped there
                child = os.fork()
                if not child:
                    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
                    hang_up = select.poll()
                    hang_up.register(0, 0)  # no more than the end of the input: what is in it is the parent's
                    hang_up.poll()
                    os._exit(0)
                reply = child
            case other:
                raise AssertionError(other)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]))
