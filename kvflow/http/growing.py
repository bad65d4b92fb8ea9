"""JSON that grows: a cumulative stream repeats all that it has sent, and yet encodes every token
once.

An answer may have a `GrowingText` or a `GrowingArray` anywhere. It is encoded to pieces, and full
blocks of those two are among them as they are: an event of n bytes is never put together, and is
written in steps of a bounded size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from aiohttp import web

BLOCK_BYTES = 1 << 17  # written at a time: some 50 us of the event loop
_CUT = b"\0"  # where a growing value belongs; JSON has this byte nowhere, in strings it is escaped
_RAW_CUT = msgspec.Raw(_CUT)


class _Growing:
    edges = b""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._open = bytearray()

    def pieces(self) -> list[bytes]:
        """The value so far, encoded. At most a block of it is copied."""
        return [self.edges[:1], *self._blocks, bytes(self._open), self.edges[1:]]

    def _grow(self, encoded: bytes) -> None:
        self._open += encoded
        if len(self._open) >= BLOCK_BYTES:
            self.close_block()

    def close_block(self) -> None:
        """What has been added is not copied again."""
        if self._open:
            self._blocks.append(bytes(self._open))
            self._open.clear()


class GrowingText(_Growing):
    """A JSON string."""

    edges = b'""'

    def followed_by(self, text: str) -> GrowingText:
        """Another one, of which the start is shared, and not copied."""
        self.close_block()
        longer = GrowingText()
        longer._blocks = self._blocks.copy()
        longer.add(text)
        return longer

    def add(self, text: str) -> None:
        if text:
            self._grow(msgspec.json.encode(text)[1:-1])


class GrowingArray(_Growing):
    """A JSON array."""

    edges = b"[]"

    def add(self, element: Any) -> None:
        if self._open or self._blocks:
            self._open += b","
        self._grow(msgspec.json.encode(element))

    def only(self) -> _Growing:
        """The one element that was added, as a value of its own."""
        return _Element(self)


class _Element(_Growing):
    """What stands between the brackets of an array."""

    def __init__(self, array: GrowingArray) -> None:
        self._array = array

    def pieces(self) -> list[bytes]:
        return self._array.pieces()[1:-1]


def encode(answer: Any) -> list[bytes]:
    """`answer` as JSON, in pieces: one, unless something in it grows."""
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
    """Write `pieces`, a block at a time; others get their turn of the event loop in between."""
    steps = _steps(pieces)
    await response.write(next(steps, b""))
    for step in steps:
        await asyncio.sleep(0)
        await response.write(step)


def _steps(pieces: Iterable[bytes]) -> Iterator[bytes | memoryview]:
    """The same bytes, small pieces joined and large ones cut; two steps in a row have more than a
    block together.
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
