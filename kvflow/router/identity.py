"""The facts about a worker that a router learns by asking it."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple, Protocol

import aiohttp
import msgspec

from kvflow.protocols.errors import LostError
from kvflow.router.feed import Source


class NotServingError(LostError):
    """A worker that answers but cannot serve; the text is the reason."""


class Traits(NamedTuple):
    """Properties that a prefill and a decode must share to serve a request together.

    An empty value is one that the engine does not report; it fits every other.
    """

    fingerprint: str = ""
    wire_version: int | None = None
    data_plane: str = ""

    def conflict_with(self, other: Traits) -> str:
        """Return how two workers differ, as a text; empty where they fit together."""
        for name, mine, theirs in zip(
            ("model fingerprint", "wire version", "data plane"), self, other, strict=True
        ):
            if mine and theirs and mine != theirs:
                return f"{name} {mine!r} and not {theirs!r}"
        return ""


class Identity(msgspec.Struct, frozen=True):
    """The facts about one worker. An empty text is one that its engine does not report."""

    role: str | None
    started_as: str | None
    incarnation: str
    model: str
    fingerprint: str
    bootstrap_port: int | None
    cache_tokens: int  # the most that its prefix cache holds; 0 where it has none
    events: Source | None  # cache events
    wire_version: int | None = None  # of the control link
    data_plane: str = ""

    @property
    def traits(self) -> Traits:
        return Traits(self.fingerprint, self.wire_version, self.data_plane)


class Identify(Protocol):
    """A function that asks the worker at `url` what it is.

    `role` is the role that the router assumes, None where the worker has to report it. `known` is
    the identity at the last check, None where the worker was down then.

    Raises: NotServingError, RequestError where the role is not known, and what a request and the
    decoding of its answer raise (aiohttp.ClientError, OSError, ValueError, RecursionError).
    """

    def __call__(
        self, session: aiohttp.ClientSession, url: str, role: str | None, known: Identity | None
    ) -> Awaitable[Identity]: ...


async def ask(
    session: aiohttp.ClientSession, url: str, path: str, meanings: Mapping[int, str]
) -> Any:
    """Return the JSON that the worker at `url` serves at `path`. `meanings` explains other
    statuses, for the error.

    Raises: as `Identify`.
    """
    # A redirect is refused: the worker must be the server at the given URL, not one that it names.
    async with session.get(f"{url}{path}", allow_redirects=False) as answer:
        if answer.status != 200:
            meaning = meanings.get(answer.status, "")
            raise NotServingError(
                f"{path} answered {answer.status}" + (f": {meaning}" if meaning else "")
            )
        return msgspec.json.decode(await answer.read())
