"""The aiohttp application around the routes of a server, with the middlewares of every role."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.typedefs import Handler, Middleware

from kvflow.aio import Turnstile
from kvflow.http.access import (
    CLIENT_GONE_STATUS,
    echo_request_id,
    log_access,
    shown_path,
    traced,
)
from kvflow.http.authorization import NO_KEYS, Keys, authorized, check_routes
from kvflow.http.cors import AllowOrigin, cross_origin
from kvflow.http.errors import Failure, failure_of
from kvflow.http.large_bodies import MAX_ADDED_BYTES
from kvflow.http.metrics import HttpMetrics
from kvflow.http.responses import json_response
from kvflow.http.tracing import Tracing
from kvflow.protocols.errors import KvflowError
from kvflow.telemetry.requests import RequestTrace

# A prompt of a million tokens fits; see large_bodies.py.
MAX_BODY_BYTES = 8 << 20
BODY_TIMEOUT_S = 60.0
# Idle time after which a connection is closed. Routers close their idle connections earlier.
IDLE_TIMEOUT_S = 120.0
# Maximum number of requests that continue in one turn of the loop. More would delay streams.
BODIES_PER_TURN = 4
_log = logging.getLogger("kvflow.http")


def build_app(
    routes: Iterable[web.RouteDef],
    metrics: HttpMetrics,
    keys: Keys = NO_KEYS,
    origins: Collection[str] = (),
    *,
    max_body_bytes: int = MAX_BODY_BYTES + MAX_ADDED_BYTES,
    tracing: Tracing | None = None,
) -> web.Application:
    """Return an application for `routes`, with the middlewares of every role.

    Web pages from `origins` may call the application ("*" stands for all origins). The default of
    `max_body_bytes` is for a worker: the router's limit, plus room for the fields that a router
    adds. Completions are traced with `tracing`, if it is given.
    """
    between = [*([cross_origin(origins)] if origins else []), authorized(keys)]
    middlewares = [_answered(metrics, tracing), *between, _with_body(Turnstile(BODIES_PER_TURN))]
    app = web.Application(middlewares=middlewares, client_max_size=max_body_bytes)
    app.on_response_prepare.append(echo_request_id)
    if origins:
        app.on_response_prepare.append(AllowOrigin(origins))
    app.add_routes([*routes, web.get("/livez", _livez)])
    check_routes(app)
    return app


async def _livez(_: web.Request) -> web.StreamResponse:
    """Report that the event loop runs. /health reports whether this server can serve."""
    return json_response({"status": "ok"})


def _answered(metrics: HttpMetrics, tracing: Tracing | None) -> Middleware:
    """Return the middleware that converts errors to responses, and counts, logs and traces
    requests.
    """

    @web.middleware
    async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
        started = time.perf_counter()
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unknown"
        with traced(request) as trace:
            span = None if tracing is None else tracing.begin(request, route, trace.request_id)
            trace.span = span
            status = CLIENT_GONE_STATUS
            try:
                response = await _response(request, handler, trace)
                status = response.status
                if not response.prepared:
                    # A prepared response already has the id, which `echo_request_id` added.
                    await echo_request_id(request, response)
            except (asyncio.CancelledError, ConnectionError):
                metrics.client_gone()
                trace.error = trace.error or "the client disconnected"
                raise
            else:
                metrics.answered(route, status, time.perf_counter() - started)
                return response
            finally:
                log_access(request, status, started, trace)
                if span is not None:
                    span.answered(status, trace)

    return answered


async def _response(
    request: web.Request, handler: Handler, trace: RequestTrace
) -> web.StreamResponse:
    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except ConnectionError:
        raise
    except web.HTTPNotFound:
        failure = Failure(
            404, "http_404", f"this server has no {request.method} {shown_path(request)}"
        )
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        failure = Failure(
            405,
            "http_405",
            f"{shown_path(request)} does not take {request.method}; it takes {allowed}",
        )
        headers["Allow"] = allowed
    except (KvflowError, web.HTTPException, TimeoutError) as error:
        failure = failure_of(error)
    except Exception as error:  # noqa: BLE001 - the server must go on; logged, and counted as a 500
        _log.exception("request %s failed", shown_path(request))
        failure = failure_of(error)
    trace.error = failure.summary
    response = failure.response(request.path)
    response.headers.update(headers)
    return response


def _with_body(turnstile: Turnstile) -> Middleware:
    """Return the middleware that reads the body first, and responds with 408 if it is late."""

    @web.middleware
    async def read(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await request.read()
        except TimeoutError:
            text = f"the request body did not arrive within {BODY_TIMEOUT_S:g} s"
            raise web.HTTPRequestTimeout(text=text) from None
        except (web.RequestPayloadError, BadHttpMessage) as error:
            raise web.HTTPBadRequest(
                text=f"the request body cannot be read: {str(error)[:200]}"
            ) from None
        # An abort request waits here too, because it can stop only requests that began before it.
        if body:
            await turnstile.passed()
        return await handler(request)

    return read


class _MalformedRequestFilter(logging.Filter):
    """Drops log records about malformed requests and lost clients.

    aiohttp answers malformed requests with 400.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, (BadHttpMessage, web.RequestPayloadError, ConnectionError))


def silence_malformed_requests() -> None:
    """Keep aiohttp from logging a traceback for every malformed request."""
    server_log = logging.getLogger("aiohttp.server")
    if not any(isinstance(f, _MalformedRequestFilter) for f in server_log.filters):
        server_log.addFilter(_MalformedRequestFilter())


def new_runner(app: web.Application) -> web.AppRunner:
    """Return a runner that cancels a handler when its client disconnects."""
    silence_malformed_requests()
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=0.5,
        keepalive_timeout=IDLE_TIMEOUT_S,
    )
