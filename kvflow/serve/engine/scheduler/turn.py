"""Copies from the host for the prompt of prefill whose turn it is, and the locks that hold them
until it begins.

A prompt loads when it is the first in its queue and could take all of its places at once, never
earlier: if many prompts loaded while they wait, the first ones would lose their pages to the last
ones before they begin. Loaded pages are locked until the prompt takes its places, which is then a
matter of one turn of the event loop.

So at most one prompt holds pages of the cache without having places, and no more of them than it
could have taken instead. A prompt that comes before it takes the turn from it, and with the turn
its lock and its copy. No request that waits for places waits for pages that another waiting prompt
locked, so there is no deadlock, however many prompts wait. The other ranks of a prefill load only
for prompts that have places at the first one, all of which fit into the smallest pool together.
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
    """Copies to the device for requests that have no places yet. Used on the event loop."""

    def __init__(
        self, steps: PrefillSteps, policy: PrefetchPolicy, ended: Callable[[PrefillRequest], None]
    ) -> None:
        """`ended` is called with a request when its copies end, unless they were stopped before."""
        self._steps, self._policy, self._on_ended = steps, policy, ended
        self._running: dict[int, asyncio.Task[None]] = {}  # by id of the request
        self._tasks: set[asyncio.Task[None]] = set()  # includes those that were stopped and drain

    def begin(self, request: PrefillRequest) -> bool:
        """Load the pages that only the host has; returns False where there is no such page."""
        if not self._steps.lacks(request):
            return False
        task = asyncio.create_task(self._load(request), name="kvflow-prefill-load")
        self._running[id(request)] = task
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, request))
        return True

    async def _load(self, request: PrefillRequest) -> None:
        # The last writes and copies of others may still read places that this load could take.
        # Loading without these places would copy less than the host has.
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
        """Stop loading for a request. Idempotent."""
        if (task := self._running.pop(id(request), None)) is not None:
            task.cancel()

    def _ended(self, request: PrefillRequest, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._running.get(id(request)) is task:
            del self._running[id(request)]
            if not task.cancelled() and (error := task.exception()) is not None:
                # A failed load does not fail the request, which begins without these pages.
                _log.error("loading a cached prefix failed", exc_info=error)
            self._on_ended(request)

    async def close(self) -> None:
        """Stop all loads, and return when no copy runs (I12)."""
        self._running.clear()
        for task in self._tasks:
            task.cancel()
        await run_to_end(asyncio.gather(*self._tasks, return_exceptions=True))


class Turn:
    """The one request of an engine that may load, or hold what it loaded."""

    def __init__(
        self, steps: PrefillSteps, policy: PrefetchPolicy, wake: Callable[[], None]
    ) -> None:
        """`wake` is called when a load ends."""
        self._steps = steps
        self._loads = Loads(steps, policy, lambda _: wake())
        self._request: PrefillRequest | None = None

    def comes(self, request: PrefillRequest) -> bool:
        """Give the turn to the first request of its queue, and end that of any other.

        Returns False while the request still loads.
        """
        if self._request is not None and self._request is not request:
            self.over(self._request)
        return not self._loads.is_running(request)

    def begins(self, request: PrefillRequest) -> bool:
        """Return True if a request that could take its places may do so: it has no page to load
        first.
        """
        if self._request is request:
            return True
        if not self._loads.begin(request):
            return True
        self._request = request
        return False

    def taken(self, request: PrefillRequest) -> None:
        """End the turn of a request that has its places; they keep the loaded pages locked."""
        if self._request is request:
            self._request = None

    def over(self, request: PrefillRequest) -> None:
        """End the turn of a request that does not take its places now, and unlock its pages.
        Idempotent.
        """
        self._loads.stop(request)
        self._steps.forget_prefix(request)
        self.taken(request)

    async def close(self) -> None:
        await self._loads.close()
