"""Prompts of traces that Mooncake publishes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import MisuseError
from kvflow.traces import BLOCK_TOKENS, Entry, hashed_prompt, read_lines

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

    def parse(entry: Entry) -> Prompt:
        num_tokens, ids = hashed_prompt(entry)
        return Prompt(num_tokens, [numbers.setdefault(one, len(numbers)) for one in ids])

    prompts = read_lines(path, parse, limit)
    if not prompts:
        raise MisuseError(f"{path} has no prompts")
    return prompts
