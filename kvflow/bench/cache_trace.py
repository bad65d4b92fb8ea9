"""Traces of prompts, in the format in which Mooncake publishes them.

Each line of a trace is a JSON object with an `input_length` in tokens and `hash_ids`, one for each
block of 512 tokens. Prompts that begin with the same ids begin with the same tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import MisuseError

BLOCK_TOKENS = 512
NAMED = ("conversation", "synthetic")
PUBLISHED = "the repository kvcache-ai/Mooncake on GitHub, folder FAST25-release/traces"
TRACES_VARIABLE = "KVFLOW_TRACES"
_OFFSETS = np.arange(BLOCK_TOKENS, dtype=np.int64)


class Prompt(NamedTuple):
    """One prompt of a trace. Blocks are numbered in the order of their first use in the trace."""

    num_tokens: int
    blocks: list[int]

    def tokens(self) -> NDArray[np.int64]:
        """Return token ids, int64 [num_tokens]; no two blocks share an id."""
        spread = np.array(self.blocks, np.int64)[:, None] * BLOCK_TOKENS + _OFFSETS
        return spread.reshape(-1)[: self.num_tokens]


def find_trace(name: str, folder: Path | None) -> Path:
    """Return the path of a trace: the file `name`, or the file of a known trace in `folder`.

    Raises: MisuseError if there is no such file.
    """
    if name not in NAMED:
        if not Path(name).is_file():
            raise MisuseError(
                f"--trace {name}: no such file, and no known name ({', '.join(NAMED)})"
            )
        return Path(name)
    path = None if folder is None else folder / f"{name}_trace.jsonl"
    if path is None or not path.is_file():
        if path:
            missing = f"{path} is not there"
        else:
            missing = f"neither --traces DIR nor {TRACES_VARIABLE} is given"
        raise MisuseError(
            f"--trace {name}: {missing}; {name}_trace.jsonl is published in {PUBLISHED}"
        )
    return path


def read_trace(path: Path, limit: int = 0) -> list[Prompt]:
    """Return the first `limit` prompts of a file; 0 returns all.

    Raises: MisuseError naming the line that is wrong.
    """
    numbers: dict[int, int] = {}
    prompts: list[Prompt] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if limit and len(prompts) == limit:
                break
            try:
                length, ids = _parse(line)
            except ValueError as error:
                raise MisuseError(f"{path}, line {number}: {error}") from None
            prompts.append(Prompt(length, [numbers.setdefault(one, len(numbers)) for one in ids]))
    if not prompts:
        raise MisuseError(f"{path} has no prompts")
    return prompts


def _parse(line: bytes) -> tuple[int, list[int]]:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError("not a JSON object")
    length, ids = entry.get("input_length"), entry.get("hash_ids")
    # True and False are instances of int, so `isinstance` would accept them as lengths.
    if type(length) is not int or length < 1:
        raise ValueError(f"input_length {length!r} is not a number of at least 1")
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise ValueError("hash_ids is not a list of integers")
    if len(ids) != (needed := -(-length // BLOCK_TOKENS)):
        raise ValueError(
            f"{len(ids)} hash_ids for {length} tokens, which are {needed} blocks of {BLOCK_TOKENS}"
        )
    return length, ids
