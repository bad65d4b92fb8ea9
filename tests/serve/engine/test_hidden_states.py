"""The last hidden states of each token equal those of transformers' own forward."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from kvflow.node.handoff import HandOff
from kvflow.protocols.errors import MisuseError, WireError
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.scheduler.handoff import check_handoff
from kvflow.serve.engine.scheduler.limits import EngineLimits
from kvflow.serve.engine.scheduler.params import SamplingParams
from tests.serve.engine.pair import EnginePair, greedy, prompt_of
from tests.serve.engine.tiny_models import Generated, Loaded, Stock

ASKED = {"hidden_states": True}
NEW_TOKENS = 6


def states_of(stock: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = stock.base_model(input_ids=torch.tensor([tokens])).last_hidden_state[
            0
        ]
    return found


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gpt2", "deepseek_v3", "bloom", "falcon_h1", "mamba2"]
)
async def test_they_are_those_of_one_forward(
    family: str, loaded: Loaded, stock: Stock, generated: Generated
) -> None:
    model = loaded(family)
    prompts = [prompt_of(n, n) for n in (19, 1, 33)]
    async with EnginePair(model, chunk_tokens=16) as pair:
        assert model.hidden_size == 64
        asked = [True, True, False]
        found = await asyncio.gather(
            *(
                pair.outputs(p, greedy(NEW_TOKENS, hidden_states=a))
                for p, a in zip(prompts, asked, strict=True)
            )
        )
        # None of the first chunk's tokens is kept.
        alone = await pair.outputs(prompts[2], greedy(NEW_TOKENS, **ASKED))
    for prompt, outs, wanted in zip(
        (*prompts, prompts[2]), (*found, alone), (*asked, True), strict=True
    ):
        assert [out.token_id for out in outs] == generated(family, prompt, NEW_TOKENS)
        if not wanted:
            assert all(out.hidden_states is None for out in outs)
            continue
        tokens = prompt + [out.token_id for out in outs[:-1]]
        want = states_of(stock(family), tokens)[len(prompt) - 1 :]
        got = torch.cat([out.hidden_states.tensor() for out in outs if out.hidden_states])
        assert got.shape == (NEW_TOKENS, 64)
        torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-3)


async def test_prefill_gives_the_prompts_and_hands_them_over(
    llama: LoadedModel, stock: Stock
) -> None:
    prompt = prompt_of(21)
    async with EnginePair(llama) as pair:
        room = pair.room(prompt)
        first = await pair.send(room, prompt, greedy(1, **ASKED))
        handoff = room.handoff
    assert first.hidden_states is not None and first.hidden_states == handoff.hidden_states
    handoff.check_fits(21, 512, 64)
    torch.testing.assert_close(
        first.hidden_states.tensor()[0], states_of(stock("llama"), prompt)[-1], atol=1e-3, rtol=1e-3
    )


async def test_retracted_requests_have_theirs_too(llama: LoadedModel) -> None:
    small = {"page_size": 4, "num_pages": 24, "source_pages": 512, "new_token_ratio": 0.2}
    prompts = [prompt_of(8 + n, n) for n in range(8)]
    async with EnginePair(llama) as roomy:
        want = [await roomy.outputs(p, greedy(24, **ASKED)) for p in prompts]
    async with EnginePair(llama, **small) as pair:
        found = await asyncio.gather(*(pair.outputs(p, greedy(24, **ASKED)) for p in prompts))
        assert pair.decode.retraction.recomputes > 0
    for one, other in zip(found, want, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.token_id == b.token_id and a.hidden_states and b.hidden_states
            torch.testing.assert_close(
                a.hidden_states.tensor(), b.hidden_states.tensor(), atol=2e-3, rtol=1e-3
            )


def test_a_model_without_an_output_layer_of_its_own_says_so() -> None:
    with pytest.raises(
        MisuseError, match="return_hidden_states: the hidden states of this model are not to be had"
    ):
        EngineLimits(512, 512, 16, 100).check_sampling([1], SamplingParams(hidden_states=True))
    EngineLimits(512, 512, 16, 100, 64).check_sampling([1], SamplingParams(hidden_states=True))


def test_a_handoff_without_them_is_refused() -> None:
    with pytest.raises(WireError, match="the handoff has no hidden states"):
        check_handoff(
            HandOff(first_token=1, prompt_tokens=5), 5, SamplingParams(hidden_states=True), 512
        )
