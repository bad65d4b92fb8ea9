"""The path of every completion request through a role: admission, generation, tokens and cleanup.

A `CompletionCall` is what differs between the routes: how they read a body and write an answer.

Guarantees for a router: an error before the first byte of the answer is an HTTP status. A stream
sends its headers with the first token or, at decode, after `headers_after_s` without one. Until the
first token, only empty lines (or comments) follow. So if the first event of a stream is `{"error":
{"code": ...}}`, the stream produced no token. A router may treat it like an answer with the status
of that code (`errors.STATUS_OF_CODE`), and retry the request on another pair.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable
from functools import partial
from typing import Any, Protocol, TypeVar

from aiohttp import web

from kvflow.http.aborts import ABORT, RunningChoices
from kvflow.http.access import shown_path
from kvflow.http.bodies import decoded
from kvflow.http.draining import ROLE_HEADER, Drainable, refusal
from kvflow.http.errors import (
    Failure,
    OverloadError,
    RequestError,
    UnknownModelError,
    failure_of,
)
from kvflow.http.large_bodies import MAX_ADDED_BYTES, take_apart
from kvflow.http.responses import long_json_response
from kvflow.http.sse import Arrivals, EventStream
from kvflow.node.prompt_logprobs import PromptLogprobs
from kvflow.protocols.errors import AbortedError, Cause, Code, KvflowError, MisuseError
from kvflow.serve.engine.model.grammars import Grammars
from kvflow.serve.http.completion import Completion, Delta, detokenize
from kvflow.serve.http.completion_service import CompletionService, GenerationRequest
from kvflow.serve.http.generation_requests import RequestLimits, rooms_of, with_digests
from kvflow.serve.http.measures import RequestMeter
from kvflow.serve.http.metrics import RoleMetrics
from kvflow.serve.http.schemas import Rendezvous, Rooms, parse
from kvflow.serve.http.structured import field_with_grammar
from kvflow.serve.http.tokenizer import ThreadedTokenizer
from kvflow.serve.http.tools.answers import PLAIN, OutputFormats
from kvflow.serve.http.tracing import annotate, annotate_first_chunk, traced
from kvflow.telemetry.requests import CURRENT, name_error, name_rooms

_log = logging.getLogger("kvflow.http")
B = TypeVar("B", bound=Rendezvous)
ANY_MODEL = "default"  # SGLang's clients send this if the user names no model
ERROR_EVENT_TIMEOUT_S = 1.0  # limit for writing the error event that ends a failed stream
_COMPLETIONS = "completions that run or wait"
_ABORTED = Cause(Code.ABORTED, "ended by /abort_request before it began")


class CompletionCall(Protocol):
    """A request to /generate, chat or completions. It has the parsed body and builds the answer."""

    stream: bool

    @property
    def body(self) -> Rendezvous: ...

    async def generation_requests(self, pipeline: CompletionPipeline) -> list[GenerationRequest]:
        """Return one request for each prompt and choice of the body. Raises: RequestError."""

    async def scored(self, index: int, scores: PromptLogprobs) -> None:
        """Add the log-probabilities of a choice's prompt, before the choice's first delta."""

    def add(self, index: int, delta: Delta) -> None:
        """Add a delta of a choice. Called for each delta in order, before `events` or `answer`."""

    def answer(self, completions: list[Completion]) -> Any:
        """Return the JSON body of an answer without streaming."""

    def opening(self) -> list[Any]:
        """Return the events that precede the first token."""

    def events(self, index: int, deltas: list[Delta], completion: Completion) -> list[Any]:
        """Return a choice's events for new deltas. A slow client gets several deltas at once."""

    def id_of(self, index: int) -> str:
        """Return the id of a choice's answer, with which a client can abort it."""

    def closing(self, completions: list[Completion]) -> list[Any]:
        """Return the events that follow the last token."""


