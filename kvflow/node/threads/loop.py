"""An event loop that runs in a thread.

Other threads post calls to it. One wake-up of the loop runs all calls posted so far.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvflow.protocols.errors import MisuseError

T = TypeVar("T")
log = logging.getLogger(__name__)


class LoopThread:
    """A daemon thread with an event loop. It runs until `stop`, or until the process exits."""

    def __init__(
        self, name: str, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    ) -> None:
        """Start the thread. `loop_factory` creates the event loop."""
        self.name = name
        self._lock = threading.Lock()
        self._posted: list[Callable[[], None]] = []
        self._woken = self._stopped = False
        self.errors = 0
        self._asked: set[concurrent.futures.Future[Any]] = set()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._begin(loop_factory)

    def _begin(self, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None) -> None:
        started: list[BaseException | None] = []
        ready = threading.Event()

        async def main() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            started.append(None)
            ready.set()
            await self._stop.wait()

        def run() -> None:
            try:
                with asyncio.Runner(loop_factory=loop_factory) as runner:
                    runner.run(main())
            except BaseException as error:
                if started:
                    raise
                # `_begin` waits for `ready`, and raises this error in the caller's thread.
                started.append(error)
                ready.set()
            finally:
                self._end()

        self._thread = threading.Thread(target=run, name=self.name, daemon=True)
        self._thread.start()
        ready.wait()
        if started[0] is not None:
            raise started[0]

    def post(self, call: Callable[[], None]) -> bool:
        """Run `call` on the loop, after all calls that were posted before.

        Returns False if the loop stopped. `call` then never runs.
        """
        with self._lock:
            if self._stopped:
                return False
            self._posted.append(call)
            # The loop is woken only once for all calls that it has not run yet.
            if not self._woken:
                self._woken = True
                self._loop.call_soon_threadsafe(self._run_posted)
        return True

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` on the loop, after all posted calls, and wait for its result.

        Raises: any error from `work`; MisuseError if the loop stopped, or if called in its thread.
        """
        self.check_not_within()
        with self._lock:
            if self._stopped:
                raise MisuseError(f"{self.name} is closed")
            future = asyncio.run_coroutine_threadsafe(work(), self._loop)
            self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        return self._wait(future)

    def _wait(self, future: concurrent.futures.Future[T]) -> T:
        return future.result()

    def check_not_within(self) -> None:
        """Raise MisuseError in the loop's own thread, where a blocking call would deadlock."""
        if threading.current_thread() is self._thread:
            raise MisuseError(f"this would block {self.name}, the thread that has to do the work")

    def stop(self) -> None:
        """Stop the loop, cancel its tasks, and wait for its thread to end. Idempotent."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _end(self) -> None:
        """Make every pending `call` raise MisuseError, when the loop ends for any reason."""
        with self._lock:
            self._stopped = True
        for future in list(self._asked):
            if not future.done():
                future.set_exception(MisuseError(f"{self.name} has ended"))

    def _run_posted(self) -> None:
        with self._lock:
            calls, self._posted = self._posted, []
            self._woken = False
        for call in calls:
            try:
                call()
            except Exception:
                # The following calls belong to other rooms, and must still run.
                self.errors += 1
                log.exception("a call that was posted to %s failed", self.name)
