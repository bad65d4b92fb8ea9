"""Optimistic starts: prompts that are computed before decode's half of their room arrives
(`--optimistic-prefill`).

Such an early request may lose its places at any time to a request with both halves of its room. The
early requests with the least work to lose give way first. So no request with both halves waits for
a half that may never arrive, and there is no deadlock, however many prompts begin early. Lost work
is computed again. A request that lost its places too often waits for its match before it begins
again.

With several ranks, the first one decides. The others take and free places in the order of its
announcements: a step that names the request, or its preemption (`engine/ranks`).
"""

from __future__ import annotations

import bisect
from typing import Generic, Protocol, TypeVar

import numpy as np

from kvflow.protocols.pages.layout import PageIndices
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.scheduler.params import EngineLoad, EngineOptimism, SamplingParams


class EarlyRequest(Protocol):
    """The attributes of an engine's request that this module uses."""

    sequence: Sequence
    params: SamplingParams


R = TypeVar("R", bound=EarlyRequest)


def urgency(request: EarlyRequest) -> int:
    """Return the sort key for priority: the smallest comes first."""
    return -request.params.priority


class OptimisticStarts(Generic[R]):
    """The requests of one prefill that may begin, or have begun, before their rooms are matched.

    `first` is the next request to begin, in order of priority and arrival. A request begins early
    at most `tries` times.
    """

    def __init__(self, tries: int) -> None:
        """`tries` is how often a request may begin early; 0 turns early starts off."""
        self._tries = tries
        self._waiting: list[R] = []
        self._holding: dict[int, R] = {}  # by id
        self._losses: dict[int, int] = {}  # by id: how often a request lost its places
        self._starts = self._hits = self._lost = 0

    @property
    def counts(self) -> EngineOptimism:
        return EngineOptimism(
            starts=self._starts, hits=self._hits, lost=self._lost, holding_now=len(self._holding)
        )

    @property
    def first(self) -> R | None:
        return self._waiting[0] if self._waiting else None

    def load(self, running: int, unmatched: int, waiting: int) -> EngineLoad:
        """Return the load.

        A request that began early is among the `running` and the `unmatched`, but counts once.
        """
        return EngineLoad(running, unmatched - len(self._holding) + waiting)

    def add(self, request: R) -> None:
        """Queue an unmatched request, unless it has places or has lost them too often."""
        if request in self._waiting or self.holds(request):
            return
        if self._losses.get(id(request), 0) < self._tries:
            bisect.insort_right(self._waiting, request, key=urgency)

    def began(self, request: R) -> None:
        self._waiting.remove(request)
        self._holding[id(request)] = request
        self._starts += 1

    def holds(self, request: R) -> bool:
        return id(request) in self._holding

    def matched(self, request: R) -> bool:
        """Record a match; return True if the request has places, which it then keeps."""
        hit = self.holds(request)
        self.forget(request)
        self._hits += hit
        return hit

    def forget(self, request: R) -> None:
        """Forget a request that ended or is matched. Idempotent."""
        self._holding.pop(id(request), None)
        self._losses.pop(id(request), None)
        if request in self._waiting:
            self._waiting.remove(request)

    def give_way(self, pages: int, rows: int, without_cache: int, in_use: PageIndices) -> list[R]:
        """Choose requests to lose their places, so that `pages` pages and `rows` rows become free.

        The requests that computed the fewest tokens are chosen, and no more of them than needed.
        The list is empty if all early requests together have too few places. `without_cache` is the
        number of pages missing at a rank without cached pages, where each early request has all
        pages of its prompt. `in_use` are cached pages that other requests read.

        The chosen requests begin again if they have tries left. Call this between steps, when no
        step includes any of them (I13).
        """
        holding = list(self._holding.values())

        def are_enough(chosen: list[R]) -> bool:
            """Return True if `chosen` suffice, counting cached pages that only they use."""
            if sum(r.sequence.rows.size for r in chosen) < rows:
                return False
            if sum(r.sequence.prompt_pages for r in chosen) < without_cache:
                return False
            missing = pages - sum(r.sequence.places[0].size for r in chosen)
            if missing <= 0 or not any(r.sequence.shared for r in chosen):
                return missing <= 0
            kept = [_shared(r) for r in holding if r not in chosen]
            alone = np.setdiff1d(
                np.concatenate([_shared(r) for r in chosen]), np.concatenate([in_use, *kept])
            )
            return int(alone.size) >= missing

        chosen: list[R] = []
        for request in sorted(
            holding, key=lambda r: r.sequence.computed - r.sequence.shared * r.sequence.page_size
        ):
            if are_enough(chosen):
                break
            chosen.append(request)
        if not are_enough(chosen):
            return []
        # The requests chosen last may suffice without some of the earlier ones.
        for request in reversed(chosen):
            others = [other for other in chosen if other is not request]
            if are_enough(others):
                chosen = others
        for request in chosen:
            del self._holding[id(request)]
            self._losses[id(request)] = self._losses.get(id(request), 0) + 1
            self._lost += 1
            self.add(request)
        return chosen


def _shared(request: EarlyRequest) -> PageIndices:
    return request.sequence.pages[: request.sequence.shared]
