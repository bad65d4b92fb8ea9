"""Traces: what a line may say, and which blocks prompts have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvflow.plan.trace import Trace, read_trace
from kvflow.protocols.errors import MisuseError


def entry(**fields: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]} | fields


def written(path: Path, *entries: dict[str, Any] | str, **options: Any) -> Trace:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in entries]
    (path / "trace").write_text("\n".join(lines))
    return read_trace(path / "trace", **options)


def test_blocks_are_numbered_and_times_begin_at_zero(tmp_path: Path) -> None:
    late = entry(timestamp=3500, hash_ids=[7, 1])
    trace = written(tmp_path, late, "", entry(timestamp=1500))
    assert [one.at_s for one in trace.requests] == [0.0, 2.0]
    first, second = (one.blocks for one in trace.requests)
    assert first[0] == second[0] and first[1] != second[1]
    assert (trace.block_tokens, trace.longest) == (512, 605)


def test_a_small_machine_plays_shorter_and_slower(tmp_path: Path) -> None:
    entries = entry(), entry(timestamp=1000)
    trace = written(tmp_path, *entries, shrink=32, speed=0.5)
    assert trace.block_tokens == 16
    (_, (at_s, prompt, new, blocks)) = trace.requests
    assert (at_s, prompt, new, len(blocks)) == (2.0, 19, 1, 2)
    assert len(written(tmp_path, *entries, limit=1).requests) == 1
    with pytest.raises(MisuseError, match="--shrink 3 does not divide the 512 tokens of a block"):
        written(tmp_path, *entries, shrink=3)


def test_prompts_may_be_given_as_they_are(tmp_path: Path) -> None:
    """A block is the same only after the same blocks."""
    prompts = [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [9, 9, 3, 4]
    plain = [{"timestamp": 0, "output_length": 1, "input_ids": ids} for ids in prompts]
    trace = written(tmp_path, *plain, block_tokens=2)
    a, b, c = (one.blocks for one in trace.requests)
    assert (len(a), len(b), len(c)) == (3, 3, 2)
    assert a[:2] == b[:2] and a[2] != b[2]
    assert not set(a) & set(c)
    assert [one.prompt_tokens for one in trace.requests] == [5, 5, 4]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: not a JSON object"),
        (entry(timestamp=-1), "line 2: timestamp -1 is not a number of milliseconds"),
        (entry(timestamp=True), "line 2: timestamp True"),
        (entry(timestamp=float("nan")), "line 2: timestamp nan"),
        (entry(input_length=0), r"line 2: input_length 0 is not a number in 1\.\."),
        (entry(input_length=1 << 40), "line 2: input_length 1099511627776"),
        (entry(output_length=None), "line 2: output_length None"),
        (entry(hash_ids="x"), "line 2: hash_ids is not a list of integers"),
        (entry(hash_ids=[1.5, 2]), "line 2: hash_ids is not a list of integers"),
        (entry(hash_ids=[1]), "line 2: 1 hash_ids for 600 tokens, which are 2 blocks of 512"),
        (entry(input_ids=[]), "line 2: number of input_ids 0"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: dict[str, Any] | str, said: str) -> None:
    with pytest.raises(MisuseError, match=said):
        written(tmp_path, entry(), line)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="No such file"):
        read_trace(tmp_path / "nothing")
    with pytest.raises(MisuseError, match="has no requests"):
        written(tmp_path, "")
