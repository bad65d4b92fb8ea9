"""The interface of an engine, which is one kind of server that a router can stand in front of."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

import aiohttp
from prometheus_client.core import Metric

from kvflow.router.identity import Identify
from kvflow.router.pairs import Pair
from kvflow.router.prompts import PromptFields
from kvflow.router.workers import Worker


class Forwarded(NamedTuple):
    """A client's request as its legs forward it, and the HTTP session that they use."""

    session: aiohttp.ClientSession
    path: str
    raw: bytes  # body of the request, a JSON object
    headers: Mapping[str, str]


class Completion(Protocol):
    """One request as the engine parsed it, ready to become the legs of a pair."""

    @property
    def fields(self) -> PromptFields: ...

    def local_tokens(self, missing: int) -> int | None:
        """Return how many tokens decode computes if it serves the request alone.

        `missing` is the number of tokens of the prompts that decode's cache lacks. Returns None if
        decode cannot serve the request alone, or always does.
        """

    def open_pair(
        self, request: Forwarded, prefill: Worker | None, decode: Worker
    ) -> AbstractAsyncContextManager[Pair]:
        """Open one try on these two workers, or on decode alone if `prefill` is None.

        On exit, close the connections whose answer is incomplete.
        """


class Engine(Protocol):
    """One kind of worker."""

    has_operations: bool
    """True if workers have kvflow's own routes for load, caches, aborts and rooms."""
    keepalive_s: float
    """Seconds for which an idle connection may be re-used.

    Workers must keep idle connections open for longer than that.
    """

    @property
    def identify(self) -> Identify:
        """The function that asks a worker for its identity."""

    @property
    def completion_paths(self) -> Collection[str]:
        """Paths of requests that a pair of workers serves."""

    @property
    def decode_routes(self) -> Collection[tuple[str, str]]:
        """Methods and paths of requests that the router forwards to any decode."""

    @property
    def retried_statuses(self) -> Collection[int]:
        """Statuses after which a request without a first token may be tried on another pair."""

    def read(self, path: str, body: bytes) -> Completion:
        """Parse a request's body from which long values were removed (`large_bodies.py`).

        `path` is that of the request, one of `completion_paths`.

        Raises: RequestError (400).
        """

    def families(self) -> Iterator[Metric]:
        """Yield metrics that only this engine has."""
