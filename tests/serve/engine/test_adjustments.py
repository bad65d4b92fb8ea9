"""Penalties, biases and bans: against transformers, OpenAI's formula, and one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvflow.protocols.errors import MisuseError
from kvflow.serve.engine.model.grammars import Grammars
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.scheduler.adjustments import adjustments_of
from kvflow.serve.engine.scheduler.limits import EngineLimits
from kvflow.serve.engine.scheduler.params import MAX_BAD_WORD_TOKENS, MAX_LOGIT_BIAS, SamplingParams
from kvflow.serve.engine.scheduler.sampling import Draw, choose
from tests.serve.engine import tiny_models
from tests.serve.engine.pair import EnginePair, greedy, prompt_of
from tests.serve.engine.tiny_models import Stock

NEW = 24
PROMPT = prompt_of(30)
NO_GRAMMARS = Grammars(None, 0, frozenset())


def row(seed: int, vocabulary: int = 400) -> torch.Tensor:
    return 4 * torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed))


def draw(params: SamplingParams, tokens: list[int], prompt_length: int, *eos_ids: int) -> Draw:
    """For the next token of `tokens`, the first `prompt_length` of which are the prompt."""
    sequence = Sequence("test", tokens[:prompt_length], 100, 16)
    for token in tokens[prompt_length:]:
        sequence.append(token)
    adjustments = adjustments_of(params, sequence, frozenset(eos_ids), NO_GRAMMARS)
    return Draw(params, params.seed or 0, len(tokens), adjustments)


def theirs(stock: Stock, **options: Any) -> list[int]:
    return tiny_models.generate(stock("llama"), PROMPT, NEW, min_new_tokens=None, **options)


async def ours(model: LoadedModel, **params: Any) -> list[int]:
    async with EnginePair(model) as pair:
        return await pair.tokens(PROMPT, greedy(NEW, **params))


async def test_over_two_engines_equals_generate(llama: LoadedModel, stock: Stock) -> None:
    plain = theirs(stock)
    bad = [[plain[0]], plain[3:5], plain[8:11], [PROMPT[-1], plain[1]]]
    bias = {plain[0]: -100.0, plain[5]: 3.5, 77: 2.25}
    every: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
        ({"bad_words": tuple(map(tuple, bad))}, {"bad_words_ids": bad}),
        (
            {"logit_bias": tuple(bias.items())},
            {"sequence_bias": {(i,): b for i, b in bias.items()}},
        ),
    ]
    all_at_once: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for mine, same in [*every, all_at_once]:
        assert await ours(llama, **mine) == theirs(stock, **same) != plain
        all_at_once[0].update(mine)
        all_at_once[1].update(same)


async def test_min_new_tokens_bars_what_would_end_the_request(
    llama: LoadedModel, stock: Stock
) -> None:
    plain = theirs(stock)
    ends = (plain[0], plain[6])  # the first token, prefill's, is barred too
    for least in (1, 6, 7, 8, 15):
        found = await ours(llama, stop_token_ids=ends, min_new_tokens=least)
        ids = list(ends)
        want = tiny_models.generate(
            stock("llama"), PROMPT, NEW, eos_token_id=ids, min_new_tokens=least
        )
        assert found == want and len(found) >= least
    assert await ours(llama, stop_token_ids=ends) == plain[:1]


def test_min_new_tokens_leaves_an_ignored_eos_alone() -> None:
    logits = row(3)
    best = int(logits.argmax())
    for ignore, want in ((True, best), (False, int(logits[0].topk(2).indices[1]))):
        params = greedy(9, min_new_tokens=3, ignore_eos=ignore)
        assert choose(logits, [draw(params, [1, 2, 3], 2, best)])[0].token_id == want


@pytest.mark.parametrize(
    ("frequency", "presence"), [(0.7, 0.0), (0.0, 1.3), (-0.4, 0.9), (2.0, -2.0)]
)
async def test_frequency_and_presence_follow_openais_formula(
    llama: LoadedModel, stock: Stock, frequency: float, presence: float
) -> None:
    """mu[j] - count[j] * frequency - (count[j] > 0) * presence, over generated tokens only."""
    tokens: list[int] = []
    for _ in range(NEW):
        with torch.inference_mode():
            found = stock("llama")(torch.tensor([PROMPT + tokens])).logits[0, -1]
        logits = found.numpy().astype(np.float64)
        for token in set(tokens):
            logits[token] -= tokens.count(token) * frequency + presence
        tokens.append(int(logits.argmax()))
    assert await ours(llama, frequency_penalty=frequency, presence_penalty=presence) == tokens


def test_a_penalty_counts_every_repetition() -> None:
    logits = torch.zeros(1, 50)
    logits[0, 7], logits[0, 8] = 3.0, 1.5
    params = greedy(9, frequency_penalty=0.5)
    for count, want in ((0, 7), (2, 7), (4, 8)):
        assert choose(logits, [draw(params, [7, 7, 7, 7] + [7] * count, 4)])[0].token_id == want


@pytest.mark.parametrize(
    "cuts",
    [
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"min_p": 1e-9},
        {"min_p": 0.05, "top_k": 12},
        {"min_p": 0.02, "top_p": 0.8},
        {"min_p": 0.3, "top_p": 0.99, "top_k": 30},
    ],
)
def test_min_p_keeps_what_transformers_keeps(cuts: dict[str, Any]) -> None:
    temperature, count = 1.4, 6000
    logits = row(11, 60)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if "top_k" in cuts:
        warpers.append(TopKLogitsWarper(cuts["top_k"]))
    if "top_p" in cuts:
        warpers.append(TopPLogitsWarper(cuts["top_p"]))
    warpers.append(MinPLogitsWarper(cuts["min_p"]))
    left = warpers(torch.tensor([[1]]), logits.clone())  # type: ignore[arg-type]
    want = torch.softmax(left, dim=-1)[0]
    params = SamplingParams(temperature=temperature, seed=4, **cuts)
    found = choose(logits.expand(count, -1), [Draw(params, 4, i) for i in range(count)])
    seen = torch.bincount(torch.tensor([c.token_id for c in found]), minlength=60) / count
    assert torch.all(seen[want == 0] == 0)
    assert torch.allclose(seen, want, atol=0.02)


def test_the_other_rows_of_a_batch_are_chosen_as_without_it() -> None:
    logits = torch.cat([row(i) for i in range(8)]).to(torch.bfloat16)
    plain = [
        Draw(greedy(9), 0, 30),
        Draw(SamplingParams(seed=1), 1, 30),
        Draw(SamplingParams(seed=2, top_p=0.9, logprobs=2), 2, 30),
        Draw(greedy(9, logprobs=3), 0, 30),
    ]
    tokens = prompt_of(30)
    adjusted = [
        draw(greedy(9, frequency_penalty=1.0, logprobs=2), tokens, 20),
        draw(SamplingParams(seed=3, repetition_penalty=1.5, min_p=0.1), tokens, 20),
        draw(SamplingParams(seed=4, logit_bias=((5, 9.0),), top_k=9, logprobs=1), tokens, 20),
        draw(SamplingParams(seed=5, min_p=0.2, top_p=0.8), tokens, 20),
    ]
    alone = [choose(logits[i : i + 1], [d])[0] for i, d in enumerate([*plain, *adjusted])]
    assert choose(logits, [*plain, *adjusted]) == alone
    order = [6, 0, 5, 2, 7, 1, 4, 3]
    assert choose(logits[order], [[*plain, *adjusted][i] for i in order]) == [
        alone[i] for i in order
    ]
    raw = torch.log_softmax(logits[4].float(), -1)
    assert alone[4].logprob == float(raw[alone[4].token_id])
    assert [i for i, _ in alone[4].top_logprobs] == raw.topk(2).indices.tolist()


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"min_p": 1.5}, "min_p 1.5 is outside 0..1"),
        ({"min_p": float("nan")}, "min_p nan is outside 0..1"),
        ({"frequency_penalty": 2.1}, "frequency_penalty 2.1 is outside -2..2"),
        ({"presence_penalty": -3.0}, "presence_penalty -3.0 is outside -2..2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0 is outside 0.01..100"),
        ({"min_new_tokens": -1}, r"min_new_tokens \(min_tokens\) -1 is outside 0..128"),
        (
            {"min_new_tokens": 9, "max_new_tokens": 8},
            r"min_new_tokens \(min_tokens\) 9 is outside 0..8 \(max_new_tokens\)",
        ),
        ({"logit_bias": ((3, 101.0),)}, "logit_bias: 101.0 for token 3 is outside -100..100"),
        ({"logit_bias": ((3, float("inf")),)}, "logit_bias: inf for token 3"),
        (
            {"logit_bias": tuple((i, 1.0) for i in range(MAX_LOGIT_BIAS + 1))},
            f"logit_bias: {MAX_LOGIT_BIAS + 1} entries, limit {MAX_LOGIT_BIAS}",
        ),
        ({"bad_words": ((1,), ())}, "bad_words: a word of no tokens"),
        (
            {"bad_words": ((1, 2),) * MAX_BAD_WORD_TOKENS},
            f"bad_words: {2 * MAX_BAD_WORD_TOKENS} tokens in all, limit",
        ),
    ],
)
def test_values_out_of_range_are_named(params: dict[str, Any], text: str) -> None:
    with pytest.raises(MisuseError, match=text):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (
            {"logit_bias": ((1, 1.0), (512, 1.0))},
            r"logit_bias: token id 512 is outside the model's vocabulary, 0\.\.511",
        ),
        (
            {"bad_words": ((1, 2), (3, 900))},
            r"bad_words: token id 900 is outside the model's vocabulary, 0\.\.511",
        ),
        ({"bad_words": tuple((i,) for i in range(500))}, "may leave none of 512 tokens"),
    ],
)
async def test_ids_that_the_model_does_not_have(
    llama: LoadedModel, params: dict[str, Any], text: str
) -> None:
    with pytest.raises(MisuseError, match=text):
        EngineLimits(512, 512, 16, 100).check_sampling(PROMPT, SamplingParams(**params))
    async with EnginePair(llama) as pair:
        for engine in (pair.prefill, pair.decode):
            with pytest.raises(MisuseError, match=text):
                engine.check(PROMPT, SamplingParams(**params))


def test_ids_beyond_the_logits_are_never_generated_anyway() -> None:
    """An embedding may be larger than the output layer."""
    logits = row(1, 100)
    params = greedy(
        9, logit_bias=((150, 5.0),), bad_words=((120,), (3, 140)), repetition_penalty=1.2
    )
    (choice,) = choose(logits, [draw(params, [130, 5], 1)])
    assert choice.token_id == int(logits.argmax())


@pytest.mark.parametrize(("ids", "outside"), [([-1, 5], -1), ([5, 512], 512)])
def test_the_least_and_the_greatest_token_id_are_looked_at(ids: list[int], outside: int) -> None:
    limits = EngineLimits(512, 512, 16, 100)
    said = rf"token id {outside} is outside the model's vocabulary, 0\.\.511"
    with pytest.raises(MisuseError, match=f"prompt: {said}"):
        limits.check_prompt(ids)
    with pytest.raises(MisuseError, match=f"token_ids_logprob: {said}"):
        limits.check_sampling(PROMPT, SamplingParams(logprobs=1, logprob_token_ids=tuple(ids)))
