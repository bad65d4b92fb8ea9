"""What differs between the servers that a router may be in front of."""

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
    """A client's request as it goes to workers."""

    session: aiohttp.ClientSession
    path: str
    raw: bytes  # its body, a JSON object
    headers: Mapping[str, str]


class Completion(Protocol):
    """What an engine has read in the body of a request: how it becomes the legs of a pair."""

    @property
    def fields(self) -> PromptFields: ...

    def open_pair(
        self, request: Forwarded, prefill: Worker, decode: Worker
    ) -> AbstractAsyncContextManager[Pair]:
        """One try: within the block both workers are asked.

        Leaving it closes what has not answered.
        """


class Engine(Protocol):
    """One kind of worker."""

    has_operations: bool
    """Whether workers have kvflow's own routes for load, caches, aborts and rooms."""
    keepalive_s: float
    """How long an idle connection is used again; less than workers keep theirs open."""

    @property
    def identify(self) -> Identify:
        """Asks a worker what it is."""

    @property
    def completion_paths(self) -> Collection[str]:
        """The paths of requests that a pair serves."""

    @property
    def decode_routes(self) -> Collection[tuple[str, str]]:
        """Methods and paths of what the router forwards to any decode."""

    @property
    def retried_statuses(self) -> Collection[int]:
        """Statuses after which another pair may serve a request that has no token."""

    def read(self, body: bytes) -> Completion:
        """Of a body without its long values (`large_bodies.py`). Raises: RequestError (400)."""

    def families(self) -> Iterator[Metric]:
        """Metrics that other engines do not have."""
