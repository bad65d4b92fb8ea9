"""Requests that go to decode alone, because decode has little of their prompts to compute.

A pair costs a second request, a place in prefill's queue and a transfer. Decode computes a prompt
in chunks between the steps of its other requests, whose tokens then come later. So the number of
tokens that one decode computes at a time is limited.
"""

from __future__ import annotations

from kvflow.router.cache_view import Prompts
from kvflow.router.engines import Completion
from kvflow.router.workers import Worker


class LocalPrefill:
    """Chooses these requests: those after which a decode computes at most `most_tokens` tokens.

    With 0, every request goes to a pair.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens

    def begin(
        self, completion: Completion, decode: Worker, prompts: Prompts, missing: dict[Worker, int]
    ) -> LocalRun | None:
        """Return a run to enter before decode is asked alone, or None if a pair serves better.

        `missing` keeps, for the other tries of the request, how many tokens each decode lacks.
        """
        if not (self.most_tokens and decode.computes_prompts and prompts.chains):
            return None
        # After a try, the router takes the prompts for cached, although the try may have failed.
        if decode not in missing:
            missing[decode] = decode.cache.missing(prompts)
        cost = completion.local_tokens(missing[decode])
        if cost is None or decode.computing + cost > self.most_tokens:
            return None
        return LocalRun(decode, cost)


class LocalRun:
    """The tokens that one request makes decode compute. They count from `with` until `computed`."""

    def __init__(self, decode: Worker, tokens: int) -> None:
        self._decode, self._tokens = decode, tokens
        self._counts = False

    def computed(self) -> None:
        """Record that the prompts are computed, because the answer has begun. Idempotent."""
        if self._counts:
            self._counts = False
            self._decode.computing -= self._tokens

    def __enter__(self) -> None:
        self._counts = True
        self._decode.computing += self._tokens
        self._decode.local_prompts += 1

    def __exit__(self, *_: object) -> None:
        self.computed()
