"""What both shells are made of: run an endpoint's commands, tick it in time, and keep track of tasks.

A shell decides nothing about the protocol. It awaits what arrives, feeds the endpoint, and runs what comes out.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from kvflow.protocols.errors import TransferError
from kvflow.protocols.limits import Timing
from kvflow.protocols.ports import DataPlane, PlaneAddress
from kvflow.telemetry.counters import Counts

log = logging.getLogger(__name__)
TICK_GRAIN_S = 0.005  # what is due within this time is dealt with in one tick


class Endpoint(Protocol):
    """Either endpoint, as far as a shell of any kind is concerned."""

    @property
    def outbox(self) -> list[Any]:
        """What it asks for; the list `commands()` empties."""

    def next_tick(self) -> float: ...

    def tick(self, now: float) -> None: ...

    def credit_stall(self, late_s: float, now: float) -> None: ...


class Shell:
    """The event loop's side of one endpoint."""

    def __init__(
        self,
        endpoint: Endpoint,
        timing: Timing,
        counts: Counts,
        now: Callable[[], float],
    ) -> None:
        self._endpoint = endpoint
        self.runners: dict[type, Callable[[Any], None]] = {}  # by type of command, what runs it
        self.timing, self.counts, self.now = timing, counts, now
        self._loop = asyncio.get_running_loop()
        # Of this node, not of the request that happens to start a task or a timer for all of them.
        self._context = contextvars.copy_context()
        self._timer: asyncio.Handle | None = None
        self._fires_at_s = 0.0
        self._due_at_s = float("inf")
        self._tasks: set[asyncio.Task[None]] = set()
        self._callbacks: list[Callable[[], None]] = []
        self._running = False
        self.changed, self.leaving = asyncio.Event(), False  # set when something was fed to a leaving endpoint

    def run(self, then: Callable[[], object] | None = None) -> None:
        """Run what the endpoint asks for until it asks for nothing more, `then`, and what users want to be called with.

        A command that feeds the endpoint may come here again: the loop below runs what follows.
        """
        if self._running:
            assert then is None
            return
        self._running = True
        outbox, runners = self._endpoint.outbox, self.runners
        try:
            for command in outbox:  # it grows meanwhile
                try:
                    runners[type(command)](command)
                except Exception:  # the commands that follow are other rooms'
                    self.counts.handler_errors += 1
                    log.exception("%r failed", command)
        finally:
            outbox.clear()
            self._running = False
        if then is not None:
            then()
        if self.leaving:
            self.changed.set()
        if self._callbacks:
            called, self._callbacks = self._callbacks, []
            for callback in called:
                self.guard(callback, "a room's on_end callback")
        if (at_s := self._endpoint.next_tick()) < self._due_at_s:
            self._arm(at_s)

    def guard(self, call: Callable[[], object], what: str) -> None:
        """Call; an exception is logged and counted, because other rooms must go on."""
        try:
            call()
        except Exception:
            self.counts.handler_errors += 1
            log.exception("%s failed", what)

    def call_back_later(self, callbacks: list[Callable[[], None]]) -> None:
        """Call each once, after the commands that are being run."""
        self._callbacks += callbacks
        callbacks.clear()

    # --- time

    def _arm(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait_s = 0.0 if at_s == float("-inf") else max(at_s - self.now(), TICK_GRAIN_S)
        wait_s = min(wait_s, self.timing.heartbeat_s)  # how late a tick comes shows a stall only where it comes often
        self._due_at_s = at_s
        self._fires_at_s = self._loop.time() + wait_s
        self._timer = self._loop.call_later(wait_s, self._tick, context=self._context)

    def _tick(self) -> None:
        """Called when something is due, by the loop's clock: how late it is tells whether the loop stood still."""
        self._timer, self._due_at_s = None, float("inf")
        now = self.now()
        if (late_s := self._loop.time() - self._fires_at_s) > self.timing.heartbeat_s:
            self._endpoint.credit_stall(late_s, now)
        self.guard(lambda: self.tick(now), "a tick")
        self.run()

    def wake(self) -> None:
        """The clock has been moved: look at what is due now."""
        self.changed.set()
        if self._timer is not None:
            self._timer.cancel()
            self._fires_at_s = self._loop.time()
            self._tick()

    async def wait_while(self, condition: Callable[[], bool], patience_s: float) -> None:
        """Wait until `condition` is false, which is looked at whenever something was fed to the endpoint, or until
        patience has ended, by the node's clock."""
        until_s = self.now() + patience_s
        timer = self._loop.call_later(patience_s, self.changed.set)
        try:
            while condition() and self.now() < until_s:
                self.changed.clear()
                await self.changed.wait()
        finally:
            timer.cancel()

    def tick(self, now: float) -> None:
        self._endpoint.tick(now)

    # --- tasks

    def spawn(self, work: Coroutine[Any, Any, None], name: str, *, of_caller: bool = False) -> asyncio.Task[None]:
        """Start `work`; what ends it by surprise is logged and counted, never silent. `of_caller`: its log lines are
        about the request of the caller."""
        context = contextvars.copy_context() if of_caller else self._context.copy()
        task = self._loop.create_task(work, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.counts.handler_errors += 1
            log.error("%s ended", task.get_name(), exc_info=error)

    async def stop(self) -> None:
        """Cancel the timer and every task, and await their end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due_at_s = float("-inf")  # never armed again
        while tasks := [task for task in self._tasks if task is not asyncio.current_task()]:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def fenced(plane: DataPlane, writer: PlaneAddress, timing: Timing, counts: Counts) -> bool:
    """True once no write of `writer` can reach our pool any more, False when that can never be proven from here."""
    return await seen_ended(lambda: plane.fence(writer), writer.locator, timing, counts)


async def seen_ended(wait: Callable[[], Awaitable[None]], whose: str, timing: Timing, counts: Counts) -> bool:
    """True once `wait` has returned, False when it raises TransferError: from here that can never be seen.

    Anything but an answer (no descriptor left to watch with, say) is counted, and asked again.
    """
    while True:
        try:
            await wait()
        except TransferError:
            return False
        except Exception:
            counts.handler_errors += 1
            log.exception("cannot watch the process of %s for now", whose)
            await asyncio.sleep(timing.heartbeat_s)
        else:
            return True
