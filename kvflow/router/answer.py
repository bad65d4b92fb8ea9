"""The answer to one client request, shared by all pairs that try to serve it."""

from __future__ import annotations

import time
from collections.abc import Callable

import aiohttp
from aiohttp import web

from kvflow.http.errors import Failure
from kvflow.http.growing import write
from kvflow.http.sse import dialect_of, encode_event
from kvflow.protocols.errors import Code
from kvflow.router.legs import (
    LegFailedError,
    PairFailedError,
    error_in,
    split_opening,
    split_silence,
    stream_headers,
)
from kvflow.router.measures import RouterMeasures
from kvflow.router.pairs import Pair
from kvflow.telemetry.requests import CURRENT, name_error
from kvflow.telemetry.spans import TIME_TO_FIRST_CHUNK


class ClientAnswer:
    """The answer to one client request. It begins at most once.

    The first pair that streams sends the headers. A later pair may continue the same stream,
    because only empty lines and comments follow the headers before the first token.
    """

    def __init__(self, http: web.Request, measures: RouterMeasures) -> None:
        self._http, self._measures = http, measures
        self._arrived_at_s = time.perf_counter()
        self._stream: web.StreamResponse | None = None
        self.on_first_token: Callable[[], None] = lambda: None
        # Set if decode is lost after the first token. The router then marks that worker lost.
        self.cut_off: LegFailedError | None = None

    async def relay(self, pair: Pair, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Relay decode's stream event by event.

        If decode is lost after the first token, send an error event.

        Raises: PairFailedError if the pair fails before the first token.
        """
        if self._stream is None:
            self._stream = web.StreamResponse(headers={**stream_headers(answer), **pair.headers})
            await self._stream.prepare(self._http)
        out = self._stream
        piece = await self._until_first_token(out, pair)
        # Pieces of an incomplete event. Joining them at every piece would take quadratic time.
        held: list[bytes] = []
        while piece:
            end = piece.rfind(b"\n\n") + 1
            if not end and held and held[-1].endswith(b"\n") and piece.startswith(b"\n"):
                # The two line feeds that end the held event arrived in two pieces.
                end = -1
            if end:
                cut = max(end, 0) + 1
                await write(out, (*held, piece[:cut]))
                held, piece = [], piece[cut:]
            if piece:
                held.append(piece)
            try:
                piece = await pair.decode.read()
            except LegFailedError as error:
                self.cut_off = error
                return await self.fail(
                    Failure(502, str(Code.PEER_LOST), f"the answer was cut off: {error}")
                )
        if held:
            await write(out, held)
        await out.write_eof()
        return out

    async def _until_first_token(self, out: web.StreamResponse, pair: Pair) -> bytes:
        """Relay empty lines and comments. Return a chat's opening events and the first token."""
        opening, rest = b"", b""
        while b"\n\n" not in rest:
            piece = await pair.first()
            if not piece:
                raise LegFailedError(pair.decode.worker, "its stream ended before the first token")
            rest += piece
            passed = True
            while passed:
                silence, rest = split_silence(rest)
                if silence:
                    await out.write(silence)
                opened, rest = split_opening(rest)
                opening += opened
                passed = bool(silence or opened)
        # An engine may send headers and then refuse the request. Another pair may still serve it.
        if failure := error_in(rest):
            raise PairFailedError(failure)
        self._measures.first_token(self._arrived_at_s)
        if (span := CURRENT.get().span) is not None:
            span.event("first token")
            span.annotate({TIME_TO_FIRST_CHUNK: time.perf_counter() - self._arrived_at_s})
        self.on_first_token()
        return opening + rest

    async def fail(
        self, failure: Failure, answer: web.Response | None = None
    ) -> web.StreamResponse:
        """End the request with an error.

        If a stream began, the error is an event in it. Otherwise the client receives `answer`,
        or a response made from `failure`.
        """
        name_error(failure.summary)
        self._measures.failed(failure)
        if self._stream is None:
            return answer or failure.response(self._http.path)
        event = encode_event(dialect_of(self._http.path).failed(failure))
        await self._stream.write(b"".join(event))
        await self._stream.write_eof()
        return self._stream
