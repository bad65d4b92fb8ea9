"""The asyncio idioms: awaiting what runs in a thread to its end, since cancelling a coroutine does
not stop it (I12); long work, and what arrives at once, in turns with the rest of the loop."""

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
TURN_S = 0.001  # of the event loop that long work takes at a time


def must_pass(error: BaseException) -> bool:
    """Whether a task may not survive `error`, raised by what it awaits: the process ends, or
    somebody has cancelled the task. A CancelledError that nobody has asked for is what it awaits,
    cancelled, and an error as any other."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, (*ENDS_PROCESS, GeneratorExit))


async def run_to_end(running: asyncio.Future[T], within_s: float | None = None) -> T:
    """Await a thread's work until it has ended.

    A cancellation is raised only then; a second one changes nothing.

    Raises: TimeoutError, or the cancellation, when it has not ended `within_s` from now.
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
        if not running.cancelled():
            running.exception()  # retrieved, or asyncio logs it
        raise cancelled
    return running.result()


async def all_ended(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Wait until every one of `tasks` has ended, in whatever way.

    A cancellation of this coroutine is raised only then: what follows in its caller must not meet
    them."""
    if waited := list(tasks):
        await run_to_end(asyncio.ensure_future(asyncio.wait(waited)))


async def wait_or_cancel(
    running: asyncio.Future[T], undo: Callable[[T], object] = lambda _: None
) -> None:
    """Wait until `running` has ended, in whatever way.

    A cancellation of this coroutine is passed on to it, and raised when it has ended; its result is
    undone then."""
    try:
        await asyncio.wait([running])
    except asyncio.CancelledError:
        running.cancel()
        # The cancellation that came first is raised.
        with suppress(Exception, asyncio.CancelledError):
            await run_to_end(running)
        if not running.cancelled() and running.exception() is None:
            undo(running.result())
        raise


async def in_thread(work: Callable[[], T], undo: Callable[[T], object] = lambda _: None) -> T:
    """Run `work` in a thread, to its end; where this coroutine was cancelled meanwhile, its result
    is undone.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await run_to_end(running)
    except asyncio.CancelledError:
        if not running.cancelled() and running.exception() is None:
            undo(running.result())
        raise


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """`items`, for a loop whose body is quick: others get their turn of the event loop every
    `TURN_S`.
    """
    turn_ends = time.perf_counter() + TURN_S
    for item in items:
        yield item
        if time.perf_counter() > turn_ends:
            await asyncio.sleep(0)
            turn_ends = time.perf_counter() + TURN_S


class Turnstile:
    """Lets at most `per_turn` coroutines go on in a turn of the event loop, first come first
    served.

    One that comes alone does not wait.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counting = False

    async def passed(self) -> None:
        if not self._counting:
            self._counting = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        if self._left:  # nobody waits, then
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
            if not first.done():  # it was not cancelled
                first.set_result(None)
                self._left -= 1
        if self._counting:
            asyncio.get_running_loop().call_soon(self._next_turn)


class Threads:
    """Threads for one kind of blocking work: what hangs keeps no other kind waiting.

    At most `limit` at a time, one per call, and daemons: a call that never returns does not hold up
    the end of the process either. For work that is rare or takes long: a thread costs some 100 us.
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
        """Run `work` to its end, or for `within_s`, the wait for a thread included; then it is left
        alone with its thread. The result of what was left alone, or was cancelled meanwhile, is
        undone.

        Raises: TimeoutError; RuntimeError when no thread is to be had; what `work` raises.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.timeout(within_s):
            await self._free.acquire()
        running: asyncio.Future[T] = loop.create_future()
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
    with suppress(RuntimeError):  # the loop is closed, and with it all that waited
        loop.call_soon_threadsafe(call, value)