class CompletionPipeline(Drainable):
    """The part that the completion routes of a role have in common."""

    def __init__(
        self,
        service: CompletionService,
        tokenizer: ThreadedTokenizer,
        metrics: RoleMetrics,
        *,
        bootstrap_port: int = 8998,
        max_requests: int = 1280,
        request_timeout_s: float = 600.0,
        keepalive_s: float = 0.1,
        headers_after_s: float = 10.0,
        low_priority_first: bool = False,
        grammars: Grammars | None = None,
        formats: OutputFormats = PLAIN,
    ) -> None:
        """`grammars` are those of the model. Without them, every grammar is refused."""
        super().__init__()
        self.formats = formats
        self.tokenizer = tokenizer
        self._grammars = grammars
        self.metrics = metrics
        self.choices = RunningChoices()
        # Completions that may run or wait at once. A body may have several.
        self.max_requests = max_requests
        self._bootstrap_port, self._low_priority_first = bootstrap_port, low_priority_first
        self._timeout_s = request_timeout_s
        self._longest_silence_s = headers_after_s
        self._keepalive_s = keepalive_s
        self.take_over(service)

    def take_over(self, service: CompletionService) -> None:
        """Send further requests to `service`. Call this only while no request runs."""
        is_decode = service.role == "decode"
        self.service = service
        self.metrics.reports(service.role, service.report)
        self.request_limits = RequestLimits(
            service.limits,
            is_decode,
            self._bootstrap_port,
            service.card.sampling_defaults,
            self._low_priority_first,
        )
        # Routers wait for the whole answer of a prefill anyway. sglang_router takes headers for a
        # success, after which it would not retry.
        self._headers_after_s = self._longest_silence_s if is_decode else float("inf")

    async def serve(self, http: web.Request, call: CompletionCall) -> web.StreamResponse:
        """Answer one call. An error after the headers of a stream is written into the stream."""
        arrived = time.perf_counter()
        try:
            self._admit(http)
        except (AbortedError, OverloadError) as error:
            self._refuse(call.body, error)
            raise
        ends = asyncio.get_running_loop().time() + self._timeout_s
        with contextlib.ExitStack() as stack:
            # The body counts as one completion at first, so that a role switch waits for it.
            stack.enter_context(self.count_running())
            meter = stack.enter_context(
                RequestMeter(self.metrics.completions, arrived, stream=call.stream)
            )
            async with asyncio.timeout_at(ends):
                try:
                    requests = await call.generation_requests(self)
                    self._check_room_for(len(requests))
                    stack.enter_context(self.count_running(len(requests) - 1))
                    await self._compile(call.body, requests)
                    requests = await with_digests(requests)
                    detokenizers = [
                        self.tokenizer.detokenizer(request.params) for request in requests
                    ]
                except KvflowError as error:
                    self._refuse(call.body, error)
                    raise
            meter.begin(requests)
            annotate(self.service, requests, stream=call.stream)
            sources = [
                detokenize(
                    traced(self.service, request),
                    detokenizer,
                    partial(call.scored, i),
                    prompt_only=not request.params.max_new_tokens,
                )
                for i, (request, detokenizer) in enumerate(zip(requests, detokenizers, strict=True))
            ]
            if call.stream:
                return await self._stream(http, call, requests, sources, meter, ends)
            async with asyncio.timeout_at(ends):
                answer = await self._collect(call, requests, sources, meter)
            return await long_json_response(http, answer)

    async def _compile(self, body: Rendezvous, requests: list[GenerationRequest]) -> None:
        """Compile grammars. Raises: RequestError (400) if one cannot be compiled."""
        for grammar in {request.params.grammar for request in requests} - {None}:
            name = field_with_grammar(body)
            if self._grammars is None:
                raise RequestError(f"{name}: this server has no grammars", param=name)
            try:
                await self._grammars.compile(grammar)
            except MisuseError as error:
                raise RequestError(f"{name}: {error}", param=name) from None

    def end_requests(self) -> None:
        self.service.end_requests()

    async def read(self, http: web.Request, kind: type[B]) -> B:
        """Read a body as `kind`. If the body is refused, end the rooms that it names."""
        raw = await http.read()
        try:
            # Decoding long values at once would block the loop for tens of milliseconds.
            raw, long_values = await take_apart(raw, MAX_ADDED_BYTES)
            body = long_values.put_back(parse(raw, kind))
            self.check_model(getattr(body, "model", None))
            return body
        except RequestError as error:
            self.metrics.refused(error.code)
            with contextlib.suppress(RequestError):
                self._end_rooms(decoded(raw, Rooms), error)
            raise

    def check_model(self, name: str | None) -> None:
        """Check the model that a body names. Raises: UnknownModelError (404)."""
        served = self.service.card.name
        if name and name not in (served, ANY_MODEL):
            raise UnknownModelError(name, served)

    def _admit(self, http: web.Request) -> None:
        self.refuse_when_draining()
        # A router may have chosen this worker before the worker switched its role.
        if http.headers.get(ROLE_HEADER, self.service.role) != self.service.role:
            raise refusal(f"this worker is a {self.service.role} now")
        if self.running >= self.max_requests:
            raise OverloadError(_COMPLETIONS, self.running + 1, self.max_requests)

    def _check_room_for(self, completions: int) -> None:
        """Check the number of completions of one body. `running` counts the body as one so far.

        Raises: OverloadError if they do not fit now; RequestError if they can never fit.
        """
        if completions > self.max_requests:
            limit = (
                f"limit {self.max_requests} (--max-running-requests and --max-queued-requests "
                "together)"
            )
            raise RequestError(
                f"the body asks for {completions} completions (prompts times n), {limit}"
            )
        if (total := self.running - 1 + completions) > self.max_requests:
            raise OverloadError(_COMPLETIONS, total, self.max_requests)

    def _refuse(self, body: Rendezvous, error: KvflowError) -> None:
        self.metrics.refused(error.code)
        self._end_rooms(body, error)

    def _end_rooms(self, body: Rooms, error: KvflowError) -> None:
        rooms = rooms_of(body, self.request_limits.bootstrap_port)
        name_rooms(room for room, _, _ in rooms)
        for room, prefill, dp_rank in rooms:
            self.service.refuse(room, prefill, error.cause(), dp_rank)

    async def _collect(
        self,
        call: CompletionCall,
        requests: list[GenerationRequest],
        sources: list[AsyncGenerator[Delta, None]],
        meter: RequestMeter,
    ) -> Any:
        completions = [Completion() for _ in sources]
        async with Arrivals(sources) as arrivals:
            with self._listed(call, arrivals, requests):
                async for batch in arrivals:
                    self._add(batch, call, completions, meter)
        return call.answer(completions)

    async def _stream(
        self,
        http: web.Request,
        call: CompletionCall,
        requests: list[GenerationRequest],
        sources: list[AsyncGenerator[Delta, None]],
        meter: RequestMeter,
        ends: float,
    ) -> web.StreamResponse:
        events = EventStream(http)
        async with Arrivals(sources, self._keepalive_s) as arrivals:
            try:
                with self._listed(call, arrivals, requests):
                    async with asyncio.timeout_at(ends):
                        await self._write(
                            events, call, arrivals, [Completion() for _ in sources], meter
                        )
            # A disconnected client cannot read an error event.
            except ConnectionError:
                raise
            except Exception as error:
                # Before the headers are sent, an error can still be a status.
                if not events.response.prepared:
                    raise
                if not isinstance(error, KvflowError | TimeoutError):
                    _log.exception("stream of %s failed", shown_path(http))
                failure = failure_of(error)
                self.metrics.stream_failed(failure)
                meter.failed = True
                name_error(failure.summary)
                await self._send_error_event(http, events, failure)
                return events.response
        await events.end()
        return events.response

    async def _write(
        self,
        events: EventStream,
        call: CompletionCall,
        arrivals: AsyncIterable[list[tuple[int, Delta]]],
        completions: list[Completion],
        meter: RequestMeter,
    ) -> None:
        opened = False
        async for batch in arrivals:
            silent_s = meter.elapsed_s
            if not batch and not events.response.prepared and silent_s < self._headers_after_s:
                continue
            if not events.response.prepared:
                await events.start()
            # Only a write reveals that the client disconnected.
            if not batch:
                await events.keepalive()
                continue
            # An error before the first token must be the only event, so `opening` waits until now.
            found = []
            if not opened:
                found, opened = call.opening(), True
                annotate_first_chunk(meter.elapsed_s)
            for index, deltas in self._add(batch, call, completions, meter).items():
                found += call.events(index, deltas, completions[index])
            await events.send(*found)
        await events.send(*call.closing(completions))

    def _listed(
        self, call: CompletionCall, arrivals: Arrivals[Delta], requests: list[GenerationRequest]
    ) -> contextlib.AbstractContextManager[None]:
        """List the choices as running until the block ends, so that clients can abort them."""

        def stop(index: int) -> None:
            request = requests[index]
            # If a choice has not begun, its `tokens` will never run, and cannot end the room.
            if arrivals.has_begun(index):
                self.service.abort(request)
            elif request.room is not None:
                self.service.refuse(
                    request.room, request.prefill, _ABORTED, request.prefill_dp_rank
                )
            arrivals.stop(index, last=Delta("", (), ABORT))

        return self.choices.listed(
            CURRENT.get().request_id, [call.id_of(i) for i in range(len(requests))], stop
        )

    def _add(
        self,
        batch: list[tuple[int, Delta]],
        call: CompletionCall,
        completions: list[Completion],
        meter: RequestMeter,
    ) -> dict[int, list[Delta]]:
        by_choice: dict[int, list[Delta]] = {}
        for index, delta in batch:
            # The choice was aborted just as it ended, so it already had a last delta.
            if completions[index].finish is not None:
                continue
            completions[index].add(delta)
            call.add(index, delta)
            by_choice.setdefault(index, []).append(delta)
            if delta.finish == ABORT:
                meter.aborted.add(index)
        now = time.perf_counter()
        for index, deltas in by_choice.items():
            meter.add(index, sum(len(delta.tokens) for delta in deltas), now)
        return by_choice

    async def _send_error_event(
        self, http: web.Request, events: EventStream, failure: Failure
    ) -> None:
        try:
            async with asyncio.timeout(ERROR_EVENT_TIMEOUT_S):
                await events.fail(failure)
        except TimeoutError:
            if http.transport is not None:
                http.transport.abort()
