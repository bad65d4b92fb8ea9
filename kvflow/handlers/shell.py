"""The base class of all shells.

A shell makes no protocol decision. It passes messages and ticks to an endpoint, runs the commands
that the endpoint returns, and keeps track of tasks.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from kvflow.aio import ENDS_PROCESS, must_pass
from kvflow.protocols.errors import Cause, Code, KvflowError, TransferError, room_error
from kvflow.protocols.limits import Timing
from kvflow.protocols.ports import ControlSocket, DataPlane, PlaneAddress
from kvflow.telemetry.counters import Counts

log = logging.getLogger(__name__)
T = TypeVar("T")
# One tick handles everything that becomes due within this time.
TICK_GRAIN_S = 0.005


class Answer(Generic[T]):
    """A result or an error that is given once, and for which several users can wait.

    Cancelling one user does not cancel the wait of another. This class creates a Future only when
    a user has to wait, because most answers are given earlier or are never awaited.
    """

    __slots__ = ("_error", "_result", "_waiting", "given")

    def __init__(self) -> None:
        self.given = False
        self._result: Any = None
        self._error: BaseException | Cause | None = None
        self._waiting: tuple[asyncio.Future[None], ...] = ()

    async def get(self) -> T:
        if not self.given:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting += (waiter,)
            try:
                await waiter
            except asyncio.CancelledError:
                self._waiting = tuple(other for other in self._waiting if other is not waiter)
                raise
        if isinstance(self._error, Cause):
            raise room_error(self._error)
        if self._error is not None:
            # Users share the exception object, so its traceback would grow with each user.
            raise self._error.with_traceback(None)
        result: T = self._result
        return result

    def give(self, result: T | None, error: BaseException | Cause | None = None) -> None:
        """Set the result or the error. A second call has no effect.

        A cause becomes an exception only in `get`, because for most failed rooms no user calls it.
        """
        if self.given:
            return
        self.given, self._result, self._error = True, result, error
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting = ()


class Endpoint(Protocol):
    """The methods of an endpoint that every shell uses."""

    @property
    def outbox(self) -> list[Any]:
        """Commands for the shell to run. The shell removes each command after running it."""

    def next_tick(self) -> float: ...

    def tick(self, now: float) -> None: ...

    def credit_stall(self, late_s: float, now: float) -> None: ...


class Shell:
    """The asyncio side of one endpoint: its timer, its tasks, and the loop that runs commands."""

    def __init__(
        self,
        endpoint: Endpoint,
        timing: Timing,
        counts: Counts,
        now: Callable[[], float],
    ) -> None:
        self._endpoint = endpoint
        self.runners: dict[type, Callable[[Any], None]] = {}
        self.timing, self.counts, self.now = timing, counts, now
        self._loop = asyncio.get_running_loop()
        # Tasks and timers serve all requests, so their log lines must not name one.
        self._context = contextvars.copy_context()
        self._timer: asyncio.Handle | None = None
        self._fires_at_s = 0.0
        self._due_at_s = float("inf")
        self._tasks: set[asyncio.Task[None]] = set()
        self._callbacks: list[Callable[[], None]] = []
        self._running = self.stopped = False
        # While `leaving` is True, each `run` sets `changed`, so that `wait_while` checks its
        # condition again.
        self.changed, self.leaving = asyncio.Event(), False

    def run(self, then: Callable[[], object] | None = None) -> None:
        """Run all commands of the endpoint, then call `then`, then the users' callbacks.

        A command may feed the endpoint and call this method again. The outer call then runs the new
        commands. A command may call user code, so every exception is logged, except those that end
        the process. After such an exception, the next call continues with the remaining commands.
        """
        if self._running:
            assert then is None
            return
        self._running = True
        outbox, runners = self._endpoint.outbox, self.runners
        ran = 0
        try:
            # Commands append to the outbox while this loop runs.
            for command in outbox:
                ran += 1
                try:
                    runners[type(command)](command)
                except ENDS_PROCESS:
                    raise
                except BaseException:
                    # The commands that follow may belong to other rooms, and must still run.
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
        """Call `call`. An exception is logged and counted, so that other rooms continue."""
        try:
            call()
        except ENDS_PROCESS:
            raise
        except BaseException:  # noqa: BLE001 - `failed` logs it
            self.failed(what)

    def failed(self, what: str) -> None:
        """Log and count the exception that is being handled."""
        self.counts.handler_errors += 1
        log.exception("%s failed", what)

    def explained(self, error: BaseException, doing: str) -> KvflowError:
        """Convert an exception into the KvflowError with which its room ends.

        An exception that is not a KvflowError is a bug in user code or in kvflow, so it is logged
        and counted, unless it is a cancellation while the node shuts down. An exception that ends
        the process is raised again.
        """
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
        self._callbacks += callbacks
        callbacks.clear()

    # --- time

    def _arm(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait_s = 0.0 if at_s == float("-inf") else max(at_s - self.now(), TICK_GRAIN_S)
        # Wake at least once per heartbeat interval, because a late timer reveals a stalled event
        # loop.
        wait_s = min(wait_s, self.timing.heartbeat_s)
        self._due_at_s = at_s
        self._fires_at_s = self._loop.time() + wait_s
        self._timer = self._loop.call_later(wait_s, self._tick, context=self._context)

    def _tick(self) -> None:
        """Tick the endpoint. If the event loop was stalled, first report how long."""
        self._timer, self._due_at_s = None, float("inf")
        now = self.now()
        if (late_s := self._loop.time() - self._fires_at_s) > self.timing.heartbeat_s:
            self._endpoint.credit_stall(late_s, now)
        self.guard(lambda: self.tick(now), "a tick")
        self.run()

    def wake(self) -> None:
        """Tick at once. Call this after moving the node's clock."""
        self.changed.set()
        if self._timer is not None:
            self._timer.cancel()
            self._fires_at_s = self._loop.time()
            self._tick()

    async def wait_while(self, condition: Callable[[], bool], patience_s: float) -> None:
        """Wait until `condition` is false, for at most `patience_s`. Set `leaving` first, so that
        the condition is checked again after each `run`.
        """
        until_s = self.now() + patience_s
        while condition() and (left_s := until_s - self.now()) > 0:
            self.changed.clear()
            # The loop's timer may fire early, so each round starts the timeout anew.
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
        """Start `work` as a task. If the shell is stopped already, the task is cancelled before its
        first step.

        `ended` receives the exception that ended the task (CancelledError if it was cancelled), or
        None. Without `ended`, an error is logged and counted.

        With `of_caller`, log lines of the task name the caller's request.
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
        # `stop` may have made its last check for tasks already.
        if self.stopped:
            task.cancel()
        return task

    def cancel(self, watch: asyncio.Task[None] | None) -> None:
        """Cancel the task that watches a process, if there is one."""
        # A watch that reported a death reaches this method in its own task, and is about to return.
        if watch is not None and watch is not asyncio.current_task():
            watch.cancel()

    async def consume(
        self,
        socket: ControlSocket,
        receive: Callable[[bytes, bytes], None],
        whose: str,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Pass every frame of a socket to `receive(sender, frame)`, until cancelled.

        `before` is called before each burst. An exception does not end the loop (I7).
        """
        this = asyncio.current_task()
        assert this is not None
        # A command that the last burst caused may have closed this socket and cancelled this task.
        while not this.cancelling():
            try:
                if not (burst := await socket.receive()):
                    raise RuntimeError(f"{socket!r} received nothing, and did not wait")
            except BaseException as error:
                if must_pass(error):
                    raise
                self.counts.handler_errors += 1
                log.exception("receiving failed; it is tried again")
                await asyncio.sleep(self.timing.heartbeat_s)
                continue
            if before is not None:
                before()
            for sender, frame in burst:
                try:
                    receive(sender, frame)
                except Exception:
                    self.counts.handler_errors += 1
                    log.exception("a message of %s failed", whose)
            self.run()

    async def stop(self) -> None:
        """Cancel the timer and every task, and wait until the tasks end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # No tick is due sooner than this, so `run` never arms the timer again.
        self._due_at_s = float("-inf")
        self.stopped = True
        while tasks := [task for task in self._tasks if task is not asyncio.current_task()]:
            for task in tasks:
                task.cancel()
            # `asyncio.gather` may return before callbacks remove ended tasks from the set.
            await asyncio.wait(tasks)


async def fenced(plane: DataPlane, writer: PlaneAddress, timing: Timing, counts: Counts) -> bool:
    """Wait for the fence of `writer`. Returns True once none of its writes can reach our pool, or
    False if this host can never prove that.
    """
    return await seen_ended(lambda: plane.fence(writer), writer.locator, timing, counts)


async def seen_ended(
    wait: Callable[[], Awaitable[None]], whose: str, timing: Timing, counts: Counts
) -> bool:
    """Wait for the end of a process. Returns True once `wait` returns, or False if it raises
    TransferError because this host can never observe that end.

    After any other error (for example, no free file descriptor) `wait` is called again. Such errors
    are logged and counted.
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
