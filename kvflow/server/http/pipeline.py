"""The way of every request through a role: admission, orders, tokens, and what is left when it ends.

The routes differ in how they read a body and how they write an answer; that is a `Job`. Everything else is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from kvflow.protocols.errors import AbortedError, KvflowError
from kvflow.server.http.completion import Completion, Delta, written
from kvflow.server.http.errors import Failure, OverloadError, RequestError, failure_of
from kvflow.server.http.listening import Busy
from kvflow.server.http.metrics import Metrics
from kvflow.server.http.orders import Menu, rooms_of
from kvflow.server.http.schemas import Rendezvous, decoded, parse
from kvflow.server.http.service import Order, Service
from kvflow.server.http.sse import EventStream, Paced, merged
from kvflow.server.http.text import Wording

_log = logging.getLogger("kvflow.http")
R = TypeVar("R", bound=Rendezvous)
FAREWELL_S = 1.0  # for the error event of a stream that fails


class Job(Protocol):
    """One parsed request of one dialect."""

    stream: bool

    @property
    def request(self) -> Rendezvous: ...

    async def orders(self, front: Front) -> list[Order]:
        """Read prompts and sampling. Raises: RequestError."""

    def answer(self, completions: list[Completion]) -> Any:
        """The JSON body when nothing is streamed."""

    def opening(self) -> list[Any]:
        """Events before the first token."""

    def event(self, index: int, delta: Delta, completion: Completion) -> Any:
        """The event of one delta."""

    def closing(self, completions: list[Completion]) -> list[Any]:
        """Events after the last token."""


class Front(Busy):
    """What the routes of one role share."""

    def __init__(
        self,
        service: Service,
        wording: Wording,
        metrics: Metrics,
        *,
        bootstrap_port: int = 8998,
        max_running_requests: int = 256,
        request_timeout_s: float = 600.0,
        keepalive_s: float = 0.1,
    ) -> None:
        super().__init__()
        self.service = service
        self.wording = wording
        self.metrics = metrics
        self.menu = Menu(service.limits, service.role == "decode", bootstrap_port)
        self._most = max_running_requests
        self._timeout_s = request_timeout_s
        self._keepalive_s = keepalive_s

    async def serve(self, http: web.Request, job: Job) -> web.StreamResponse:
        """Answer one request. Errors before the first token are raised; later ones are written into the stream."""
        arrived = time.perf_counter()
        try:
            self._admit()
        except (AbortedError, OverloadError) as error:
            self._refuse(job.request, error)
            raise
        ends = asyncio.get_running_loop().time() + self._timeout_s
        with self.one_more():
            async with asyncio.timeout_at(ends):
                try:
                    orders = await job.orders(self)
                    pieces = [self.wording.pieces(order.params.stop) for order in orders]
                except KvflowError as error:
                    self._refuse(job.request, error)
                    raise
            sources = [written(self.service.tokens(o), p) for o, p in zip(orders, pieces, strict=True)]
            if job.stream:
                return await self._stream(http, job, sources, arrived, ends)
            async with asyncio.timeout_at(ends):
                return await self._collect(http, job, sources, arrived)

    def read(self, raw: bytes, kind: type[R]) -> R:
        """A body as `kind`. One that cannot be read may still name the room whose other leg waits."""
        try:
            return parse(raw, kind)
        except RequestError as error:
            with contextlib.suppress(RequestError):
                self._refuse(decoded(raw, Rendezvous), error)
            raise

    def _admit(self) -> None:
        self.refuse_when_draining()
        if self.running >= self._most:
            raise OverloadError("running requests", self.running + 1, self._most)

    def _refuse(self, request: Rendezvous, error: KvflowError) -> None:
        """The other leg waits for this room: tell it why it will never come."""
        for room in rooms_of(request):
            self.service.refuse(room, error.cause())

    async def _collect(
        self, http: web.Request, job: Job, sources: list[AsyncGenerator[Delta, None]], arrived: float
    ) -> web.StreamResponse:
        completions = [Completion() for _ in sources]
        async with aclosing(merged(sources)) as deltas:
            async for index, delta in deltas:
                self._count(completions[index], arrived)
                completions[index].add(delta)
        return json_response(job.answer(completions))

    async def _stream(
        self, http: web.Request, job: Job, sources: list[AsyncGenerator[Delta, None]], arrived: float, ends: float
    ) -> web.StreamResponse:
        events = EventStream(http)
        async with Paced(merged(sources), self._keepalive_s) as deltas:
            try:
                async with asyncio.timeout_at(ends):
                    await self._write(events, job, deltas, [Completion() for _ in sources], arrived)
            except ConnectionError:
                raise
            except Exception as error:
                if not events.response.prepared:
                    raise
                if not isinstance(error, KvflowError | TimeoutError):
                    _log.exception("stream of %s failed", http.path)
                failure = failure_of(error)
                self.metrics.stream_failed(failure)
                await self._take_leave(http, events, failure)
                return events.response
        await events.end()
        return events.response

    async def _write(
        self,
        events: EventStream,
        job: Job,
        deltas: AsyncIterable[tuple[int, Delta] | None],
        completions: list[Completion],
        arrived: float,
    ) -> None:
        """Every delta as an event; a comment where nothing came for a while, so that a client that left is noticed."""
        async for item in deltas:
            if item is None:
                if events.response.prepared:
                    await events.keepalive()
                continue
            if not events.response.prepared:
                await events.start()
                for event in job.opening():
                    await events.send(event)
            index, delta = item
            self._count(completions[index], arrived)
            completions[index].add(delta)
            await events.send(job.event(index, delta, completions[index]))
        for event in job.closing(completions):
            await events.send(event)

    async def _take_leave(self, http: web.Request, events: EventStream, failure: Failure) -> None:
        """Say in the stream why it ends; a reader that does not read gets its connection cut instead."""
        try:
            async with asyncio.timeout(FAREWELL_S):
                await events.fail(failure)
        except TimeoutError:
            if http.transport is not None:
                http.transport.abort()

    def _count(self, completion: Completion, arrived: float) -> None:
        if not completion.tokens:
            self.metrics.first_token(time.perf_counter() - arrived)
        self.metrics.generated(1)


def json_response(body: Any, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
