"""The OpenAI routes, asked by the official client."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest

from kvflow.protocols.errors import Cause, Code
from tests.fakes.service import CHAT, META, Role


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["fake"]
    model = await client.models.retrieve("fake")
    assert (model.id, model.object, model.owned_by) == ("fake", "model", "kvflow")
    assert model.model_extra is not None and model.model_extra["root"] == "fake/model"
    assert 0 <= time.time() - model.created < 60  # since when it is served; zero is shown as 1970
    for other in ("other", "a/b"):
        with pytest.raises(openai.NotFoundError, match="ask for 'fake'") as caught:
            await client.models.retrieve(other)
        assert caught.value.code == "model_not_found"


async def test_another_model_is_not_found(
    client: openai.AsyncOpenAI, decode: Role, prefill: Role
) -> None:
    with pytest.raises(openai.NotFoundError) as chat:
        await client.chat.completions.create(model="other", messages=CHAT)
    with pytest.raises(openai.NotFoundError) as text:
        await client.completions.create(model="other", prompt="w1")
    for caught in (chat, text):
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert "'other' is not served here; ask for 'fake'" in str(caught.value)
    # Each leg tells the other one.
    assert len(prefill.service.refused) == len(decode.service.refused) == 2
    assert decode.service.requests == []


async def test_sglangs_default_is_any_model(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="default", prompt="w1", max_tokens=1)
    assert answer.model == "fake"


async def test_chat(client: openai.AsyncOpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "w1"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "w2 "}, {"type": "text", "text": "w3"}],
        },
    ]
    answer = await client.chat.completions.create(
        model="fake", messages=messages, max_tokens=3, temperature=0
    )
    assert (answer.choices[0].message.content or "").split() == ["w4", "w5", "w6"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 3)
    assert answer.id.startswith("chatcmpl-")


async def test_chat_without_a_limit_may_fill_what_the_pool_has_left(
    client: openai.AsyncOpenAI, decode: Role
) -> None:
    await client.chat.completions.create(model="fake", messages=CHAT)
    assert decode.service.requests[0].params.max_new_tokens == 63


async def test_chat_choices_seed_stop_and_logprobs(
    client: openai.AsyncOpenAI, decode: Role
) -> None:
    answer = await client.chat.completions.create(
        model="fake",
        messages=CHAT,
        n=2,
        seed=5,
        stop=["w4"],
        logprobs=True,
        top_logprobs=2,
        max_completion_tokens=9,
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert (choice.message.content or "").split() == ["w2", "w3"]
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None and choice.logprobs.content is not None
        first = choice.logprobs.content[0]
        assert (first.token, first.logprob, first.bytes) == ("w2", -0.5, list(b"w2"))
        assert [top.token for top in first.top_logprobs] == ["w2", "w3"]
    assert sorted(request.params.seed or 0 for request in decode.service.requests) == [5, 6]
    assert len({request.room for request in decode.service.requests}) == 2


async def test_chat_stream_with_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="fake",
        messages=CHAT,
        max_tokens=3,
        stream=True,
        n=2,
        stream_options={"include_usage": True},
        logprobs=True,
    )
    chunks = [chunk async for chunk in stream]
    texts, logprobs = ["", ""], []
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
        logprobs += [choice.logprobs] if choice.logprobs is not None else []
    assert logprobs
    assert all(one.model_fields_set == {"content", "refusal"} for one in logprobs)
    assert [text.split() for text in texts] == [["w2", "w3", "w4"]] * 2
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.choices[0].finish_reason for chunk in chunks if chunk.choices} == {None, "length"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_completions_of_texts_and_of_token_ids(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="fake", prompt=["w1", "w5 w6"], max_tokens=2, n=2, echo=True
    )
    assert [choice.text.split() for choice in answer.choices] == [
        ["w1w2", "w3"],
        ["w1w2", "w3"],
        ["w5", "w6w7", "w8"],
        ["w5", "w6w7", "w8"],
    ]
    for prompt in ([9], [[9]]):
        answer = await client.completions.create(model="fake", prompt=prompt, max_tokens=2)
        assert answer.choices[0].text.split() == ["w10", "w11"]


async def test_completions_default_to_sixteen_tokens(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="fake", prompt="w1")
    assert answer.usage is not None and answer.usage.completion_tokens == 16


async def test_completion_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="fake", prompt="w1", max_tokens=2, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["w2", "w3"]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.top_logprobs == [{"w2": -0.5}, {"w3": -0.5}]
    assert logprobs.text_offset == [0, 2]


async def test_completion_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="fake", prompt="w1", max_tokens=3, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]).split() == ["w2", "w3", "w4"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "w1"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "refusal", "text": "w1"}]}]},
            "type text",
        ),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format: type 'xml' is none of"),
        ({"top_logprobs": 1}, "logprobs"),
        ({"n": 0}, "`n`"),
        ({"presence_penalty": 2.5}, "-2..2"),
        ({"max_tokens": 1000}, "context"),
    ],
)
async def test_bad_chats_are_bad_requests(
    client: openai.AsyncOpenAI, arguments: dict[str, Any], part: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**{"model": "fake", "messages": CHAT, **arguments})
    assert part in str(caught.value)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/completions"])
async def test_a_field_that_is_missing_is_named(decode: Role, path: str) -> None:
    error = (await decode.post(path, {"model": "fake"}, status=400))["error"]
    assert error["message"] == f"Object missing required field `{error['param']}`"


async def test_a_full_server_is_retryable(client: openai.AsyncOpenAI, decode: Role) -> None:
    decode.service.failure = Cause(Code.CAPACITY, "no pages")
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(model="fake", prompt="w1")
    assert caught.value.status_code == 503
    assert caught.value.response.headers["Retry-After"] == "1"


async def test_an_error_in_a_stream_reaches_the_client(
    client: openai.AsyncOpenAI, decode: Role
) -> None:
    decode.service.fail_after = 1
    stream = await client.completions.create(model="fake", prompt="w1", stream=True)
    with pytest.raises(openai.APIError, match="step failed"):
        async for _ in stream:
            pass


async def test_a_model_without_tokenizer_serves_token_ids_only(decode: Role) -> None:
    decode.tokenizer._tokenizer = None
    for path, document in (
        ("/v1/completions", {"prompt": "w1"}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/completions", {"prompt": [1], "stop": "w5", **META}),
    ):
        error = await decode.refused(400, path, document)
        assert "tokenizer" in error["message"]
