"""A TCP proxy that can cut, stall or swallow what passes through it."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Self

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST
_CHUNK = 1 << 16
FAULTS = ("reset", "stall", "swallow", "restart")


class Proxy:
    """Listens on a free port of 127.0.0.1 and forwards to `target_port` there; use as an async
    context manager.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._open = asyncio.Event()
        self._open.set()
        self._swallow = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.accepted = 0

    async def start(self) -> None:
        """Listen, on the port of the first time."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Nobody gets in any more, and who was in is out."""
        if self._server is not None:
            self._server.close()
            self.reset()
            await self._server.wait_closed()
            self._server = None

    def reset(self) -> None:
        """Cut every connection with RST; what was on its way is lost."""
        for writer in list(self._writers):
            with_socket: socket.socket = writer.get_extra_info("socket")
            if with_socket.fileno() >= 0:
                with_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    def stall(self) -> None:
        """Connections stay, nothing passes; `flow` ends it."""
        self._open.clear()

    def swallow(self) -> None:
        """What is sent is taken and lost; `flow` ends it, with a reset: a stream with a hole in it
        is no stream.
        """
        self._swallow = True

    def flow(self) -> None:
        if self._swallow:
            self._swallow = False
            self.reset()
        self._open.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(far_writer)
        try:
            await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))
        finally:
            for one in (writer, far_writer):
                one.transport.abort()
                self._writers.discard(one)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(_CHUNK):
                await self._open.wait()
                if not self._swallow:
                    writer.write(chunk)
                    await writer.drain()
            if not writer.is_closing() and writer.can_write_eof():
                writer.write_eof()
        except OSError:
            writer.transport.abort()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.flow()
        await self.stop()


async def disturb(proxy: Proxy, fault: str, for_s: float) -> None:
    """One of `FAULTS`, for so long; a reset is over at once."""
    if fault == "reset":
        proxy.reset()
    elif fault == "restart":
        await proxy.stop()
        await asyncio.sleep(for_s)
        await proxy.start()
    else:
        (proxy.stall if fault == "stall" else proxy.swallow)()
        await asyncio.sleep(for_s)
        proxy.flow()
