"""POST /abort_request, as SGLang has it: it ends running requests by their id or X-Request-ID, and
each answers with the tokens that it has.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from aiohttp import web

from kvflow.http.bodies import decoded
from kvflow.http.responses import json_response

ABORT = "abort"  # as a finish reason
PATH = "/abort_request"


class AbortRequest(msgspec.Struct, frozen=True):
    """The body: one id, or all running requests. With neither the request does nothing, as in
    SGLang.
    """

    rid: str | None = None
    abort_all: bool | None = None


class RunningChoices:
    """The choices that are being generated, and the function that stops each."""

    def __init__(self) -> None:
        # By id, then by a number that is unique, because clients may use one id several times.
        self._stops: dict[str, dict[int, Callable[[], None]]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len({number for stops in self._stops.values() for number in stops})

    @contextmanager
    def listed(
        self, request_id: str, ids: Sequence[str], stop: Callable[[int], None]
    ) -> Iterator[None]:
        """List the choices of one request, by its id and by theirs, until the block ends.

        Ids need not be unique.
        """
        listed = [(name, i) for i, one in enumerate(ids) for name in {one, request_id or one}]
        numbers = [next(self._numbers) for _ in ids]
        for one, i in listed:
            self._stops.setdefault(one, {})[numbers[i]] = functools.partial(stop, i)
        try:
            yield
        finally:
            for one, i in listed:
                del self._stops[one][numbers[i]]
                if not self._stops[one]:
                    del self._stops[one]

    def abort(self, request: AbortRequest) -> int:
        """Stop the choices with this id, or all. Return their number."""
        ids = list(self._stops) if request.abort_all else [request.rid or ""]
        # By number, because a choice that is listed under several ids is stopped and counted once.
        stops = {number: stop for one in ids for number, stop in self._stops.get(one, {}).items()}
        for stop in stops.values():
            stop()
        return len(stops)


def routes(choices: RunningChoices) -> list[web.RouteDef]:
    """Return the abort route of a prefill or a decode."""

    async def abort(http: web.Request) -> web.StreamResponse:
        return json_response({"aborted": choices.abort(decoded(await http.read(), AbortRequest))})

    return [web.post(PATH, abort)]
