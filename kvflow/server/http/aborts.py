"""POST /abort_request, as SGLang has it: what runs is ended by the id of its answer, and answers with what there is."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from aiohttp import web

from kvflow.server.http.responses import json_response
from kvflow.server.http.schemas import decoded

ABORT = "abort"  # as a finish reason
PATH = "/abort_request"


class AbortRequest(msgspec.Struct, frozen=True):
    """The body: one id, or all that runs. Neither is nothing to do, as in SGLang."""

    rid: str | None = None
    abort_all: bool | None = None


class RunningChoices:
    """Every choice that is being generated, and how to stop it."""

    def __init__(self) -> None:
        self._stops: dict[str, dict[int, Callable[[], None]]] = {}  # by id, and by a number of their own
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return sum(map(len, self._stops.values()))

    @contextmanager
    def listed(self, ids: Sequence[str], stop: Callable[[int], None]) -> Iterator[None]:
        """List the choices of one request until the block ends. Their ids need not differ, nor those of requests."""
        listed = [(one, next(self._numbers)) for one in ids]
        for i, (one, number) in enumerate(listed):
            self._stops.setdefault(one, {})[number] = functools.partial(stop, i)
        try:
            yield
        finally:
            for one, number in listed:
                del self._stops[one][number]
                if not self._stops[one]:
                    del self._stops[one]

    def abort(self, request: AbortRequest) -> int:
        """Stop the choices of this id, or all. Returns how many there are."""
        ids = list(self._stops) if request.abort_all else [request.rid or ""]
        stops = [stop for one in ids for stop in self._stops.get(one, {}).values()]
        for stop in stops:
            stop()
        return len(stops)


def routes(choices: RunningChoices) -> list[web.RouteDef]:
    """The route of a prefill or a decode."""

    async def abort(http: web.Request) -> web.StreamResponse:
        return json_response({"aborted": choices.abort(decoded(await http.read(), AbortRequest))})

    return [web.post(PATH, abort)]
