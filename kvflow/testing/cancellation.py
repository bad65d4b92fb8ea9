"""Cancels a coroutine at a chosen wait, so that a test can try each of its waits.

    for at in itertools.count():
        # Steps(work, 3, 4) would cancel twice: at wait 3, and at the next one, in the clean-up.
        steps = Steps(node.close(), at)
        await asyncio.gather(steps.task(), return_exceptions=True)
        ...                                         # check that nothing is left behind
        if steps.waits <= at:
            break                                   # the coroutine ended before wait number `at`

A wait is an `await` that suspends the task. An `await` of a result that is ready is not a wait, and
cannot be cancelled. `stepping` does the same to a task that the code under test starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Steps(Generic[T]):
    """Drives a coroutine in the task that awaits this object, and cancels that task in the waits
    with the numbers `at`, counted from 0.

    The task is cancelled when such a wait begins, or `after_s` later.
    """

    def __init__(self, work: Coroutine[Any, Any, T], *at: int, after_s: float = 0.0) -> None:
        self._work, self._at, self._after_s = work, frozenset(at), after_s
        self.waits = 0  # number of waits that have begun

    def task(self) -> asyncio.Task[T]:
        """Return a task that drives the coroutine."""
        return asyncio.create_task(self.run())

    async def run(self) -> T:
        return await self

    def __await__(self) -> Generator[Any, Any, T]:
        error: BaseException | None = None
        while True:
            try:
                waiting = self._work.send(None) if error is None else self._work.throw(error)
            except StopIteration as end:
                result: T = end.value
                return result
            late = self._cancel() if self.waits in self._at else None
            self.waits += 1
            try:
                yield waiting
                error = None
            except BaseException as caught:  # noqa: BLE001 - all of it belongs to the coroutine
                error = caught
            # If the wait ended early, the timer must not cancel the next wait instead.
            if late is not None:
                late.cancel()

    def _cancel(self) -> asyncio.TimerHandle | None:
        task = asyncio.current_task()
        assert task is not None
        if self._after_s:
            return asyncio.get_running_loop().call_later(self._after_s, task.cancel)
        task.cancel()
        return None


@contextmanager
def stepping(name: str, *at: int, nth: int = 0) -> Iterator[list[Steps[Any]]]:
    """Drive a task that the block starts, and cancel it in its waits `at`.

    `name` is the qualified name of its coroutine function ("Shell.consume"). `nth` selects one of
    several such tasks, counted from 0. Once the task starts, the yielded list contains its `Steps`.
    """
    found: list[Steps[Any]] = []
    loop = asyncio.get_running_loop()
    before, passed = loop.get_task_factory(), 0

    def factory(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        nonlocal passed
        if not found and getattr(work, "__qualname__", "") == name:
            if passed == nth:
                found.append(Steps(work, *at))
                work = found[0].run()
            passed += 1
        return asyncio.Task(work, loop=loop, **options)

    loop.set_task_factory(factory)
    try:
        yield found
    finally:
        loop.set_task_factory(before)
