"""A node's loop thread in virtual time, and engine threads that block while the loop goes on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar, cast

from kvflow.node.threads.loop import LoopThread
from kvflow.proof.sim.loop import Process, VirtualLoop
from kvflow.proof.sim.times import LONG_PREEMPTED_S, POST_S, PREEMPTED_S, TICK_S

T = TypeVar("T")


class VirtualLoopThread(LoopThread):
    """Loop thread whose posted calls run a moment later, in the node's process."""

    def __init__(self, name: str, process: Process, loop: VirtualLoop) -> None:
        self._process, self._virtual = process, loop
        super().__init__(name)

    def _begin(self, _: object) -> None:
        self._loop = cast(asyncio.AbstractEventLoop, _Later(self._process, self._virtual))

    def post(self, call: Callable[[], None]) -> bool:
        """Post a call. A calling `LockStep` may be preempted just before and just after."""
        step = threading.current_thread()
        if not isinstance(step, LockStep):
            return super().post(call)
        step.stand(self._preempted_s())
        posted = super().post(call)
        step.stand(self._preempted_s())
        return posted

    def _preempted_s(self) -> float:
        rng = self._virtual.rng
        return rng.uniform(*(LONG_PREEMPTED_S if rng.random() < 0.2 else PREEMPTED_S))

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` and return its result.

        In a `LockStep`, the call blocks as in a real thread. Elsewhere, `work` runs at once and
        must not wait for anything.
        """
        if isinstance(threading.current_thread(), LockStep):
            return super().call(work)
        answer: T = self._process.run(self._at_once, work)
        return answer

    def _at_once(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._run_posted()
        try:
            work().send(None)
        except StopIteration as end:
            answer: T = end.value
            return answer
        raise AssertionError("what waits for something must be called in a LockStep")

    def check_not_within(self) -> None:
        """Do nothing: all threads share one loop here, so every call comes from within it."""

    def _wait(self, future: concurrent.futures.Future[T]) -> T:
        step = threading.current_thread()
        assert isinstance(step, LockStep)
        step.wait_for(future)
        return future.result()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
        self._process.run(self._run_posted)


class _Later:
    """The methods of an event loop that `LoopThread` and asyncio use from another thread.

    Calls run a moment later, in the order in which they came.
    """

    def __init__(self, process: Process, loop: VirtualLoop) -> None:
        self._process, self._loop = process, loop
        self._last_at_s = 0.0

    def call_soon_threadsafe(self, callback: Callable[..., object], *arguments: Any) -> None:
        now = self._loop.time()
        self._last_at_s = max(now + self._loop.rng.uniform(*POST_S), self._last_at_s + TICK_S)
        self._process.run(self._loop.call_later, self._last_at_s - now, callback, *arguments)

    def create_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self._loop.create_task(work)


class _AbandonedError(BaseException):
    """Raised in a thread that still waits when the simulation is over."""


class LockStep(threading.Thread, Generic[T]):
    """Blocking work of a simulated process, in a real thread.

    The thread and the virtual loop never run at the same time, so that a seed always gives the same
    run. Await the result of the work, `answer`, on the virtual loop.
    """

    def __init__(self, loop: VirtualLoop, process: Process, work: Callable[[], T]) -> None:
        super().__init__(name=f"{process.name}, which blocks", daemon=True)
        self.answer: asyncio.Future[T] = loop.create_future()
        self._loop, self._process, self._work = loop, process, work
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._ended = self._abandoned = False
        self._result: tuple[T | None, BaseException | None] = (None, None)
        self.start()
        self._go_on()

    def stand(self, for_s: float) -> None:
        """Block for `for_s` seconds of virtual time. Call this in the thread itself."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._process.run(self._loop.call_later, for_s, done.set_result, None)
        self.wait_for(done)

    def wait_for(self, future: concurrent.futures.Future[Any]) -> None:
        """Let the virtual loop run until `future` is done. Call this in the thread itself."""
        if future.done():
            return
        future.add_done_callback(lambda _: self._go_on())
        self._back.release()
        self._turn.acquire()
        if self._abandoned:
            raise _AbandonedError

    def abandon(self) -> None:
        if not self._ended:
            self._abandoned = True
            self._turn.release()
            self.join()

    def run(self) -> None:
        self._turn.acquire()
        try:
            self._result = self._process.run(self._work), None
        except BaseException as error:  # noqa: BLE001 - whoever awaits the answer gets it
            self._result = None, error
        self._ended = True
        self._back.release()

    def _go_on(self) -> None:
        """Let the thread run until it waits or ends. The loop is blocked meanwhile."""
        if self._abandoned:
            return
        self._turn.release()
        self._back.acquire()
        if self._ended and not self.answer.done():
            result, error = self._result
            if error is None:
                self.answer.set_result(cast(T, result))
            else:
                self.answer.set_exception(error)
