"""The trace of the request that the current task serves: its id, its rooms, and the values for its
access log line.

A context variable carries the trace into every coroutine, task and room that the request starts, so
that their log lines name the request.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from contextvars import ContextVar

from kvflow.telemetry.spans import Span

MAX_REQUEST_ID = 128
_UNSAFE = re.compile(r"[^A-Za-z0-9._:/+=@~-]")


class RequestTrace:
    """One HTTP request while it is served.

    `error` is the reason why it failed, even if its status was already sent. `span` is None unless
    the server exports traces.
    """

    __slots__ = ("completion_tokens", "error", "prompt_tokens", "request_id", "rooms", "span")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.rooms: tuple[int, ...] = ()
        self.prompt_tokens = self.completion_tokens = 0
        self.error = ""
        self.span: Span | None = None


NO_REQUEST = RequestTrace("")
CURRENT: ContextVar[RequestTrace] = ContextVar("kvflow_request", default=NO_REQUEST)


def name_rooms(rooms: Iterable[int]) -> None:
    """Set the rooms of the current request, for its log lines."""
    # Tasks outside of any request share NO_REQUEST, which must stay empty.
    if (trace := CURRENT.get()) is not NO_REQUEST:
        trace.rooms = tuple(rooms)


def name_error(summary: str) -> None:
    """Set the reason why the current request failed, for its access line."""
    if (trace := CURRENT.get()) is not NO_REQUEST:
        trace.error = summary


def clean_request_id(given: str) -> str:
    """Return a client's request id in a form that is safe in a header and a log line, or a new id
    if no usable character is left.

    The id is truncated to `MAX_REQUEST_ID` characters. Every character other than letters, digits
    and `._:/+=@~-` becomes `_`.
    """
    cleaned = _UNSAFE.sub("_", given[:MAX_REQUEST_ID])
    return cleaned if cleaned.strip("_") else uuid.uuid4().hex
