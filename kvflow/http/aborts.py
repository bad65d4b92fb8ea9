"""POST /abort_request, as in SGLang: aborted requests respond with their tokens so far."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from aiohttp import web

from kvflow.http.bodies import decoded
from kvflow.http.responses import json_response

ABORT = "abort"  # the finish reason of an aborted choice
PATH = "/abort_request"


class AbortRequest(msgspec.Struct, frozen=True):
    """Body of an abort request. Without an id or `abort_all` it aborts nothing, as in SGLang."""

    rid: str | None = None
    abort_all: bool | None = None


class RunningChoices:
    """The choices that are being generated, each with a function that stops it."""

    def __init__(self) -> None:
        # Keyed by id, then by a unique number, because several choices may have the same id.
        self._stops: dict[str, dict[int, Callable[[], None]]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len({number for stops in self._stops.values() for number in stops})

    @contextmanager
    def listed(
        self, request_id: str, ids: Sequence[str], stop: Callable[[int], None]
    ) -> Iterator[None]:
        """List the choices of one request until the block ends.

        Each choice is listed under `request_id` and under its own entry in `ids`. `stop` receives
        the index of the choice to stop.
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
        """Stop the choices with the id of `request`, or all choices. Return their number."""
        ids = list(self._stops) if request.abort_all else [request.rid or ""]
        # Keyed by number, so that a choice under several ids is stopped and counted once.
        stops = {number: stop for one in ids for number, stop in self._stops.get(one, {}).items()}
        for stop in stops.values():
            stop()
        return len(stops)


def routes(choices: RunningChoices) -> list[web.RouteDef]:
    """Return the abort route of a prefill or a decode."""

    async def abort(http: web.Request) -> web.StreamResponse:
        return json_response({"aborted": choices.abort(decoded(await http.read(), AbortRequest))})

    return [web.post(PATH, abort)]
