"""What a drain waits for: the requests that run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvflow.protocols.errors import AbortedError, Code

ROLE_HEADER = "X-Kvflow-Role"
"""Of a router's leg: the role that it takes this worker for.

A worker that has switched its role since refuses it.
"""
_SHUTTING_DOWN = "this server is shutting down"


class Drainable:
    """What can be drained, a completion pipeline or a router: its running requests, and whether it
    accepts more.

    A drain ends with the process (`stop`), or is over after a while (`pause`, `resume`).
    """

    def __init__(self) -> None:
        self.draining = False
        self.stopping = False
        self.draining_reason = _SHUTTING_DOWN
        self.running = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def refuse_when_draining(self) -> None:
        """Raises: AbortedError."""
        if self.draining:
            raise refusal(self.draining_reason)

    def stop(self) -> None:
        """Accept no more requests from here on."""
        self.draining = self.stopping = True
        self.draining_reason = _SHUTTING_DOWN

    def pause(self, reason: str) -> None:
        """Accept no requests until `resume`."""
        self.draining = True
        if not self.stopping:
            self.draining_reason = reason

    def resume(self) -> None:
        """Accept requests again, unless this server stops."""
        self.draining = self.stopping
        self.draining_reason = _SHUTTING_DOWN

    def end_requests(self) -> None:
        """End the running requests, each with an error that says why: they had their time to
        finish.
        """
        raise NotImplementedError

    @contextmanager
    def count_running(self, count: int = 1) -> Iterator[None]:
        """Count so many more running requests until the block ends."""
        self.running += count
        self.idle.clear()
        try:
            yield
        finally:
            self.running -= count
            if not self.running:
                self.idle.set()


def refusal(reason: str) -> AbortedError:
    """Refuses a request that another worker may serve."""
    error = AbortedError(reason)
    error.code = Code.SHUTDOWN
    return error
