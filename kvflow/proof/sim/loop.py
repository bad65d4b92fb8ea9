"""An asyncio event loop in virtual time: its clock jumps from one timer to the next.

    loop = VirtualLoop(random.Random(7))
    loop.run_until_complete(main())

All randomness comes from one generator, so the same seed gives the same run. Threads are virtual,
too: work for an executor runs later, in the thread of the loop. Tasks and timers belong to the
process (`Process.run`) that started them. A process can be halted for a while, as by SIGSTOP, or
killed.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

from kvflow.aio import Job
from kvflow.proof.sim.times import THREAD_S

T = TypeVar("T")
_ROUNDS = 5


class Process:
    """Process of one node. Its handlers, engine and threads run or halt together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        # Callbacks that wait while the process is halted. None while it runs.
        self.parked: list[asyncio.Handle] | None = None

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function`. The tasks and timers that it starts belong to this process."""
        context = contextvars.copy_context()
        context.run(_process.set, self)
        return context.run(function, *arguments)


_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
# Context of timers that belong to no process, such as those of the network and of accidents.
_NOBODY = contextvars.Context()


def current_process() -> Process | None:
    return _process.get()


class VirtualThread(Executor):
    """Executor without a thread. It decides when its work happens, and in how many parts."""

    def begin(self, done: asyncio.Future[Any], job: Job[Any]) -> None:
        """Schedule the work of `job` with timers of the running loop. Resolve `done` at its end.

        If the job is cancelled before it begins, its caller has already cancelled `done`.
        """
        raise NotImplementedError


class VirtualLoop(asyncio.BaseEventLoop):
    """Event loop in virtual time. A step runs one timer, and all callbacks that become ready."""

    # asyncio defines these three attributes.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool
    thread_s = THREAD_S

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.steps = 0
        self.raised: list[dict[str, Any]] = []  # errors that no task caught
        self._now = 0.0
        self._halted: set[Process] = set()  # halted or dead
        self.set_exception_handler(lambda _, context: self.raised.append(context))

    def time(self) -> float:
        return self._now

    def later(
        self, delay_s: float, callback: Callable[..., object], *arguments: Any
    ) -> asyncio.TimerHandle:
        """Call `callback` after a delay, even while processes are halted."""
        return self.call_later(delay_s, callback, *arguments, context=_NOBODY)

    def soon(self, callback: Callable[..., object], *arguments: Any) -> asyncio.Handle:
        """Call `callback` after the current callback, even while processes are halted."""
        return self.call_soon(callback, *arguments, context=_NOBODY)

    # --- processes

    def halt(self, process: Process) -> None:
        if process.parked is None:
            process.parked = []
            self._halted.add(process)

    def resume(self, process: Process) -> None:
        if process.parked is not None and not process.dead:
            self._halted.discard(process)
            parked, process.parked = process.parked, None
            self._ready.extend(parked)

    def kill(self, process: Process) -> None:
        self.halt(process)
        process.dead = True

    def play(self, main: Coroutine[Any, Any, None]) -> None:
        task = self.create_task(main)
        try:
            self.run_until_complete(task)
        except RuntimeError:
            # asyncio raises if `stop` ends the loop before the task ends.
            if task.done():
                raise

    def wind_up(self) -> None:
        """Cancel all tasks, including those of dead processes, and let them end.

        Tasks that begin meanwhile are cancelled, too, for a few rounds.
        """
        for process in list(self._halted):
            process.dead = False
            self.resume(process)
        for _ in range(_ROUNDS):
            if not (tasks := asyncio.all_tasks(self)):
                return
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks, timeout=60))

    # --- what asyncio asks of a loop

    def run_in_executor(  # type: ignore[override]
        self, executor: object, function: Callable[..., T], *arguments: Any
    ) -> asyncio.Future[T]:
        """Do the work later, in one piece unless the executor is a `VirtualThread`.

        Cancelling the future does not stop the work.
        """
        future: asyncio.Future[T] = self.create_future()
        if isinstance(executor, VirtualThread):
            # Shipped code hands work over as jobs of `aio.Threads`.
            executor.begin(future, function.__self__)  # type: ignore[attr-defined]
            return future

        def work() -> None:
            try:
                result = function(*arguments)
            except Exception as error:  # noqa: BLE001
                # The caller that awaits the work receives the error, as from a thread.
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(self.rng.uniform(*self.thread_s), work)
        return future

    def call_soon_threadsafe(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *arguments: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *arguments, context=context)

    def _run_once(self) -> None:
        """Run all ready callbacks, and move to the next timer. asyncio calls this in a loop."""
        ready = self._ready
        while ready:
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if self._halted:
                context = handle._context  # type: ignore[attr-defined]
                process: Process | None = context.get(_process)
                if process is not None and process.parked is not None:
                    process.parked.append(handle)
                    continue
            handle._run()
        if not self._stopping:
            self._next_timer()

    def _next_timer(self) -> None:
        """Move the clock to the next timer. Raises: RuntimeError if no timer is left."""
        timers = self._scheduled
        while timers:
            timer = heapq.heappop(timers)
            timer._scheduled = False  # type: ignore[attr-defined]
            if not timer._cancelled:
                # A timer may be set for a time in the past, but the clock never runs backwards.
                self._now = max(self._now, timer.when())
                self.steps += 1
                self._ready.append(timer)
                return
        raise RuntimeError(f"deadlock at {self._now:.6f} s: everybody waits, and no timer is left")

    def _process_events(self, event_list: object) -> None:
        raise AssertionError("there is nothing to select on")

    def _write_to_self(self) -> None:
        """Do nothing: this loop never sleeps in a selector, so it needs no wake-up."""
