"""Token parity: two engines, two pools, whatever the family. fp32 against `generate`, bf16 against
one process.

(bf16: batching alone flips tokens in stock transformers, so what is compared must have the same
batch composition.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvflow.aio import Threads
from kvflow.protocols.pages.layout import Order
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.scheduler.params import SamplingParams, TokenOut
from tests.engine import tiny_models
from tests.engine.pair import EnginePair, FakeRoom, Side, greedy, prompt_of, until
from tests.engine.single import SingleEngine

CHUNK = 40
NEW = 20
MATRIX: tuple[tuple[int, Order], ...] = ((1, "page_first"), (16, "layer_first"), (64, "page_first"))
Loader = Callable[..., LoadedModel]

_expected: dict[tuple[str, tuple[int, ...], int], list[int]] = {}


def expected(family: str, stock: Any, prompt: list[int], count: int) -> list[int]:
    key = (family, tuple(prompt), count)
    if key not in _expected:
        _expected[key] = tiny_models.generate(stock, prompt, count)
    return _expected[key]


def lengths(page: int) -> list[int]:
    """One token, one page and its neighbours, many pages, more than one chunk; 16 in all."""
    around = [page - 1, page, page + 1, 3 * page - 1, 3 * page, 3 * page + 1, 7 * page]
    found = sorted({1, CHUNK, CHUNK + 1, 2 * CHUNK + 7, 150, *(n for n in around if 0 < n < 300)})
    return [*found, 5, 23, 37, 50, 64, 90, 111, 130, 17, 44][:16]


async def compare(
    model: LoadedModel, stock: Any, family: str, page: int, orders: tuple[Order, Order]
) -> None:
    prompts = [prompt_of(n, salt) for salt, n in enumerate(lengths(page))]
    async with EnginePair(
        model,
        page_size=page,
        num_pages=16 * 320 // page,
        orders=orders,
        chunk_tokens=CHUNK,
        max_batch_tokens=64,
    ) as pair:
        found = await asyncio.gather(*(pair.tokens(p, greedy(NEW)) for p in prompts))
        await until(lambda: pair.home)
        assert any(len(room.sends) > 2 for room in pair.rooms), "no prompt was longer than a chunk"
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == expected(family, stock, prompt, NEW), f"prompt of {len(prompt)} tokens"
    assert len({tuple(t) for t in found}) == len(prompts)


@pytest.mark.parametrize("family", [*tiny_models.FAMILIES, "bloom"])
async def test_fp32_equals_generate(
    family: str, loaded: Loader, stock: Callable[[str], Any]
) -> None:
    await compare(loaded(family), stock(family), family, 16, ("page_first", "layer_first"))


@pytest.mark.parametrize(("family", "page"), [("llama", 1), ("deepseek_v3", 64)])
async def test_fp32_other_page_sizes(
    family: str, page: int, loaded: Loader, stock: Callable[[str], Any]
) -> None:
    await compare(loaded(family), stock(family), family, page, ("layer_first", "page_first"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "page", "order"),
    [
        pytest.param(
            *(family, page, order),
            marks=() if page == 16 else pytest.mark.soak,
        )
        for family in (*tiny_models.FAMILIES, *tiny_models.CORNERS)
        for page, order in MATRIX
        # Pages of 16 tokens, in both orders, are tried above.
        if page != 16 or family in tiny_models.CORNERS
    ],
)
async def test_fp32_matrix(
    family: str, page: int, order: Order, loaded: Loader, stock: Callable[[str], Any]
) -> None:
    await compare(loaded(family), stock(family), family, page, (order, order))


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
async def test_a_zeroed_page_changes_the_output(
    family: str, loaded: Loader, stock: Callable[[str], Any]
) -> None:
    """The negative control: parity would not notice pages, or a row, that nobody reads."""
    prompt = prompt_of(60)
    async with EnginePair(loaded(family)) as pair:

        def spoil(room: FakeRoom) -> None:
            def zero() -> None:
                places = pair.target.pool.layout.split(room.pages)
                for component in pair.target.pool.layout.components:
                    place = places.rows[0] if component.in_rows else places.pages[-1]
                    pair.target.pool.tensor(component.name)[int(place)] = 0

            room.on_landed = zero

        pair.on_room = spoil
        tokens = await pair.tokens(prompt, greedy(NEW))
    whole = expected(family, stock(family), prompt, NEW)
    assert tokens[0] == whole[0], "the first token is prefill's"
    assert tokens != whole


async def together(
    pair: EnginePair, prompts: list[list[int]], params: SamplingParams
) -> list[list[TokenOut]]:
    """All in one batch, from their first decode step to the last."""
    pair.decode.pause()
    running = [asyncio.ensure_future(pair.outputs(p, params)) for p in prompts]
    await until(lambda: pair.decode.load().running == len(prompts))
    pair.decode.resume()
    return list(await asyncio.gather(*running))


async def single(
    model: LoadedModel, prompts: list[list[int]], params: SamplingParams
) -> list[list[TokenOut]]:
    side = Side(model, 256, 16, "page_first")
    executor = Threads("model")
    engine = SingleEngine(
        model, side.pool, side.pages, executor, chunk_tokens=CHUNK, max_batch_rooms=1
    )
    await engine.start()

    async def one(prompt: list[int]) -> list[TokenOut]:
        return [out async for out in engine.generate(prompt, params)]

    engine.decode.pause()
    running = [asyncio.ensure_future(one(p)) for p in prompts]
    await until(lambda: engine.decode.load().running == len(prompts))
    engine.decode.resume()
    found = list(await asyncio.gather(*running))
    await engine.close()
    executor.close()
    assert side.pages.at_rest()
    return found


# No layer looks at which of the two it has, so float16 is for one family of each kind.
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, "bfloat16") for family in tiny_models.FAMILIES),
        *((family, "float16") for family in ("llama", "gemma3", "mixtral", "deepseek_v3")),
    ],
)
async def test_half_precision_equals_one_process_bit_for_bit(
    family: str, dtype: str, loaded: Loader
) -> None:
    """Tokens and log-probabilities, not one bit apart: alone, and eight at once."""
    model = loaded(family, dtype)
    params = greedy(NEW, logprobs=3)
    many = [prompt_of(n, n) for n in (1, 15, 16, 17, 40, 41, 90, 150)]
    for prompts in ([prompt_of(33)], many):
        async with EnginePair(model, chunk_tokens=CHUNK, max_batch_rooms=1) as pair:
            assert await together(pair, prompts, params) == await single(model, prompts, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_seeded_sampling_equals_one_process(dtype: str, loaded: Loader) -> None:
    model = loaded("qwen3", dtype)
    prompts = [prompt_of(n, n) for n in (3, 16, 41)]
    texts = []
    limits: tuple[dict[str, Any], ...] = (
        {},
        {"top_k": 20},
        {"top_p": 0.9},
        {"top_k": 40, "top_p": 0.8},
    )
    for n, more in enumerate(limits):
        params = SamplingParams(temperature=1.3, seed=7 + n, max_new_tokens=NEW, logprobs=1, **more)
        async with EnginePair(model, chunk_tokens=CHUNK, max_batch_rooms=1) as pair:
            found = await together(pair, prompts, params)
        assert found == await single(model, prompts, params)
        texts += [tuple(out.token_id for out in outs) for outs in found]
    assert len(set(texts)) == len(texts)


async def test_seeded_sampling_in_fp32_ignores_the_company(llama: LoadedModel) -> None:
    """The same seed gives the same tokens alone and among strangers; another seed, others."""
    prompt = prompt_of(30)
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=-5, max_new_tokens=NEW)
    async with EnginePair(llama) as pair:
        alone = await pair.tokens(prompt, params)
        crowd = [
            pair.tokens(prompt_of(n, n), SamplingParams(seed=n, max_new_tokens=NEW))
            for n in (9, 31, 70)
        ]
        among, *_ = await asyncio.gather(pair.tokens(prompt, params), *crowd)
        other = await pair.tokens(
            prompt, SamplingParams(temperature=1.0, top_p=0.95, seed=6, max_new_tokens=NEW)
        )
    assert alone == among != other


async def test_logprobs_are_those_of_the_stock_model(
    llama: LoadedModel, stock: Callable[[str], Any]
) -> None:
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
