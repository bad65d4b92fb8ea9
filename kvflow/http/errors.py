"""Errors as HTTP responses: one error object, and one status for each code.

    {"error": {"type": ..., "code": ..., "param": ..., "message": ...}}

On the routes of Anthropic's API, `type` is one of its types, and its form surrounds the same error:

    {"type": "error", "error": {...}, "request_id": ...}

The statuses suit routers such as sglang_router. Routers retry 408, 429, 500, 502, 503 and 504 with
a new room, but never 400 or 404, and only 5xx count against a worker's circuit breaker. An error
in the request is therefore 4xx, and an error that a retry may avoid is 5xx.
"""

from __future__ import annotations

from typing import Any, Self

import msgspec
from aiohttp import web

from kvflow.http.paths import MESSAGES_PATHS
from kvflow.protocols.errors import MAX_CAUSE_TEXT, CapacityError, Code, KvflowError, MisuseError
from kvflow.telemetry.requests import CURRENT

RETRY_AFTER_S = 1
MAX_SUMMARY = 300  # longest `Failure.summary`, in characters
# OpenAI's code for a prompt that is too long; clients react to it.
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"

STATUS_OF_CODE: dict[Code, int] = {
    # No client reads this response. As a 4xx it does not count against a circuit breaker.
    Code.CLIENT_GONE: 499,
    # The status appears in log lines and metrics only: both legs respond with their tokens so far.
    Code.ABORTED: 499,
    Code.DEADLINE: 504,
    Code.RENDEZVOUS: 504,
    Code.CAPACITY: 503,
    Code.REFUSED: 502,  # prefill and decode do not fit together, but those of another pair may
    Code.BAD_REQUEST: 400,
    Code.PROMPT_MISMATCH: 400,
    Code.ROOM_IN_USE: 409,
    Code.STALE_GRANT: 502,
    Code.ENGINE_ERROR: 500,
    Code.TRANSFER_ERROR: 502,
    Code.PROTOCOL_ERROR: 502,
    Code.PEER_LOST: 502,
    Code.SHUTDOWN: 503,
}

_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    499: "client_closed_request",
    500: "internal_error",
    502: "bad_gateway",
    503: "service_unavailable",
    504: "gateway_timeout",
}

# Types of Anthropic's API for its own statuses. It uses the first for every other 4xx.
_INVALID, _INTERNAL = "invalid_request_error", "api_error"
_ANTHROPIC_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class RequestError(MisuseError):
    """A request that the client must change. The text explains how. `param` names the field."""

    status = 400
    reason = str(Code.BAD_REQUEST)

    def __init__(self, text: str, *, param: str | None = None, reason: str = reason) -> None:
        super().__init__(text)
        self.param, self.reason = param, reason


class UnknownModelError(RequestError):
    """A request for a model that this server does not serve."""

    status = 404

    def __init__(self, asked: str, served: str) -> None:
        text = f"the model {asked[:200]!r} is not served here; ask for {served!r}"
        super().__init__(text, param="model", reason="model_not_found")


class ConflictError(RequestError):
    """An operator's request that conflicts with the state of this server."""

    status = 409

    def __init__(self, text: str) -> None:
        super().__init__(text, reason="conflict")


class OverloadError(CapacityError):
    """A request beyond the number that the server accepts at once."""


class _ErrorFields(msgspec.Struct):
    message: str = "no reason given"
    code: str | int | None = None
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorFields


_CODES = frozenset(Code)
_ERROR_STATUSES = frozenset(map(str, range(400, 600)))
_KNOWN_CODES = {
    *_CODES,
    "unauthorized",
    "draining",
    "degraded",
    "no_workers",
    "model_not_found",
    CONTEXT_LENGTH_EXCEEDED,
}


class Failure(msgspec.Struct, frozen=True):
    """One error as a client receives it."""

    status: int
    code: str
    message: str
    param: str | None = None

    @classmethod
    def read(cls, status: int, body: bytes) -> Self:
        """Read an error body from another server.

        The message is truncated to `MAX_CAUSE_TEXT` characters. A body in another format yields
        "no reason given". Pass status 0 for an event in a stream; the result's status then follows
        from the code.
        """
        try:
            told = msgspec.json.decode(body, type=_ErrorBody).error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return cls(status or 500, "", "no reason given")
        code = str(told.code or "")
        known = STATUS_OF_CODE[Code(code)] if code in _CODES else 500
        # Some servers, vLLM among them, send the status as the code.
        if code in _ERROR_STATUSES:
            known = int(code)
        return cls(status or known, code, told.message[:MAX_CAUSE_TEXT], told.param)

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPE_OF_STATUS.get(self.status, "api_error")
        return {
            "error": {"type": kind, "code": self.code, "param": self.param, "message": self.message}
        }

    def body_at(self, path: str) -> dict[str, Any]:
        """Return the body in the form that clients of the route with this path read."""
        if path not in MESSAGES_PATHS:
            return self.body
        otherwise = _INVALID if self.status < 500 else _INTERNAL
        kind = _ANTHROPIC_TYPE_OF_STATUS.get(self.status, otherwise)
        # A router reads the code in the answer of a worker, as on every route.
        error = {**self.body["error"], "type": kind}
        return {"type": "error", "error": error, "request_id": CURRENT.get().request_id}

    @property
    def summary(self) -> str:
        """Code and message, for a log line."""
        text = (
            self.message if self.message.startswith(self.code) else f"{self.code}: {self.message}"
        )
        return text[:MAX_SUMMARY]

    def response(self, path: str = "") -> web.Response:
        """Return the response to a request at `path`."""
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}
        body = msgspec.json.encode(self.body_at(path))
        return web.Response(
            body=body, status=self.status, content_type="application/json", headers=headers
        )


def bounded_code(code: str) -> str:
    """Return `code` as a metric label, or "other" if it is neither a status nor a kvflow code."""
    # Another server may send any code, and each new one would add a time series.
    if code in _KNOWN_CODES or (len(code) == 3 and code.isascii() and code.isdigit()):
        return code
    return "other"


def failure_of(error: BaseException) -> Failure:
    """Return the failure for any exception that a handler raises."""
    if isinstance(error, RequestError):
        return Failure(error.status, error.reason, str(error)[:MAX_CAUSE_TEXT], error.param)
    if isinstance(error, KvflowError):
        return Failure(
            STATUS_OF_CODE.get(error.code, 500), str(error.code), str(error)[:MAX_CAUSE_TEXT]
        )
    if isinstance(error, web.HTTPException):
        return Failure(error.status, f"http_{error.status}", error.text or error.reason)
    if isinstance(error, TimeoutError):
        return Failure(
            504,
            str(Code.DEADLINE),
            "the request took longer than this server allows (--request-timeout-s)",
        )
    # The text of an unexpected error is left out, because it may contain internal data.
    return Failure(500, str(Code.ENGINE_ERROR), f"internal error: {type(error).__name__}")
