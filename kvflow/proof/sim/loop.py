"""An asyncio event loop without time: a virtual clock that jumps from one timer to the next, and
nothing else moves it.

    loop = VirtualLoop(random.Random(7))
    loop.run_until_complete(main())

Everything random comes from one generator, so the same seed gives the same run. Threads are virtual
too: what is given to an executor happens at a later moment, whole, on this thread. Tasks and timers
belong to the process (`Process.run`) that started them; a process can be halted for a while, as by
SIGSTOP, or for good.
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

from kvflow.proof.sim.times import THREAD_S

T = TypeVar("T")
_ROUNDS = 5


class Process:
    """Whose turn it is: what one node's handlers, engine and threads have in common."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.parked: list[asyncio.Handle] | None = None  # what waits while it is halted

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function` as this process; tasks and timers it starts are this process's."""
        context = contextvars.copy_context()
        context.run(_process.set, self)
        return context.run(function, *arguments)


_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
# Of timers that belong to no process: the network, the plan of faults.
_NOBODY = contextvars.Context()


def current_process() -> Process | None:
    return _process.get()


class VirtualThread(Executor):
    """An executor that says by itself when its work happens, and in how many parts. No thread."""

    def begin(self, done: asyncio.Future[Any], work: Callable[..., Any], *arguments: Any) -> None:
        """Do `work` some time, by timers of the running loop, and answer `done` after it, if
        somebody still waits.
        """
        raise NotImplementedError


class VirtualLoop(asyncio.BaseEventLoop):
    """One step is one timer, and then every callback it makes ready, in the order asyncio would
    call them.
    """

    _ready: deque[asyncio.Handle]  # asyncio's own, as are the next two
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool
    thread_s = THREAD_S

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.steps = 0
        self.raised: list[dict[str, Any]] = []  # what nobody caught
        self._now = 0.0
        self._halted: set[Process] = set()  # halted ones
        self.set_exception_handler(lambda _, context: self.raised.append(context))

    def time(self) -> float:
        return self._now

    def later(
        self, delay_s: float, callback: Callable[..., object], *arguments: Any
    ) -> asyncio.TimerHandle:
        """As `call_later`, for what goes on whoever is halted."""
        return self.call_later(delay_s, callback, *arguments, context=_NOBODY)

    def soon(self, callback: Callable[..., object], *arguments: Any) -> asyncio.Handle:
        """As `call_soon`, for what goes on whoever is halted: what runs now is over by then."""
        return self.call_soon(callback, *arguments, context=_NOBODY)

    # --- processes

    def halt(self, process: Process) -> None:
        """Nothing of it runs until `resume`; the world goes on."""
        if process.parked is None:
            process.parked = []
            self._halted.add(process)

    def resume(self, process: Process) -> None:
        if process.parked is not None and not process.dead:
            self._halted.discard(process)
            parked, process.parked = process.parked, None
            self._ready.extend(parked)

    def kill(self, process: Process) -> None:
        """Nothing of it runs any more, not even what would clean up."""
        self.halt(process)
        process.dead = True

    def play(self, main: Coroutine[Any, Any, None]) -> None:
        """Run `main` to its end, or until somebody calls `stop`."""
        task = self.create_task(main)
        try:
            self.run_until_complete(task)
        except RuntimeError:
            if task.done():  # else somebody has
                raise

    def wind_up(self) -> None:
        """Cancel whatever is left, of the dead too, and let it end;
        what begins meanwhile, as well.
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
        """The work happens in one go at a later moment; as with a thread, cancelling the future
        does not stop it.
        """
        future: asyncio.Future[T] = self.create_future()
        if isinstance(executor, VirtualThread):
            executor.begin(future, function, *arguments)
            return future

        def work() -> None:
            try:
                result = function(*arguments)
            except Exception as error:  # noqa: BLE001
                # Whoever awaits it gets it, as from a thread.
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
        ready = self._ready
        while ready:
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if self._halted:
                process: Process | None = handle._context.get(  # type: ignore[attr-defined]
                    _process,
                )
                if process is not None and process.parked is not None:
                    process.parked.append(handle)
                    continue
            handle._run()
        if not self._stopping:
            self._next_timer()

    def _next_timer(self) -> None:
        """Raises: RuntimeError when nothing is left that could ever happen."""
        timers = self._scheduled
        while timers:
            timer = heapq.heappop(timers)
            timer._scheduled = False  # type: ignore[attr-defined]
            if not timer._cancelled:
                self._now = max(self._now, timer.when())
                self.steps += 1
                self._ready.append(timer)
                return
        raise RuntimeError(f"deadlock at {self._now:.6f} s: everybody waits, and no timer is left")

    def _process_events(self, event_list: object) -> None:
        raise AssertionError("there is nothing to select on")

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector."""
