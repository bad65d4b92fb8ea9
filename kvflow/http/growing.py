"""JSON values that grow, so that a cumulative stream encodes every token only once.

`encode` returns pieces of a body, and does not copy the full blocks of a growing value. `write`
sends the pieces in steps of bounded size, so a large event is never joined into one string.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from aiohttp import web

# Maximum number of bytes written at a time. Writing them blocks the event loop for some 50 us.
BLOCK_BYTES = 1 << 17
# A placeholder for a growing value. JSON never contains this byte, which is escaped in strings.
_CUT = b"\0"
_RAW_CUT = msgspec.Raw(_CUT)


class _Growing:
    edges = b""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._open = bytearray()

    def pieces(self) -> list[bytes]:
        """Return the encoded value so far, in pieces. At most one block is copied."""
        return [self.edges[:1], *self._blocks, bytes(self._open), self.edges[1:]]

    def _grow(self, encoded: bytes) -> None:
        self._open += encoded
        if len(self._open) >= BLOCK_BYTES:
            self.close_block()

    def close_block(self) -> None:
        """Close the open block, so that `pieces` no longer copies its bytes."""
        if self._open:
            self._blocks.append(bytes(self._open))
            self._open.clear()


class GrowingText(_Growing):
    """A JSON string to which text can be appended."""

    edges = b'""'

    def followed_by(self, text: str) -> GrowingText:
        """Return this string plus `text`, as a new value that shares the encoded blocks."""
        self.close_block()
        longer = GrowingText()
        longer._blocks = self._blocks.copy()
        longer.add(text)
        return longer

    def add(self, text: str) -> None:
        if text:
            self._grow(msgspec.json.encode(text)[1:-1])


class GrowingArray(_Growing):
    """A JSON array to which elements can be appended."""

    edges = b"[]"

    def add(self, element: Any) -> None:
        if self._open or self._blocks:
            self._open += b","
        self._grow(msgspec.json.encode(element))

    def only(self) -> _Growing:
        """Return the only element of this array as a value."""
        return _Element(self)


class _Element(_Growing):
    def __init__(self, array: GrowingArray) -> None:
        self._array = array

    def pieces(self) -> list[bytes]:
        return self._array.pieces()[1:-1]


def encode(answer: Any) -> list[bytes]:
    """Encode `answer` as JSON, in pieces. Without a growing value there is only one piece."""
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
    """Write `pieces`, one block at a time. Other tasks can run in between."""
    steps = _steps(pieces)
    await response.write(next(steps, b""))
    for step in steps:
        await asyncio.sleep(0)
        await response.write(step)


def _steps(pieces: Iterable[bytes]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of `pieces` in steps of at most a block.

    Small pieces are joined, and large ones are cut. Two consecutive steps together exceed a block,
    which bounds the number of steps.
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
