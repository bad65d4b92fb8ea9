"""The format in which Mooncake publishes traces of requests.

Each line is a JSON object. `input_length` is the length of a prompt in tokens, and `hash_ids` has
one id for each block of it, 512 tokens unless said otherwise. Prompts that begin with the same ids
begin with the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvflow.protocols.errors import MisuseError

BLOCK_TOKENS = 512
_MOST_TOKENS = 1 << 30
Entry = dict[str, Any]
T = TypeVar("T")


class Hashed(NamedTuple):
    """A prompt's length, and the ids of its blocks as the line has them."""

    num_tokens: int
    hash_ids: list[int]


def read_lines(path: Path, parse: Callable[[Entry], T], limit: int = 0) -> list[T]:
    """Return what `parse` makes of the first `limit` lines; 0 takes all. Empty lines are no lines.

    Raises: OSError, MisuseError naming a line that is no object, or for which `parse` raises
    ValueError.
    """
    found: list[T] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if limit and len(found) == limit:
                break
            try:
                found.append(parse(_object(line)))
            except ValueError as error:
                raise MisuseError(f"{path}, line {number}: {error}") from None
    return found


def hashed_prompt(entry: Entry, block_tokens: int = BLOCK_TOKENS) -> Hashed:
    """Return the prompt of a line. Raises: ValueError."""
    tokens, ids = length(entry, "input_length"), integers(entry, "hash_ids")
    if len(ids) != (needed := -(-tokens // block_tokens)):
        raise ValueError(
            f"{len(ids)} hash_ids for {tokens} tokens, which are {needed} blocks of {block_tokens}"
        )
    return Hashed(tokens, ids)


def length(entry: Entry, name: str) -> int:
    """Return a number of tokens. Raises: ValueError."""
    value = entry.get(name)
    check_length(name, value)
    return int(value)  # type: ignore[arg-type]


def check_length(name: str, value: Any) -> None:
    """Raises: ValueError if `value` is not a number of tokens."""
    # True and False are instances of int, so `isinstance` would accept them.
    if type(value) is not int or not 1 <= value <= _MOST_TOKENS:
        raise ValueError(f"{name} {value!r} is not a number in 1..{_MOST_TOKENS}")


def integers(entry: Entry, name: str) -> list[int]:
    """Return a list of integers. Raises: ValueError."""
    found = entry.get(name)
    if not isinstance(found, list) or not all(type(one) is int for one in found):
        raise ValueError(f"{name} is not a list of integers")
    return found


def _object(line: bytes) -> Entry:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError("not a JSON object")
    return entry
