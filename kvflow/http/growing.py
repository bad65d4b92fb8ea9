"""JSON that grows: a cumulative stream repeats all that it sent before, but encodes every token
once.

An answer may contain a `GrowingText` or a `GrowingArray` anywhere. It is encoded to pieces, which
include the full blocks of those two without a copy: an event of n bytes is never joined, and is
written in steps of a bounded size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from aiohttp import web

BLOCK_BYTES = 1 << 17  # written at a time: some 50 us of the event loop
# The mark at the place of a growing value. JSON text never contains this byte, because strings
# escape it.
_CUT = b"\0"
_RAW_CUT = msgspec.Raw(_CUT)


class _Growing:
    edges = b""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._open = bytearray()

    def pieces(self) -> list[bytes]:
        """Return the encoded value so far. At most one block of it is copied."""
        return [self.edges[:1], *self._blocks, bytes(self._open), self.edges[1:]]

    def _grow(self, encoded: bytes) -> None:
        self._open += encoded
        if len(self._open) >= BLOCK_BYTES:
            self.close_block()

    def close_block(self) -> None:
        """Close the open block, so that its bytes are not copied again."""
        if self._open:
            self._blocks.append(bytes(self._open))
            self._open.clear()


class GrowingText(_Growing):
    """A JSON string that grows."""

    edges = b'""'

    def followed_by(self, text: str) -> GrowingText:
        """Return a longer string that shares the beginning with this one, without a copy of it."""
        self.close_block()
        longer = GrowingText()
        longer._blocks = self._blocks.copy()
        longer.add(text)
        return longer

    def add(self, text: str) -> None:
        if text:
            self._grow(msgspec.json.encode(text)[1:-1])


class GrowingArray(_Growing):
    """A JSON array that grows."""

    edges = b"[]"

    def add(self, element: Any) -> None:
        if self._open or self._blocks:
            self._open += b","
        self._grow(msgspec.json.encode(element))

    def only(self) -> _Growing:
        """Return the one element of this array as a separate value."""
        return _Element(self)


class _Element(_Growing):
    """The text between the brackets of an array."""

    def __init__(self, array: GrowingArray) -> None:
        self._array = array

    def pieces(self) -> list[bytes]:
        return self._array.pieces()[1:-1]


def encode(answer: Any) -> list[bytes]:
    """Return `answer` as JSON, in pieces: one piece, unless a part of it grows."""
    growing: list[_Growing] = []

    def cut_out(value: Any) -> msgspec.Raw:
        if not isinstance(value, _Growing):
            raise TypeError(f"{type(value).__name__} is not JSON")
        growing.append(value)
        return _RAW_CUT

    first, *others = msgspec.json.encode(answer, enc_hook=cut_out).split(_CUT)
    pieces = [first]
    for value, after in zip(growing, others, strict=True):
        pieces += value.pieces()
        pieces.append(after)
    return pieces


async def write(response: web.StreamResponse, pieces: Iterable[bytes]) -> None:
    """Write `pieces`, one block at a time; other tasks get their turn of the event loop in
    between.
    """
    steps = _steps(pieces)
    await response.write(next(steps, b""))
    for step in steps:
        await asyncio.sleep(0)
        await response.write(step)


def _steps(pieces: Iterable[bytes]) -> Iterator[bytes | memoryview]:
    """Yield the same bytes with small pieces joined and large ones cut. Two consecutive steps have
    more than a block together, so the number of steps is bounded.
    """
    small: list[bytes | memoryview] = []
    size = 0
    for piece in filter(None, pieces):
        if size + len(piece) > BLOCK_BYTES and small:
            yield b"".join(small)
            small, size = [], 0
        rest = memoryview(piece)
        while len(rest) > BLOCK_BYTES:
            yield rest[:BLOCK_BYTES]
            rest = rest[BLOCK_BYTES:]
        small.append(rest)
        size += len(rest)
    if small:
        yield b"".join(small)
