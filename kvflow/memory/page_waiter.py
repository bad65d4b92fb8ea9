"""A waiter for pages, which is woken when there may be pages that were missing before.

The waiter looks at the pages in one turn of its event loop, and waits if they do not suffice. No
wake-up is lost, by construction. Pages that become free are announced after the fact, from any
thread, in a later turn of the loop: a turn that comes before the look changes nothing, because the
look sees these pages, and a turn that comes after it wakes the waiter. Pages that a cache can give
up change on the waiter's own loop only, so comparing their number with that of the last look is
exact; a look that locks cached pages and unlocks them again wakes no other waiter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol


class Watched(Protocol):
    """The part of an allocator that a waiter uses."""

    waiters: set[PageWaiter]

    @property
    def available_pages(self) -> int: ...


class PageWaiter:
    """One waiter for pages of some allocators. Used on one event loop."""

    def __init__(self, woken: Callable[[], None], *allocators: Watched | None) -> None:
        """`woken` is called on the event loop, once for each `wait`. None stands for no allocator,
        as a pool without rows has one.
        """
        self._woken = woken
        self._allocators = [allocator for allocator in allocators if allocator is not None]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = self._waits = False
        self._seen: list[int] = []

    def look(self) -> None:
        """Begin to look at the pages: call it before that."""
        self._waits = False
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            for allocator in self._allocators:
                allocator.waiters.add(self)

    def wait(self) -> None:
        """Ask for a call of `woken`, in the turn of the loop that found too few pages."""
        self._waits, self._seen = True, self._available()

    def close(self) -> None:
        """Wait no more. Idempotent; the next `look` begins anew."""
        self._waits, self._loop = False, None
        for allocator in self._allocators:
            allocator.waiters.discard(self)

    def wake(self) -> None:
        """Look again, in a later turn of the event loop. Called from any thread."""
        # The turn that is scheduled already comes after this moment.
        if self._scheduled or (loop := self._loop) is None:
            return
        self._scheduled = True
        # A loop that is closed has no waiter.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._come_back)

    def evictable(self) -> None:
        """Learn that a cache can perhaps give up more pages. Called on the event loop."""
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
