"""Page promises: who may grow how far, first come first served, so that no running request can starve."""

from __future__ import annotations

import asyncio
from collections import deque

from kvflow.memory.allocator import PageAllocator
from kvflow.protocols.errors import CapacityError, KvflowError

LOOK_AGAIN_S = 0.02  # rooms and writes free pages without telling us: whoever waits looks this often


class Admission:
    """A promise of `total` pages, `taken` of which are owned already. `release` is idempotent."""

    __slots__ = ("_budget", "granted", "taken", "total")

    def __init__(self, budget: PageBudget, total: int, taken: int) -> None:
        self._budget, self.total, self.taken = budget, total, taken
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def took(self, pages: int) -> None:
        """That many pages of the promise are owned now."""
        self.taken = min(self.total, self.taken + pages)

    def release(self) -> None:
        """The request is over, its pages given back: the promise ends."""
        self._budget.forget(self)


class PageBudget:
    """Free pages minus what was promised. Counts every promise at its worst case."""

    def __init__(self, pages: PageAllocator) -> None:
        self._pages = pages
        self.capacity = pages.capacity
        self._live: set[Admission] = set()
        self._waiting: deque[Admission] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def check(self, total: int, what: str = "pages for prompt + max_new_tokens") -> None:
        """Raises: CapacityError for what can never fit."""
        if total > self.capacity:
            raise CapacityError(what, total, self.capacity)

    async def admit(self, total: int, taken: int = 0) -> Admission:
        """Wait for a turn, first come first served.

        Raises: CapacityError for what can never fit; and, for a request that sits on `taken` pages, when nobody is left
        who could give any back (its pages may be all that the next one needs).
        """
        self.check(total)
        admission = Admission(self, total, taken)
        self._waiting.append(admission)
        self._grant()
        try:
            await admission.granted
        except BaseException:
            self.forget(admission)
            raise
        return admission

    def forget(self, admission: Admission) -> None:
        self._live.discard(admission)
        if not admission.granted.done():
            admission.granted.cancel()
        if admission in self._waiting:
            self._waiting.remove(admission)
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            head = self._waiting[0]
            if head.granted.done():  # cancelled in this very turn of the loop: its own `forget` is still to come
                self._waiting.popleft()
                continue
            promised = sum(a.total - a.taken for a in self._live)
            spare = self._pages.free_pages - promised
            if head.total - head.taken > spare:
                if not head.taken or self._live:
                    break
                self._waiting.popleft()
                head.granted.set_exception(CapacityError("pages to grow", head.total - head.taken, max(0, spare)))
                continue
            self._waiting.popleft()
            self._live.add(head)
            head.granted.set_result(None)
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._grant()

    def close(self, error: KvflowError) -> None:
        """Nobody will be admitted any more; who waits gets `error`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for admission in list(self._waiting):
            self._waiting.remove(admission)
            if not admission.granted.done():
                admission.granted.set_exception(error)
