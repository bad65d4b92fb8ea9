"""Models that keep more than K and V: prefill in one process, decode in another, sockets and shared
memory between.

Token parity with stock transformers, also when every request leaves the pool in mid-decode and
comes back; and what is lost on the way shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvflow.serve.engine.model.probe import RINGS
from tests.e2e.parity_pair import CHUNKS, Model, ProcessPair
from tests.serve.engine import tiny_models
from tests.serve.engine.pair import prompt_of

NEW = 16
CHUNK = CHUNKS["chunk_tokens"]
GREEDY = {"temperature": 0, "max_new_tokens": NEW}
FAMILIES = [*tiny_models.INDEXED, *tiny_models.STATEFUL]
WINDOWED = ["gpt_oss", *(pytest.param(f, marks=pytest.mark.soak) for f in ("gemma3", "mistral"))]
PAGES = [16, pytest.param(64, marks=pytest.mark.soak)]
Tiny = Callable[[str], Path]
Expected = Callable[[str, list[int], int], list[int]]

# One pair of processes for this module and test_parity.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("parity")]


def prompts_for(page: int) -> list[list[int]]:
    """Eight: one token, one more than the indexers choose, the edges of a chunk and of a page (of
    16 tokens, which are a window of gpt_oss), and many of both."""
    return [
        prompt_of(n, n)
        for n in (1, 9, CHUNK, CHUNK + 1, page - 1, page, page + 1, 2 * page + CHUNK)
    ]


def run(model: Model, prompts: list[list[int]], **how: Any) -> list[list[int]]:
    _, decode = model.run(prompts, GREEDY, **how)
    assert decode["retracts"] >= len(prompts) * how.get("retract", False)
    return [[out["token_id"] for out in outs] for outs in decode["outs"]]


def check(model: Model, family: str, zero: tuple[int, str], expected: Expected) -> None:
    """Eight requests at once, also when all of them leave the pool in mid-decode, and the last one
    when what `zero` names is lost."""
    prompts = prompts_for(model.page_size)
    wanted = [expected(family, prompt, NEW) for prompt in prompts]
    assert len({tuple(tokens) for tokens in wanted}) == len(prompts) == 8
    assert run(model, prompts) == wanted
    assert run(model, prompts, lockstep=True, retract=True) == wanted
    spoiled = run(model, prompts[-1:], zero=zero)[0]
    assert spoiled[0] == wanted[-1][0] and spoiled != wanted[-1], "nobody reads what was lost"


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_at_once_equal_generate(
    family: str, page: int, pair: ProcessPair, tiny: Tiny, expected: Expected
) -> None:
    with pair.open(tiny(family), page_size=page, orders=("page_first", "layer_first")) as model:
        streams = "index_k" if family in tiny_models.INDEXED else "0" if model.row_bytes else ""
        check(model, family, (0, streams), expected)


@pytest.mark.parametrize("rings", ["always", "never"])
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("family", WINDOWED)
def test_windows_in_rows_and_in_pages(
    family: str, page: int, rings: str, pair: ProcessPair, tiny: Tiny, expected: Expected
) -> None:
    orders = ("page_first", "layer_first")
    with pair.open(tiny(family), page_size=page, orders=orders, sliding_window_rows=rings) as model:
        assert bool(model.row_bytes) == (rings == "always")
        check(model, family, (-1, RINGS if model.row_bytes else ""), expected)
