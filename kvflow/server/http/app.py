"""An aiohttp application around the routes: errors as bodies, the bearer key, counting, quiet about garbage."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Iterable

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.typedefs import Handler, Middleware

from kvflow.protocols.errors import KvflowError
from kvflow.server.http.errors import Failure, failure_of
from kvflow.server.http.metrics import Metrics

MAX_BODY_BYTES = 8 << 20  # a million tokens; parsing holds the event loop, some 30 ms per plain MiB
BODY_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 120.0  # without a request, or with one whose headers never end; longer than routers keep theirs
OPEN_PATHS = frozenset({"/health", "/health_generate", "/metrics"})
_log = logging.getLogger("kvflow.http")


def build_app(routes: Iterable[web.RouteDef], metrics: Metrics, api_key: str = "") -> web.Application:
    """The application with the middlewares every role has."""
    middlewares = [_answers(metrics), *([_key_asked(api_key)] if api_key else []), _body_read]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
    app.add_routes(routes)
    return app


def _answers(metrics: Metrics) -> Middleware:
    @web.middleware
    async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
        started = time.perf_counter()
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unknown"
        try:
            response = await handler(request)
        except (asyncio.CancelledError, ConnectionError):
            metrics.client_gone()
            raise
        except (KvflowError, web.HTTPException, TimeoutError) as error:
            response = failure_of(error).response()
        except Exception as error:  # noqa: BLE001 - the server must go on; the error is logged and counted as a 500
            _log.exception("request %s failed", request.path)
            response = failure_of(error).response()
        metrics.answered(route, response.status, time.perf_counter() - started)
        return response

    return answered


def _key_asked(api_key: str) -> Middleware:
    expected = f"Bearer {api_key}".encode()

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path not in OPEN_PATHS and not hmac.compare_digest(given, expected):
            return Failure(401, "unauthorized", "missing or wrong API key").response()
        return await handler(request)

    return checked


@web.middleware
async def _body_read(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A body is here in time, or its sender has had its chance."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except (web.RequestPayloadError, BadHttpMessage) as error:
        raise web.HTTPBadRequest(text=f"the body cannot be read: {str(error)[:200]}") from None
    return await handler(request)


class _GarbageFilter(logging.Filter):
    """Bytes that are no HTTP/1 (an HTTP/2 preface, TLS) get their 400; a traceback for them helps nobody."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, (BadHttpMessage, web.RequestPayloadError, ConnectionError))


def quiet_about_garbage() -> None:
    """Keep aiohttp from printing tracebacks for what strangers send."""
    server_log = logging.getLogger("aiohttp.server")
    if not any(isinstance(f, _GarbageFilter) for f in server_log.filters):
        server_log.addFilter(_GarbageFilter())


def new_runner(app: web.Application) -> web.AppRunner:
    """A runner in which a client that leaves cancels its handler."""
    quiet_about_garbage()
    return web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5, keepalive_timeout=IDLE_TIMEOUT_S
    )
