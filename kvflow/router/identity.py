"""What a router finds out of a worker by asking it."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple, Protocol

import aiohttp
import msgspec

from kvflow.protocols.errors import LostError
from kvflow.router.feed import Source


class NotServingError(LostError):
    """A worker that answers, but cannot serve; the text says why."""


class Traits(NamedTuple):
    """What a prefill and a decode must have in common to serve a request together.

    Empty: its engine does not say.
    """

    fingerprint: str = ""
    wire_version: int | None = None
    data_plane: str = ""

    def conflict_with(self, other: Traits) -> str:
        """In what two workers do not fit together; empty where they do."""
        for name, mine, theirs in zip(
            ("model fingerprint", "wire version", "data plane"), self, other, strict=True
        ):
            if mine and theirs and mine != theirs:
                return f"{name} {mine!r} and not {theirs!r}"
        return ""


class Identity(msgspec.Struct, frozen=True):
    """What a worker is. Empty texts: its engine does not say."""

    role: str | None
    started_as: str | None
    incarnation: str
    model: str
    fingerprint: str
    bootstrap_port: int | None
    cache_tokens: int  # at most, in its prefix cache; 0 where it has none
    events: Source | None  # of that cache
    wire_version: int | None = None  # of the control link
    data_plane: str = ""

    @property
    def traits(self) -> Traits:
        return Traits(self.fingerprint, self.wire_version, self.data_plane)


class Identify(Protocol):
    """Asks the worker at `url` what it is.

    `role`: what it is taken for, None where it has to say that itself. `known`: what it was at the
    last check, None where it was down then.

    Raises: NotServingError, RequestError where the role is not known, and what a request and the
    decoding of its answer raise (aiohttp.ClientError, OSError, ValueError, RecursionError).
    """

    def __call__(
        self, session: aiohttp.ClientSession, url: str, role: str | None, known: Identity | None
    ) -> Awaitable[Identity]: ...


async def ask(
    session: aiohttp.ClientSession, url: str, path: str, meanings: Mapping[int, str]
) -> Any:
    """The JSON that the worker at `url` has at `path`; `meanings`: of other statuses.

    Raises: as `Identify`.
    """
    async with session.get(f"{url}{path}", allow_redirects=False) as answer:
        if answer.status != 200:
            meaning = meanings.get(answer.status, "")
            raise NotServingError(
                f"{path} answered {answer.status}" + (f": {meaning}" if meaning else "")
            )
        return msgspec.json.decode(await answer.read())
