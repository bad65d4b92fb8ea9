"""The first token is prefill's; decode takes it if both halves choose it in the same way."""

from __future__ import annotations

from typing import Any

import pytest

from kvflow.protocols.errors import Code, MisuseError
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.scheduler.params import SamplingParams
from tests.serve.engine.pair import EnginePair, prompt_of

WARM: dict[str, Any] = {"temperature": 0.7, "seed": 5, "max_new_tokens": 4}


def digest(**params: Any) -> str:
    return SamplingParams(**{**WARM, **params}).first_token_digest().hex()


@pytest.mark.parametrize(
    "other",
    [
        {"temperature": 0.8},
        {"temperature": 0.0},
        {"seed": 6},
        {"seed": None},
        {"top_p": 0.5},
        {"top_k": 3},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((7, 1.0),)},
        {"bad_words": ((7,),)},
        {"min_new_tokens": 2},
        {"min_new_tokens": 2, "ignore_eos": True},
    ],
    ids=str,
)
def test_what_decides_the_first_token_is_in_its_digest(other: dict[str, Any]) -> None:
    assert digest() != digest(**other)


def test_the_digest_of_the_same_request_never_changes() -> None:
    """A decode of another release computes it too: it is part of the wire."""
    warm = SamplingParams(**WARM, min_new_tokens=2, stop_token_ids=(9, 4), top_k=0)
    assert [params.first_token_digest().hex() for params in (SamplingParams(), warm)] == [
        "d9e6c0b2136e9b0b",
        "af1c80db4b4921fc",
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"max_new_tokens": 1}),
        ({}, {"stop": ("a",)}),
        ({}, {"stop_token_ids": (4,)}),
        ({}, {"ignore_eos": True}),
        ({}, {"logprobs": 2}),
        ({}, {"frequency_penalty": 1.0}),
        ({}, {"presence_penalty": 1.0}),
        ({}, {"priority": 3}),
        ({}, {"hidden_states": True}),
        ({}, {"top_k": 0}),
        (
            {"temperature": 1, "top_p": 1, "min_p": 0},
            {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0},
        ),
        ({"repetition_penalty": 1}, {"repetition_penalty": 1.0}),
        ({"logit_bias": ((7, 1), (8, -2.0))}, {"logit_bias": ((8, -2), (7, 1.0))}),
        ({"bad_words": ((7, 8), (9,))}, {"bad_words": ((9,), (7, 8), (9,))}),
        (
            {"min_new_tokens": 1, "stop_token_ids": (4, 5)},
            {"min_new_tokens": 2, "stop_token_ids": (5, 4, 4)},
        ),
        # Greedy requests draw nothing.
        (
            {"temperature": 0.0, "seed": 1, "top_p": 0.5},
            {"temperature": 0.9, "seed": None, "top_k": 1},
        ),
    ],
    ids=str,
)
def test_what_decides_nothing_is_left_out_and_one_thing_in_other_words_has_one_digest(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    """A proxy may write the body of each leg anew."""
    assert digest(**one) == digest(**other)


def test_a_prefill_that_was_asked_for_exactly_one_token() -> None:
    """Proxies like vLLM's send prefill `max_tokens` and `min_tokens` 1."""
    leg = SamplingParams(
        **{**WARM, "max_new_tokens": 1, "min_new_tokens": 1, "stop_token_ids": (4,)}
    )
    client = SamplingParams(**WARM, stop_token_ids=(4,))
    assert client.may_take_first_token(leg.first_token_digest())
    assert client.may_take_first_token(client.first_token_digest())
    assert not leg.may_take_first_token(client.first_token_digest()), (
        "a token that ends the answer was not asked for"
    )
    for other in ({"stop_token_ids": (5,)}, {"stop_token_ids": (4,), "seed": 6}):
        assert not SamplingParams(**{**WARM, **other}).may_take_first_token(
            leg.first_token_digest()
        )


@pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 1.3, "logit_bias": ((7, 2.0),)}])
async def test_legs_that_ask_for_one_token_in_other_words_agree(
    llama: LoadedModel, penalties: dict[str, Any]
) -> None:
    prompt = prompt_of(20)
    asked = SamplingParams(**{**WARM, **penalties})
    leg = SamplingParams(
        **{**WARM, **penalties, "max_new_tokens": 1, "min_new_tokens": 1, "priority": 1}
    )
    async with EnginePair(llama) as pair:
        room = pair.room(prompt)
        prefilled = pair.send(room, prompt, leg)
        answer = [token async for token in pair.decode.generate(room, prompt, asked)]
        assert len(answer) == asked.max_new_tokens
        assert answer[0].token_id == (await prefilled).token_id


async def test_a_token_that_was_chosen_for_another_request_is_refused(llama: LoadedModel) -> None:
    """A room id that is used again at once may join legs of two requests."""
    prompt = prompt_of(20)
    first, second = SamplingParams(**WARM), SamplingParams(**{**WARM, "temperature": 0.0})
    async with EnginePair(llama) as pair:
        room = pair.room(prompt)
        leg = pair.send(room, prompt, first)
        with pytest.raises(
            MisuseError, match="chosen the first token by other sampling parameters than"
        ) as refused:
            await anext(pair.decode.generate(room, prompt, second))
        assert refused.value.code is Code.BAD_REQUEST
        await leg
