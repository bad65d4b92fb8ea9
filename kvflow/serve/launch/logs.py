"""Log lines of a role, as text or as JSON, with the ids of requests. A peer cannot forge a line.

Messages and tracebacks are cut to a fixed size, because both may repeat what a client sent.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import time
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

import msgspec

from kvflow.telemetry.requests import CURRENT

LogFormat = Literal["text", "json"]
# Characters that could end a line or move a terminal's cursor (C0, DEL, C1, the Unicode line
# separators), and lone surrogates, which UTF-8 cannot encode.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_SHOWN_ROOMS = 8
MAX_MESSAGE = 4096  # characters
MAX_TRACEBACK = 16_384  # characters
_MAX_FRAMES = 32  # frames of each exception in a traceback


def printable(text: str) -> str:
    """Return `text` as a single line, with control characters as Python's escape sequences."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class RequestFields(logging.Filter):
    """A filter that adds the task's request id and rooms to records that have none in `extra`."""

    def filter(self, record: logging.LogRecord) -> bool:
        trace = CURRENT.get()
        if not hasattr(record, "request_id"):
            record.request_id = trace.request_id
        if not hasattr(record, "rooms"):
            record.rooms = trace.rooms
        return True


class WithoutClosedTls(logging.Filter):
    """A filter that drops uvloop's report of a TLS client that left while uvloop answered it.

    uvloop calls that a fatal error, with a traceback. Each client that disconnects early may cause
    one, and the access log has its request.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not (
            isinstance(error, RuntimeError)
            and str(error).endswith("the handler is closed")
            and record.getMessage().startswith("Fatal error on SSL protocol")
        )


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return (
        f"{text[: most // 2]} ... {len(text) - most} characters left out ... {text[-(most // 2) :]}"
    )


def _formatted(exc_info: tuple[type[BaseException], BaseException, TracebackType | None]) -> str:
    # After an endless recursion there are thousands of outer calls, so the innermost are shown.
    found = traceback.TracebackException(*exc_info, limit=-_MAX_FRAMES, compact=True)
    return _cut("".join(found.format()).removesuffix("\n"), MAX_TRACEBACK)


class TextFormatter(logging.Formatter):
    """A formatter for `time level logger: message (request ID, room N)`. It indents tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        rooms: tuple[int, ...] = getattr(record, "rooms", ())
        about = (
            [f"request {request_id}"] if (request_id := getattr(record, "request_id", "")) else []
        )
        if rooms:
            more = f" and {len(rooms) - _SHOWN_ROOMS} more" if len(rooms) > _SHOWN_ROOMS else ""
            about.append(f"room {', '.join(map(str, rooms[:_SHOWN_ROOMS]))}{more}")
        # Escaping can make the message several times longer, so it is cut first.
        message = printable(_cut(record.getMessage(), MAX_MESSAGE))
        line = f"{self.formatTime(record)} {record.levelname[0]} {record.name}: {message}"
        line += f" ({', '.join(about)})" if about else ""
        if record.exc_info and record.exc_info[0]:
            trace = _formatted(record.exc_info).splitlines()
            line = "\n    ".join([line, *map(printable, trace)])
        return line


class JsonFormatter(logging.Formatter):
    """A formatter for one JSON object per line, with the `fields` of a record's `extra`."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, Any] = {
            "time": _iso(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "role": self._role,
            "message": _cut(record.getMessage(), MAX_MESSAGE),
        }
        if request_id := getattr(record, "request_id", ""):
            document["request_id"] = request_id
        if rooms := getattr(record, "rooms", ()):
            document["rooms"] = list(rooms)
        document.update(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[0]:
            document["traceback"] = _formatted(record.exc_info)
        return encoded(document)


def encoded(document: dict[str, Any]) -> str:
    """Return one line of JSON. Characters that UTF-8 cannot encode are escaped."""
    try:
        return msgspec.json.encode(document).decode()
    except UnicodeEncodeError:
        safe = {
            name: printable(value) if isinstance(value, str) else value
            for name, value in document.items()
        }
        return msgspec.json.encode(safe).decode()


def relayed(text: str, role: str, process: str) -> str:
    """Return a child's line as JSON with `process` added. A line of text becomes a new object."""
    document: dict[str, Any] = {
        "time": _iso(time.time()),
        "level": "info",
        "logger": "stderr",
        "role": role,
        "message": text,
    }
    with contextlib.suppress(msgspec.DecodeError, UnicodeError):
        document = msgspec.json.decode(text, type=dict[str, Any])
    return encoded({**document, "process": process})


def _iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")


def set_up_logging(
    level: str, *, log_format: LogFormat = "text", access_log: bool = True, role: str = ""
) -> None:
    """Log to stderr, with Python's warnings. Libraries log only warnings and errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RequestFields())
    handler.addFilter(WithoutClosedTls())
    handler.setFormatter(JsonFormatter(role) if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("kvflow").setLevel(level.upper())
    logging.getLogger("kvflow.access").setLevel(logging.NOTSET if access_log else logging.WARNING)
    if log_format == "json":
        sys.excepthook = _log_exception


def _log_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    logging.getLogger("kvflow").critical(
        "the process ends by an exception", exc_info=(kind, error, trace)
    )
