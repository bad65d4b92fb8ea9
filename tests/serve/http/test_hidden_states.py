"""`return_hidden_states` of /generate: the last token's, as SGLang's "last" answers."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from kvflow.node.packed_array import PackedArray
from kvflow.serve.engine.scheduler.params import TokenOut
from kvflow.serve.http.completion import detokenize
from kvflow.serve.http.tokenizer import NullDetokenizer
from tests.fakes.servers import events_of
from tests.fakes.service import CHAT, Role, body

pytestmark = pytest.mark.usefixtures("met")


def last(**changes: Any) -> dict[str, Any]:
    return body(return_hidden_states="last", **changes)


@pytest.mark.parametrize(
    ("sampling", "ids", "state"),
    [
        ({"max_new_tokens": 3}, [3, 4, 5], 5.5),
        ({"max_new_tokens": 9, "stop": "w4"}, [3, 4], 4.5),
        ({"max_new_tokens": 9, "stop_token_ids": [4]}, [3, 4], 4.5),
        ({"max_new_tokens": 0}, [], 3.5),
    ],
    ids=["the limit", "a stop string", "a stop token", "the prompt alone"],
)
async def test_whatever_ends_an_answer_has_the_states_of_its_last_token(
    decode: Role, sampling: dict[str, Any], ids: list[int], state: float
) -> None:
    answer = await decode.post("/generate", last(sampling_params={**sampling, "temperature": 0}))
    assert (answer["output_ids"], answer["meta_info"]["hidden_states"]) == (ids, [state] * 4)


async def test_a_stream_ends_with_them(decode: Role) -> None:
    decode.service.gate.clear()
    async with decode.opened("/generate", last(stream=True)) as answer:
        first = json.loads((await answer.content.readuntil(b"\n\n")).removeprefix(b"data: "))
        decode.service.gate.set()
        end = events_of(await answer.read())[-1]
    assert (first["output_ids"], end["output_ids"]) == ([3], [3, 4, 5])
    assert "hidden_states" not in first["meta_info"]
    assert end["meta_info"]["hidden_states"] == [5.5] * 4


async def test_each_prompt_says_whether(decode: Role) -> None:
    document = body(
        text=["w1", "w2", "w3"],
        bootstrap_room=[7, 8, 9],
        return_hidden_states=["last", False, "last"],
    )
    answers = await decode.post("/generate", document)
    found = [one["meta_info"].get("hidden_states") for one in answers]
    assert found == [[4.5] * 4, None, [6.5] * 4]
    asked = [request.params.hidden_states for request in decode.service.requests]
    assert asked == [True, False, True]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, 'true asks for those of every token; send "last" for those of the last one'),
        (["last", "last"], "return_hidden_states: 2 entries for 1 prompts; give one for each"),
        ("first", "return_hidden_states"),
        (1, "return_hidden_states"),
    ],
)
async def test_what_is_not_to_be_had_is_named(decode: Role, value: Any, text: str) -> None:
    error = await decode.refuses("/generate", body(return_hidden_states=value))
    assert error["param"] == "return_hidden_states" and text in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_openai_routes_refuse_it(decode: Role, path: str) -> None:
    error = await decode.refuses(path, last(prompt="w1", messages=CHAT))
    assert error["param"] == "return_hidden_states"


async def test_only_the_last_ones_are_kept() -> None:
    """Those of a long answer would be hundreds of megabytes."""
    states = [PackedArray.of(np.full((1, 4), n, dtype="f4")) for n in range(3)]

    async def tokens() -> AsyncGenerator[TokenOut, None]:
        for n, one in enumerate(states):
            yield TokenOut(n, finish_reason="length" if n == 2 else None, hidden_states=one)

    async def scored(_: object) -> None:
        raise AssertionError("no scores were asked for")

    deltas = [
        delta async for delta in detokenize(tokens(), NullDetokenizer(), scored, prompt_only=False)
    ]
    assert [delta.hidden_states for delta in deltas] == [None, None, states[-1]]
    assert [token.hidden_states for delta in deltas for token in delta.tokens] == [None] * 3
