"""Traces of requests: JSON lines, in the format that Mooncake publishes, or with token ids.

Each line is an object with `timestamp` (ms), `output_length` (tokens), and either `input_length`
(tokens) with `hash_ids`, or `input_ids`, the prompt itself. There is one hash id for each block of
the prompt, 512 tokens unless said otherwise; prompts that begin with the same ids begin with the
same tokens.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from kvflow.protocols.errors import MisuseError

BLOCK_TOKENS = 512
_MOST_TOKENS = 1 << 30


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
    numbers: dict[Any, int] = {}
    found: list[Request] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip() or (limit and len(found) == limit):
                    continue
                try:
                    found.append(_parse(line, shrink, speed, block_tokens, numbers))
                except ValueError as error:
                    raise MisuseError(f"{path}, line {number}: {error}") from None
    except OSError as error:
        raise MisuseError(f"--trace {path}: {error.strerror}") from None
    if not found:
        raise MisuseError(f"--trace {path} has no requests")
    found.sort(key=lambda one: one.at_s)
    first_s = found[0].at_s
    return Trace([one._replace(at_s=one.at_s - first_s) for one in found], size)


def _parse(
    line: bytes, shrink: int, speed: float, block_tokens: int, numbers: dict[Any, int]
) -> Request:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError("not a JSON object")
    at_ms = entry.get("timestamp")
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not 0 <= at_ms < math.inf:
        raise ValueError(f"timestamp {at_ms!r} is not a number of milliseconds from 0 on")
    new_tokens = _length(entry, "output_length")
    if "input_ids" in entry:
        ids = _integers(entry, "input_ids")
        prompt_tokens = len(ids)
        _check_length("number of input_ids", prompt_tokens)
        # The key of a block is its own tokens after those of the blocks before it.
        keys, before = [], -1
        for start in range(0, prompt_tokens, block_tokens):
            before = numbers.setdefault((before, *ids[start : start + block_tokens]), len(numbers))
            keys.append(before)
        blocks = tuple(keys)
    else:
        prompt_tokens, hashes = _length(entry, "input_length"), _integers(entry, "hash_ids")
        if len(hashes) != (needed := -(-prompt_tokens // block_tokens)):
            raise ValueError(
                f"{len(hashes)} hash_ids for {prompt_tokens} tokens, which are {needed} blocks of "
                f"{block_tokens}"
            )
        blocks = tuple(numbers.setdefault(one, len(numbers)) for one in hashes)
    return Request(
        at_ms / 1000 / speed, -(-prompt_tokens // shrink), -(-new_tokens // shrink), blocks
    )


def _length(entry: dict[str, Any], name: str) -> int:
    value = entry.get(name)
    _check_length(name, value)
    return int(value)  # type: ignore[arg-type]


def _check_length(name: str, value: Any) -> None:
    # True and False are instances of int, so `isinstance` would accept them.
    if type(value) is not int or not 1 <= value <= _MOST_TOKENS:
        raise ValueError(f"{name} {value!r} is not a number in 1..{_MOST_TOKENS}")


def _integers(entry: dict[str, Any], name: str) -> list[int]:
    found = entry.get(name)
    if not isinstance(found, list) or not all(type(one) is int for one in found):
        raise ValueError(f"{name} is not a list of integers")
    return found
