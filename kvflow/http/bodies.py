"""Decoding of JSON request bodies, with limits on what they may contain."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
import numpy as np

from kvflow.http.errors import RequestError

# Maximum number of lists, objects and fields in a body. Decoding that many takes 3 ms. A chat of
# 5,000 messages has fewer.
MAX_STRUCTURE = 1 << 14
# Maximum number of lists and objects within each other. What reads a body may call itself for each,
# and near the end of Python's stack even the finalizers of unrelated objects fail.
MAX_NESTING = 128
# Maximum number of completions that one body may request (prompts times n).
MAX_COMPLETIONS = 256
# Bytes that neither begin nor end a list, an object or a string.
_NO_MARKS = bytes(set(range(256)) - set(b'[]{}"'))
# What each byte outside strings adds to the number of open lists and objects.
_ADDS = np.zeros(256, np.int8)
_ADDS[list(b"[{")] = 1
_ADDS[list(b"]}")] = -1
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
    check_nesting(raw, "the body")
    read: S = read_json(raw, kind)
    return read


def check_nesting(raw: bytes, what: str, *, param: str | None = None) -> None:
    """Raise RequestError if JSON is nested deeper than `MAX_NESTING`. `what` names it."""
    # Most bodies have fewer lists and objects in all, and no string has to be looked at.
    if raw.count(b"[") + raw.count(b"{") <= MAX_NESTING:
        return
    # Without escapes, each quote begins or ends a string.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(plain.translate(None, _NO_MARKS), np.uint8)
    outside = ~np.logical_xor.accumulate(marks == ord('"'))
    found = int((_ADDS[marks] * outside).cumsum(dtype=np.int32).max(initial=0))
    if found > MAX_NESTING:
        text = f"{what} is nested {found} levels deep, limit {MAX_NESTING}"
        raise RequestError(text, param=param)


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
