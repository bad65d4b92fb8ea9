"""The other side of a check: an object here, or a process that can be killed or frozen."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec

from kvflow.protocols.errors import LostError
from kvflow.protocols.pages.layout import Order, PoolLayout
from kvflow.protocols.ports import PlaneAddress
from kvflow.testing.conformance.adapter import Adapter, NotRunError
from kvflow.testing.conformance.station import Side, Station
from kvflow.testing.freezing import freeze

PROCESS = "kvflow.testing.conformance.process"
LINE_LIMIT = 1 << 26  # bytes of one answer, which may contain a whole pool in base 64


class Peer(Protocol):
    """The other side of a check, with its own pool and plane."""

    address: PlaneAddress
    layout: PoolLayout

    async def ask(self, *command: Any) -> Any:
        """Run a command of `station.Station` at the peer, and return its result."""

    async def kill(self) -> None:
        """Kill the peer as with SIGKILL, and return when it is dead.

        Raises: NotRunError if the peer cannot be killed.
        """

    async def freeze(self) -> None:
        """Stop the peer as with SIGSTOP, and return when it is stopped.

        Raises: NotRunError if the peer cannot be stopped.
        """

    def thaw(self) -> None: ...


class ProcessPeer:
    """A peer in another process. Implements `Peer`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.address: PlaneAddress
        self.layout: PoolLayout

    async def start(self) -> None:
        """Wait until the process exports its pool. Raises: LostError if it ends instead."""
        self.address, self.layout = msgspec.json.decode(
            await self._line(), type=tuple[PlaneAddress, PoolLayout]
        )

    async def ask(self, *command: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        return json.loads(await self._line())

    async def _line(self) -> bytes:
        assert self.process.stdout is not None
        if not (line := await self.process.stdout.readline()):
            raise LostError("the peer's process has ended where an answer of it was awaited")
        return line

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def freeze(self) -> None:
        await freeze(self.process.pid)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class ObjectPeer:
    """A peer in this process. Implements `Peer`."""

    def __init__(self, adapter: Adapter, side: Side) -> None:
        self.address, self.layout = side.address, side.layout
        self._adapter, self._station = adapter, Station(side)

    async def ask(self, *command: Any) -> Any:
        return await self._station.do(*command)

    async def kill(self) -> None:
        self._adapter.kill(self._station.side.plane)

    async def freeze(self) -> None:
        raise NotRunError("its planes live within one process, which would freeze too")

    def thaw(self) -> None:
        return


def environment() -> dict[str, str]:
    """Return the environment of a peer process. It can import what this process can, including the
    module of the adapter.
    """
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


async def _start(arguments: Sequence[str], prefix: Sequence[str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(*prefix, sys.executable, "-P", "-m", PROCESS, *arguments),
        env=environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_LIMIT,
    )


@asynccontextmanager
async def spawned(
    plane: str,
    order: Order = "page_first",
    rate: float | None = None,
    *,
    prefix: Sequence[str] = (),
    host: str = "127.0.0.1",
) -> AsyncIterator[ProcessPeer]:
    """Run a station in another process, and yield the peer.

    `plane` is a name for `load_adapter`. `prefix` is a command that runs the process, such as `ip
    netns exec NAME`. `host` is the address at which other processes reach its plane.
    """
    # Free unused engines before the fork: the child lacks their threads and could not free them.
    gc.collect()
    process = await _start([plane, order, str(rate or 0), host], prefix)
    try:
        peer = ProcessPeer(process)
        await peer.start()
        yield peer
    finally:
        assert process.stdin is not None
        # Closing this pipe also ends a child that the process forked (see `Station.do_fork`).
        process.stdin.close()
        if process.returncode is None:
            process.kill()
        await process.wait()
        # Without this, uvloop warns if a child still holds a pipe.
        process._transport.close()  # type: ignore[attr-defined]
