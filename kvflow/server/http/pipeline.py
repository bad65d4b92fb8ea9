"""The path of every completion request through a role: admission, generation, tokens, and cleanup at its end.

The routes differ in how they read a body and how they write an answer; that is a `CompletionCall`. The rest is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from aiohttp import web

from kvflow.protocols.errors import AbortedError, KvflowError
from kvflow.server.http.completion import Completion, Delta, detokenize
from kvflow.server.http.completion_service import CompletionService, GenerationRequest
from kvflow.server.http.errors import Failure, OverloadError, RequestError, UnknownModelError, failure_of
from kvflow.server.http.generation_requests import RequestLimits, rooms_of
from kvflow.server.http.listening import Drainable
from kvflow.server.http.metrics import Metrics
from kvflow.server.http.responses import json_response
from kvflow.server.http.schemas import Rendezvous, decoded, parse
from kvflow.server.http.sse import EventStream, Paced, merged
from kvflow.server.http.tokenizer import ThreadedTokenizer

_log = logging.getLogger("kvflow.http")
B = TypeVar("B", bound=Rendezvous)
ANY_MODEL = "default"  # what SGLang's clients ask for when they name no model
ERROR_EVENT_TIMEOUT_S = 1.0  # for the last event of a stream that fails


class CompletionCall(Protocol):
    """One parsed body of one API (/generate, chat, completions), and how its answer is written."""

    stream: bool

    @property
    def body(self) -> Rendezvous: ...

    async def generation_requests(self, pipeline: CompletionPipeline) -> list[GenerationRequest]:
        """Read prompts and sampling. Raises: RequestError."""

    def answer(self, completions: list[Completion]) -> Any:
        """The JSON body when nothing is streamed."""

    def opening(self) -> list[Any]:
        """Events before the first token."""

    def event(self, index: int, delta: Delta, completion: Completion) -> Any:
        """The event of one delta."""

    def closing(self, completions: list[Completion]) -> list[Any]:
        """Events after the last token."""


class CompletionPipeline(Drainable):
    """What the completion routes of one role share."""

    def __init__(
        self,
        service: CompletionService,
        tokenizer: ThreadedTokenizer,
        metrics: Metrics,
        *,
        bootstrap_port: int = 8998,
        max_running_requests: int = 256,
        request_timeout_s: float = 600.0,
        keepalive_s: float = 0.1,
    ) -> None:
        super().__init__()
        self.service = service
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.request_limits = RequestLimits(service.limits, service.role == "decode", bootstrap_port)
        self._max_running = max_running_requests
        self._timeout_s = request_timeout_s
        self._keepalive_s = keepalive_s

    async def serve(self, http: web.Request, call: CompletionCall) -> web.StreamResponse:
        """Answer one call. Errors before the first token are raised; later ones are written into the stream."""
        arrived = time.perf_counter()
        try:
            self._admit()
        except (AbortedError, OverloadError) as error:
            self._refuse(call.body, error)
            raise
        ends = asyncio.get_running_loop().time() + self._timeout_s
        with self.count_running():
            async with asyncio.timeout_at(ends):
                try:
                    requests = await call.generation_requests(self)
                    detokenizers = [self.tokenizer.detokenizer(request.params.stop) for request in requests]
                except KvflowError as error:
                    self._refuse(call.body, error)
                    raise
            sources = [detokenize(self.service.tokens(r), d) for r, d in zip(requests, detokenizers, strict=True)]
            if call.stream:
                return await self._stream(http, call, sources, arrived, ends)
            async with asyncio.timeout_at(ends):
                return await self._collect(call, sources, arrived)

    def read(self, raw: bytes, kind: type[B]) -> B:
        """A body as `kind`. A body that is refused may still name a room whose other leg waits: that room is ended."""
        try:
            body = parse(raw, kind)
            self.check_model(getattr(body, "model", None))
            return body
        except RequestError as error:
            with contextlib.suppress(RequestError):
                self._refuse(decoded(raw, Rendezvous), error)
            raise

    def check_model(self, name: str | None) -> None:
        """Raises: UnknownModelError (404) for another model than the one that is served."""
        served = self.service.card.name
        if name and name not in (served, ANY_MODEL):
            raise UnknownModelError(name, served)

    def _admit(self) -> None:
        self.refuse_when_draining()
        if self.running >= self._max_running:
            raise OverloadError("running requests", self.running + 1, self._max_running)

    def _refuse(self, body: Rendezvous, error: KvflowError) -> None:
        """End the body's rooms: their other legs wait, and get the cause."""
        for room, prefill in rooms_of(body, self.request_limits.bootstrap_port):
            self.service.refuse(room, prefill, error.cause())

    async def _collect(
        self, call: CompletionCall, sources: list[AsyncGenerator[Delta, None]], arrived: float
    ) -> web.StreamResponse:
        completions = [Completion() for _ in sources]
        async with aclosing(merged(sources)) as deltas:
            async for index, delta in deltas:
                self._count(completions[index], arrived)
                completions[index].add(delta)
        return json_response(call.answer(completions))

    async def _stream(
        self,
        http: web.Request,
        call: CompletionCall,
        sources: list[AsyncGenerator[Delta, None]],
        arrived: float,
        ends: float,
    ) -> web.StreamResponse:
        events = EventStream(http)
        async with Paced(merged(sources), self._keepalive_s) as deltas:
            try:
                async with asyncio.timeout_at(ends):
                    await self._write(events, call, deltas, [Completion() for _ in sources], arrived)
            except ConnectionError:
                raise
            except Exception as error:
                if not events.response.prepared:
                    raise
                if not isinstance(error, KvflowError | TimeoutError):
                    _log.exception("stream of %s failed", http.path)
                failure = failure_of(error)
                self.metrics.stream_failed(failure)
                await self._send_error_event(http, events, failure)
                return events.response
        await events.end()
        return events.response

    async def _write(
        self,
        events: EventStream,
        call: CompletionCall,
        deltas: AsyncIterable[tuple[int, Delta] | None],
        completions: list[Completion],
        arrived: float,
    ) -> None:
        """Every delta as an event, and comments during silence: writing one is how a client that left is noticed."""
        async for item in deltas:
            if item is None:
                if events.response.prepared:
                    await events.keepalive()
                continue
            if not events.response.prepared:
                await events.start()
                for event in call.opening():
                    await events.send(event)
            index, delta = item
            self._count(completions[index], arrived)
            completions[index].add(delta)
            await events.send(call.event(index, delta, completions[index]))
        for event in call.closing(completions):
            await events.send(event)

    async def _send_error_event(self, http: web.Request, events: EventStream, failure: Failure) -> None:
        """Write the error as the last event; the connection of a client that does not read is cut instead."""
        try:
            async with asyncio.timeout(ERROR_EVENT_TIMEOUT_S):
                await events.fail(failure)
        except TimeoutError:
            if http.transport is not None:
                http.transport.abort()

    def _count(self, completion: Completion, arrived: float) -> None:
        if not completion.tokens:
            self.metrics.first_token(time.perf_counter() - arrived)
        self.metrics.generated(1)
