"""One request as two legs, each a POST to one worker. Decode's answer goes to the client.

Closing a leg's connection ends the leg: the worker treats it as an abort. A request that failed
before its first token may be tried again:

- if a connection could not be made, or was lost before the answer was complete;
- after status 502 or 503: a worker drains, its queue is full, the link between the two workers is
  lost, or they do not fit together;
- after status 504 with code "rendezvous": the other leg never arrived.

It is not tried again after an error in the request (4xx) or in the model (500), because another
pair would repeat the error, nor after a deadline (504), because the request has used up its time.
In other engines, statuses may have other meanings, so `Engine.retried_statuses` lists those after
which a retry may help.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web

from kvflow.http.errors import Failure
from kvflow.http.large_bodies import LARGE_BYTES
from kvflow.protocols.errors import Code, LostError
from kvflow.router.workers import Worker, unreachable
from kvflow.telemetry.requests import CURRENT
from kvflow.telemetry.spans import Span

# Names of the events that open a stream of /v1/messages or /v1/responses.
_OPENING = frozenset({b"message_start", b"response.created", b"response.in_progress"})
_COPIED = ("Content-Type", "Cache-Control", "Retry-After", "X-Accel-Buffering")
# Temporary errors: the pair may serve the request once the drained or lost worker is back.
_PASSING = frozenset({Code.SHUTDOWN, Code.PEER_LOST, Code.RENDEZVOUS, Code.STALE_GRANT})


class PairFailedError(LostError):
    """The failure of a pair to serve a request, before the first token of its answer."""

    def __init__(self, failure: Failure, answer: web.Response | None = None) -> None:
        super().__init__(failure.message)
        self.failure, self.answer = failure, answer
        self.passes = failure.code in _PASSING
        """True if the same pair may serve the request later."""

    def may_retry(self, statuses: Collection[int]) -> bool:
        """Return True if the status is among `statuses`, or if the other leg never arrived."""
        return self.failure.status in statuses or self.failure.code == Code.RENDEZVOUS


class LegFailedError(PairFailedError):
    """The loss of a worker before its answer was complete."""

    def __init__(self, worker: Worker, why: str) -> None:
        super().__init__(Failure(502, str(Code.PEER_LOST), f"{worker.role} {worker.url}: {why}"))
        self.worker, self.why = worker, why


class Leg:
    """One POST to one worker."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        worker: Worker,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
    ) -> None:
        self.worker = worker
        self._path = path
        self._call = (session, f"{worker.url}{path}", body, headers)
        self._answer: aiohttp.ClientResponse | None = None
        self._span: Span | None = None

    async def begin(self) -> aiohttp.ClientResponse | web.Response:
        """Send the request, and return the answer.

        A stream is returned as soon as it begins, and any other answer once it is complete.

        Raises: LegFailedError.
        """
        session, url, body, headers = self._call
        if (request := CURRENT.get().span) is not None:
            self._span, continued = request.call(f"{self.worker.role} leg", self._attributes())
            headers = {**headers, **continued}
        # aiohttp writes a file object in steps, but bytes in one piece, which blocks the loop.
        in_steps = io.BytesIO(body) if len(body) > LARGE_BYTES else body
        try:
            self._answer = await session.post(url, data=in_steps, headers=headers)
            if self._answer.status == 200 and self._answer.content_type == "text/event-stream":
                return self._answer
            answer = copied(self._answer, await self._answer.read())
            self._end_span(str(answer.status) if answer.status >= 400 else "")
            return answer
        except (aiohttp.ClientError, ConnectionError) as error:
            self._end_span(str(Code.PEER_LOST))
            raise LegFailedError(self.worker, _describe(error)) from None

    async def read(self) -> bytes:
        """Return the next piece of the stream, empty at its end. Raises: LegFailedError."""
        assert self._answer is not None
        try:
            piece = await self._answer.content.readany()
            if not piece:
                self._end_span()
            return piece
        except (aiohttp.ClientError, ConnectionError) as error:
            self._end_span(str(Code.PEER_LOST))
            raise LegFailedError(self.worker, _describe(error)) from None

    async def complete(self) -> web.Response:
        """Read the whole answer and return it.

        For a stream, return the error that it begins with, or an empty response.

        Raises: LegFailedError.
        """
        answer = await self.begin()
        if isinstance(answer, web.Response):
            return answer
        start, failure = b"", None
        while piece := await self.read():
            # Until the first event is complete, drop the empty lines and comments before it.
            if b"\n\n" not in start:
                start = split_silence(start + piece)[1]
                failure = error_in(start)
        return web.Response() if failure is None else failure.response(self._path)

    def close(self) -> None:
        """Close the connection, unless the answer is complete."""
        # A leg may be closed in the middle: prefill's when decode's answer is complete.
        if self._span is not None:
            self._span.annotate({"kvflow.closed_by_router": True})
        self._end_span()
        if self._answer is not None:
            self._answer.close()

    def _attributes(self) -> dict[str, str | int]:
        parts = urlsplit(self.worker.url)
        return {
            "http.request.method": "POST",
            "url.full": self._call[1],
            "server.address": parts.hostname or "",
            "server.port": parts.port or 80,
        }

    def _end_span(self, error: str = "") -> None:
        """End the span of this leg, if it runs. The first end counts."""
        if self._span is not None:
            if self._answer is not None:
                self._span.annotate({"http.response.status_code": self._answer.status})
            self._span.end(error)
            self._span = None

    def dispose(self, task: asyncio.Task[Any]) -> None:
        """Close the connection that `task` may still have opened, now that the task is done."""
        self.close()
        if not task.cancelled():
            # Retrieving the exception keeps asyncio from logging it.
            task.exception()


