"""JSON bodies of requests: their decoding, and the limits of their size."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from kvflow.http.errors import RequestError

# The limit of Python objects that a body may create, which hold the event loop for some 3 ms. It
# allows 5,000 messages of a chat.
MAX_STRUCTURE = 1 << 14
MAX_COMPLETIONS = 256  # of one body: prompts times n
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_PLACE = re.compile(r" - at `([^`]+)`$")  # the place that msgspec names in an error

S = TypeVar("S")


def decoded(raw: bytes, kind: type[S]) -> S:
    """Return the body of any request as `kind`.

    Fields that `kind` does not name are only checked to be JSON.

    Raises: RequestError (400) naming the field.
    """
    if len(raw) > MAX_STRUCTURE and _structure(raw) > MAX_STRUCTURE:
        # Texts contain such characters too. They are removed only now, because that is slower than
        # the first count.
        found = _structure(_STRING.sub(b"", raw))
        if found > MAX_STRUCTURE:
            raise RequestError(
                f"the body has {found} lists, objects and fields, limit {MAX_STRUCTURE}"
            )
    read: S = read_json(raw, kind)
    return read


def whole_number(value: object) -> int | None:
    """Return a whole number of a JSON document; None for any other value.

    To Python `true` and `false` are numbers too, so `isinstance` would take them for 1 and 0.
    """
    return value if type(value) is int else None


def read_json(raw: bytes, kind: Any) -> Any:
    """Return `raw` as `kind`, whatever its size. Raises: RequestError (400) naming the field."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        text = str(error).replace("`$.", "`")
        place = _PLACE.search(text)
        raise RequestError(text, param=place[1] if place else None) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error}") from None


def _structure(raw: bytes) -> int:
    """Return an upper bound of the lists, objects and fields in `raw`."""
    return sum(map(raw.count, (b"[", b"{", b":")))
