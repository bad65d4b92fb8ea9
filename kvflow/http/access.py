"""Request ids, which responses echo, and the access log with one line per request."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from kvflow.http.paths import MESSAGES_PATHS
from kvflow.telemetry.requests import CURRENT, NO_REQUEST, RequestTrace, clean_request_id

REQUEST_ID_HEADER = "X-Request-ID"
_ANTHROPIC_ID_HEADER = "request-id"
# Other programs repeat these requests every second or two, so they are logged at debug level unless
# they fail.
_PROBED = {"/livez", "/health", "/health_generate", "/metrics", "/engine_metrics"}
_WATCHED = {
    *("/server_info", "/get_server_info", "/get_load", "/get_loads", "/workers"),
    *("/rooms", "/peers", "/overview", "/overview/events"),
}
POLLED_PATHS = _PROBED | _WATCHED
# The status appears in log lines only, because a client that disconnected receives no response.
CLIENT_GONE_STATUS = 499
MAX_PATH = 256
_log = logging.getLogger("kvflow.access")


@contextmanager
def traced(request: web.Request) -> Iterator[RequestTrace]:
    """Make the trace of this request the current one (`CURRENT`) until the block ends."""
    trace = RequestTrace(clean_request_id(request.headers.get(REQUEST_ID_HEADER, "")))
    token = CURRENT.set(trace)
    try:
        yield trace
    finally:
        CURRENT.reset(token)


async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Add the request id to the headers of a response, before they are sent."""
    if (trace := CURRENT.get()) is not NO_REQUEST:
        response.headers[REQUEST_ID_HEADER] = trace.request_id
        if request.path in MESSAGES_PATHS:
            response.headers[_ANTHROPIC_ID_HEADER] = trace.request_id


def shown_path(request: web.Request) -> str:
    """Return the raw path without the query, truncated to `MAX_PATH` characters."""
    return request.rel_url.raw_path[:MAX_PATH]


def log_access(request: web.Request, status: int, started: float, trace: RequestTrace) -> None:
    """Log a request that ended. `started` is `time.perf_counter` at its start."""
    path = shown_path(request)
    level = logging.DEBUG if path in POLLED_PATHS and status < 400 else logging.INFO
    if not _log.isEnabledFor(level):
        return
    duration_s = round(time.perf_counter() - started, 4)
    fields = {
        "client": request.remote or "",
        "method": request.method,
        "path": path,
        "status": status,
        "duration_s": duration_s,
    }
    text = f'{request.remote} "{request.method} {path}" {status} {duration_s:.3f} s'
    if trace.prompt_tokens:
        text += f", {trace.prompt_tokens}+{trace.completion_tokens} tokens"
        fields["prompt_tokens"] = trace.prompt_tokens
        fields["completion_tokens"] = trace.completion_tokens
    if trace.error:
        text += f": {trace.error}"
        fields["error"] = trace.error
    _log.log(level, "%s", text, extra={"fields": fields})