def _describe(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return unreachable(error)
    return f"the connection was lost ({type(error).__name__})"


def check(answer: web.Response) -> None:
    """Raise PairFailedError if a complete answer is an error."""
    if answer.status >= 400:
        body = answer.body if isinstance(answer.body, bytes) else b""
        raise PairFailedError(Failure.read(answer.status, body), answer)


def split_silence(start: bytes) -> tuple[bytes, bytes]:
    """Return the empty lines and complete comments that a stream begins with, and the rest."""
    cut = 0
    while True:
        if start.startswith(b"\n", cut):
            cut += 1
        elif start.startswith(b":", cut) and (end := start.find(b"\n\n", cut)) >= 0:
            cut = end + 2
        else:
            break
    return start[:cut], start[cut:]


def split_opening(events: bytes) -> tuple[bytes, bytes]:
    """Return the complete events that open a chat before its first token, and the rest."""
    cut = 0
    while (end := events.find(b"\n\n", cut)) >= 0 and _is_opening(events[cut:end]):
        cut = end + 2
    return events[:cut], events[cut:]


def _is_opening(event: bytes) -> bool:
    """Return True for an event without a token, which vLLM sends before it checks a request."""
    if event.startswith(b"event:"):
        return event.partition(b"\n")[0].removeprefix(b"event:").strip() in _OPENING
    try:
        choices = msgspec.json.decode(event.removeprefix(b"data:"), type=_Chunk).choices
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return bool(choices) and all(
        one.finish_reason is None
        and one.delta.keys() <= {"role", "content"}
        and not one.delta.get("content")
        for one in choices
    )


class _Choice(msgspec.Struct):
    delta: dict[str, Any]
    finish_reason: Any = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


def error_in(event: bytes) -> Failure | None:
    """Return the error in a stream's first event, or None."""
    first, whole, _ = event.partition(b"\n\n")
    name = b""
    if first.startswith(b"event:"):
        name, _, first = first.partition(b"\n")
    if not whole or not first.startswith(b"data:"):
        return None
    failure = Failure.read(0, first.removeprefix(b"data:"))
    # Errors in vLLM's streams of /v1/messages have no code.
    return failure if failure.code or name.removeprefix(b"event:").strip() == b"error" else None


def copied(answer: aiohttp.ClientResponse, body: bytes) -> web.Response:
    """Return a worker's complete answer as the router's response."""
    return web.Response(body=body, status=answer.status, headers=stream_headers(answer))


def stream_headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    """Return the headers of a worker's answer that are passed on to the client."""
    return {name: answer.headers[name] for name in _COPIED if name in answer.headers}


def with_fields(raw: bytes, fields: dict[str, Any]) -> bytes:
    """Return the JSON object `raw` with `fields` appended.

    They override earlier fields of the same name. The bytes of `raw` are forwarded unchanged and
    are not decoded.
    """
    head = raw.rstrip()[:-1].rstrip()
    return head + (b"" if head.endswith(b"{") else b",") + msgspec.json.encode(fields)[1:]
