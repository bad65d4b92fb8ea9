"""With how much of a cached prefix a prompt begins, where other ranks have to begin at the same
token.

The first rank gives a request its places, with what its own cache has, and asks the others; until
all have answered no step names it. Where one of them has less, the request gives its places back
and takes others, which may be a moment later: the prompts that have places fit into every pool
without any cache, so they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvflow.serve.engine.scheduler.lockstep import Lockstep
from kvflow.serve.engine.scheduler.prefill_steps import PrefillRequest, PrefillSteps


class Beginnings:
    """The requests of one engine that have places, until each begins."""

    def __init__(
        self,
        steps: PrefillSteps,
        lockstep: Lockstep | None,
        begins: Callable[[PrefillRequest], None],
    ) -> None:
        """`begins` is called with a request once steps may name it."""
        self._steps, self._lockstep, self._begins = steps, lockstep, begins
        self._short: dict[int, PrefillRequest] = {}  # by id: those that wait for other places

    @property
    def are_short(self) -> bool:
        return bool(self._short)

    def placed(self, request: PrefillRequest) -> None:
        """It has taken its places."""
        if self._lockstep is None or not request.cached_tokens:
            self._begin(request)
            return
        request.is_asking = True
        # Which may tell that a rank is lost, and drop it.
        self._lockstep.find(request, request.cached_tokens)

    def agreed(self, request: PrefillRequest, tokens: int) -> None:
        """Every rank has its first `tokens` tokens."""
        if not request.is_asking or request.agreed is not None:
            return
        request.agreed = tokens
        if tokens < request.sequence.computed:
            self._take_fewer(request)
        else:
            self._begin(request)

    def flushed(self, placed: Iterable[PrefillRequest]) -> None:
        """The cache has been.

        Of `placed`, those that no step has named begin without it, at every rank.
        """
        if self._lockstep is None:
            return
        self._lockstep.flush()  # which may tell that a rank is lost, and drop some
        for request in list(placed):
            if not request.has_begun and request.cached_tokens:
                request.agreed, request.is_asking = 0, True
                self._take_fewer(request)

    def take_missing(self) -> None:
        """As far as there are places now."""
        for request in list(self._short.values()):
            if max(self._steps.short_of(request)) > 0:
                return
            del self._short[id(request)]
            self._steps.take_places(request)
            self._begin(request)

    def forget(self, request: PrefillRequest) -> None:
        """It loses its places, or has ended. Idempotent."""
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
