"""Loading cached pages from host memory for the prefill prompt whose turn it is, and locking them
until the prompt begins.

A prompt loads pages only when it is the first in its queue and could take all of its places at
once. If many prompts loaded pages while they waited, later prompts would evict the pages of earlier
ones that have not begun. Loaded pages are locked, and the prompt takes its places before the
engine's next step.

So at most one prompt locks pages of the cache without having places, and it locks no more pages
than it could have taken instead. When another prompt moves ahead in the queue, the first one loses
its turn, its locks and its running copy. So a waiting prompt never waits for pages that another
waiting prompt has locked, and there is no deadlock, however many prompts wait. The other
ranks of a prefill load only for prompts that have places at the first rank, and all of these
prompts fit into the smallest pool together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from kvflow.aio import run_to_end
from kvflow.memory.page_waiter import PageWaiter
from kvflow.protocols.cache.choices import PrefetchPolicy
from kvflow.serve.engine.scheduler.prefill_steps import PrefillRequest, PrefillSteps

_log = logging.getLogger("kvflow.serve.engine")


class Loads:
    """Copies cached pages from the host to the device, for requests that have no places yet."""

    def __init__(
        self, steps: PrefillSteps, policy: PrefetchPolicy, ended: Callable[[PrefillRequest], None]
    ) -> None:
        """`ended` is called with a request when its copies end, unless they are stopped first."""
        self._steps, self._policy, self._on_ended = steps, policy, ended
        self._running: dict[int, asyncio.Task[None]] = {}  # by id of the request
        self._tasks: set[asyncio.Task[None]] = set()  # includes stopped tasks that still drain

    def begin(self, request: PrefillRequest) -> bool:
        """Start to load the pages that only the host has; return False if there are none."""
        if not self._steps.lacks(request):
            return False
        task = asyncio.create_task(self._load(request), name="kvflow-prefill-load")
        self._running[id(request)] = task
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, request))
        return True

    async def _load(self, request: PrefillRequest) -> None:
        # Writes and copies of other requests may still use places that this load could take.
        # Wait for these places, because loading without them would copy less than the host has.
        steps, returned = self._steps, asyncio.Event()
        places = PageWaiter(returned.set, steps.pages, steps.rows)
        try:
            places.look()
            while max(steps.short_of(request)) > 0:
                places.wait()
                await returned.wait()
                returned.clear()
                places.look()
        finally:
            places.close()
        await steps.load(request, self._policy)

    def is_running(self, request: PrefillRequest) -> bool:
        return id(request) in self._running

    def stop(self, request: PrefillRequest) -> None:
        if (task := self._running.pop(id(request), None)) is not None:
            task.cancel()

    def _ended(self, request: PrefillRequest, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._running.get(id(request)) is task:
            del self._running[id(request)]
            if not task.cancelled() and (error := task.exception()) is not None:
                # A failed load does not fail the request, which begins without the pages.
                _log.error("loading a cached prefix failed", exc_info=error)
            self._on_ended(request)

    async def close(self) -> None:
        """Stop all loads, and wait until no copy runs (I12)."""
        self._running.clear()
        for task in self._tasks:
            task.cancel()
        await run_to_end(asyncio.gather(*self._tasks, return_exceptions=True))


class Turn:
    """Lets one request at a time load pages, and keep them locked until it begins."""

    def __init__(
        self, steps: PrefillSteps, policy: PrefetchPolicy, wake: Callable[[], None]
    ) -> None:
        """`wake` is called when a load ends."""
        self._steps = steps
        self._loads = Loads(steps, policy, lambda _: wake())
        self._request: PrefillRequest | None = None

    def comes(self, request: PrefillRequest) -> bool:
        """End the turn of any other request, because this one is now the first of its queue.

        Returns False while the request is still loading.
        """
        if self._request is not None and self._request is not request:
            self.over(self._request)
        return not self._loads.is_running(request)

    def begins(self, request: PrefillRequest) -> bool:
        """Return True if a request may take its places now; otherwise, start to load its pages.

        A request may take its places if its load has ended, or if the host has no pages for it.
        """
        if self._request is request:
            return True
        if not self._loads.begin(request):
            return True
        self._request = request
        return False

    def taken(self, request: PrefillRequest) -> None:
        """End the turn of a request that took its places. It keeps the loaded pages locked."""
        if self._request is request:
            self._request = None

    def over(self, request: PrefillRequest) -> None:
        """End the turn of a request that takes no places now; unlock its pages. Idempotent."""
        self._loads.stop(request)
        self._steps.forget_prefix(request)
        self.taken(request)

    async def close(self) -> None:
        await self._loads.close()
