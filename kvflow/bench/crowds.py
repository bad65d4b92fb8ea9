"""Crowds for `kvflow bench stalls`: large numbers of connections or rooms at prefill."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

from kvflow.bench.pair import Process

IDLE_CONNECTIONS = 2_000
ANNOUNCED_ROOMS = 32_000

Crowd = Callable[[Process, dict[str, Any], float], Awaitable[int]]
"""A function that gathers a crowd at prefill, and returns the size of the crowd.

Its arguments are the prefill process, the reply of that process to `setup`, and the seconds for
which the crowd is watched.
"""


def allow_many_connections() -> None:
    """Raise this process's limit on file descriptors to the hard limit. Roles do so too."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def idle_connections(prefill: Process, ready: dict[str, Any], watch_s: float) -> int:
    """Open silent connections to prefill's control port, and return how many prefill counts."""
    # This end needs as many descriptors as prefill.
    allow_many_connections()
    loop, port = asyncio.get_running_loop(), int(ready["rank"]["control"].rpartition(":")[2])
    with ExitStack() as stack:
        for _ in range(IDLE_CONNECTIONS):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            await loop.sock_connect(stranger, ("127.0.0.1", port))
        await asyncio.sleep(watch_s)
        return int((await prefill.ask("connections"))["count"])


async def announced_rooms(prefill: Process, ready: dict[str, Any], watch_s: float) -> int:
    """Let a decode announce rooms, kill it, and wait until prefill forgets the rooms."""
    decode = await Process.run_module("kvflow.bench.stalls_worker", "crowd")
    try:
        await decode.ask("announce", count=ANNOUNCED_ROOMS, rank=ready["rank"])
        await prefill.ask("announced", count=ANNOUNCED_ROOMS)
    finally:
        await decode.kill()
    await prefill.ask("announced", count=0)
    return ANNOUNCED_ROOMS


def crowds() -> dict[str, Crowd]:
    return {
        f"{IDLE_CONNECTIONS:,} idle connections": idle_connections,
        f"{ANNOUNCED_ROOMS:,} announced rooms of a decode that dies": announced_rooms,
    }
