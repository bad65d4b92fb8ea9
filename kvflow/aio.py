"""Helpers for asyncio: run work in threads, and await it to its end, since the cancellation of a
coroutine does not stop the thread (I12); divide long work, and bursts of arrivals, into turns of
the event loop.

`Threads` is the only way in which kvflow runs work in a thread for an event loop. Its threads are
daemons, so a call that hangs delays neither the end of the process nor any other kind of work.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, ClassVar, Generic, Self, TypeVar

T = TypeVar("T")
ENDS_PROCESS = (KeyboardInterrupt, SystemExit)
TURN_S = 0.001  # long work holds the event loop for this long at a time


def must_pass(error: BaseException) -> bool:
    """Return True if a task must let `error` pass, which came from something that it awaits: the
    process ends, or another task cancelled this one.
    """
    # Without a request to cancel this task, the awaited future itself was cancelled. For the task
    # this is an error like any other.
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, (*ENDS_PROCESS, GeneratorExit))


async def run_to_end(
    running: asyncio.Future[T],
    within_s: float | None = None,
    stop: Callable[[], object] = lambda: None,
) -> T:
    """Await a thread's work to its end, and return its result.

    A cancellation is raised only after the end; a second one has no effect. `stop` is called at a
    cancellation and when the time is over: it may end the work, or make it end sooner.

    Raises: TimeoutError, or the cancellation, when the work does not end `within_s` from now.
    """
    loop = asyncio.get_running_loop()
    until_s = None if within_s is None else loop.time() + within_s
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        left_s = None if until_s is None else until_s - loop.time()
        if left_s is not None and left_s <= 0:
            stop()
            raise cancelled or TimeoutError
        try:
            await asyncio.wait([running], timeout=left_s)
        except asyncio.CancelledError as error:
            cancelled = error
            stop()
    if cancelled is not None:
        # asyncio logs an exception that is never retrieved.
        if not running.cancelled():
            running.exception()
        raise cancelled
    return running.result()


async def all_ended(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Wait until all of `tasks` end, with a result, an error or a cancellation.

    A cancellation of this coroutine is raised only then, so that no task still runs when the caller
    continues.
    """
    if waited := list(tasks):
        await run_to_end(asyncio.ensure_future(asyncio.wait(waited)))


async def wait_or_cancel(
    running: asyncio.Future[T], undo: Callable[[T], object] = lambda _: None
) -> None:
    """Wait until `running` ends, with a result, an error or a cancellation.

    A cancellation of this coroutine is passed on to `running`, and raised when it ends. If it ends
    with a result nevertheless, `undo` receives it.
    """
    try:
        await asyncio.wait([running])
    except asyncio.CancelledError:
        running.cancel()
        # The first cancellation is raised below, whatever happens during this wait.
        with suppress(Exception, asyncio.CancelledError):
            await run_to_end(running)
        if not running.cancelled() and running.exception() is None:
            undo(running.result())
        raise


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield `items` for a loop with a quick body, and let other tasks run every `TURN_S`."""
    turn_ends = time.perf_counter() + TURN_S
    for item in items:
        yield item
        if time.perf_counter() > turn_ends:
            await asyncio.sleep(0)
            turn_ends = time.perf_counter() + TURN_S


class Turnstile:
    """A gate that lets at most `per_turn` coroutines pass in a turn of the event loop, in order of
    arrival.

    A coroutine that arrives alone does not wait.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counting = False

    async def passed(self) -> None:
        if not self._counting:
            self._counting = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        # Places are left only while the queue is empty, so no coroutine is passed here.
        if self._left:
            self._left -= 1
            return
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        await mine

    def _next_turn(self) -> None:
        self._counting = self._left < self._per_turn
        self._left = self._per_turn
        while self._left and self._waiting:
            first = self._waiting.popleft()
            # A cancelled coroutine must not use up a place.
            if not first.done():
                first.set_result(None)
                self._left -= 1
        if self._counting:
            asyncio.get_running_loop().call_soon(self._next_turn)


class Job(Generic[T]):
    """Work that `Threads.start` queued for a thread."""

    ended: asyncio.Future[T]
    """Resolves, on the event loop, when no thread does the work any more: with its result or its
    error. It is cancelled if the work was cancelled before it began. Await it through `run_to_end`:
    cancelling this future would not stop the thread.
    """

    def __init__(self, work: Callable[..., T], arguments: tuple[Any, ...]) -> None:
        self.work, self.arguments = work, arguments
        # Acquired once, by the thread that begins the work or by `cancel`, whichever is first.
        self._begun = threading.Lock()
        self._cancelled = False

    def is_cancelled(self) -> bool:
        """Return True when the work should stop. The work asks between two slices."""
        return self._cancelled

    def cancel(self) -> bool:
        """Let the work never begin, or else stop where it asks `is_cancelled`. Idempotent.

        Return True, once, if the work never begins. The job then holds none of its arguments.
        """
        self._cancelled = True
        if not self._begun.acquire(blocking=False):
            return False
        self._forget()
        self.ended.cancel()
        return True

    def begin(self) -> bool:
        """Begin the work, in its thread; False if it was cancelled before."""
        return self._begun.acquire(blocking=False)

    def run(self) -> T | None:
        """Do the work, in its thread."""
        if not self.begin():
            return None
        try:
            return self.work(*self.arguments, self.is_cancelled)
        finally:
            self._forget()

    def _forget(self) -> None:
        # The job may outlive its work, and must not keep the memory mapped that the work used.
        del self.work, self.arguments


