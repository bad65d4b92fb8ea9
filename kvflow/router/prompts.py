"""What a router knows a prompt by: hashes of its beginnings, as far as they are seen without a
tokenizer.

A prompt is a stream of bytes: its token ids where the body has them, else its text, or the messages
of its chat in one canonical form, so that a conversation's next turn goes on where this one ends.
The stream is cut into chunks, and each chunk's hash is that of everything up to its end. What
separates prompts in a worker's cache (`cache_salt`, `extra_key`) or may change all that a template
writes goes into all of them.

The hashes are Python's own, keyed by a secret of the process: fast, and no client can aim at those
of others.
"""

from __future__ import annotations

import array
import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

# 16 token ids, or about as many tokens of English text: a page. After the first 64 KiB of a prompt,
# where a chunk more or less matters little, 1 KiB, which keeps the time and the memory of the
# longest prompts small.
FINE_BYTES, COARSE_BYTES = 64, 1024
FINE_CHUNKS = 1024
CHUNK_TOKENS = FINE_BYTES // 4  # about
_STEP_BYTES = 1 << 16  # between two turns of the loop: some 300 us
_PIECE_CHARACTERS = 1 << 14

Chain = list[int]


def chunk_bytes(index: int) -> int:
    """The size of chunk `index` of any prompt."""
    return FINE_BYTES if index < FINE_CHUNKS else COARSE_BYTES


class PromptFields(msgspec.Struct):
    """The fields of a body in which its prompts are, and those that say what they share with
    others.
    """

    text: Any = None
    input_ids: Any = None
    prompt: Any = None
    messages: Any = None
    model: Any = None
    cache_salt: Any = None
    extra_key: Any = None
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None
    add_special_tokens: Any = None

    async def chains(self) -> list[Chain]:
        """The hashes of each prompt, shortest beginning first.

        A value that a worker will refuse has none.
        """
        root = _Hashing(0)
        common = (
            self.model,
            self.cache_salt,
            self.extra_key,
            self.chat_template_kwargs,
            self.reasoning_effort,
        )
        await _hash_all(root, _pieces(common))
        found = []
        for prompt in self._streams():
            chain = _Hashing(root.of_all)
            try:
                await _hash_all(chain, prompt)
            except (TypeError, ValueError, OverflowError):
                # An id of 1e9999, a key that is no string.
                continue
            found.append(chain.hashes)
        return found

    def prompts(self) -> list[Any]:
        """Those that are no conversation: each a text or token ids,
        or what a worker will refuse.
        """
        for value in (self.input_ids, self.text, self.prompt):
            if value is not None:
                several = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
                return value if several else [value]
        return []

    def _streams(self) -> Iterator[Iterator[bytes]]:
        if isinstance(self.messages, list):
            yield (piece for message in self.messages for piece in _pieces(message))
        yield from map(_prompt, self.prompts())


class _Hashing:
    """A chain that grows with its prompt."""

    def __init__(self, root: int) -> None:
        self.hashes: Chain = []
        self._last, self._rest = root, b""

    @property
    def of_all(self) -> int:
        """The hash of every byte up to here, those of a chunk that is not full included."""
        return hash((self._last, self._rest))

    def add(self, piece: bytes) -> None:
        data = self._rest + piece
        at, last, size = 0, self._last, chunk_bytes(len(self.hashes))
        while (end := at + size) <= len(data):
            last = hash((last, data[at:end]))
            self.hashes.append(last)
            at, size = end, chunk_bytes(len(self.hashes))
        self._last, self._rest = last, data[at:]


async def _hash_all(into: _Hashing, pieces: Iterator[bytes]) -> None:
    """Long prompts in steps, between which others get their turn of the loop."""
    done = 0
    for piece in pieces:
        into.add(piece)
        done += len(piece) + FINE_BYTES
        if done >= _STEP_BYTES:
            done = 0
            await asyncio.sleep(0)


def _prompt(value: Any) -> Iterator[bytes]:
    """One prompt.

    Token ids are 4 bytes each, whether they came as a short list or as a long array.
    """
    if isinstance(value, str):
        yield from _text(value)
    elif isinstance(value, list):
        yield array.array("I", value).tobytes()
    elif isinstance(value, np.ndarray):
        for at in range(0, value.size, _PIECE_CHARACTERS):
            yield value[at : at + _PIECE_CHARACTERS].tobytes()


def _text(value: str) -> Iterator[bytes]:
    for at in range(0, len(value), _PIECE_CHARACTERS):
        yield value[at : at + _PIECE_CHARACTERS].encode("utf-8", "surrogatepass")


_CLOSED = object()


def _pieces(value: Any) -> Iterator[bytes]:
    """Any JSON value, the fields of an object by name.

    Two values that differ give streams that differ.
    """
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            yield b'"%d:' % len(item)
            yield from _text(item)
        elif isinstance(item, dict):
            yield b"{"
            left.append(_CLOSED)
            for key in sorted(item, reverse=True):
                left += (item[key], key)
        elif isinstance(item, list | tuple):
            yield b"["
            left.append(_CLOSED)
            left.extend(reversed(item))
        elif item is _CLOSED:
            yield b"]"
        else:
            yield msgspec.json.encode(item) + b","
