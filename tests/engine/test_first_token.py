"""The first token is prefill's: decode takes it only where both halves of the request choose it in the same way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvflow.engine.model.load import LoadedModel
from kvflow.engine.scheduler.params import SamplingParams
from kvflow.protocols.errors import Code, MisuseError
from tests.engine.pair import EnginePair, prompt_of, until

WARM: dict[str, Any] = {"temperature": 0.7, "seed": 5, "max_new_tokens": 4}


@pytest.mark.parametrize(
    "other",
    [
        *({"temperature": 0.8}, {"temperature": 0.0}, {"seed": 6}, {"seed": None}, {"top_p": 0.5}, {"top_k": 3}),
        *({"min_p": 0.1}, {"repetition_penalty": 1.1}, {"logit_bias": ((7, 1.0),)}, {"bad_words": ((7,),)}),
        *({"min_new_tokens": 2}, {"min_new_tokens": 2, "ignore_eos": True}),
    ],
)
def test_what_decides_the_first_token_is_in_its_digest(other: dict[str, Any]) -> None:
    assert SamplingParams(**WARM).first_token_digest() != SamplingParams(**{**WARM, **other}).first_token_digest()


@pytest.mark.parametrize(
    "other",
    [
        *({"max_new_tokens": 1}, {"stop": ("a",)}, {"stop_token_ids": (4,)}, {"ignore_eos": True}, {"logprobs": 2}),
        *({"frequency_penalty": 1.0}, {"presence_penalty": 1.0}, {"priority": 3}, {"hidden_states": True}),
        {"top_k": 0},
    ],
)
def test_what_does_not_is_left_out(other: dict[str, Any]) -> None:
    assert SamplingParams(**WARM).first_token_digest() == SamplingParams(**{**WARM, **other}).first_token_digest()


def test_greedy_requests_draw_nothing() -> None:
    greedy = [SamplingParams(temperature=0.0, seed=1, top_p=0.5), SamplingParams(temperature=0.9, top_k=1)]
    assert len({params.first_token_digest() for params in greedy}) == 1


async def test_a_token_that_was_chosen_for_another_request_is_refused(llama: LoadedModel) -> None:
    """As where a room id is used again at once, for the same prompt: the first leg at prefill meets the second one's
    other half."""
    prompt = prompt_of(20)
    first, second = SamplingParams(**WARM), SamplingParams(**{**WARM, "temperature": 0.0})
    async with EnginePair(llama) as pair:
        room = pair.room(prompt)
        leg = asyncio.create_task(pair.prefill.prefill(room.prefill_half, prompt, first))
        with pytest.raises(MisuseError, match="chosen the first token by other sampling parameters than") as refused:
            await anext(pair.decode.generate(room, prompt, second))
        assert refused.value.code is Code.BAD_REQUEST
        await leg
        await until(lambda: pair.home)
