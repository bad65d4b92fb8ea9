"""Host name lookups in separate threads, so that a silent name server delays no other work."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from ipaddress import ip_address

from kvflow.aio import Threads

LOOKUPS = 4  # lookups at a time; the system's resolver limits how long each may take


class HostNames:
    """Name lookups for one owner, `LOOKUPS` at a time."""

    def __init__(self, name: str) -> None:
        self._threads = Threads(f"{name}-names", LOOKUPS)

    async def addresses(self, host: str, within_s: float) -> list[str]:
        """Return a host's IP addresses in the system's order. Raises: OSError, TimeoutError."""
        with suppress(ValueError):
            ip_address(host.partition("%")[0])
            return [host]
        found = await self._threads.run(
            lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM), within_s=within_s
        )
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    async def connect(
        self,
        host: str,
        port: int,
        within_s: float,
        limit: int = 1 << 16,
        tls: ssl.SSLContext | None = None,
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect like `asyncio.open_connection`, but look up the host in our own threads.

        asyncio would use the threads that the whole loop shares. With `tls`, the server must prove
        that it is `host`.
        """
        proven = None if tls is None else host
        error: OSError = OSError(f"{host} has no address")
        for address in await self.addresses(host, within_s):
            try:
                return await asyncio.open_connection(
                    address, port, limit=limit, ssl=tls, server_hostname=proven
                )
            except OSError as refused:
                error = refused
        raise error
