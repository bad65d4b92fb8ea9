"""Choosing tokens: greedy, seeded, cut, and what is said about probabilities."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kvflow.serve.engine.scheduler import sampling
from kvflow.serve.engine.scheduler.params import SamplingParams
from kvflow.serve.engine.scheduler.sampling import Draw, choose, uniform


def draws(count: int, position: int = 0, **params: Any) -> list[Draw]:
    asked = SamplingParams(**params)
    return [Draw(asked, asked.seed or 0, position + i) for i in range(count)]


def test_greedy_is_the_argmax() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    found = choose(logits, draws(5, temperature=0))
    assert [c.token_id for c in found] == logits.argmax(-1).tolist()
    assert found == choose(logits, draws(5, top_k=1, temperature=3.0))
    assert found[0].logprob is None


def test_the_uniform_number_of_a_draw_never_changes() -> None:
    """Two machines, or two releases, must draw the same token."""
    assert [round(uniform(s, p), 12) for s, p in ((0, 0), (7, 3), (-1, 5))] == [
        0.506247308828,
        0.509655346368,
        0.644340964975,
    ]
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    count = 20_000
    found = choose(logits.expand(count, 5), draws(count, temperature=1.0, seed=3))
    seen = torch.bincount(torch.tensor([c.token_id for c in found]), minlength=5) / count
    assert torch.allclose(seen, torch.softmax(logits, -1), atol=0.012)
    warm = choose(logits.expand(count, 5), draws(count, temperature=2.0, seed=3))
    seen = torch.bincount(torch.tensor([c.token_id for c in warm]), minlength=5) / count
    assert torch.allclose(seen, torch.softmax(logits / 2, -1), atol=0.012)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (-1, 0.7), (4, 0.6), (2, 0.01), (500, 0.9)])
def test_cuts_keep_exactly_the_nucleus(top_k: int, top_p: float) -> None:
    """By definition: the first top_k, then the smallest set of them that reaches top_p."""
    logits = torch.linspace(3, -3, 12)[
        torch.randperm(12, generator=torch.Generator().manual_seed(5))
    ]
    order = logits.argsort(descending=True).tolist()[: top_k if top_k > 0 else None]
    chances = torch.softmax(logits[order], -1).tolist()
    nucleus = {order[i] for i in range(len(order)) if sum(chances[:i]) < top_p}
    found = choose(
        logits.expand(4000, 12), draws(4000, temperature=1.0, seed=1, top_k=top_k, top_p=top_p)
    )
    assert {c.token_id for c in found} == nucleus


@pytest.mark.parametrize("top_k", [0, 12])
def test_a_cut_of_no_tokens_or_of_all_is_none(top_k: int) -> None:
    logits = torch.linspace(3, -3, 12)
    cut, uncut = (
        choose(logits.expand(500, 12), draws(500, temperature=1.0, seed=1, top_k=k, top_p=0.9))
        for k in (top_k, -1)
    )
    assert cut == uncut and len({choice.token_id for choice in cut}) > 2


def test_a_nucleus_wider_than_the_candidates_is_still_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(2))
    asked = draws(40, temperature=1.5, seed=9, top_p=0.999) + draws(
        40, temperature=1.5, seed=9, top_k=2000
    )
    both = torch.cat([logits, logits])
    found = choose(both, asked)
    monkeypatch.setattr(sampling, "CANDIDATES", 3000)
    assert found == choose(both, asked)
    narrow = draws(40, temperature=0.3, seed=9, top_p=0.5)
    whole = choose(logits, narrow)
    monkeypatch.setattr(sampling, "CANDIDATES", 256)
    assert whole == choose(logits, narrow)


def test_a_row_is_chosen_the_same_in_any_company() -> None:
    logits = torch.randn(6, 2000, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    mixed = [
        draws(1, 4, temperature=0)[0],
        draws(1, 5, temperature=1.1, seed=1)[0],
        draws(1, 6, temperature=1.1, seed=1, top_p=0.9, logprobs=2)[0],
        draws(1, 7, temperature=0.7, seed=2, top_k=30)[0],
        draws(1, 8, temperature=1.9, seed=3, top_p=0.9999)[0],
        draws(1, 9, temperature=0, logprobs=5)[0],
    ]
    alone = [choose(logits[i : i + 1], [mixed[i]])[0] for i in range(6)]
    for order in itertools.islice(itertools.permutations(range(6)), 0, 720, 97):
        assert choose(logits[list(order)], [mixed[i] for i in order]) == [alone[i] for i in order]


def test_logprobs_are_raw() -> None:
    """Of the distribution before temperature and cuts, as OpenAI's clients expect."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(6))
    (choice,) = choose(logits, draws(1, temperature=0.2, seed=1, top_k=5, logprobs=3))
    want = torch.log_softmax(logits[0], -1)
    assert choice.logprob == pytest.approx(float(want[choice.token_id]))
    assert [t for t, _ in choice.top_logprobs] == want.topk(3).indices.tolist()
    (own,) = choose(logits, draws(1, temperature=0, logprobs=0))
    assert own.top_logprobs == () and own.logprob == pytest.approx(float(want.max()))


def test_each_row_has_as_many_top_logprobs_as_it_asks_for() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(6))
    rows = [draws(1, temperature=0, logprobs=count)[0] for count in (0, 2, None, 5)]
    assert [len(choice.top_logprobs) for choice in choose(logits, rows)] == [0, 2, 0, 5]
    assert [choice.logprob is None for choice in choose(logits, rows)] == [
        False,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-7])
def test_next_to_no_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)) * 30
    (choice,) = choose(logits, [Draw(SamplingParams(temperature=temperature, top_p=0.9), 1, 2)])
    assert choice.token_id == int(logits.argmax())
