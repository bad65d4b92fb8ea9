"""One request as two legs: the same body goes to prefill and to decode, decode's answer goes to the client.

Both legs start at once. The first failure closes the other leg's connection; a worker takes that as an abort.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from kvflow.protocols.errors import Code, LostError
from kvflow.server.http.errors import Failure, failure_of
from kvflow.server.router.workers import Worker

ROOT_CAUSE_WAIT_S = 2.0
_COPIED = ("Content-Type", "Cache-Control", "Retry-After", "X-Accel-Buffering")


class LegFailedError(LostError):
    """A worker was lost before it answered; the request can be sent to another one."""

    def __init__(self, worker: Worker, why: str) -> None:
        super().__init__(f"{worker.role} {worker.url}: {why}")
        self.worker = worker


class Leg:
    """One POST to one worker."""

    def __init__(
        self, session: aiohttp.ClientSession, worker: Worker, path: str, body: bytes, headers: dict[str, str]
    ) -> None:
        self.worker = worker
        self._call = (session, f"{worker.url}{path}", body, headers)
        self._answer: aiohttp.ClientResponse | None = None

    async def begin(self) -> aiohttp.ClientResponse | web.Response:
        """Return a stream as soon as it has begun, any other answer when it is complete. Raises: LegFailedError."""
        session, url, body, headers = self._call
        try:
            self._answer = await session.post(url, data=body, headers=headers)
            if self._answer.status == 200 and self._answer.content_type == "text/event-stream":
                return self._answer
            return copied(self._answer, await self._answer.read())
        except (aiohttp.ClientError, ConnectionError) as error:
            raise LegFailedError(self.worker, _describe(error)) from None

    async def complete(self) -> web.Response:
        """Return the answer when it is complete; the content of a stream is dropped. Raises: LegFailedError."""
        answer = await self.begin()
        if isinstance(answer, web.Response):
            return answer
        try:
            async for _ in answer.content.iter_any():
                pass
        except (aiohttp.ClientError, ConnectionError) as error:
            raise LegFailedError(self.worker, _describe(error)) from None
        return web.Response()

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


@asynccontextmanager
async def both_legs(prefill: Leg, decode: Leg) -> AsyncGenerator[aiohttp.ClientResponse | web.Response, None]:
    """Yield decode's stream once it has begun, or a complete answer: decode's, or prefill's refusal.

    Leaving closes both connections. Raises: LegFailedError.
    """
    for leg in (prefill, decode):
        leg.worker.running += 1
        leg.worker.served += 1
    prefilling = asyncio.create_task(prefill.complete())
    decoding = asyncio.create_task(decode.begin())
    try:
        await asyncio.wait([prefilling, decoding], return_when=asyncio.FIRST_COMPLETED)
        only_prefill = prefilling.done() and not decoding.done()
        refusal = await _refusal(prefilling.result(), decoding) if only_prefill else None
        yield refusal or await decoding
    finally:
        # No await here: a failed write to a client that left is followed by the cancellation of its handler, which
        # would end this block at its first await and leave the legs open.
        for leg, task in ((prefill, prefilling), (decode, decoding)):
            leg.worker.running -= 1
            task.cancel()
            task.add_done_callback(leg.dispose)
            leg.close()


async def _refusal(
    answer: web.Response, decoding: asyncio.Task[aiohttp.ClientResponse | web.Response]
) -> web.Response | None:
    """Prefill's refusal; None when it only follows from a failure of decode, whose own answer is about to arrive."""
    if answer.status == 200:
        return None
    if answer.status != 499:
        return answer
    await asyncio.wait([decoding], timeout=ROOT_CAUSE_WAIT_S)
    if decoding.done():
        return None
    text = f"decode ended the room and gave no reason within {ROOT_CAUSE_WAIT_S:g} s"
    return Failure(502, str(Code.CLIENT_GONE), text).response()


def copied(answer: aiohttp.ClientResponse, body: bytes) -> web.Response:
    """A worker's complete answer as the router's own."""
    return web.Response(body=body, status=answer.status, headers=_headers(answer))


def _headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in _COPIED if name in answer.headers}


async def relay(http: web.Request, answer: aiohttp.ClientResponse, room_header: dict[str, str]) -> web.StreamResponse:
    """Relay decode's stream to the client, event by event; a decode that is lost in between becomes an error event."""
    out = web.StreamResponse(headers={**_headers(answer), **room_header})
    await out.prepare(http)
    rest = b""
    try:
        async for chunk in answer.content.iter_any():
            rest += chunk
            cut = rest.rfind(b"\n\n") + 2
            if cut > 1:
                await out.write(rest[:cut])
                rest = rest[cut:]
    except (aiohttp.ClientError, TimeoutError) as error:
        text = f"the connection to decode was lost before the end of the answer ({type(error).__name__})"
        timed_out = isinstance(error, TimeoutError)
        failure = failure_of(error) if timed_out else Failure(502, str(Code.PEER_LOST), text)
        rest = b"data: " + msgspec.json.encode(failure.body) + b"\n\n"
    if rest:
        await out.write(rest)
    await out.write_eof()
    return out


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
