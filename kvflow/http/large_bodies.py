"""Decoding of large JSON bodies in steps. Decoding 8 MiB at once would block the loop for 80 ms.

A thread would not help: the decoder holds the GIL. Long strings and long arrays of token ids
are decoded in steps, and a marker replaces each of them in the body. The small rest is then decoded
like any other body, and `LongValues.put_back` replaces the markers with the values.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvflow.http.errors import RequestError

# Bodies of at least this size are decoded in steps.
LARGE_BYTES = 1 << 16
# Strings, and arrays of token ids, are cut out if they have at least this many bytes.
LONG_BYTES = 1 << 8
# Maximum size of a body without its long values. This rest is decoded at once, in some 4 ms.
MAX_REST_BYTES = 1 << 19
# Maximum number of bytes that a router adds to a body: the rooms, and the address of prefill.
MAX_ADDED_BYTES = 1 << 13
# Maximum number of strings and lists in a large body. The scan handles each of them in Python.
MAX_VALUES = 1 << 18
PROMPTS = frozenset({"input_ids", "prompt", "tokens"})
# Decoding this many bytes takes some 200 us.
_STEP_BYTES = 1 << 15
_STEP_VALUES = 256
# Matches as much of a string as possible without ending inside an escape or a surrogate pair.
_UNITS = re.compile(
    rb'(?:[^"\\]++|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|'
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\[^u])*+"
)
_ids_of = msgspec.json.Decoder(list[Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]]).decode
_text_of = msgspec.json.Decoder(str).decode

S = TypeVar("S", bound=msgspec.Struct)


class LongValues:
    """The values that were cut out of a body, each with a marker that a client cannot guess."""

    def __init__(self) -> None:
        self._name = secrets.token_hex(16)
        self._numbers = [secrets.randbits(31) for _ in range(4)]
        self._found: list[str | NDArray[np.uint32]] = []

    def marker(self, value: str | NDArray[np.uint32]) -> bytes:
        """Store `value` and return its marker as JSON: a string, or a list in place of an array."""
        self._found.append(value)
        index = len(self._found) - 1
        return msgspec.json.encode(
            f"{self._name}{index}" if isinstance(value, str) else [*self._numbers, index]
        )

    def put_back(self, body: S) -> S:
        """Return a decoded body with every marker replaced by its value.

        In the fields of `PROMPTS` a long array of token ids stays an array, uint32 [n].
        """
        if not self._found:
            return body
        changed = {
            name: self._restored(getattr(body, name), name in PROMPTS)
            for name in body.__struct_fields__
        }
        return msgspec.structs.replace(body, **changed)

    def _restored(self, value: Any, as_array: bool) -> Any:
        if isinstance(value, str) and value.startswith(self._name):
            return self._found[int(value.removeprefix(self._name))]
        if isinstance(value, list):
            if value[:4] == self._numbers:
                ids: Any = self._found[value[4]]
                return ids if as_array else ids.tolist()
            # A flat list of numbers contains no marker, and may be too long to visit.
            if as_array:
                flat = bool(value) and isinstance(value[0], int)
            else:
                flat = {int}.issuperset(map(type, value))
            return value if flat else [self._restored(v, as_array) for v in value]
        if isinstance(value, dict):
            return {key: self._restored(item, as_array) for key, item in value.items()}
        return self.put_back(value) if isinstance(value, msgspec.Struct) else value


async def take_apart(raw: bytes, added_bytes: int = 0) -> tuple[bytes, LongValues]:
    """Return `raw` with a marker in place of each long value, and these values.

    Invalid JSON stays in the result, and decoding the result reports it. A router may have added up
    to `added_bytes` bytes, which do not count against the limit.

    Raises: RequestError for more strings and lists than MAX_VALUES, or more bytes outside long
    values than MAX_REST_BYTES.
    """
    found = _Body(raw)
    if len(raw) >= LARGE_BYTES:
        await found.scan()
    rest = found.condensed()
    if len(rest) > MAX_REST_BYTES + added_bytes:
        text = (
            f"the body has {len(rest)} bytes beside strings and lists of token ids of {LONG_BYTES} "
            "bytes and more"
        )
        raise RequestError(f"{text}, limit {MAX_REST_BYTES}")
    return rest, found.values


class _Body:
    """One pass over a body. `_kept` has the condensed pieces of the body up to `_done`."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self._kept, self._done = raw, list[bytes](), 0
        self._steps = 0
        self.values = LongValues()

    def condensed(self) -> bytes:
        return b"".join((*self._kept, self._raw[self._done :])) if self._kept else self._raw

    async def scan(self) -> None:
        at = 0
        while (quote := self._raw.find(b'"', at)) >= 0:
            await self._between_strings(at, quote)
            end = await self._string(quote)
            # The string is invalid, so the body is not JSON. Decoding the rest reports the error.
            if not end:
                return
            at = end
        await self._between_strings(at, len(self._raw))

    async def _between_strings(self, start: int, end: int) -> None:
        """Cut out the long arrays of `raw[start:end]`, which contains no string."""
        at = start
        while end - at >= LONG_BYTES and (close := self._raw.find(b"]", at, end)) >= 0:
            await self._count()
            opened = self._raw.rfind(b"[", at, close)
            if opened >= 0 and close - opened >= LONG_BYTES:
                ids = await self._ids(opened + 1, close)
                if ids is not None:
                    self._cut(opened, close + 1, ids)
            at = close + 1

    async def _string(self, quote: int) -> int:
        """Cut out a long string. Return the position after the string, or 0 if it is invalid."""
        raw, at = self._raw, quote + 1
        await self._count()
        parts: list[bytes] = []
        while True:
            # The pattern also matches the empty string, so there is always a match.
            end = _UNITS.match(raw, at, at + _STEP_BYTES).end()  # type: ignore[union-attr]
            if raw[end : end + 1] == b'"':
                break
            # A part must not end within a UTF-8 character.
            while end > at and raw[end : end + 1] and raw[end] & 0xC0 == 0x80:
                end -= 1
            if end == at:
                return 0
            parts.append(raw[at:end])
            at = end
            await asyncio.sleep(0)
        parts.append(raw[at:end])
        if end - quote >= LONG_BYTES:
            try:
                texts = []
                for part in parts:
                    texts.append(_text_of(b'"%b"' % part))
                    await asyncio.sleep(0)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return 0
            self._cut(quote, end + 1, "".join(texts))
        return end + 1

    async def _ids(self, start: int, end: int) -> NDArray[np.uint32] | None:
        """Return the token ids of a flat array, or None if an element is not a token id."""
        parts: list[NDArray[np.uint32]] = []
        at = start
        while at <= end:
            comma = end if end - at <= _STEP_BYTES else self._raw.rfind(b",", at, at + _STEP_BYTES)
            try:
                ids = _ids_of(b"[%b]" % self._raw[at:comma]) if comma >= 0 else []
            except (msgspec.DecodeError, UnicodeDecodeError):
                return None
            if not ids:
                return None
            parts.append(np.array(ids, dtype=np.uint32))
            at = comma + 1
            await asyncio.sleep(0)
        return np.concatenate(parts)

    async def _count(self) -> None:
        self._steps += 1
        if self._steps > MAX_VALUES:
            raise RequestError(f"the body has more than {MAX_VALUES} strings and lists")
        if not self._steps % _STEP_VALUES:
            await asyncio.sleep(0)

    def _cut(self, start: int, end: int, value: str | NDArray[np.uint32]) -> None:
        self._kept += (self._raw[self._done : start], self.values.marker(value))
        self._done = end
