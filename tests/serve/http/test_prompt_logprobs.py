"""Log-probabilities of the prompt and echo, in /generate and /v1/completions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import numpy as np
import openai
import pytest

from kvflow import aio
from kvflow.node.prompt_logprobs import PromptLogprobs
from kvflow.serve.engine.scheduler.limits import EngineLimits
from kvflow.serve.engine.scheduler.params import TokenOut
from kvflow.serve.http.completion import Completion, Delta, detokenize
from kvflow.serve.http.generation_requests import MAX_SCORES_BYTES
from kvflow.serve.http.openai import TextCompletionCall
from kvflow.serve.http.schemas import CompletionRequest
from kvflow.serve.http.tokenizer import NullDetokenizer
from tests.fakes.service import META, FakeService, Meeting, Role, body

TEXT = "w1 w2 w3 w4"


@pytest.fixture
async def alone(decode: Role, met: None) -> Role:
    return decode


async def meta(alone: Role, **changes: Any) -> dict[str, Any]:
    answer = await alone.post("/generate", body(text=TEXT, return_logprob=True, **changes))
    found: dict[str, Any] = answer["meta_info"]
    return found


@pytest.mark.parametrize(
    ("start", "want"),
    [
        (None, []),
        (-1, []),
        (0, [[None, 1, None], [-0.5, 2, None], [-0.5, 3, None], [-0.5, 4, None]]),
        (2, [[None, 3, None], [-0.5, 4, None]]),
        (3, [[None, 4, None]]),
    ],
)
async def test_from_where_they_are_asked_for(alone: Role, start: int | None, want: Any) -> None:
    """The first one of them has none, as in SGLang."""
    found = await meta(alone, logprob_start_len=start)
    assert found["input_token_logprobs"] == want
    assert len(found["output_token_logprobs"]) == 3
    assert "input_top_logprobs" not in found
    assert (found["prompt_tokens"], found["completion_tokens"]) == (4, 3)


async def test_top_ones_and_texts(alone: Role) -> None:
    asked = {"top_logprobs_num": 2, "return_text_in_logprobs": True}
    found = await meta(alone, logprob_start_len=1, **asked)
    assert found["input_token_logprobs"] == [[None, 2, "w2"], [-0.5, 3, "w3"], [-0.5, 4, "w4"]]
    assert found["input_top_logprobs"] == [
        None,
        [[-0.5, 3, "w3"], [-1.5, 4, "w4"]],
        [[-0.5, 4, "w4"], [-1.5, 5, "w5"]],
    ]
    assert len(found["output_top_logprobs"]) == 3


async def test_tokens_that_are_named(alone: Role) -> None:
    found = await meta(alone, logprob_start_len=2, token_ids_logprob=[9, 4])
    assert found["input_token_ids_logprobs"] == [None, [[-9, 9, None], [-4, 4, None]]]
    assert found["output_token_ids_logprobs"] == [[[-9, 9, None], [-4, 4, None]]] * 3
    document = body(text=["w1 w2", "w5"], bootstrap_room=[7, 8], bootstrap_port=None)
    document |= {"return_logprob": True, "token_ids_logprob": [[9], []], "logprob_start_len": 0}
    answer = await alone.post("/generate", document)
    assert answer[0]["meta_info"]["input_token_ids_logprobs"] == [None, [[-9, 9, None]]]
    assert "input_token_ids_logprobs" not in answer[1]["meta_info"]


async def test_without_return_logprob_nothing_is_scored(alone: Role) -> None:
    answer = await alone.post("/generate", body(logprob_start_len=0))
    assert "input_token_logprobs" not in answer["meta_info"]
    assert alone.service.requests[0].params.prompt_logprobs_from is None


async def test_every_event_of_a_stream_has_them(alone: Role) -> None:
    document = body(return_logprob=True, logprob_start_len=0)
    found = [event["meta_info"] for event in await alone.events("/generate", document)]
    assert all(one["input_token_logprobs"] == [[None, 1, None], [-0.5, 2, None]] for one in found)
    assert len(found[-1]["output_token_logprobs"]) == 3


async def test_each_prompt_and_choice_its_own(alone: Role) -> None:
    document = body(
        text=["w1 w2", "w5 w6 w7"],
        return_logprob=True,
        logprob_start_len=[0, 1],
        sampling_params={"max_new_tokens": 0, "n": 2},
        bootstrap_room=[7, 8, 9, 10],
    )
    document |= {"bootstrap_host": ["127.0.0.1"] * 4, "bootstrap_port": None}
    answers = await alone.post("/generate", document)
    for answer, ids, tokens in zip(
        answers, ([1, 2], [1, 2], [6, 7], [6, 7]), (2, 2, 3, 3), strict=True
    ):
        assert (answer["text"], answer["output_ids"]) == ("", [])
        found = answer["meta_info"]
        assert [one[1] for one in found["input_token_logprobs"]] == ids
        assert found["output_token_logprobs"] == []
        assert found["finish_reason"] == {"type": "length", "length": 0}
        assert (found["prompt_tokens"], found["completion_tokens"]) == (tokens, 0)


async def test_prefills_own_answer_has_none(prefill: Role) -> None:
    """sglang_router puts prefill's before decode's, which has all of them."""
    document = body(return_logprob=True, logprob_start_len=0, bootstrap_room=99)
    answer = await prefill.post("/generate", document)
    assert answer["meta_info"]["input_token_logprobs"] == []


def tokens_of(usage: openai.types.CompletionUsage | None) -> tuple[int, int, int]:
    assert usage is not None
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


async def test_echo_with_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="fake", prompt=[[1, 2], [5, 6, 7]], max_tokens=1, n=2, echo=True, logprobs=2
    )
    assert [choice.text.split()[0][:2] for choice in answer.choices] == ["w1", "w1", "w5", "w5"]
    first = answer.choices[0].logprobs
    assert first is not None
    assert first.tokens == ["w1", "w2", "w3"]
    assert first.token_logprobs == [None, -0.5, -0.5]
    assert first.top_logprobs == [None, {"w2": -0.5, "w3": -1.5}, {"w3": -0.5, "w4": -1.5}]
    assert first.text_offset == [0, 2, 4]
    assert answer.choices[3].logprobs is not None
    assert answer.choices[3].logprobs.tokens == ["w5", "w6", "w7", "w8"]
    assert tokens_of(answer.usage) == (5, 4, 9)


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_an_echo_of_the_prompt_alone(
    client: openai.AsyncOpenAI, logprobs: int | None
) -> None:
    more: dict[str, Any] = {} if logprobs is None else {"logprobs": logprobs}
    answer = await client.completions.create(
        model="fake", prompt=TEXT, max_tokens=0, n=2, echo=True, **more
    )
    for choice in answer.choices:
        assert (choice.text, choice.finish_reason) == (TEXT, "length")
        assert (choice.logprobs is None) == (logprobs is None)
        if choice.logprobs is not None:
            assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert tokens_of(answer.usage) == (4, 0, 4)


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_a_streamed_echo_is_the_whole_answer_in_parts(
    client: openai.AsyncOpenAI, max_tokens: int
) -> None:
    arguments: Any = {"model": "fake", "prompt": ["w1 w2", "w5"], "n": 2, "echo": True}
    arguments["logprobs"] = 1
    whole = await client.completions.create(**arguments, max_tokens=max_tokens)
    stream = await client.completions.create(
        **arguments, max_tokens=max_tokens, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    for index, choice in enumerate(whole.choices):
        mine = [one for chunk in chunks for one in chunk.choices if one.index == index]
        assert "".join(one.text for one in mine).replace(" ", "") == choice.text.replace(" ", "")
        assert [one.finish_reason for one in mine][-1] == choice.finish_reason == "length"
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [getattr(one.logprobs, name) for one in mine]
            assert [value for part in parts for value in part] == getattr(choice.logprobs, name)
    assert chunks[-1].usage == whole.usage
    assert tokens_of(whole.usage) == (3, 4 * max_tokens, 3 + 4 * max_tokens)


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        ("/generate", {"logprob_start_len": 4}, "logprob_start_len 4 is outside the prompt, 0..3"),
        ("/generate", {"logprob_start_len": -2}, "logprob_start_len -2 is outside the prompt"),
        ("/generate", {"logprob_start_len": "0"}, "logprob_start_len"),
        ("/generate", {"logprob_start_len": [0, 1]}, "logprob_start_len: 2 entries for 1 prompts"),
        ("/generate", {"token_ids_logprob": [100]}, "token_ids_logprob: token id 100 is outside"),
        ("/generate", {"token_ids_logprob": [1] * 129}, "token_ids_logprob: 129 ids, limit 128"),
        ("/generate", {"token_ids_logprob": [1, [2]]}, "token_ids_logprob must be one list"),
        ("/generate", {"token_ids_logprob": [[1], [2]]}, "token_ids_logprob: 2 entries for 1"),
        ("/generate", {"top_logprobs_num": 21}, "top_logprobs_num"),
        ("/v1/completions", {"max_tokens": -1}, "max_tokens"),
        ("/v1/completions", {"max_tokens": 0, "min_tokens": 1}, "(min_tokens) 1 is outside 0..0"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_cannot_be_is_refused_and_ends_both_legs(
    prefill: Role, path: str, fields: dict[str, Any], text: str
) -> None:
    document = {
        "/generate": body(text=TEXT, return_logprob=True),
        "/v1/completions": {"prompt": TEXT, "echo": True, "logprobs": 1, **META},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], **META},
    }[path] | fields
    assert text in (await prefill.refuses(path, document))["message"]


BIG: dict[str, dict[str, Any]] = {
    "/generate": {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 20,
        "sampling_params": {"n": 128},
    },
    "/v1/completions": {"echo": True, "logprobs": 20, "n": 128, "max_tokens": 0},
}


@pytest.mark.parametrize("path", BIG)
async def test_those_of_all_choices_together_are_bounded(path: str) -> None:
    """256 handoffs of a MiB each were written as a gigabyte of JSON."""
    tokens = MAX_SCORES_BYTES // 128 // (4 + 8 * 20)
    name = "input_ids" if path == "/generate" else "prompt"
    async with Role(FakeService("prefill", Meeting(), pool_tokens=10_000)) as role:
        role.service.limits = EngineLimits(10_000, 100, 1, 10_000)
        role.pipeline.request_limits = msgspec.structs.replace(
            role.pipeline.request_limits, engine=role.service.limits
        )
        # The first token of a prompt has none.
        await role.post(path, {name: [1] * (tokens + 1), **BIG[path], **META})
        assert len(role.service.requests) == 128
        error = await role.refuses(path, {name: [1] * (tokens + 2), **BIG[path], **META})
    assert error["param"] == ("top_logprobs_num" if path == "/generate" else "logprobs")
    size = (tokens + 1) * 164 * 128
    assert f"128 completions are {size} bytes, limit {MAX_SCORES_BYTES}" in error["message"]


def test_two_tokens_of_one_label_are_the_more_likely_one() -> None:
    """Clients compare the token's own with the largest of the top ones."""
    call = TextCompletionCall(CompletionRequest(prompt="a", logprobs=2), "m", lambda _: b"same")
    top = ((3, -0.25), (4, -2.0))
    (event,) = call.events(0, [Delta("", (TokenOut(3, -0.25, top),))], Completion())
    assert event["choices"][0]["logprobs"]["top_logprobs"] == [{"same": -0.25}]


