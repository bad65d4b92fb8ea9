"""What both shells are made of: run an endpoint's commands, tick it in time, and keep track of
tasks.

A shell decides nothing about the protocol. It awaits what arrives, feeds the endpoint, and runs
what comes out.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from kvflow.aio import ENDS_PROCESS, must_pass
from kvflow.protocols.errors import Cause, Code, KvflowError, TransferError, room_error
from kvflow.protocols.limits import Timing
from kvflow.protocols.ports import ControlSocket, DataPlane, PlaneAddress
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
        self._running = self.stopped = False
        # set when something was fed to a leaving endpoint.
        self.changed, self.leaving = asyncio.Event(), False

    def run(self, then: Callable[[], object] | None = None) -> None:
        """Run what the endpoint asks for until it asks for nothing more, `then`, and what users
        want to be called with.

        A command that feeds the endpoint may come here again: the loop below runs what follows.
        What a command calls may be the user's, and may raise anything; only what ends the process
        passes, and the next call goes on.
        """
        if self._running:
            assert then is None
            return
        self._running = True
        outbox, runners = self._endpoint.outbox, self.runners
        ran = 0
        try:
            for command in outbox:  # it grows meanwhile
                ran += 1
                try:
                    runners[type(command)](command)
                except ENDS_PROCESS:
                    raise
                except BaseException:  # the commands that follow are other rooms'
                    self.counts.handler_errors += 1
                    log.exception("%r failed", command)
        finally:
            del outbox[:ran]
            self._running = False
        if then is not None:
            self.guard(then, "what follows the commands")
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
        except ENDS_PROCESS:
            raise
        except BaseException:
            self.counts.handler_errors += 1
            log.exception("%s failed", what)

    def explained(self, error: BaseException, doing: str) -> KvflowError:
        """Turn whatever has ended a piece of work into the error of its room.

        What kvflow does not raise on purpose is a fault of user code or of ours: it is logged and
        counted. Raises: what ends the process."""
        if isinstance(error, KvflowError):
            return error
        if isinstance(error, ENDS_PROCESS):
            raise error
        if isinstance(error, asyncio.CancelledError) and (self.leaving or self.stopped):
            return room_error(
                Cause(Code.SHUTDOWN, f"{doing} was cancelled: this node is shutting down")
            )
        self.counts.handler_errors += 1
        log.error("%s failed", doing, exc_info=error)
        return room_error(
            Cause(Code.ENGINE_ERROR, f"{doing} failed: {type(error).__name__}: {error}")
        )

    def call_back_later(self, callbacks: list[Callable[[], None]]) -> None:
        """Call each once, after the commands that are being run."""
        self._callbacks += callbacks
        callbacks.clear()

    # --- time

    def _arm(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait_s = 0.0 if at_s == float("-inf") else max(at_s - self.now(), TICK_GRAIN_S)
        # How late a tick comes shows a stall only where it comes often.
        wait_s = min(wait_s, self.timing.heartbeat_s)
        self._due_at_s = at_s
        self._fires_at_s = self._loop.time() + wait_s
        self._timer = self._loop.call_later(wait_s, self._tick, context=self._context)

    def _tick(self) -> None:
        """Called when something is due, by the loop's clock: how late it is tells whether the loop
        stood still.
        """
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
        """Wait until `condition` is false, which is looked at whenever something was fed to the
        endpoint, or until patience has ended, by the node's clock."""
        until_s = self.now() + patience_s
        while condition() and (left_s := until_s - self.now()) > 0:
            self.changed.clear()
            # Each time anew: a loop's timer may fire a moment before its time, and where nothing is
            # fed any more there is no other.
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self.changed.wait()

    def tick(self, now: float) -> None:
        self._endpoint.tick(now)

    # --- tasks

    def spawn(
        self,
        work: Coroutine[Any, Any, None],
        name: str,
        *,
        of_caller: bool = False,
        ended: Callable[[BaseException | None], None] | None = None,
    ) -> asyncio.Task[None]:
        """Start `work`, which does nothing once this shell has stopped.

        Its end is reported to `ended` with what it raised, whatever that is, a cancellation before
        its first step included; without `ended`, what it raises is logged and counted.

        `of_caller`: its log lines are about the request of the caller.
        """
        context = contextvars.copy_context() if of_caller else self._context.copy()
        task = self._loop.create_task(work, name=name, context=context)
        self._tasks.add(task)

        def report(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            error = asyncio.CancelledError() if done.cancelled() else done.exception()
            if ended is not None:
                self.guard(lambda: ended(error), f"reporting the end of {name}")
                self.run()
            elif error is not None and not done.cancelled():
                self.counts.handler_errors += 1
                log.error("%s ended", name, exc_info=error)

        task.add_done_callback(report, context=context)
        if self.stopped:  # else nothing would ever end it
            task.cancel()
        return task

    async def bursts(self, socket: ControlSocket) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """What a socket receives, until this is cancelled.

        A failure is counted, and it is tried again (I7).
        """
        while True:
            try:
                if not (burst := await socket.receive()):
                    raise RuntimeError(f"{socket!r} received nothing, and did not wait")
            except BaseException as error:
                if must_pass(error):
                    raise
                self.counts.handler_errors += 1
                log.exception("receiving failed; it is tried again")
                await asyncio.sleep(self.timing.heartbeat_s)
            else:
                yield burst

    async def stop(self) -> None:
        """Cancel the timer and every task, and await their end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due_at_s = float("-inf")  # never armed again
        self.stopped = True
        while tasks := [task for task in self._tasks if task is not asyncio.current_task()]:
            for task in tasks:
                task.cancel()
            # A task leaves the set in a callback of its end. `asyncio.gather` returns at once where
            # all have ended (from Python 3.12 on), before any callback runs: this would be a loop
            # without end.
            await asyncio.wait(tasks)


async def fenced(plane: DataPlane, writer: PlaneAddress, timing: Timing, counts: Counts) -> bool:
    """True once no write of `writer` can reach our pool any more, False when that can never be
    proven from here.
    """
    return await seen_ended(lambda: plane.fence(writer), writer.locator, timing, counts)


async def seen_ended(
    wait: Callable[[], Awaitable[None]], whose: str, timing: Timing, counts: Counts
) -> bool:
    """True once `wait` has returned, False when it raises TransferError: from here that can never
    be seen.

    Anything but an answer (no descriptor left to watch with, say) is counted, and asked again.
    """
    while True:
        try:
            await wait()
        except TransferError:
            return False
        except BaseException as error:
            if must_pass(error):
                raise
            counts.handler_errors += 1
            log.exception("cannot watch the process of %s for now", whose)
            await asyncio.sleep(timing.heartbeat_s)
        else:
            return True
