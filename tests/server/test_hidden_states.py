"""`return_hidden_states` of /generate: the last token's, as SGLang's "last" answers."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import numpy as np
import pytest

from kvflow.node.packed_array import PackedArray
from kvflow.serve.engine.scheduler.params import TokenOut
from kvflow.serve.http.completion import detokenize
from kvflow.serve.http.tokenizer import NullDetokenizer
from tests.server.fake_service import Meeting, Role, Server
from tests.server.test_generate import body, events, post


@pytest.fixture(autouse=True)
async def met(meeting: Meeting) -> None:
    for room in range(7, 12):
        meeting.of(room).set_result(None)


def last(**changes: Any) -> dict[str, Any]:
    return body(return_hidden_states="last", **changes)


async def test_the_last_tokens_states_are_told(
    decode_server: Server, session: aiohttp.ClientSession
) -> None:
    _, answer = await post(session, decode_server, last())
    assert answer["output_ids"] == [3, 4, 5]
    assert answer["meta_info"]["hidden_states"] == [5.5] * 4


async def test_a_stream_ends_with_them(
    decode: Role, decode_server: Server, session: aiohttp.ClientSession
) -> None:
    decode.service.gate.clear()
    async with session.post(decode_server.make_url("/generate"), json=last(stream=True)) as answer:
        first = json.loads((await answer.content.readuntil(b"\n\n")).removeprefix(b"data: "))
        decode.service.gate.set()
        end = json.loads((await events(answer))[-2])
    assert (first["output_ids"], end["output_ids"]) == ([3], [3, 4, 5])
    assert "hidden_states" not in first["meta_info"]
    assert end["meta_info"]["hidden_states"] == [5.5] * 4


async def test_a_stop_string_and_a_stop_token_end_with_theirs(
    decode_server: Server, session: aiohttp.ClientSession
) -> None:
    for stop in ({"stop": "w4"}, {"stop_token_ids": [4]}):
        sampling = {"max_new_tokens": 9, "temperature": 0, **stop}
        _, answer = await post(
            session, decode_server, last(sampling_params=sampling, bootstrap_room=8)
        )
        assert answer["output_ids"] == [3, 4]
        assert answer["meta_info"]["hidden_states"] == [4.5] * 4


async def test_the_prompt_alone_has_its_own(
    decode_server: Server, session: aiohttp.ClientSession
) -> None:
    _, answer = await post(session, decode_server, last(sampling_params={"max_new_tokens": 0}))
    assert (answer["output_ids"], answer["meta_info"]["hidden_states"]) == ([], [3.5] * 4)


async def test_each_prompt_says_whether(
    decode: Role, decode_server: Server, session: aiohttp.ClientSession
) -> None:
    document = body(
        text=["w1", "w2", "w3"],
        bootstrap_room=[7, 8, 9],
        return_hidden_states=["last", False, "last"],
    )
    _, answers = await post(session, decode_server, document)
    assert [one["meta_info"].get("hidden_states") for one in answers] == [
        [4.5] * 4,
        None,
        [6.5] * 4,
    ]
    assert [request.params.hidden_states for request in decode.service.requests] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            True,
            (
                'return_hidden_states: true asks for those of every token; send "last" for those '
                "of the last one"
            ),
        ),
        (["last", "last"], "return_hidden_states: 2 entries for 1 prompts; give one for each"),
        ("first", "return_hidden_states"),
        (1, "return_hidden_states"),
    ],
)
async def test_what_is_not_to_be_had_is_named(
    decode: Role, decode_server: Server, session: aiohttp.ClientSession, value: Any, text: str
) -> None:
    status, answer = await post(session, decode_server, body(return_hidden_states=value))
    assert status == 400
    assert text in answer["error"]["message"]
    assert answer["error"]["param"] == "return_hidden_states"
    assert decode.service.requests == [] and [room for room, _ in decode.service.refused] == [7]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_openai_routes_refuse_it(
    decode_server: Server, session: aiohttp.ClientSession, path: str
) -> None:
    document = last(prompt="w1", messages=[{"role": "user", "content": "w1"}])
    status, answer = await post(session, decode_server, document, path)
    assert (status, answer["error"]["param"]) == (400, "return_hidden_states")


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
