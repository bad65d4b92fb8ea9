"""Taking pages for the next tokens of running requests, and ending requests that get none."""

from __future__ import annotations

from collections.abc import Callable

from kvflow.memory.allocator import PageAllocator
from kvflow.protocols.errors import KvflowError
from kvflow.serve.engine.scheduler.budget import PageBudget, Shortage
from kvflow.serve.engine.scheduler.burst import DecodeRequest


class Growth:
    """Takes pages for the next steps of a batch.

    `short` maps each request that got no pages to the number of pages that it needs.
    """

    def __init__(
        self,
        budget: PageBudget,
        pages: PageAllocator,
        failed: Callable[[DecodeRequest, KvflowError], None],
    ) -> None:
        self._budget, self._pages, self._failed = budget, pages, failed
        self.short: dict[DecodeRequest, int] = {}
        self._shortage = Shortage()
        self.stuck_in_s: float | None = None
        """Seconds until `fail_stuck` ends the requests in `short`; None if they need not end."""

    def grow(self, batch: list[DecodeRequest], most_steps: int) -> tuple[list[DecodeRequest], int]:
        """Take pages for the next steps; return the requests that got them and the number of steps.

        The number is `most_steps`, or 1 if the pages do not suffice for that many steps of all
        requests.
        """
        self.short = {}
        needed = [request.pages_missing(most_steps) for request in batch]
        if not any(needed):
            return batch, most_steps
        self._budget.reclaim(sum(needed))
        spare = max(0, self._budget.spare)
        if sum(needed) > spare:
            most_steps, needed = 1, [request.pages_missing(1) for request in batch]
            self._budget.reclaim(min(sum(needed), self._budget.most_spare))
            spare = max(0, self._budget.spare)
        ready: list[DecodeRequest] = []
        for request, missing in zip(batch, needed, strict=True):
            if missing > spare:
                self.short[request] = missing
                continue
            self._take(request, missing)
            spare -= missing
            ready.append(request)
        return ready, most_steps

    def fail_stuck(self, *, may_come: bool) -> None:
        """End the requests in `short` once no pages have come for `STUCK_S`.

        `may_come` is True while a step or a copy may still free pages. Then the time restarts.
        """
        self.stuck_in_s = None
        if may_come or not self.short:
            self._shortage.ended()
        elif left_s := self._shortage.left_s():
            self.stuck_in_s = left_s
        else:
            for request, missing in self.short.items():
                what = "free pool tokens to grow, and no running request will free more"
                self._failed(request, self._budget.shortage(what, missing, self._budget.spare))
            self.short = {}

    def _take(self, request: DecodeRequest, count: int) -> None:
        if count:
            pages = self._pages.take(count, request.sequence.owner)
            request.sequence.add_pages(pages)
            request.resident.add(pages)
            request.admission.took(count)
