"""Helpers for asyncio: await a thread's work to its end, since the cancellation of a coroutine does
not stop the thread (I12); divide long work, and bursts of arrivals, into turns of the event loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

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


async def run_to_end(running: asyncio.Future[T], within_s: float | None = None) -> T:
    """Await a thread's work to its end, and return its result.

    A cancellation is raised only after the end; a second one has no effect.

    Raises: TimeoutError, or the cancellation, when the work does not end `within_s` from now.
    """
    loop = asyncio.get_running_loop()
    until_s = None if within_s is None else loop.time() + within_s
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        left_s = None if until_s is None else until_s - loop.time()
        if left_s is not None and left_s <= 0:
            raise cancelled or TimeoutError
        try:
            await asyncio.wait([running], timeout=left_s)
        except asyncio.CancelledError as error:
            cancelled = error
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


async def in_thread(work: Callable[[], T], undo: Callable[[T], object] = lambda _: None) -> T:
    """Run `work` in a thread, to its end, and return its result. If this coroutine is cancelled
    meanwhile, `undo` receives the result.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await run_to_end(running)
    except asyncio.CancelledError:
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


class Threads:
    """Threads for one kind of blocking work, so that a call that hangs delays no other kind.

    There are at most `limit` at a time, one per call. They are daemons: a call that never returns
    does not delay the end of the process. Use them for work that is rare or takes long, since a
    thread costs some 100 us.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit = f"kvflow-{name}", limit
        self._free = asyncio.Semaphore(limit)
        self.hung = 0  # calls that are no longer waited for

    def __repr__(self) -> str:
        return f"<Threads {self._name}: at most {self._limit}, {self.hung} hung>"

    async def run(
        self,
        work: Callable[[], T],
        undo: Callable[[T], object] = lambda _: None,
        *,
        within_s: float | None = None,
    ) -> T:
        """Run `work` and return its result, but wait at most `within_s`, the wait for a thread
        included; then abandon the thread. If the work is abandoned or cancelled, `undo` receives
        its result.

        Raises: TimeoutError; RuntimeError when the system has no thread; every error of `work`.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.timeout(within_s):
            await self._free.acquire()
        running: asyncio.Future[T] = loop.create_future()
        # The place is free when the work ends, not when the wait does: a thread that hangs keeps
        # its place, so there are never more than `limit`.
        running.add_done_callback(lambda _: self._free.release())
        try:
            threading.Thread(
                target=_work, args=(work, loop, running), name=self._name, daemon=True
            ).start()
        except RuntimeError as error:
            running.set_exception(error)
        try:
            return await run_to_end(
                running, None if within_s is None else began_s + within_s - loop.time()
            )
        except (asyncio.CancelledError, TimeoutError):
            if not running.done():
                self.hung += 1
                running.add_done_callback(self._woke)
            running.add_done_callback(lambda _: running.exception() or undo(running.result()))
            raise

    def _woke(self, _: object) -> None:
        self.hung -= 1


def _work(
    work: Callable[[], T], loop: asyncio.AbstractEventLoop, running: asyncio.Future[T]
) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - whoever awaits it gets it
        _tell(loop, running.set_exception, error)
    else:
        _tell(loop, running.set_result, result)


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[T], None], value: T) -> None:
    # On a closed loop no task waits for the result.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, value)