class Threads:
    """At most `limit` threads for one kind of blocking work, started as work comes, in the order in
    which it comes. Used by any event loop.

    A call that never returns keeps its thread, so it delays the work behind it, but no other kind
    of work, no caller longer than it wants to wait, and not the end of the process.
    """

    _all: ClassVar[weakref.WeakSet[Threads]] = weakref.WeakSet()

    def __init__(self, name: str, limit: int = 1) -> None:
        threads = _DaemonThreads(f"kvflow-{name}", limit)
        self._name, self._limit = name, limit
        self.executor: Executor = threads
        """The same threads, for a caller that is a thread itself."""
        self.hung = 0  # calls that are no longer waited for
        # Threads that have no more work end with the last reference to this object.
        weakref.finalize(self, threads.shutdown).atexit = False
        self._all.add(self)

    def __repr__(self) -> str:
        return f"<Threads {self._name}: at most {self._limit}, {self.hung} hung>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more work, and let the threads end after the work that waits. Idempotent.

        It waits for no thread.
        """
        self.executor.shutdown(wait=False)

    @classmethod
    def close_all(cls) -> None:
        """Close all threads of the process, which is about to end."""
        for threads in list(cls._all):
            threads.close()

    def start(self, work: Callable[..., T], *arguments: Any) -> Job[T]:
        """Queue `work`. Its last argument, after `arguments`, is `Job.is_cancelled`.

        Raises: RuntimeError when the system has no thread, or after `close`.
        """
        job = Job(work, arguments)
        # The event loop hands the work to the threads, because the loop of the simulators does it
        # in virtual time instead.
        job.ended = asyncio.get_running_loop().run_in_executor(
            self.executor,
            job.run,  # type: ignore[arg-type]
        )
        return job

    async def run(
        self,
        work: Callable[[], T],
        undo: Callable[[T], object] = lambda _: None,
        *,
        within_s: float | None = None,
    ) -> T:
        """Run `work` and return its result, but wait at most `within_s`, the wait for a thread
        included; then abandon the thread. If the work is abandoned or cancelled, `undo` receives
        its result. Work that did not begin by then never begins.

        Raises: TimeoutError; RuntimeError when the system has no thread; every error of `work`.
        """
        job = self.start(_whole, work)
        try:
            return await run_to_end(job.ended, within_s, job.cancel)
        except (asyncio.CancelledError, TimeoutError):
            if not job.ended.done():
                self.hung += 1
                job.ended.add_done_callback(self._woke)
            job.ended.add_done_callback(functools.partial(_undo, undo))
            raise

    async def ask(self, work: Callable[[], T]) -> T:
        """Run `work` and return its result. A caller that is cancelled leaves at once, so nothing
        may depend on the end of the work.

        Raises: as `run`.
        """
        job = self.start(_whole, work)
        try:
            return await asyncio.shield(job.ended)
        finally:
            job.cancel()

    def _woke(self, _: object) -> None:
        self.hung -= 1


def _whole(work: Callable[[], T], _: Callable[[], bool]) -> T:
    """Do work that cannot be stopped between its beginning and its end."""
    return work()


def _undo(undo: Callable[[T], object], ended: asyncio.Future[T]) -> None:
    if not ended.cancelled() and ended.exception() is None:
        undo(ended.result())


class _DaemonThreads(Executor):
    """An executor of daemon threads, for which the end of the process does not wait, as it does for
    those of `ThreadPoolExecutor`.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit = name, limit
        self._threads = self._idle = 0
        self._closed = False
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()

    def submit(self, work: Callable[..., T], /, *args: Any, **more: Any) -> Future[T]:
        """Queue `work`. Raises: RuntimeError when no thread can be started, or after `shutdown`."""
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("no work is taken after shutdown")
            # Each idle thread is going to take one piece of the work that waits already.
            if self._idle <= len(self._waiting) and self._threads < self._limit:
                self._start_thread()
            self._waiting.append((future, functools.partial(work, *args, **more)))
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end after the work that waits; never wait for them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _start_thread(self) -> None:
        name = f"{self._name}-{self._threads}"
        try:
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        except RuntimeError:
            # One thread is enough to do the work, if the system has no more.
            if not self._threads:
                raise
        else:
            self._threads += 1

    def _serve(self) -> None:
        while (next_one := self._next()) is not None:
            future, work = next_one
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 - whoever awaits it gets it
                    future.set_exception(error)
            # The thread may wait long for its next work, and must not keep the memory of this one
            # mapped.
            del next_one, future, work

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._idle -= 1
            return self._waiting.popleft() if self._waiting else None


_SHARED = Threads("shared", 8)


async def in_thread(work: Callable[[], T], undo: Callable[[T], object] = lambda _: None) -> T:
    """Run `work`, which is short, in a thread that all callers share, to its end, and return its
    result. If this coroutine is cancelled meanwhile, `undo` receives the result.
    """
    ended = _SHARED.start(_whole, work).ended
    try:
        return await run_to_end(ended)
    except asyncio.CancelledError:
        _undo(undo, ended)
        raise