async def test_a_long_prompt_does_not_hold_up_the_loop() -> None:
    """Its log-probabilities are encoded in turns with what else the loop has to do."""
    count, top = 5_000, 20
    prompt = list(range(count + 1))
    ids = np.tile(np.arange(top), (count, 1))
    scores = PromptLogprobs.pack(
        0, np.full(count, -1.25), ids, np.full((count, top), -2.5), np.zeros((count, 0))
    )
    call = TextCompletionCall(
        CompletionRequest(prompt=[*prompt], logprobs=top, echo=True), "m", lambda i: b"%d" % i
    )

    async def tokens() -> Any:
        yield TokenOut(7, -0.5, finish_reason="length", prompt_logprobs=scores)

    async def scored(given: PromptLogprobs) -> None:
        await call._logprobs[0].add_prompt(given, np.array(prompt, dtype=np.uint32))

    async def deltas() -> list[Delta]:
        return [
            one async for one in detokenize(tokens(), NullDetokenizer(), scored, prompt_only=False)
        ]

    running = asyncio.ensure_future(deltas())
    turns = 0
    while not running.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 10
    (delta,) = await running
    assert delta.tokens[0].prompt_logprobs is None
    found = [
        len(json.loads(b"".join(value.pieces()))) for value in call._logprobs[0].all().values()
    ]
    assert found == [count + 1] * 4


@pytest.mark.parametrize(("turn_s", "turns"), [(0.0, 5), (60.0, 0)])
async def test_turns_are_given_by_time(
    monkeypatch: pytest.MonkeyPatch, turn_s: float, turns: int
) -> None:
    monkeypatch.setattr(aio, "TURN_S", turn_s)
    given: list[int] = []

    async def other() -> None:
        while True:
            given.append(0)
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    assert [item async for item in aio.in_turns(range(5))] == [0, 1, 2, 3, 4]
    task.cancel()
    assert len(given) == turns
