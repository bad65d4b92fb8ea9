"""The interface to the servers that a router can stand in front of."""

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
    """A client's request in the form in which it goes to workers."""

    session: aiohttp.ClientSession
    path: str
    raw: bytes  # its body, a JSON object
    headers: Mapping[str, str]


class Completion(Protocol):
    """One request as an engine reads its body, ready to become the legs of a pair."""

    @property
    def fields(self) -> PromptFields: ...

    def open_pair(
        self, request: Forwarded, prefill: Worker, decode: Worker
    ) -> AbstractAsyncContextManager[Pair]:
        """Open one try: within the block both workers are asked. Leaving the block closes the
        connections that have not answered.
        """


class Engine(Protocol):
    """One kind of worker."""

    has_operations: bool
    """True where workers have kvflow's own routes for load, caches, aborts and rooms."""
    keepalive_s: float
    """Seconds for which an idle connection may be used again; less than workers keep theirs open.
    """

    @property
    def identify(self) -> Identify:
        """The function that asks a worker what it is."""

    @property
    def completion_paths(self) -> Collection[str]:
        """Paths of the requests that a pair serves."""

    @property
    def decode_routes(self) -> Collection[tuple[str, str]]:
        """Methods and paths of the requests that the router forwards to any decode."""

    @property
    def retried_statuses(self) -> Collection[int]:
        """Statuses after which another pair may serve a request that has no token yet."""

    def read(self, body: bytes) -> Completion:
        """Read a body from which long values were taken out (`large_bodies.py`). Raises:
        RequestError (400).
        """

    def families(self) -> Iterator[Metric]:
        """Yield the metrics that only this engine has."""
