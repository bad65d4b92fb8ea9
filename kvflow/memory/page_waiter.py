"""A waiter for pages. It is woken when pages that it lacked may be available.

In one turn of its event loop, the waiter checks the pages, and waits if they are too few. No
wake-up can be lost:

- Pages become free in any thread, which then schedules a wake-up. If the wake-up runs before the
  check, the check sees these pages. If it runs after the check, it wakes the waiter.
- The number of pages that a cache can evict changes on the waiter's event loop only. So the waiter
  compares the number of available pages with that at its last check, and is woken only if it is
  larger. A check that locks and unlocks cached pages therefore wakes no other waiter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol


class Watched(Protocol):
    """The members of an allocator that a waiter uses."""

    waiters: set[PageWaiter]

    @property
    def available_pages(self) -> int: ...


class PageWaiter:
    """A waiter for pages of one or more allocators. Belongs to one event loop."""

    def __init__(self, woken: Callable[[], None], *allocators: Watched | None) -> None:
        """`woken` is called on the event loop, at most once for each `wait`.

        An allocator may be None, because a pool without rows has no allocator of rows.
        """
        self._woken = woken
        self._allocators = [allocator for allocator in allocators if allocator is not None]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = self._waits = False
        self._seen: list[int] = []

    def look(self) -> None:
        """Prepare for a check of the pages. Call it before each check."""
        self._waits = False
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            for allocator in self._allocators:
                allocator.waiters.add(self)

    def wait(self) -> None:
        """Request a call of `woken`. Call it in the turn of the loop that found too few pages."""
        self._waits, self._seen = True, self._available()

    def close(self) -> None:
        """Stop waiting. Idempotent. The waiter can be used again after another `look`."""
        self._waits, self._loop = False, None
        for allocator in self._allocators:
            allocator.waiters.discard(self)

    def wake(self) -> None:
        """Schedule the call of `woken`, if the waiter waits. May be called from any thread."""
        # A wake-up that is scheduled but has not run yet serves for this call as well.
        if self._scheduled or (loop := self._loop) is None:
            return
        self._scheduled = True
        # If the loop is closed, no waiter is left to wake.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._come_back)

    def evictable(self) -> None:
        """Wake the waiter if more pages are available than at its `wait`. Call it on the loop."""
        if self._waits and any(
            now > before for now, before in zip(self._available(), self._seen, strict=True)
        ):
            self.wake()

    def _come_back(self) -> None:
        self._scheduled = False
        if self._waits:
            self._waits = False
            self._woken()

    def _available(self) -> list[int]:
        return [allocator.available_pages for allocator in self._allocators]
