"""Draining: a server stops accepting requests and waits for the running ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvflow.protocols.errors import AbortedError, Code

ROLE_HEADER = "X-Kvflow-Role"
"""The header of a router's leg that names the role in which the router uses this worker.

A worker that changed its role since then refuses the request.
"""
_SHUTTING_DOWN = "this server is shutting down"


class Drainable:
    """A completion pipeline or a router that can be drained: it counts its running requests and may
    refuse new ones.

    A drain lasts until the process ends (`stop`), or for a while (`pause`, `resume`).
    """

    def __init__(self) -> None:
        self.draining = False
        self.stopping = False
        self.draining_reason = _SHUTTING_DOWN
        self.running = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def refuse_when_draining(self) -> None:
        """Refuse a request while draining. Raises: AbortedError."""
        if self.draining:
            raise refusal(self.draining_reason)

    def stop(self) -> None:
        """Accept no more requests, permanently."""
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
        """End the running requests, each with an error that gives the reason: their time to finish
        is over.
        """
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
    # This code, unlike that of an abort, allows a router to try another pair.
    error.code = Code.SHUTDOWN
    return error
