"""JSON that a stranger wrote. What is nested too deep is refused before anything recurses into it.

At the end of Python's stack, even the finalizers of unrelated objects fail.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from kvflow.protocols.errors import WireError

# Maximum number of lists and objects within each other.
MAX_NESTING = 128
# Bytes that neither begin nor end a list, an object or a string.
_NO_MARKS = bytes(set(range(256)) - set(b'[]{}"'))
# What each byte outside strings adds to the number of open lists and objects.
_ADDS = np.zeros(256, np.int8)
_ADDS[list(b"[{")] = 1
_ADDS[list(b"]}")] = -1


def check_nesting(raw: bytes) -> None:
    """Raise WireError if JSON is nested deeper than `MAX_NESTING`."""
    # Most JSON has fewer lists and objects in all, and no string has to be looked at.
    if raw.count(b"[") + raw.count(b"{") <= MAX_NESTING:
        return
    # Without escapes, each quote begins or ends a string.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(plain.translate(None, _NO_MARKS), np.uint8)
    outside = ~np.logical_xor.accumulate(marks == ord('"'))
    found = int((_ADDS[marks] * outside).cumsum(dtype=np.int32).max(initial=0))
    if found > MAX_NESTING:
        raise WireError(f"nested {found} levels deep, limit {MAX_NESTING}")


def decode_json(raw: bytes) -> Any:
    """Decode JSON. Raises: WireError."""
    check_nesting(raw)
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(str(error)) from None
