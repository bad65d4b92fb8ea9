"""The agreement of all ranks on how much of a prompt is cached, since all ranks must begin at the
same token.

The first rank gives a request its places, which include the pages that its own cache has, and asks
the other ranks how much they have cached. No step names the request until all of them answer. If
one of them has less, the request frees its places and takes new ones, perhaps a moment later. It is
certain to get them, because all prompts that have places fit into every pool, even without a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvflow.serve.engine.scheduler.lockstep import Lockstep
from kvflow.serve.engine.scheduler.prefill_steps import PrefillRequest, PrefillSteps


class Beginnings:
    """The requests of one engine that have places but have not begun yet."""

    def __init__(
        self,
        steps: PrefillSteps,
        lockstep: Lockstep | None,
        begins: Callable[[PrefillRequest], None],
    ) -> None:
        """`begins` is called with a request once steps may name it."""
        self._steps, self._lockstep, self._begins = steps, lockstep, begins
        self._short: dict[int, PrefillRequest] = {}  # by id: requests that wait for new places

    @property
    def are_short(self) -> bool:
        return bool(self._short)

    def placed(self, request: PrefillRequest) -> None:
        if self._lockstep is None or not request.cached_tokens:
            self._begin(request)
            return
        request.is_asking = True
        self._lockstep.find(request, request.cached_tokens)

    def agreed(self, request: PrefillRequest, tokens: int) -> None:
        """Begin a request whose first `tokens` tokens are cached at every rank."""
        if not request.is_asking or request.agreed is not None:
            return
        request.agreed = tokens
        if tokens < request.sequence.computed:
            self._take_fewer(request)
        else:
            self._begin(request)

    def flushed(self, placed: Iterable[PrefillRequest]) -> None:
        """Flush the caches of the other ranks, after this rank's cache was flushed.

        Requests of `placed` that no step has named yet begin without cached pages, at every rank.
        """
        if self._lockstep is None:
            return
        self._lockstep.flush()
        for request in list(placed):
            if not request.has_begun and request.cached_tokens:
                request.agreed, request.is_asking = 0, True
                self._take_fewer(request)

    def take_missing(self) -> None:
        """Give new places to the requests that wait for them, while enough are free."""
        for request in list(self._short.values()):
            if max(self._steps.short_of(request)) > 0:
                return
            del self._short[id(request)]
            self._steps.take_places(request)
            self._begin(request)

    def forget(self, request: PrefillRequest) -> None:
        """Forget a request that has ended or loses its places. Idempotent."""
        self._short.pop(id(request), None)
        request.agreed, request.is_asking = None, False

    def _take_fewer(self, request: PrefillRequest) -> None:
        self._steps.start_again(request)
        self._short[id(request)] = request
        self.take_missing()

    def _begin(self, request: PrefillRequest) -> None:
        request.is_asking = False
        self._steps.count(request)
        self._begins(request)
