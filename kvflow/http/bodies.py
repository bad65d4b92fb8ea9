"""Decoding of JSON request bodies, with limits on what they may contain."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from kvflow.http.errors import RequestError
from kvflow.protocols.errors import WireError
from kvflow.protocols.wire.json_text import check_nesting

# Maximum number of lists, objects and fields in a body. Decoding that many takes 3 ms. A chat of
# 5,000 messages has fewer.
MAX_STRUCTURE = 1 << 14
# Maximum number of completions that one body may request (prompts times n).
MAX_COMPLETIONS = 256
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
# The path of a field at the end of msgspec's errors, or the name of one that the body lacks.
_PLACE = re.compile(r"(?: - at |^Object missing required field )`([^`]+)`$")

S = TypeVar("S")


def decoded(raw: bytes, kind: type[S]) -> S:
    """Decode a request body to `kind`.

    Fields that `kind` lacks are ignored, but must be valid JSON.

    Raises: RequestError (400). It names the field if one field has a wrong value.
    """
    if len(raw) > MAX_STRUCTURE and _structure(raw) > MAX_STRUCTURE:
        # The first count is fast, but includes characters inside strings. This one is exact.
        found = _structure(_STRING.sub(b"", raw))
        if found > MAX_STRUCTURE:
            raise RequestError(
                f"the body has {found} lists, objects and fields, limit {MAX_STRUCTURE}"
            )
    try:
        check_nesting(raw)
    except WireError as error:
        raise RequestError(f"the body is {error}") from None
    read: S = read_json(raw, kind)
    return read


def whole_number(value: object) -> int | None:
    """Return `value` if it is an integer and not a bool, else None."""
    return value if type(value) is int else None


def read_json(raw: bytes, kind: Any) -> Any:
    """Decode `raw` to `kind`, without checking `MAX_STRUCTURE`. Raises: RequestError (400)."""
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
    """Return an upper bound on the number of lists, objects and fields in `raw`."""
    return sum(map(raw.count, (b"[", b"{", b":")))
