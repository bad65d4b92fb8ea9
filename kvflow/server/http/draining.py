"""What a drain waits for: the requests that run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvflow.protocols.errors import AbortedError, Code


class Drainable:
    """What can be drained, a completion pipeline or a router: its running requests, and whether it accepts more."""

    def __init__(self) -> None:
        self.draining = False
        self.running = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def refuse_when_draining(self) -> None:
        """Raises: AbortedError."""
        if self.draining:
            error = AbortedError("this server is shutting down")
            error.code = Code.SHUTDOWN
            raise error

    def end_requests(self) -> None:
        """End the running requests, each with an error that says why: they had their time to finish."""
        raise NotImplementedError

    @contextmanager
    def count_running(self) -> Iterator[None]:
        """Count one more running request until the block ends."""
        self.running += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()
