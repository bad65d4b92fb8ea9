"""OpenTelemetry traces of requests, exported over OTLP/HTTP.

Every import of OpenTelemetry is inside a function, so that a server without --otlp-endpoint neither
needs nor loads it. The exporter is the SDK's own: it sends batches from its own thread, and drops
spans beyond its bounded queue.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from aiohttp import web

from kvflow.http.access import CLIENT_GONE_STATUS
from kvflow.protocols.errors import MisuseError
from kvflow.telemetry.spans import Attributes

if TYPE_CHECKING:
    from kvflow.telemetry.requests import RequestTrace

QUEUE_SPANS = 2048
EXPORT_TIMEOUT_S = 5.0
LOG_EVERY_S = 60.0
MAX_LOGGED = 300
FLUSH_TIMEOUT_S = 3.0  # how long a server that ends waits for its last spans to be sent
HEADERS = ("traceparent", "tracestate")  # W3C Trace Context
_TRACES = "/v1/traces"
# Names by the semantic conventions of OpenTelemetry for generative AI.
_OPERATIONS = {"/generate": "generate_content", "/v1/completions": "text_completion"}
_OTHER_OPERATION = "chat"
_NOT_COMPLETIONS = ("tokenize", "count_tokens")
_log = logging.getLogger("kvflow.http")


class Tracing:
    """The tracer of one process."""

    def __init__(self, provider: Any) -> None:
        """`provider` is a `TracerProvider` of the SDK."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("kvflow")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str, ratio: float, role: str) -> Self:
        """Return a tracer that exports to the collector at `endpoint`.

        `ratio` is the share of traces to record of those that begin here. A client that sends
        `traceparent` decides for its own requests.

        Raises: MisuseError (see `check_collector`).
        """
        url = check_collector(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        _log_rarely()
        # At exit, the SDK would wait without limit for a collector that hangs; `close` has one.
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)),
            resource=Resource.create(
                {
                    "service.name": f"kvflow-{role}",
                    "service.version": importlib.metadata.version("kvflow"),
                }
            ),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)
        provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=QUEUE_SPANS))
        return cls(provider)

    def begin(self, request: web.Request, route: str, request_id: str) -> OtelSpan | None:
        """Return the span of a completion request, or None for any other request."""
        if request.method != "POST" or not _is_completion(route):
            return None
        attributes: dict[str, str | int] = {
            "http.request.method": request.method,
            "http.route": route,
            "gen_ai.operation.name": _OPERATIONS.get(route, _OTHER_OPERATION),
            "gen_ai.provider.name": "kvflow",
            "kvflow.request_id": request_id,
        }
        span = self._tracer.start_span(
            f"POST {route}",
            self._propagator.extract({name: request.headers.get(name, "") for name in HEADERS}),
            kind=_kind("SERVER"),
            attributes=attributes,
        )
        return OtelSpan(self, span)

    async def close(self) -> None:
        """Send the last spans, for at most `FLUSH_TIMEOUT_S`. Later spans are dropped."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            # The loop may be gone by then, if the collector hangs.
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.set)

        # A daemon thread: the process ends although a collector that hangs still holds it.
        threading.Thread(target=shut_down, name="otel-shutdown", daemon=True).start()
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await done.wait()
        except TimeoutError:
            _log.warning("the last spans were not sent within %g s", FLUSH_TIMEOUT_S)


class OtelSpan:
    """Implements `telemetry.spans.Span`."""

    __slots__ = ("_began_s", "_epoch_ns", "_span", "_tracing")

    def __init__(self, tracing: Tracing, span: Any) -> None:
        self._tracing, self._span = tracing, span
        self._began_s = time.perf_counter()
        self._epoch_ns = time.time_ns() - int(self._began_s * 1e9)

    @property
    def recording(self) -> bool:
        return bool(self._span.is_recording())

    def annotate(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def child(self, name: str, began_s: float, ended_s: float, attributes: Attributes) -> None:
        if not self.recording:
            return
        # A node reads its clock once per turn of the loop, so its times may be a little early.
        began_s = max(began_s, self._began_s)
        ended_s = max(began_s, min(ended_s, time.perf_counter()))
        span = self._tracing._tracer.start_span(
            name, self._context(), attributes=attributes, start_time=self._at(began_s)
        )
        span.end(self._at(ended_s))

    def call(self, name: str, attributes: Attributes) -> tuple[OtelSpan, dict[str, str]]:
        span = OtelSpan(
            self._tracing,
            self._tracing._tracer.start_span(
                name, self._context(), kind=_kind("CLIENT"), attributes=attributes
            ),
        )
        headers: dict[str, str] = {}
        self._tracing._propagator.inject(headers, span._context())
        return span, headers

    def end(self, error: str = "") -> None:
        if error:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def answered(self, status: int, trace: RequestTrace) -> None:
        """End the span of a request that was answered with `status`."""
        attributes: dict[str, str | int | list[str]] = {"http.response.status_code": status}
        if trace.rooms:
            # A room is an unsigned number of 64 bits, and attributes have signed ones.
            attributes["kvflow.rooms"] = [str(room) for room in trace.rooms]
        if trace.prompt_tokens:
            attributes["gen_ai.usage.input_tokens"] = trace.prompt_tokens
            attributes["gen_ai.usage.output_tokens"] = trace.completion_tokens
        code = trace.error.partition(":")[0] if status != CLIENT_GONE_STATUS else "client_gone"
        error = code or (str(status) if status >= 400 else "")
        # By the conventions, a client's own error is no failure of a server.
        if error and 400 <= status < 500:
            attributes["error.type"], error = error, ""
        self.annotate(attributes)
        self.end(error)

    def _context(self) -> Any:
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(self._span)

    def _at(self, at_s: float) -> int:
        return self._epoch_ns + int(at_s * 1e9)


@asynccontextmanager
async def tracing_to(
    endpoint: str, ratio: float, role: str
) -> AsyncGenerator[Tracing | None, None]:
    """Yield a tracer, or None without an endpoint. Raises: MisuseError (see `check_collector`)."""
    if not endpoint:
        yield None
        return
    tracing = Tracing.to(endpoint, ratio, role)
    try:
        yield tracing
    finally:
        await tracing.close()


def check_collector(endpoint: str) -> str:
    """Return the URL for traces at a collector, or an empty string without one.

    Raises: MisuseError if OpenTelemetry is not installed, or the URL is wrong.
    """
    if not endpoint:
        return ""
    try:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter  # noqa: F401
        from opentelemetry.sdk import trace  # noqa: F401
    except ModuleNotFoundError as error:
        raise MisuseError(
            f"--otlp-endpoint needs OpenTelemetry ({error.name} is not installed): pip install "
            "'kvflow[otel]'"
        ) from None
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise MisuseError(
            f"--otlp-endpoint: {endpoint!r} is no URL of a collector, such as http://localhost:4318"
        )
    return endpoint if parts.path.endswith(_TRACES) else endpoint.rstrip("/") + _TRACES


class _Rarely(logging.Handler):
    """Logs at most one message of OpenTelemetry in `LOG_EVERY_S`, in kvflow's own log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next_at_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if (now := time.monotonic()) >= self._next_at_s:
            self._next_at_s = now + LOG_EVERY_S
            _log.warning("traces: %s", record.getMessage()[:MAX_LOGGED])


def _log_rarely() -> None:
    # While a collector is away, the SDK logs several lines for each batch, every few seconds.
    theirs = logging.getLogger("opentelemetry")
    theirs.propagate, theirs.handlers = False, [_Rarely()]


def _is_completion(route: str) -> bool:
    if route.endswith(_NOT_COMPLETIONS):
        return False
    return route == "/generate" or route.startswith("/v1/")


def _kind(name: str) -> Any:
    from opentelemetry.trace import SpanKind

    return SpanKind[name]
