"""Helpers for asyncio.

Cancelling a coroutine does not stop the thread that it waits for (I12), so some helpers run work in
a thread and wait until that work ends. Others divide long work, and bursts of arrivals, into turns
of the event loop.

The event loops of kvflow hand work to threads only through `Threads`. These threads are daemons, so
a call that hangs does not delay the end of the process. Each kind of work has its own threads, so
such a call does not delay other kinds of work either.
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
# Long work pauses after this time, so that other tasks can run.
TURN_S = 0.001


def must_pass(error: BaseException) -> bool:
    """Return True if the current task must not handle `error`, because the process is ending or the
    task itself was cancelled or closed.
    """
    # If the task was not cancelled, the error comes from a future that it awaited.
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, (*ENDS_PROCESS, GeneratorExit))


async def run_to_end(
    running: asyncio.Future[T],
    within_s: float | None = None,
    stop: Callable[[], object] = lambda: None,
) -> T:
    """Wait until a thread's work ends, and return its result.

    A cancellation of the caller is raised only after the work ends, or after `within_s`. `stop` is
    called at each cancellation and at a time-out. It may cancel the work, or make it end sooner.

    Raises: any error from the work; TimeoutError if the work does not end within `within_s` and the
    caller was not cancelled.
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
        # The exception is retrieved, because asyncio would otherwise log it.
        if not running.cancelled():
            running.exception()
        raise cancelled
    return running.result()


