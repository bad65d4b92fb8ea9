"""Promises of pages to requests, and the queue of requests that wait for a promise.

The first request in the queue is never passed over, even if a later one would fit.

Decode uses this queue. It announces a room to prefill before the room's request waits here. Prefill
gives the room no places before the request leaves the queue, except those of an early start, which
it can take back. So requests cannot wait for each other in a circle, in whatever order their legs
arrive at several prefills and decodes.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvflow.memory.allocator import PageAllocator
from kvflow.memory.page_waiter import PageWaiter
from kvflow.protocols.errors import CapacityError, KvflowError

# While no request runs, all pages that are neither free nor cached are in quarantine.
# A request that needs them fails after this time, so that others get the free pages.
STUCK_S = 20.0
DECAY_STEPS, LEAST_SHARE, RETRACT_STEPS = 600, 0.14, 20  # values of SGLang's scheduler
MOST_TOKENS_AHEAD = 4096  # the most new tokens that count in a promise, as in SGLang


class NewTokenRatio:
    """The share of a request's remaining new tokens for which it is promised pages.

    At 1.0, every request is promised its worst case. A share below 1 decays with every step,
    because most requests end early. A retraction raises it to what the running requests turned out
    to need. SGLang's scheduler does the same.
    """

    def __init__(self, initial: float = 1.0) -> None:
        self.now = self._initial = initial
        self._least = initial * LEAST_SHARE if initial < 1 else 1.0

    def stepped(self, steps: int) -> None:
        self.now = max(self._least, self.now - steps * (self._initial - self._least) / DECAY_STEPS)

    def retracted(self, generated: int, limit: int, running: int) -> None:
        """Raise the share to what `running` requests need. So far they have generated `generated`
        of at most `limit` tokens.
        """
        self.now = max(self.now, min(1.0, (generated + RETRACT_STEPS * running) / max(1, limit)))

    def rest(self) -> None:
        """Reset the share. Call this while no request runs."""
        self.now = self._initial


class Shortage:
    """Measures the time during which too few pages are free, and no running request frees more."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def ended(self) -> None:
        self._since_s = None

    def left_s(self) -> float:
        """Return the seconds until the shortage reaches `STUCK_S`, 0 from then on.

        The shortage begins with the first call after `ended`.
        """
        now = asyncio.get_running_loop().time()
        self._since_s = now if self._since_s is None else self._since_s
        return max(0.0, self._since_s + STUCK_S - now)


@dataclass(slots=True, eq=False, repr=False)
class Admission:
    """A promise of pages to one request, and of a row if the pool has rows.

    It covers at least `base` and at most `total` pages, of which the request already owns `taken`.
    `release` is idempotent.
    """

    _budget: PageBudget
    total: int
    taken: int
    base: int
    priority: int
    number: int
    away: bool = False  # True once the request is retracted
    row_taken: bool = field(init=False)
    covered: int = 0
    granted: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def __post_init__(self) -> None:
        self.row_taken = bool(self.taken)

    def took(self, pages: int) -> None:
        self.taken = min(self.total, self.taken + pages)
        self.row_taken = True

    def cover(self, pages: int) -> None:
        """Record how many cached pages the request begins with. A repeated call is harmless."""
        self.has(pages - self.covered)
        self.covered = pages

    def has(self, pages: int) -> None:
        """Promise `pages` fewer pages, because the request has that many cached pages.

        If `pages` is negative, the request lost cached pages, and that many are promised again.
        """
        self.total, self.base = max(self.taken, self.total - pages), max(0, self.base - pages)
        if pages > 0:
            self._budget.promises_less()

    def release(self) -> None:
        """End the promise. Call this after the request's pages are freed."""
        self._budget.forget(self)

    @property
    def opening(self) -> int:
        """The number of pages that the request needs in order to begin, and does not own yet."""
        return max(0, self.base - self.taken)

    @property
    def place(self) -> tuple[bool, int, int]:
        """The sort key in the queue.

        Retracted requests come first, since their readers already have tokens. Among equals, a
        higher priority comes first, and then an earlier arrival.
        """
        return not self.away, -self.priority, self.number

    def outstanding(self, ratio: float, most_ahead: int) -> int:
        """Return how many pages the request is still promised, at a ratio below 1.

        At most `most_ahead` of its remaining pages count before the ratio is applied.
        """
        known = max(self.base, self.taken)
        return known - self.taken + math.ceil(min(self.total - known, most_ahead) * ratio)


