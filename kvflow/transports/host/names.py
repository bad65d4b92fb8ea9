"""Host names to addresses, in threads of their own: a name server that does not answer holds up
nothing else.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from ipaddress import ip_address

from kvflow.aio import Threads

LOOKUPS = 4  # at a time; each may take as long as the resolver of the system lets it


class HostNames:
    """Looks up names for one owner, `LOOKUPS` at a time."""

    def __init__(self, name: str) -> None:
        self._threads = Threads(f"{name}-names", LOOKUPS)

    async def addresses(self, host: str, within_s: float) -> list[str]:
        """The IP addresses of a host, in the system's order; an address is its own.

        Raises: OSError, TimeoutError.
        """
        with suppress(ValueError):
            ip_address(host.partition("%")[0])
            return [host]
        found = await self._threads.run(
            lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM), within_s=within_s
        )
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    async def connect(
        self, host: str, port: int, within_s: float, limit: int = 1 << 16
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """As `asyncio.open_connection`, whose own lookup shares its threads with everything.

        Raises: OSError, TimeoutError."""
        error: OSError = OSError(f"{host} has no address")
        for address in await self.addresses(host, within_s):
            try:
                return await asyncio.open_connection(address, port, limit=limit)
            except OSError as refused:
                error = refused
        raise error
