"""The main loop of an engine: a task that runs steps until the engine is closed.

However the task stops, every request ends.
"""

from __future__ import annotations

import asyncio
import logging

from kvflow.aio import run_to_end
from kvflow.protocols.errors import Cause, Code, LostError, room_error
from kvflow.telemetry.histogram import BOOTSTRAP_SECONDS, QUEUE_SECONDS, Histogram

_log = logging.getLogger("kvflow.serve.engine")


class EngineLoop:
    """The base class of the prefill engine and the decode engine.

    `_run` runs steps until `_closing`, and sleeps on `_wake`. `_fail_all` ends every request.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._closing_cause = Cause(Code.SHUTDOWN, "the engine is closing")
        self.failed_steps = 0
        # The time that requests wait for a place in the batch and for pages.
        self.queue_seconds = Histogram(sorted({*QUEUE_SECONDS, *BOOTSTRAP_SECONDS}))

    async def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"kvflow-{self._name}-engine")
            self._task.add_done_callback(
                lambda _: self._end_all(f"the {self._name} engine has stopped")
            )

    def end_requests(self) -> None:
        """End all requests with `Code.SHUTDOWN`, and accept no more; the running step goes on."""
        self._wake.set()
        self._end_all("the engine is closing")

    def break_off(self, cause: Cause) -> None:
        """End all present and future requests with `cause`, because no more steps can run."""
        if not self._closing:
            self._closing, self._closing_cause = True, cause
            self._fail_all(cause)
        self._wake.set()

    async def close(self) -> None:
        """End every request, and wait for the running step, even if cancelled (I12)."""
        self.end_requests()
        if self._task is not None:
            await run_to_end(self._task)

    @property
    def healthy(self) -> bool:
        return self._task is not None and not self._task.done() and not self._closing

    async def _run(self) -> None:
        raise NotImplementedError

    def _fail_all(self, cause: Cause) -> None:
        raise NotImplementedError

    def _end_all(self, why: str) -> None:
        self._closing = True
        self._fail_all(Cause(Code.SHUTDOWN, why))

    def _refuse_when_closing(self) -> None:
        if self._closing:
            raise room_error(self._closing_cause)

    def _failed(self, what: str, error: Exception) -> Cause:
        """Count and log a failure; return the cause with which the affected requests end."""
        self.failed_steps += 1
        # Another process of the model is at fault, so a traceback of this one would not help.
        if isinstance(error, LostError):
            _log.error("%s failed: %s", what, error)
            return error.cause()
        _log.exception("%s failed", what)
        return Cause(Code.ENGINE_ERROR, f"{what} failed: {type(error).__name__}")
