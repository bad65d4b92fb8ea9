"""Page promises: how far each request may grow, first come first served, so that no running request starves.

This is the queue of a decode. A room is announced before it waits here, and its prefill gives it nothing before it
leaves. So the holder of a place here never waits for a request that waits for that place, whatever order the legs of
requests arrive in at several prefills and decodes: there is no deadlock.
"""

from __future__ import annotations

import asyncio
from collections import deque

from kvflow.memory.allocator import PageAllocator
from kvflow.protocols.errors import CapacityError, KvflowError

RECHECK_S = 0.02  # rooms and writes free pages without an event, so waiting requests poll this often
STUCK_S = 20.0  # without a running request what is not free is in quarantine: after this long, others may have pages


class Admission:
    """A promise of `total` pages to one request, `taken` of which it owns already. `release` is idempotent."""

    __slots__ = ("_budget", "granted", "taken", "total")

    def __init__(self, budget: PageBudget, total: int, taken: int) -> None:
        self._budget, self.total, self.taken = budget, total, taken
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def took(self, pages: int) -> None:
        """Record that the request owns that many more pages of the promise."""
        self.taken = min(self.total, self.taken + pages)

    def release(self) -> None:
        """End the promise; call it when the request's pages have been given back."""
        self._budget.forget(self)


class PageBudget:
    """Free pages minus promised pages, to `most` requests at a time; a promise covers the worst case of its request."""

    def __init__(self, pages: PageAllocator, most: int = 1 << 30) -> None:
        self._pages, self._most = pages, most
        self.capacity = pages.capacity
        self._live: set[Admission] = set()
        self._waiting: deque[Admission] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._stuck_since_s: float | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def check(self, total: int, what: str = "pages for prompt + max_new_tokens") -> None:
        """Raises: CapacityError for a request that can never fit."""
        if total > self.capacity:
            raise CapacityError(what, total, self.capacity)

    async def admit(self, total: int, taken: int = 0) -> Admission:
        """Wait until `total` pages can be promised, first come first served.

        Raises: CapacityError for a request that can never fit, for one that owns `taken` pages while no running request
        is left that could free more (its own pages may be all that the next one needs), and after `STUCK_S` without
        a running request in which too few pages have come back.
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
            if head.granted.done():  # cancelled in this turn of the loop, before its own `forget` has run
                self._waiting.popleft()
                continue
            if len(self._live) >= self._most:
                break
            promised = sum(a.total - a.taken for a in self._live)
            spare = self._pages.free_pages - promised
            if head.total - head.taken > spare:
                if self._live or not (head.taken or self._stuck()):
                    break
                self._waiting.popleft()
                what = "pages to grow" if head.taken else "free pages, and no running request will free more"
                head.granted.set_exception(CapacityError(what, head.total - head.taken, max(0, spare)))
                continue
            self._waiting.popleft()
            self._live.add(head)
            self._stuck_since_s = None
            head.granted.set_result(None)
        if not self._waiting:
            self._stuck_since_s = None
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RECHECK_S, self._recheck)

    def _stuck(self) -> bool:
        """Whether the pages that are missing have not come back for `STUCK_S`, with no request running."""
        now = asyncio.get_running_loop().time()
        self._stuck_since_s = now if self._stuck_since_s is None else self._stuck_since_s
        return now - self._stuck_since_s >= STUCK_S

    def _recheck(self) -> None:
        self._timer = None
        self._grant()

    def close(self, error: KvflowError) -> None:
        """Admit no more requests; the waiting ones raise `error`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for admission in list(self._waiting):
            self._waiting.remove(admission)
            if not admission.granted.done():
                admission.granted.set_exception(error)