class PageBudget:
    """Promises the free pages of a pool, to at most `most` requests at a time."""

    def __init__(
        self,
        pages: PageAllocator,
        most: int = 1 << 30,
        *,
        rows: PageAllocator | None = None,
        ratio: NewTokenRatio | None = None,
        page_size: int = 1,
        release_cached: Callable[[], bool] = lambda: False,
        on_spare: Callable[[], None] = lambda: None,
    ) -> None:
        """`rows` are the rows of the pool, if it has any; every request needs one. `on_spare` is
        called when a promise ends or shrinks, so that running requests may grow into its pages.

        `release_cached` is called when no request runs and pages are missing. It unlocks the cached
        pages of one waiting request, or returns False if there are none.
        """
        self._pages, self._rows, self._most = pages, rows, most
        self._release_cached, self._on_spare = release_cached, on_spare
        self._returned = PageWaiter(self.grant, pages, rows)
        self._ratio, self._most_ahead = ratio or NewTokenRatio(), -(-MOST_TOKENS_AHEAD // page_size)
        self.capacity, self._page_size = pages.capacity, page_size
        self._live: set[Admission] = set()
        self._waiting: list[Admission] = []  # sorted by `place`
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None  # for the end of a shortage
        self._shortage = Shortage()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def admitted(self) -> int:
        return len(self._live)

    @property
    def spare(self) -> int:
        """The number of free pages that running requests may grow into.

        The other free pages are promised to requests that begin.
        """
        return self._pages.free_pages - self._opening

    @property
    def _opening(self) -> int:
        return sum(a.opening for a in self._live)

    def reclaim(self, count: int) -> None:
        """Make the cache evict pages until `spare` reaches `count`. Evict none if it cannot."""
        if self._pages.reclaimables:
            self._pages.reclaim(self._opening + count)

    @property
    def most_spare(self) -> int:
        """The value that `spare` would have if the cache evicted all pages that it can."""
        return self._pages.available_pages - self._opening

    def shortage(self, what: str, asked: int, free: int) -> CapacityError:
        """Return the error for missing pages. It counts tokens, the unit that clients know."""
        return CapacityError(what, asked * self._page_size, max(0, free) * self._page_size)

    async def admit(
        self, total: int, taken: int = 0, *, base: int | None = None, priority: int = 0
    ) -> Admission:
        """Wait for a promise of `base` pages (by default `total`), and of a share of the remaining
        pages up to `total`.

        Requests are admitted in order of priority and arrival.

        Raises: CapacityError in three cases. A request that can never fit fails at once. A request
        that already owns `taken` pages fails if no running request could free more, because its own
        pages may be all that the next one needs. Any other request fails if no request runs and
        too few pages return for `STUCK_S`.
        """
        if total > self.capacity:
            raise self.shortage(
                "tokens of prompt + max_new_tokens, in whole pages", total, self.capacity
            )
        admission = Admission(
            self, total, taken, total if base is None else base, priority, next(self._numbers)
        )
        self._enqueue(admission)
        try:
            await admission.granted
        except BaseException:
            self.forget(admission)
            raise
        return admission

    def retract(self, admission: Admission, base: int) -> None:
        """Move a running request, whose pages are being freed, back to the queue.

        It waits for `base` pages before it begins again; `granted` resolves when they are promised.
        """
        self._live.discard(admission)
        admission.away, admission.taken, admission.row_taken, admission.base = True, 0, False, base
        admission.total = max(admission.total, base)
        admission.granted = asyncio.get_running_loop().create_future()
        self._enqueue(admission)

    def forget(self, admission: Admission) -> None:
        if not admission.granted.done():
            admission.granted.cancel()
        if admission in self._live:
            self._live.remove(admission)
        elif admission in self._waiting:
            self._waiting.remove(admission)
        self.promises_less()

    def promises_less(self) -> None:
        self.grant()
        self._on_spare()

    def _enqueue(self, admission: Admission) -> None:
        bisect.insort(self._waiting, admission, key=lambda a: a.place)
        self.grant()

    def grant(self) -> None:
        """Grant promises in order, as long as pages and rows are free."""
        self._returned.look()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            head = self._waiting[0]
            # The request was cancelled in this turn of the loop, before its own `forget` ran.
            if head.granted.done():
                self._waiting.pop(0)
                continue
            if len(self._live) >= self._most:
                break
            asked = self._promised((head,))
            spare = self._pages.available_pages - self._promised(self._live)
            rows = self._spare_rows()
            if asked > spare or (rows < 1 and not head.row_taken):
                if asked > spare and not self._live and self._release_cached():
                    continue
                if self._live:
                    break
                if not head.taken and (left_s := self._shortage.left_s()) > 0:
                    self._timer = asyncio.get_running_loop().call_later(left_s, self.grant)
                    break
                self._waiting.pop(0)
                head.granted.set_exception(self._never(head, asked, spare, rows))
                continue
            self.reclaim(head.opening)
            if self._pages.reclaimables and self.spare < head.opening:
                # A step or a write still reads evicted pages, which become free when it ends.
                break
            self._waiting.pop(0)
            self._live.add(head)
            self._shortage.ended()
            head.granted.set_result(None)
        if self._waiting:
            self._returned.wait()
        else:
            self._shortage.ended()

    def _promised(self, admissions: Iterable[Admission]) -> int:
        ratio, ahead = self._ratio.now, self._most_ahead
        # This sum is computed whenever a request ends, so the common case calls no methods.
        if ratio >= 1:
            return sum(a.total - a.taken for a in admissions)
        return sum(a.outstanding(ratio, ahead) for a in admissions)

    def _spare_rows(self) -> int:
        if self._rows is None:
            return 1
        return self._rows.free_pages - sum(not a.row_taken for a in self._live)

    def _never(self, head: Admission, asked: int, spare: int, rows: int) -> CapacityError:
        if head.taken:
            return self.shortage("free pool tokens to grow", asked, spare)
        if asked > spare:
            return self.shortage(
                "free pool tokens, and no running request will free more", asked, spare
            )
        return CapacityError("free rows, and no running request will free more", 1, max(0, rows))

    def close(self, error: KvflowError) -> None:
        """Make all waiting requests raise `error`. Do not call `admit` after this."""
        self._returned.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for admission in waiting:
            if not admission.granted.done():
                admission.granted.set_exception(error)
