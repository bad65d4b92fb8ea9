"""One request as two legs: the same body goes to prefill and to decode, decode's answer goes to the client.

Both legs start at once. The first failure closes the other leg's connection; a worker takes that as an abort. After a
failure before the first token of its answer a request may be tried again (`PairFailedError.may_retry`):

- where a connection could not be made, or ended before its answer;
- after status 502 or 503: a worker drains, its queue is full, a link between the two is lost, they do not fit together;
- after status 504 with code "rendezvous": the other leg never came.

Not after an error of the request (4xx) or of the model (500), which another pair would repeat, and not after a deadline
(504): the request has had its time.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from kvflow.protocols.errors import Code, LostError
from kvflow.server.http.draining import ROLE_HEADER
from kvflow.server.http.errors import Failure
from kvflow.server.http.large_bodies import LARGE_BYTES
from kvflow.server.router.workers import Worker

ROOT_CAUSE_WAIT_S = 2.0
_COPIED = ("Content-Type", "Cache-Control", "Retry-After", "X-Accel-Buffering")
# These pass: the same pair may serve the request when the worker that drains or was lost is back.
_PASSING = frozenset({Code.SHUTDOWN, Code.PEER_LOST, Code.RENDEZVOUS, Code.STALE_GRANT})


class PairFailedError(LostError):
    """A pair has ended a request before the first token of its answer."""

    def __init__(self, failure: Failure, answer: web.Response | None = None) -> None:
        super().__init__(failure.message)
        self.failure, self.answer = failure, answer or failure.response()

    @property
    def may_retry(self) -> bool:
        """Whether another pair may serve the request."""
        return self.failure.status in (502, 503) or self.failure.code == Code.RENDEZVOUS

    @property
    def passes(self) -> bool:
        """Whether the same pair may serve the request later."""
        return self.failure.code in _PASSING


class LegFailedError(PairFailedError):
    """A worker was lost before it answered."""

    def __init__(self, worker: Worker, why: str) -> None:
        super().__init__(Failure(502, str(Code.PEER_LOST), f"{worker.role} {worker.url}: {why}"))
        self.worker = worker


class Leg:
    """One POST to one worker."""

    def __init__(
        self, session: aiohttp.ClientSession, worker: Worker, path: str, body: bytes, headers: dict[str, str]
    ) -> None:
        self.worker = worker
        self._call = (session, f"{worker.url}{path}", body, {**headers, ROLE_HEADER: worker.role})
        self._answer: aiohttp.ClientResponse | None = None

    async def begin(self) -> aiohttp.ClientResponse | web.Response:
        """Return a stream as soon as it has begun, any other answer when it is complete. Raises: LegFailedError."""
        session, url, body, headers = self._call
        in_steps = io.BytesIO(body) if len(body) > LARGE_BYTES else body
        try:
            self._answer = await session.post(url, data=in_steps, headers=headers)
            if self._answer.status == 200 and self._answer.content_type == "text/event-stream":
                return self._answer
            return copied(self._answer, await self._answer.read())
        except (aiohttp.ClientError, ConnectionError) as error:
            raise LegFailedError(self.worker, _describe(error)) from None

    async def read(self) -> bytes:
        """The next piece of a stream that has begun, empty at its end. Raises: LegFailedError."""
        assert self._answer is not None
        try:
            return await self._answer.content.readany()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise LegFailedError(self.worker, _describe(error)) from None

    async def complete(self) -> web.Response:
        """Return the answer when it is complete; of a stream, the error that it begins with. Raises: LegFailedError."""
        answer = await self.begin()
        if isinstance(answer, web.Response):
            return answer
        start, failure = b"", None
        while piece := await self.read():
            if b"\n\n" not in start:  # up to here there was nothing but silence
                start = split_silence(start + piece)[1]
                failure = error_in(start)
        return web.Response() if failure is None else failure.response()

    def close(self) -> None:
        """Close the connection, unless the answer is complete."""
        if self._answer is not None:
            self._answer.close()

    def dispose(self, task: asyncio.Task[Any]) -> None:
        """Done callback of a leg that was closed: its task may have ended with an answer or an error all the same."""
        self.close()
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it: the first failure has been reported


def _describe(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot be reached ({error.os_error.strerror or error.os_error})"
    return f"the connection was lost ({type(error).__name__})"


class Pair:
    """Both legs of one try."""

    def __init__(self, prefill: Leg, decode: Leg) -> None:
        self.prefill, self.decode = prefill, decode
        self._prefilling = asyncio.create_task(prefill.complete())
        self._decoding = asyncio.create_task(decode.begin())

    async def answer(self) -> aiohttp.ClientResponse | web.Response:
        """Decode's stream once it has begun, or its complete answer. Raises: PairFailedError."""
        await asyncio.wait([self._prefilling, self._decoding], return_when=asyncio.FIRST_COMPLETED)
        if not self._decoding.done():
            await self._check_prefill(self._decoding)
        answer = await self._decoding
        if isinstance(answer, web.Response):
            _check(answer)
        return answer

    async def first(self) -> bytes:
        """A piece of decode's stream while there is no token in it yet: prefill's refusal ends the wait.

        Raises: PairFailedError.
        """
        reading = asyncio.create_task(self.decode.read())
        try:
            await asyncio.wait([self._prefilling, reading], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await self._check_prefill(reading)
            return await reading
        finally:
            reading.cancel()

    async def _check_prefill(self, decode: asyncio.Task[Any]) -> None:
        """Prefill has answered: return when that was no refusal, or one that only follows from a failure of decode,
        whose own answer has arrived then. Raises: PairFailedError."""
        answer = self._prefilling.result()
        if answer.status != 499:
            _check(answer)
            return
        await asyncio.wait([decode], timeout=ROOT_CAUSE_WAIT_S)
        if decode.done():
            return
        text = f"decode ended the room and gave no reason within {ROOT_CAUSE_WAIT_S:g} s"
        raise PairFailedError(Failure(502, str(Code.CLIENT_GONE), text))

    def close(self) -> None:
        """Close both connections. No await here: a failed write to a client that left is followed by the cancellation
        of its handler, which would end this at its first await and leave the legs open."""
        for leg, task in ((self.prefill, self._prefilling), (self.decode, self._decoding)):
            task.cancel()
            task.add_done_callback(leg.dispose)
            leg.close()


@asynccontextmanager
async def both_legs(prefill: Leg, decode: Leg) -> AsyncGenerator[Pair, None]:
    """Begin both legs; leaving closes both."""
    for leg in (prefill, decode):
        leg.worker.begin()
    pair = Pair(prefill, decode)
    try:
        yield pair
    finally:
        for leg in (prefill, decode):
            leg.worker.end()
        pair.close()


def _check(answer: web.Response) -> None:
    """Raises: PairFailedError when a complete answer is an error."""
    if answer.status >= 400:
        body = answer.body if isinstance(answer.body, bytes) else b""
        raise PairFailedError(Failure.read(answer.status, body), answer)


def split_silence(start: bytes) -> tuple[bytes, bytes]:
    """The empty lines and complete comments that a stream begins with, and the rest."""
    cut = 0
    while True:
        if start.startswith(b"\n", cut):
            cut += 1
        elif start.startswith(b":", cut) and (end := start.find(b"\n\n", cut)) >= 0:
            cut = end + 2
        else:
            break
    return start[:cut], start[cut:]


def error_in(event: bytes) -> Failure | None:
    """The error that a stream's first event is, if it is one: nothing has been generated then."""
    if not event.startswith(b"data:") or b"\n\n" not in event:
        return None
    failure = Failure.read(0, event.partition(b"\n\n")[0].removeprefix(b"data:"))
    return failure if failure.code else None


def copied(answer: aiohttp.ClientResponse, body: bytes) -> web.Response:
    """A worker's complete answer as the router's own."""
    return web.Response(body=body, status=answer.status, headers=stream_headers(answer))


def stream_headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    """The headers of a worker's answer that its client gets too."""
    return {name: answer.headers[name] for name in _COPIED if name in answer.headers}


def with_fields(raw: bytes, fields: dict[str, Any]) -> bytes:
    """The JSON object `raw` with `fields` added at its end, where they win over fields of the same name.

    The bytes before them are forwarded unchanged, without being decoded.
    """
    head = raw.rstrip()[:-1].rstrip()
    return head + (b"" if head.endswith(b"{") else b",") + msgspec.json.encode(fields)[1:]


def bootstrap_fields(prefill: Worker, rooms: list[int]) -> dict[str, Any]:
    """The fields that give both legs the same room; lists for several rooms."""
    if len(rooms) == 1:
        return {"bootstrap_host": prefill.host, "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": rooms[0]}
    count = len(rooms)
    return {
        "bootstrap_host": [prefill.host] * count,
        "bootstrap_port": [prefill.bootstrap_port] * count,
        "bootstrap_room": rooms,
    }
