"""Token parity of two engines: float32 against `generate`, bfloat16 against one process.

Batching alone flips bfloat16 tokens in stock transformers, so both must have the same batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvflow.protocols.pages.components import Component
from kvflow.protocols.pages.layout import Order
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.scheduler.params import SamplingParams, TokenOut
from tests.serve.engine import tiny_models
from tests.serve.engine.pair import EnginePair, greedy, one_batch, prompt_of
from tests.serve.engine.single import one_process
from tests.serve.engine.tiny_models import Generated, Loaded, Stock

CHUNK = 40
NEW = 20
USUAL = ("llama", "gemma3", "deepseek_v3")  # a family of each kind of attention
BESIDES = [pytest.mark.slow, pytest.mark.soak]
MATRIX: tuple[tuple[int, Order], ...] = ((1, "page_first"), (16, "layer_first"), (64, "page_first"))


def lengths(page: int) -> list[int]:
    """One token, one page and its neighbours, many pages, more than one chunk; 16 in all."""
    around = [page - 1, page, page + 1, 3 * page - 1, 3 * page, 3 * page + 1, 7 * page]
    found = sorted({1, CHUNK, CHUNK + 1, 2 * CHUNK + 7, 150, *(n for n in around if 0 < n < 300)})
    return [*found, 5, 23, 37, 50, 64, 90, 111, 130, 17, 44][:16]


async def compare(
    family: str, page: int, orders: tuple[Order, Order], loaded: Loaded, generated: Generated
) -> None:
    prompts = [prompt_of(n, salt) for salt, n in enumerate(lengths(page))]
    async with EnginePair(
        loaded(family),
        page_size=page,
        num_pages=16 * 320 // page,
        orders=orders,
        chunk_tokens=CHUNK,
        max_batch_tokens=64,
    ) as pair:
        found = await pair.tokens_of_all(prompts, greedy(NEW))
        assert any(len(room.sends) > 2 for room in pair.rooms), "no prompt was longer than a chunk"
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == generated(family, prompt, NEW, tokens), f"prompt of {len(prompt)} tokens"
    assert len({tuple(t) for t in found}) == len(prompts)


@pytest.mark.parametrize(
    ("family", "page", "orders"),
    [
        *((f, 16, ("page_first", "layer_first")) for f in (*tiny_models.FAMILIES, "bloom")),
        ("llama", 1, ("layer_first", "page_first")),
        ("deepseek_v3", 64, ("layer_first", "page_first")),
    ],
)
async def test_fp32_equals_generate(
    family: str, page: int, orders: tuple[Order, Order], loaded: Loaded, generated: Generated
) -> None:
    await compare(family, page, orders, loaded, generated)


def test_a_wrong_draft_is_not_taken_for_what_a_model_generates(stock: Stock) -> None:
    """Otherwise no test of parity that passes its tokens as a draft could fail."""
    model, prompt = stock("llama"), prompt_of(CHUNK)
    want = tiny_models.generate(model, prompt, NEW)
    assert tiny_models.would_generate(model, prompt, want)
    wrong = [(token + 1) % model.config.vocab_size for token in want]
    for place, token in enumerate(wrong):
        draft = [*want[:place], token, *want[place + 1 :]]
        assert not tiny_models.would_generate(model, prompt, draft)
    assert Generated(stock)("llama", prompt, NEW, wrong) == want


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "page", "order"),
    [
        pytest.param(*(family, page, order), marks=() if page == 16 else pytest.mark.soak)
        for family in (*tiny_models.FAMILIES, *tiny_models.CORNERS)
        for page, order in MATRIX
        # Pages of 16 tokens, in both orders, are tried above.
        if page != 16 or family in tiny_models.CORNERS
    ],
)
async def test_fp32_matrix(
    family: str, page: int, order: Order, loaded: Loaded, generated: Generated
) -> None:
    await compare(family, page, (order, order), loaded, generated)


LOST: dict[str, Callable[[Component], bool]] = {
    "all": lambda component: True,
    "indexer": lambda component: component.name.endswith("index_k"),
    "row": lambda component: component.space > 0,
    "page": lambda component: component.space == 0,
}
HYBRID = ("gpt_oss", "gemma2", "gemma3", "gemma4_shared_kv")


@pytest.mark.parametrize(
    ("family", "lost"),
    [
        *((family, "all") for family in tiny_models.FAMILIES),
        *((family, "indexer") for family in tiny_models.INDEXED),
        *((family, "row") for family in (*tiny_models.STATEFUL, *HYBRID)),
        *((family, "page") for family in HYBRID),
    ],
)
async def test_a_zeroed_place_changes_the_output(
    family: str, lost: str, loaded: Loaded, generated: Generated
) -> None:
    """The negative control: parity would not notice pages, or a row, that nobody reads."""
    prompt = prompt_of(60)
    async with EnginePair(loaded(family)) as pair:
        assert any(map(LOST[lost], pair.target.pool.layout.components))
        tokens = await pair.spoiled(prompt, NEW, LOST[lost])
    whole = generated(family, prompt, NEW)
    # The first token is prefill's; those of decode show what was lost.
    assert tokens[0] == whole[0] and tokens != whole


async def single(
    model: LoadedModel, prompts: list[list[int]], params: SamplingParams
) -> list[list[TokenOut]]:
    async with one_process(model, 256, chunk_tokens=CHUNK, max_batch_rooms=1) as (engine, _):

        async def one(prompt: list[int]) -> list[TokenOut]:
            return [out async for out in engine.generate(prompt, params)]

        return await one_batch(engine.decode, [one(prompt) for prompt in prompts])


async def equals_one_process(
    model: LoadedModel, prompts: list[list[int]], params: SamplingParams
) -> list[list[TokenOut]]:
    async with EnginePair(model, chunk_tokens=CHUNK, max_batch_rooms=1) as pair:
        found = await pair.together(prompts, params)
    assert found == await single(model, prompts, params)
    return found


# No layer looks at which of the two it has, so float16 is for one family of each kind.
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(
            pytest.param(family, "bfloat16", marks=() if family in USUAL else pytest.mark.slow)
            for family in tiny_models.FAMILIES
        ),
        *(
            pytest.param(family, "float16", marks=() if family == "llama" else BESIDES)
            for family in ("llama", "gemma3", "mixtral", "deepseek_v3")
        ),
    ],
)
async def test_half_precision_equals_one_process_bit_for_bit(
    family: str, dtype: str, loaded: Loaded
) -> None:
    model = loaded(family, dtype)
    params = greedy(NEW, logprobs=3)
    many = [prompt_of(n, n) for n in (1, 15, 16, 17, 40, 41, 90, 150)]
    for prompts in ([prompt_of(33)], many):
        await equals_one_process(model, prompts, params)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.soak), "bfloat16"])
async def test_seeded_sampling_equals_one_process(dtype: str, loaded: Loaded) -> None:
    model = loaded("qwen3", dtype)
    prompts = [prompt_of(n, n) for n in (3, 16, 41)]
    texts = []
    options: tuple[dict[str, Any], ...] = (
        {},
        {"top_k": 20},
        {"top_p": 0.9},
        {"top_k": 40, "top_p": 0.8},
        {"min_p": 0.05},
        {"frequency_penalty": 1.0, "presence_penalty": 0.5, "top_p": 0.9},
        {"repetition_penalty": 1.4, "logit_bias": ((9, 4.0),), "min_p": 0.02, "top_k": 50},
        {
            "bad_words": ((11,), (12, 13)),
            "min_new_tokens": 5,
            "stop_token_ids": tuple(range(20, 60)),
        },
    )
    for n, more in enumerate(options):
        params = SamplingParams(temperature=1.3, seed=7 + n, max_new_tokens=NEW, logprobs=1, **more)
        found = await equals_one_process(model, prompts, params)
        texts += [tuple(out.token_id for out in outs) for outs in found]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.95},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_p": 0.01},
    ],
    ids=str,
)
async def test_company_does_not_change_a_request_in_fp32(
    options: dict[str, Any], llama: LoadedModel, generated: Generated
) -> None:
    def params(seed: int) -> SamplingParams:
        return SamplingParams(seed=seed, max_new_tokens=NEW, **options)

    prompt, others = prompt_of(30), [prompt_of(n, n) for n in (9, 31, 70)]
    async with EnginePair(llama) as pair:
        alone = await pair.tokens(prompt, params(-5))
        among, found = await asyncio.gather(
            pair.tokens(prompt, params(-5)), pair.tokens_of_all(others, greedy(NEW))
        )
        other = await pair.tokens(prompt, params(6))
    assert alone == among != other
    assert found == [generated("llama", one, NEW) for one in others]


async def test_logprobs_are_those_of_the_stock_model(llama: LoadedModel, stock: Stock) -> None:
    prompt = prompt_of(21)
    async with EnginePair(llama) as pair:
        outs = await pair.outputs(prompt, greedy(6, logprobs=4))
    tokens = [out.token_id for out in outs]
    with torch.inference_mode():
        logits = stock("llama")(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    want = torch.log_softmax(logits.float(), dim=-1)
    for out, row in zip(outs, want, strict=True):
        assert out.logprob == pytest.approx(float(row[out.token_id]), abs=1e-4)
        assert [t for t, _ in out.top_logprobs] == row.topk(4).indices.tolist()
        assert out.top_logprobs[0] == (out.token_id, out.logprob)
