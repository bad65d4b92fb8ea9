"""Models that keep more than K and V: token parity, what a row holds, and whose it is."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.kinds import ROW
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.scheduler import limits
from tests.serve.engine import tiny_models
from tests.serve.engine.pair import (
    EnginePair,
    Watched,
    greedy,
    poison,
    poisoned_pool,
    prompt_of,
    sequence_of,
    tokens_of,
    until,
)
from tests.serve.engine.single import one_process
from tests.serve.engine.tiny_models import Generated, Loaded, Stock

NEW, CHUNK, PAGE = 12, 40, 16
# One token and two, a page, a chunk, a window of gpt_oss (16), and 8 indexed keys, with their
# neighbours.
LENGTHS = (1, 2, 9, 16, 17, 40, 41, 97)
FAMILIES = [*tiny_models.INDEXED, *tiny_models.STATEFUL]

PROMPTS = [prompt_of(n, n) for n in LENGTHS]


async def equal_generate(
    family: str, pair: EnginePair, generated: Generated, prompts: list[list[int]] = PROMPTS
) -> None:
    found = await pair.tokens_of_all(prompts, greedy(NEW))
    assert found == [
        generated(family, prompt, NEW, tokens)
        for prompt, tokens in zip(prompts, found, strict=True)
    ]
    assert len({tuple(tokens) for tokens in found}) == len(prompts)


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
async def test_eight_at_once_equal_generate(
    family: str, loaded: Loaded, generated: Generated
) -> None:
    async with EnginePair(
        loaded(family), page_size=PAGE, chunk_tokens=CHUNK, max_batch_tokens=64
    ) as pair:
        await equal_generate(family, pair, generated)


@pytest.mark.parametrize(
    "chunk", [1, 7, *(pytest.param(n, marks=[pytest.mark.slow, pytest.mark.soak]) for n in (2, 16))]
)
@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_next", "deepseek_v32", "gpt_oss"])
async def test_however_a_prompt_is_divided(
    family: str, chunk: int, loaded: Loaded, generated: Generated
) -> None:
    """nemotron_h has other numbers for a token that comes alone: prompts must never leave one."""
    async with EnginePair(loaded(family), chunk_tokens=chunk, max_batch_tokens=3 * chunk) as pair:
        await equal_generate(family, pair, generated, PROMPTS[:7])


@pytest.mark.parametrize("family", ["falcon_h1", "jamba", "mamba2", "gpt_oss", "mistral"])
async def test_one_row_for_one_request_after_the_other(
    family: str, loaded: Loaded, generated: Generated
) -> None:
    model = loaded(family)
    async with EnginePair(model, source_rows=1, chunk_tokens=CHUNK) as pair:
        await equal_generate(family, pair, generated)
    async with one_process(model, 64, num_rows=1, chunk_tokens=CHUNK) as (engine, side):
        for prompt in PROMPTS[-2:]:
            tokens = await tokens_of(engine.generate(prompt, greedy(NEW)))
            assert tokens == generated(family, prompt, NEW, tokens)
            await until(side.places.at_rest)


@pytest.mark.parametrize("host_pages", [200, 0], ids=["snapshots", "computed again"])
@pytest.mark.parametrize(
    "family", [*FAMILIES, "gpt_oss", "gemma2", "gemma3", "gemma4_shared_kv", "mistral"]
)
async def test_everybody_is_retracted_in_mid_decode(
    family: str, host_pages: int, loaded: Loaded, generated: Generated
) -> None:
    async with EnginePair(loaded(family), host_pages=host_pages, chunk_tokens=CHUNK) as pair:
        engine, steps = pair.decode, Watched(pair.decode._runner)

        def retract() -> None:
            if len(steps.steps) == 4:
                engine._budget._most = 0  # all stay away for now
                engine.retract_all()

        steps.before = retract
        running = asyncio.create_task(pair.together(PROMPTS, greedy(NEW)))
        await until(lambda: engine.retraction.retracted_now == 8 and pair.target.places.at_rest())
        poison(pair.target.pool)
        engine._budget._most = 256
        engine._budget.grant()
        outs = await running
        report = pair.decode.retraction
        assert (report.resumes, report.recomputes) == ((8, 0) if host_pages else (0, 8))
    for prompt, found in zip(PROMPTS, outs, strict=True):
        tokens = [out.token_id for out in found]
        assert tokens == generated(family, prompt, NEW, tokens)


@pytest.mark.parametrize("family", ["falcon_h1", "gpt_oss"])
async def test_a_full_prefix_still_gets_its_row(family: str, loaded: Loaded) -> None:
    """Decode has the pages of the prompt, and no state at their end."""
    async with EnginePair(loaded(family), page_size=PAGE, chunk_tokens=PAGE) as pair:
        prompt = prompt_of(3 * PAGE)
        admission = await pair.decode.admit(prompt, greedy(2))
        room = pair.room(prompt, late=True)
        room._sent = 3
        room.meet(len(prompt))
        leg = pair.send(room, prompt, greedy(2))
        tokens = pair.decode.generate(room, prompt, greedy(2), admission)
        await anext(tokens)
        assert room.sends == [(1, True)]
        await leg
        row = pair.target.pool.layout.split(room.pages)[1][0]
        states = [
            pair.target.pool.tensor(k.name)[int(row)]
            for k in loaded(family).streams
            if k.unit == ROW
        ]
        assert all(bool(torch.isfinite(state).all()) for state in states)
        await tokens.aclose()


@pytest.mark.parametrize("family", ["jamba", "nemotron_h", "mamba2", "deepseek_v32"])
async def test_logprobs_of_the_prompt_are_those_of_the_stock_model(
    family: str, loaded: Loaded, stock: Stock
) -> None:
    prompt = prompt_of(70)
    async with EnginePair(loaded(family), chunk_tokens=CHUNK) as pair:
        outs = await pair.outputs(prompt, greedy(1, prompt_logprobs_from=5, logprobs=2))
    with torch.inference_mode():
        want = torch.log_softmax(stock(family)(torch.tensor([prompt])).logits[0].float(), dim=-1)
    scores = outs[0].prompt_logprobs
    assert scores is not None
    own = want[range(5, 69), prompt[6:]].numpy()
    np.testing.assert_allclose(np.frombuffer(scores.logprobs, "<f4"), own, atol=2e-3)


@pytest.mark.parametrize(("family", "refused"), [("jamba", True), ("nemotron_h", False)])
async def test_logprobs_of_a_prompt_that_is_not_divided_are_bounded(
    family: str, refused: bool, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_LOGITS_BYTES", 69 * 4 * loaded(family).vocab_size)
    async with EnginePair(loaded(family), chunk_tokens=CHUNK) as pair:
        for engine in (pair.prefill, pair.decode):
            engine.check(prompt_of(70), greedy(1, prompt_logprobs_from=1, logprobs=2))
            with pytest.raises(MisuseError, match="one step") if refused else nullcontext():
                engine.check(prompt_of(70), greedy(1, prompt_logprobs_from=0, logprobs=2))


@pytest.mark.parametrize("family", ["lfm2", "gpt_oss"])
async def test_a_request_that_ends_in_any_state_gives_its_row_back(
    family: str, loaded: Loaded
) -> None:
    async with EnginePair(loaded(family), source_rows=2, chunk_tokens=8) as pair:
        running = [
            asyncio.ensure_future(pair.outputs(prompt_of(90, n), greedy(300))) for n in range(6)
        ]
        await until(lambda: pair.decode.load().running > 1)
        for task in running[::2]:
            task.cancel()
        await asyncio.wait(running[::2])
        await until(lambda: pair.decode.load().running == 3)
        for task in running:
            task.cancel()
        await asyncio.wait(running)


def pages_from(first: int, tokens: int) -> range:
    return range(first, first + -(-(tokens + 8) // 4))


@pytest.mark.parametrize("family", tiny_models.STATEFUL)
def test_a_step_reads_and_writes_its_own_rows_in_every_layer(family: str, loaded: Loaded) -> None:
    """Rows of others are poison, and stay it."""
    model = loaded(family)
    pool = poisoned_pool(model, 40, num_rows=5)
    runner = model.runner(pool)
    a = sequence_of(prompt_of(10), pages_from(3, 10), 4)
    b = sequence_of(prompt_of(6, 1), pages_from(20, 6), 1)
    first = runner.forward([Row(a, 10), Row(b, 6)])
    a.computed, b.computed = 10, 6
    a.append(5)
    b.append(7)
    names = [k.name for k in model.streams if k.unit == ROW]
    before = {name: pool.tensor(name).clone() for name in names}
    decoded = runner.forward([Row(a, 1), Row(b, 1)])
    assert bool(torch.isfinite(first).all()) and bool(torch.isfinite(decoded).all())
    for name in names:
        states = pool.tensor(name)
        assert bool(torch.isnan(states[[0, 2, 3]]).all()), name
        assert bool(torch.isfinite(states[[1, 4]]).all()), name
        for row in (1, 4):
            assert not torch.equal(states[row], before[name][row]), f"{name} was left behind"
    again = sequence_of(prompt_of(6, 1), pages_from(30, 6), 4)  # in the row of another
    # Not bit for bit: seen to differ in the last digits where many tests had run before. Another's
    # state is off by far.
    assert torch.allclose(runner.forward([Row(again, 6)])[0], first[1], atol=1e-4)


@pytest.mark.parametrize(
    ("family", "whole"), [("jamba", True), ("mamba2", False), ("nemotron_h", False)]
)
def test_the_self_test_finds_scans_that_begin_at_nothing(
    family: str, whole: bool, loaded: Loaded
) -> None:
    for model in (loaded(family), loaded(family, "bfloat16")):
        assert (model.whole_prompts, model.mode) == (whole, "pad")
        states = {kind.dtype for kind in model.streams if "recurrent" in kind.name}
        assert states == {"float32"}, "recurrent states are not rounded"
