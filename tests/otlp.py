"""A collector of OpenTelemetry traces: it takes what the real exporter sends over OTLP/HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from tests.fakes.servers import Server

WITHIN_S = 30.0
SERVER, CLIENT = 2, 3  # span kinds of OTLP


class Received(NamedTuple):
    """One span. Times are nanoseconds since the epoch; `parent` is empty at a root."""

    service: str
    name: str
    kind: int
    trace: str
    id: str
    parent: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    events: dict[str, int]
    failed: bool


class Collector(Server):
    """Keeps all spans that it gets. While `open` is not set, it does not answer."""

    def __init__(self) -> None:
        pytest.importorskip("opentelemetry.sdk", reason="make setup installs kvflow[otel]")
        self.spans: list[Received] = []
        self.open = asyncio.Event()
        self.open.set()
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        super().__init__(app)

    async def _take(self, http: web.Request) -> web.Response:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        found = trace_service_pb2.ExportTraceServiceRequest.FromString(await http.read())
        await self.open.wait()
        self.spans += _spans(found)
        answer = trace_service_pb2.ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=answer, content_type="application/x-protobuf")

    async def until(self, count: int) -> list[Received]:
        """Return all spans, once there are `count` of them."""
        async with asyncio.timeout(WITHIN_S):
            while len(self.spans) < count:
                await asyncio.sleep(0.05)
        return self.spans


def _spans(found: Any) -> Iterator[Received]:
    for process in found.resource_spans:
        service = _values(process.resource.attributes)["service.name"]
        for span in (one for scope in process.scope_spans for one in scope.spans):
            yield Received(
                service,
                span.name,
                span.kind,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                _values(span.attributes),
                {event.name: event.time_unix_nano for event in span.events},
                span.status.code == 2,
            )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(found: Any) -> Any:
    kind = found.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in found.array_value.values]
    return getattr(found, kind)
