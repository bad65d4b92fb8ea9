"""Traces of requests: JSON lines, in the format that Mooncake publishes, or with token ids.

Each line is an object with `timestamp` (ms), `output_length` (tokens), and either `input_length`
(tokens) with `hash_ids`, as `kvflow.traces` describes them, or `input_ids`, the prompt itself.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvflow.protocols.errors import MisuseError
from kvflow.traces import (
    BLOCK_TOKENS,
    Entry,
    check_length,
    hashed_prompt,
    integers,
    length,
    read_lines,
)


class Request(NamedTuple):
    """One request. `blocks` identify the blocks of its prompt; each id stands for its tokens and
    all that precede them.
    """

    at_s: float
    prompt_tokens: int
    new_tokens: int
    blocks: tuple[int, ...]


class Trace(NamedTuple):
    """Requests by time of arrival, from 0 on. Each block of a prompt has `block_tokens` tokens."""

    requests: list[Request]
    block_tokens: int

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its completion."""
        return max(one.prompt_tokens + one.new_tokens for one in self.requests)


def read_trace(
    path: Path,
    *,
    limit: int = 0,
    shrink: int = 1,
    speed: float = 1.0,
    block_tokens: int = BLOCK_TOKENS,
) -> Trace:
    """Return the first `limit` requests of a file (0 = all), `speed` times as fast.

    `shrink` divides all lengths, blocks included, so that a small machine can play a large trace.

    Raises: MisuseError naming the line that is wrong.
    """
    if block_tokens % shrink:
        raise MisuseError(
            f"--shrink {shrink} does not divide the {block_tokens} tokens of a block (--block)"
        )
    size = block_tokens // shrink
    # Numbers of blocks, in the order of their first use.
    numbers: dict[Any, int] = {}
    parse = partial(
        _request, shrink=shrink, speed=speed, block_tokens=block_tokens, numbers=numbers
    )
    try:
        found = read_lines(path, parse, limit)
    except OSError as error:
        raise MisuseError(f"--trace {path}: {error.strerror}") from None
    if not found:
        raise MisuseError(f"--trace {path} has no requests")
    found.sort(key=lambda one: one.at_s)
    first_s = found[0].at_s
    return Trace([one._replace(at_s=one.at_s - first_s) for one in found], size)


def _request(
    entry: Entry, *, shrink: int, speed: float, block_tokens: int, numbers: dict[Any, int]
) -> Request:
    at_ms = entry.get("timestamp")
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not 0 <= at_ms < math.inf:
        raise ValueError(f"timestamp {at_ms!r} is not a number of milliseconds from 0 on")
    new_tokens = length(entry, "output_length")
    if "input_ids" in entry:
        ids = integers(entry, "input_ids")
        prompt_tokens = len(ids)
        check_length("number of input_ids", prompt_tokens)
        # The key of a block is its own tokens after those of the blocks before it.
        blocks, before = [], -1
        for start in range(0, prompt_tokens, block_tokens):
            before = numbers.setdefault((before, *ids[start : start + block_tokens]), len(numbers))
            blocks.append(before)
    else:
        prompt_tokens, hashes = hashed_prompt(entry, block_tokens)
        blocks = [numbers.setdefault(one, len(numbers)) for one in hashes]
    return Request(
        at_ms / 1000 / speed, -(-prompt_tokens // shrink), -(-new_tokens // shrink), tuple(blocks)
    )
