"""Identities of workers: what a router learns by asking them."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple, Protocol

import aiohttp
import msgspec

from kvflow.protocols.errors import LostError
from kvflow.router.feed import Source


class NotServingError(LostError):
    """A worker answers but cannot serve. The text is the reason."""


class Traits(NamedTuple):
    """Properties that must agree for a prefill and a decode to serve a request together.

    An empty value means that the engine does not report the property. It agrees with every other
    value.
    """

    fingerprint: str = ""
    wire_version: int | None = None
    data_plane: str = ""

    def conflict_with(self, other: Traits) -> str:
        """Describe the first property in which two workers conflict, or return "" if they fit."""
        for name, mine, theirs in zip(
            ("model fingerprint", "wire version", "data plane"), self, other, strict=True
        ):
            if mine and theirs and mine != theirs:
                return f"{name} {mine!r} and not {theirs!r}"
        return ""


class Identity(msgspec.Struct, frozen=True):
    """The identity of one worker. A string is empty if the engine does not report that property."""

    role: str | None
    started_as: str | None
    incarnation: str
    model: str
    fingerprint: str
    bootstrap_port: int | None
    cache_tokens: int  # tokens that its prefix cache can hold; 0 without one
    events: Source | None  # the source of its cache events
    wire_version: int | None = None  # version of the control link
    data_plane: str = ""
    computes_prompts: bool = False  # True for a decode that computes prompts without a prefill
    max_model_len: int | None = None  # most tokens of a prompt and its completion

    @property
    def traits(self) -> Traits:
        return Traits(self.fingerprint, self.wire_version, self.data_plane)


class Identify(Protocol):
    """A function that asks the worker at `url` for its identity.

    `role` is the role that the router assumes, or None if the worker has to report it. `known` is
    the identity that the last check found, or None if the worker was down.

    Raises: NotServingError; RequestError if the role stays unknown; and the errors of a request and
    of decoding its answer (aiohttp.ClientError, OSError, ValueError, RecursionError).
    """

    def __call__(
        self, session: aiohttp.ClientSession, url: str, role: str | None, known: Identity | None
    ) -> Awaitable[Identity]: ...


async def ask(
    session: aiohttp.ClientSession, url: str, path: str, meanings: Mapping[int, str]
) -> Any:
    """Return the JSON document that the worker at `url` serves at `path`.

    `meanings` explains statuses other than 200 in the error.

    Raises: see `Identify`.
    """
    # Redirects are refused: the worker must be the server at the given URL, not one that it names.
    async with session.get(f"{url}{path}", allow_redirects=False) as answer:
        if answer.status != 200:
            meaning = meanings.get(answer.status, "")
            raise NotServingError(
                f"{path} answered {answer.status}" + (f": {meaning}" if meaning else "")
            )
        return msgspec.json.decode(await answer.read())


async def read_at_most(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes | None:
    """Return the body of a worker's answer, or None if it has more than `most_bytes`."""
    raw = bytearray()
    async for piece in answer.content.iter_any():
        raw += piece
        if len(raw) > most_bytes:
            return None
    return bytes(raw)
