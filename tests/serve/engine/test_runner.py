"""One forward over a mix of rows: what it writes, and that company changes nothing in fp32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvflow.memory.pool import PagedPool
from kvflow.protocols.pages.layout import Order, PageIndices
from kvflow.serve.engine.model.load import LoadedModel, load_model
from kvflow.serve.engine.model.runner import hidden_size_of
from kvflow.serve.engine.model.step import Row
from tests.serve.engine.pair import poisoned_pool, prompt_of, sequence_of
from tests.serve.engine.tiny_models import Loaded, Tiny

PAGE = 4


def others(pool: PagedPool, mine: list[int]) -> PageIndices:
    return np.setdiff1d(
        np.arange(pool.layout.num_pages, dtype=np.int32), np.array(mine, dtype=np.int32)
    )


def test_hidden_states_are_not_to_be_had_where_nothing_linear_reads_them(
    llama: LoadedModel,
) -> None:
    for output, size in (
        (llama.model.get_output_embeddings(), 64),
        (torch.nn.Identity(), 0),
        (None, 0),
    ):
        model: Any = SimpleNamespace(get_output_embeddings=lambda output=output: output)
        assert hidden_size_of(model) == size


def test_a_stage_that_is_not_the_last_has_no_logits(stages: list[LoadedModel]) -> None:
    first = stages[0]
    first.neighbours.begin(1)
    pool = poisoned_pool(first, 4)
    assert first.runner(pool).forward([Row(sequence_of(prompt_of(6), [0, 1]), 6)]).shape[0] == 0
    pool.close()


def test_a_model_does_not_attend_outside_of_a_step(llama: LoadedModel) -> None:
    """Not even after one: it would read the pages of that step's sequences."""
    pool = poisoned_pool(llama, 4)
    llama.runner(pool).forward([Row(sequence_of(prompt_of(6), [0, 1]), 6)])
    with pytest.raises(
        RuntimeError, match="the attention function kvflow was called outside a step"
    ):
        llama.model(input_ids=torch.tensor([[1, 2]]))
    pool.close()


@pytest.mark.parametrize("order", ["page_first", "layer_first"])
@pytest.mark.parametrize("family", ["gemma2", "deepseek_v2", "gpt2", "bloom"])
def test_a_step_touches_its_own_slots_only(family: str, order: Order, loaded: Loaded) -> None:
    """All else is NaN before and after. gemma2 has windows of 16 tokens in rows."""
    model = loaded(family)
    pool = poisoned_pool(model, 20, order=order, num_rows=5)
    runner = model.runner(pool)
    a, b = sequence_of(prompt_of(10), [7, 3, 12], 4), sequence_of(prompt_of(6, 1), [1, 18], 1)
    logits = runner.forward([Row(a, 9, 0), Row(b, 6)])
    assert logits.shape == (1, 512) and bool(torch.isfinite(logits).all())
    a.computed, b.computed = 9, 6
    b.append(int(logits[0].argmax()))
    mixed = runner.forward([Row(a, 1), Row(b, 1)])
    assert mixed.shape == (2, 512) and bool(torch.isfinite(mixed).all())
    for component in pool.layout.components:
        values = pool.tensor(component.name)
        if component.space:
            assert bool(torch.isnan(values[[0, 2, 3]]).all())
            for row, tokens in ((4, 10), (1, 7)):
                assert not bool(torch.isnan(values[row, :tokens]).any()) and bool(
                    torch.isnan(values[row, tokens:]).all()
                )
            continue
        assert bool(torch.isnan(values[others(pool, [7, 3, 12, 1, 18])]).all())
        assert bool(torch.isnan(values[12, 2:]).all()) and bool(torch.isnan(values[18, 3:]).all())
        assert not bool(torch.isnan(values[[7, 3]]).any()) and not bool(
            torch.isnan(values[18, :3]).any()
        )


@pytest.mark.parametrize("attention", ["packed", "pad"])
@pytest.mark.parametrize("family", ["mistral", "gemma3", "mixtral"])
def test_chunks_and_company_change_nothing_in_fp32(family: str, attention: str, tiny: Tiny) -> None:
    model = load_model(str(tiny(family)), attention=attention)
    assert model.mode == attention
    prompts = [prompt_of(n, n) for n in (30, 7, 1, 19)]

    def run(groups: list[list[int]], chunk: int) -> torch.Tensor:
        pool = poisoned_pool(model, 40)
        runner = model.runner(pool)
        pages = np.random.default_rng(1).permutation(40).tolist()
        needed = [-(-len(p) // PAGE) for p in prompts]
        sequences = [
            sequence_of(p, [pages.pop() for _ in range(needed[i])], i)
            for i, p in enumerate(prompts)
        ]
        found: dict[int, torch.Tensor] = {}
        for group in groups:
            while rows := [
                (i, Row(s, min(chunk, s.length - s.computed)))
                for i in group
                if (s := sequences[i]).computed < s.length
            ]:
                logits = runner.forward([row for _, row in rows])
                for (i, row), one in zip(rows, logits, strict=True):
                    found[i] = one
                    sequences[i].computed += row.new
        return torch.stack([found[i] for i in range(len(prompts))])

    alone = run([[0], [1], [2], [3]], 100)
    assert torch.allclose(run([[0, 1, 2, 3]], 5), alone, atol=2e-3, rtol=1e-3)
    assert torch.allclose(run([[3, 1], [2, 0]], 100), alone, atol=2e-3, rtol=1e-3)


def test_a_step_without_logits_computes_none(llama: LoadedModel) -> None:
    runner = llama.runner(poisoned_pool(llama, 8))
    assert runner.forward([Row(sequence_of(prompt_of(9), [0, 1, 2]), 8, False)]).shape[0] == 0