async def all_ended(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Wait until all of `tasks` end, with a result, an error or a cancellation.

    A cancellation of this coroutine is raised only after that, so that no task still runs when the
    caller continues.
    """
    if waited := list(tasks):
        await run_to_end(asyncio.ensure_future(asyncio.wait(waited)))


async def wait_or_cancel(
    running: asyncio.Future[T], undo: Callable[[T], object] = lambda _: None
) -> None:
    """Wait until `running` ends, with a result, an error or a cancellation.

    A cancellation of this coroutine cancels `running`, and is raised when `running` ends. If
    `running` still ends with a result, `undo` receives it.
    """
    try:
        await asyncio.wait([running])
    except asyncio.CancelledError:
        running.cancel()
        # The first cancellation is raised below. Errors and further cancellations are suppressed.
        with suppress(Exception, asyncio.CancelledError):
            await run_to_end(running)
        if not running.cancelled() and running.exception() is None:
            undo(running.result())
        raise


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield `items`, and let other tasks run every `TURN_S`.

    The body of the caller's loop must be quick.
    """
    turn_ends = time.perf_counter() + TURN_S
    for item in items:
        yield item
        if time.perf_counter() > turn_ends:
            await asyncio.sleep(0)
            turn_ends = time.perf_counter() + TURN_S


class Turnstile:
    """A gate that at most `per_turn` coroutines pass in one turn of the event loop, in order of
    arrival.

    A coroutine waits only if others took all places of the current turn.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counting = False

    async def passed(self) -> None:
        if (turn := self.queue()) is not None:
            await turn

    def queue(self) -> asyncio.Future[None] | None:
        """Take a place in this turn of the loop and return None, or return a future that is done
        when a place is free. To leave the queue, cancel the future.
        """
        if not self._counting:
            self._counting = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        # Places are left only while no coroutine waits, so this one does not jump the queue.
        if self._left:
            self._left -= 1
            return None
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        return mine

    def _next_turn(self) -> None:
        self._counting = self._left < self._per_turn
        self._left = self._per_turn
        while self._left and self._waiting:
            first = self._waiting.popleft()
            # Whoever was cancelled must not use up a place.
            if not first.done():
                first.set_result(None)
                self._left -= 1
        if self._counting:
            asyncio.get_running_loop().call_soon(self._next_turn)


class Job(Generic[T]):
    """A call that `Threads.start` queued for a thread."""

    ended: asyncio.Future[T]
    """Resolves with the result or the error when the work ends. The future is cancelled if the work
    is cancelled before it begins. Await the future with `run_to_end`, because cancelling the future
    does not stop the thread.
    """

    def __init__(self, work: Callable[..., T], arguments: tuple[Any, ...]) -> None:
        self.work, self.arguments = work, arguments
        # The first caller that acquires this lock begins or cancels the work. The lock is never
        # released.
        self._begun = threading.Lock()
        self._cancelled = False

    def is_cancelled(self) -> bool:
        """Return True if the work should stop. The work calls this function between two slices."""
        return self._cancelled

    def cancel(self) -> bool:
        """Prevent the work from beginning. If it has begun, ask it to stop (see `is_cancelled`).

        Idempotent. Return True if this call prevented the work. The job then drops its references
        to the work and its arguments.
        """
        self._cancelled = True
        if not self._begun.acquire(blocking=False):
            return False
        self._forget()
        self.ended.cancel()
        return True

    def begin(self) -> bool:
        """Mark the work as begun. Returns False if it has already begun or was cancelled."""
        return self._begun.acquire(blocking=False)

    def run(self) -> T | None:
        if not self.begin():
            return None
        try:
            return self.work(*self.arguments, self.is_cancelled)
        finally:
            self._forget()

    def _forget(self) -> None:
        # A job may outlive its work, and these references would keep memory mapped.
        del self.work, self.arguments


class Threads:
    """A pool of at most `limit` threads for one kind of blocking work. Threads start on demand, and
    work begins in the order of its arrival. Any event loop may use the pool.

    A call that never returns occupies its thread. It delays later work of the same kind, but not
    other kinds of work, nor a caller with a time limit, nor the end of the process.
    """

    _all: ClassVar[weakref.WeakSet[Threads]] = weakref.WeakSet()

    def __init__(self, name: str, limit: int = 1) -> None:
        threads = _DaemonThreads(f"kvflow-{name}", limit)
        self._name, self._limit = name, limit
        self.executor: Executor = threads
        """The same threads, for callers outside of an event loop."""
        self.hung = 0  # abandoned calls that have not returned yet
        # When this object is garbage collected, the threads finish the queued work and end.
        weakref.finalize(self, threads.shutdown).atexit = False
        self._all.add(self)

    def __repr__(self) -> str:
        return f"<Threads {self._name}: at most {self._limit}, {self.hung} hung>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Refuse new work, and return at once. The threads end after the queued work."""
        self.executor.shutdown(wait=False)

    @classmethod
    def close_all(cls) -> None:
        """Close every `Threads` in this process. Call this before the process ends."""
        for threads in list(cls._all):
            threads.close()

    def start(self, work: Callable[..., T], *arguments: Any) -> Job[T]:
        """Queue a call to `work` with `arguments` and, as the last argument, `Job.is_cancelled`.

        Raises: RuntimeError if no thread can be started, or after `close`.
        """
        job = Job(work, arguments)
        # Start the work through the loop, because the simulators' loop runs it in virtual time.
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
        """Run `work` in a thread, and return its result.

        After `within_s`, which includes the wait for a thread, the work is abandoned: it never
        begins, or its thread is left running. If the work is abandoned or the caller cancelled, and
        the work still ends with a result, `undo` receives that result.

        Raises: TimeoutError; RuntimeError if no thread can be started; any error from `work`.
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
        """Run `work` in a thread, and return its result.

        A cancelled caller returns at once, while the work may still run. Use this method only for
        work whose end does not matter.

        Raises: RuntimeError if no thread can be started; any error from `work`.
        """
        job = self.start(_whole, work)
        try:
            return await asyncio.shield(job.ended)
        except asyncio.CancelledError:
            # The caller is gone, and asyncio would log an error of the work that is left.
            job.ended.add_done_callback(functools.partial(_undo, lambda _: None))
            raise
        finally:
            job.cancel()

    def _woke(self, _: object) -> None:
        self.hung -= 1


def _whole(work: Callable[[], T], _: Callable[[], bool]) -> T:
    """Call `work`. Ignore `Job.is_cancelled`, because this work cannot stop once it begins."""
    return work()


def _undo(undo: Callable[[T], object], ended: asyncio.Future[T]) -> None:
    if not ended.cancelled() and ended.exception() is None:
        undo(ended.result())


class _DaemonThreads(Executor):
    """An executor of daemon threads, which do not keep the process from ending."""

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit = name, limit
        self._threads = self._idle = 0
        self._closed = False
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()

    def submit(self, work: Callable[..., T], /, *args: Any, **more: Any) -> Future[T]:
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("no work is taken after shutdown")
            # Each idle thread takes one item from the queue.
            if self._idle <= len(self._waiting) and self._threads < self._limit:
                self._start_thread()
            self._waiting.append((future, functools.partial(work, *args, **more)))
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _start_thread(self) -> None:
        name = f"{self._name}-{self._threads}"
        try:
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        except RuntimeError:
            # If the system cannot start another thread, the existing ones do the work.
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
            # These references would keep memory mapped while the thread waits for more work.
            del next_one, future, work

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._idle -= 1
            return self._waiting.popleft() if self._waiting else None


_SHARED = Threads("shared", 8)


async def in_thread(work: Callable[[], T], undo: Callable[[T], object] = lambda _: None) -> T:
    """Run short `work` in one of the threads that all callers share, and return its result.

    A cancellation is raised only after the work ends. `undo` then receives the result, if any.
    """
    ended = _SHARED.start(_whole, work).ended
    try:
        return await run_to_end(ended)
    except asyncio.CancelledError:
        _undo(undo, ended)
        raise
