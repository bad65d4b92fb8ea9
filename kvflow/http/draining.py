"""Draining: a server refuses new requests while it waits for the running ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvflow.protocols.errors import AbortedError, Code

ROLE_HEADER = "X-Kvflow-Role"
"""Header in which a router states the role that it expects of a worker.

If the worker now has another role, it refuses the request.
"""
_SHUTTING_DOWN = "this server is shutting down"


class Drainable:
    """Base class of servers that count running requests, and refuse new ones while draining.

    A drain lasts until the process ends (`stop`), or from `pause` to `resume`.
    """

    def __init__(self) -> None:
        self.draining = False
        self.stopping = False
        self.draining_reason = _SHUTTING_DOWN
        self.running = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def refuse_when_draining(self) -> None:
        """Raise AbortedError while draining."""
        if self.draining:
            raise refusal(self.draining_reason)

    def stop(self) -> None:
        """Refuse new requests permanently."""
        self.draining = self.stopping = True
        self.draining_reason = _SHUTTING_DOWN

    def pause(self, reason: str) -> None:
        """Refuse new requests until `resume`."""
        self.draining = True
        if not self.stopping:
            self.draining_reason = reason

    def resume(self) -> None:
        """Accept requests again, unless `stop` was called."""
        self.draining = self.stopping
        self.draining_reason = _SHUTTING_DOWN

    def end_requests(self) -> None:
        """End all running requests with an error, because the drain took too long."""
        raise NotImplementedError

    @contextmanager
    def count_running(self, count: int = 1) -> Iterator[None]:
        """Count `count` more running requests until the block ends."""
        self.running += count
        self.idle.clear()
        try:
            yield
        finally:
            self.running -= count
            if not self.running:
                self.idle.set()


def refusal(reason: str) -> AbortedError:
    """Return the error for a request that another worker may serve."""
    error = AbortedError(reason)
    # After SHUTDOWN, a router tries another pair. After the code of an abort, it does not.
    error.code = Code.SHUTDOWN
    return error
