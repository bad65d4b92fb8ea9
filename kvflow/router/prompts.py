"""Hashes of a prompt's beginnings, by which a router recognizes prompts without a tokenizer.

A prompt is hashed as a stream of bytes: its token ids if the body has them, otherwise its text, or
the messages of its chat in a canonical form. The next turn of a conversation then continues the
stream of the previous one. The stream is cut into chunks, and the hash of a chunk covers everything
up to its end. Some fields separate prompts in a worker's cache (`cache_salt`, `extra_key`). Others
may change everything that a template writes. All of them enter every hash.

The hashes are Python's own, keyed by a secret of the process. They are fast, and a client cannot
make its prompt collide with another client's.
"""

from __future__ import annotations

import array
import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

# A fine chunk is one page: 16 token ids, or about as many tokens of English text.
# Chunks beyond the first 64 KiB are coarse: the exact length of a match matters little there.
FINE_BYTES, COARSE_BYTES = 64, 1024
FINE_CHUNKS = 1024
CHUNK_TOKENS = FINE_BYTES // 4  # tokens of a fine chunk; for text, an estimate
_STEP_BYTES = 1 << 16  # bytes between two turns of the loop; hashing them takes some 300 us
_PIECE_CHARACTERS = 1 << 14

Chain = list[int]


def chunk_bytes(index: int) -> int:
    """Return the size of chunk `index` of any prompt, in bytes."""
    return FINE_BYTES if index < FINE_CHUNKS else COARSE_BYTES


def chain_bytes(length: int) -> int:
    """Return the size of the first `length` chunks of any prompt, in bytes."""
    fine = min(length, FINE_CHUNKS)
    return fine * FINE_BYTES + (length - fine) * COARSE_BYTES


class PromptFields(msgspec.Struct):
    """The fields that contain a body's prompts or decide which prompts share pages."""

    text: Any = None
    input_ids: Any = None
    prompt: Any = None
    messages: Any = None
    model: Any = None
    cache_salt: Any = None
    extra_key: Any = None
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None
    tools: Any = None
    tool_choice: Any = None
    # Of /v1/messages and /v1/responses.
    system: Any = None
    instructions: Any = None
    input: Any = None
    add_special_tokens: Any = None

    async def chains(self) -> list[Chain]:
        """Return one chain of hashes per prompt, leaving out prompts that a worker will refuse."""
        root = _Hashing(0)
        common = (
            self.model,
            self.cache_salt,
            self.extra_key,
            self.chat_template_kwargs,
            self.reasoning_effort,
            self.template_tools,
            self.system,
            self.instructions,
        )
        await _hash_all(root, _pieces(common))
        found = []
        for prompt in self._streams():
            chain = _Hashing(root.of_all)
            try:
                await _hash_all(chain, prompt)
            except (TypeError, ValueError, OverflowError):
                # The prompt has an id such as 1e9999, or an object key that is not a string.
                continue
            found.append(chain.hashes)
        return found

    @property
    def template_tools(self) -> Any:
        """The tools that the chat template gets."""
        return None if self.tool_choice in ("none", {"type": "none"}) else self.tools

    def prompts(self) -> list[Any]:
        """Return the prompts of a body that is not a chat: texts, token ids, or unusable values."""
        for value in (self.input_ids, self.text, self.prompt):
            if value is not None:
                several = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
                return value if several else [value]
        return []

    def _streams(self) -> Iterator[Iterator[bytes]]:
        if isinstance(self.messages, list):
            yield (piece for message in self.messages for piece in _pieces(message))
        if isinstance(self.input, list):
            yield (piece for item in self.input for piece in _pieces(item))
        elif isinstance(self.input, str):
            yield _text(self.input)
        yield from map(_prompt, self.prompts())


class _Hashing:
    """A chain of hashes that grows with its prompt."""

    def __init__(self, root: int) -> None:
        self.hashes: Chain = []
        self._last, self._rest = root, b""

    @property
    def of_all(self) -> int:
        """The hash of every byte so far, including those in an incomplete chunk."""
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
    done = 0
    for piece in pieces:
        into.add(piece)
        # FINE_BYTES stands for the fixed cost of a piece, so that many tiny pieces end a step too.
        done += len(piece) + FINE_BYTES
        if done >= _STEP_BYTES:
            done = 0
            await asyncio.sleep(0)


def _prompt(value: Any) -> Iterator[bytes]:
    """Yield the bytes of one prompt. A token id takes 4 bytes, both in a list and in an array."""
    if isinstance(value, str):
        yield from _text(value)
    elif isinstance(value, list):
        yield array.array("I", value).tobytes()
    elif isinstance(value, np.ndarray):
        for at in range(0, value.size, _PIECE_CHARACTERS):
            yield value[at : at + _PIECE_CHARACTERS].tobytes()


def _text(value: str) -> Iterator[bytes]:
    for at in range(0, len(value), _PIECE_CHARACTERS):
        # JSON may contain a lone surrogate, which strict UTF-8 cannot encode.
        yield value[at : at + _PIECE_CHARACTERS].encode("utf-8", "surrogatepass")


_CLOSED = object()


def _pieces(value: Any) -> Iterator[bytes]:
    """Yield bytes that identify a JSON value, whatever the order of the fields in its objects."""
    # The stack is explicit, because a generator that called itself would hand each piece on through
    # as many generators as lists and objects are open.
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
