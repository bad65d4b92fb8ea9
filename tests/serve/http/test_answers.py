"""Answers of the OpenAI routes to the official client: usage, ids, stops, bytes, errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import openai
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from kvflow.protocols.errors import MisuseError
from kvflow.serve.config.sources import resolve
from kvflow.serve.demo_model import DEMO_MODEL_DIR
from kvflow.serve.engine.scheduler.params import TokenOut
from kvflow.serve.http.completion import Completion, Delta
from kvflow.serve.http.openai import ChatCall, TextCompletionCall
from kvflow.serve.http.schemas import ChatRequest, CompletionRequest, parse
from kvflow.serve.http.tokenizer import ThreadedTokenizer
from kvflow.serve.launch import parts
from tests.fakes.service import META, PROMPTS, FakeService, Meeting, Role

HELLO: Any = [{"role": "user", "content": "w1 w2"}]


async def test_a_prompt_of_several_choices_counts_once(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=3, n=4)
    text = await client.completions.create(model="fake", prompt=["w1 w2", "w5"], max_tokens=3, n=2)
    for usage, prompt in ((chat.usage, 2), (text.usage, 3)):
        assert usage is not None and usage.prompt_tokens_details is not None
        told = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
        assert told == (prompt, 12, prompt + 12)
        assert usage.prompt_tokens_details.cached_tokens == 0


async def test_usage_in_a_chats_first_event_too(client: openai.AsyncOpenAI) -> None:
    options: Any = {"continuous_usage_stats": True}
    stream = await client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=2, stream=True, stream_options=options
    )
    usages = [chunk.usage for chunk in [chunk async for chunk in stream]]
    assert [usage and usage.completion_tokens for usage in usages] == [0, 1, 2]


async def test_usage_in_every_event(client: openai.AsyncOpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.completions.create(
        model="fake", prompt="w1 w2", max_tokens=3, n=2, stream=True, stream_options=options
    )
    seen: dict[int, list[int]] = {0: [], 1: []}
    last = 0
    async for chunk in stream:
        assert chunk.usage is not None and chunk.usage.prompt_tokens == 2
        last = chunk.usage.completion_tokens
        if chunk.choices:
            seen[chunk.choices[0].index].append(last)
    assert seen == {0: [1, 2, 3], 1: [1, 2, 3]}
    assert last == 6


@pytest.mark.parametrize(
    "stop", [{"stop": ["w4"]}, {"stop_token_ids": [4]}], ids=lambda stop: next(iter(stop))
)
@pytest.mark.parametrize("field", ["no_stop_trim", "include_stop_str_in_output"])
async def test_what_ends_the_text_is_kept_on_request(
    client: openai.AsyncOpenAI, field: str, stop: dict[str, Any]
) -> None:
    for extra, words in (({}, ["w2", "w3"]), ({field: True}, ["w2", "w3", "w4"])):
        answer = await client.completions.create(
            model="fake", prompt="w1", max_tokens=9, extra_body={**stop, **extra}
        )
        assert answer.choices[0].text.split() == words
        assert answer.choices[0].finish_reason == "stop"


async def test_the_models_sampling_is_the_default(meeting: Meeting, met: None) -> None:
    """On the OpenAI routes, as in vLLM and SGLang; /generate has SGLang's own defaults."""
    service = FakeService("decode", meeting)
    service.card = msgspec.structs.replace(
        service.card, sampling_defaults={"temperature": 0.6, "top_k": 20}
    )
    cases: list[tuple[str, dict[str, Any], tuple[float, int]]] = [
        ("/v1/completions", {}, (0.6, 20)),
        ("/v1/chat/completions", {}, (0.6, 20)),
        ("/v1/completions", {"temperature": 0.9, "top_k": -1}, (0.9, -1)),
        ("/generate", {}, (1.0, -1)),
    ]
    async with Role(service) as decode:
        for room, (path, own, expected) in enumerate(cases, 7):
            await decode.post(path, {**PROMPTS[path], **META, "bootstrap_room": room, **own})
            params = service.requests[-1].params
            assert (params.temperature, params.top_k, params.top_p) == (*expected, 1.0), path


def test_recommended_sampling_that_no_request_may_have_is_refused_at_the_start() -> None:
    model: Any = SimpleNamespace(sampling_defaults={"temperature": -1})
    given = {"model_path": str(DEMO_MODEL_DIR)}
    with pytest.raises(
        MisuseError, match=r"generation_config.json.*temperature -1.*--sampling-defaults openai"
    ):
        parts._sampling_defaults(resolve("decode", given, env={}), model)
    off = resolve("decode", {**given, "sampling_defaults": "openai"}, env={})
    assert parts._sampling_defaults(off, model) == {}


async def test_the_template_sees_variables(client: openai.AsyncOpenAI, decode: Role) -> None:
    async def chat(**extra: Any) -> None:
        await client.chat.completions.create(
            model="fake", messages=HELLO, max_tokens=1, extra_body=extra
        )

    await chat(chat_template_kwargs={"lead": "w9"})
    assert decode.service.requests[0].prompt == [9, 1, 2]
    with pytest.raises(
        openai.BadRequestError, match="'tokenize' is an argument of the tokenizer"
    ) as caught:
        await chat(chat_template_kwargs={"tokenize": False})
    assert caught.value.param == "chat_template_kwargs"


async def test_ids_that_the_client_chooses(client: openai.AsyncOpenAI) -> None:
    for field, expected in (("rid", "mine"), ("request_id", "cmpl-mine")):
        answer = await client.completions.create(
            model="fake", prompt="w1", max_tokens=1, extra_body={field: "mine"}
        )
        assert answer.id == expected


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"prompt": [1] * 200}, "prompt"),
        ({"prompt": "w1 " * 1000}, "prompt"),
        ({"prompt": "w1", "max_tokens": 500}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "w1 " * 200}]}, "messages"),
        ({"messages": HELLO, "max_tokens": 500}, "max_tokens"),
        ({"messages": HELLO, "max_completion_tokens": 500}, "max_completion_tokens"),
    ],
)
async def test_what_cannot_fit_has_openais_code(
    client: openai.AsyncOpenAI, arguments: dict[str, Any], param: str
) -> None:
    create: Any = (
        client.completions.create if "prompt" in arguments else client.chat.completions.create
    )
    with pytest.raises(openai.BadRequestError) as caught:
        await create(model="fake", **arguments)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


async def test_a_value_of_the_wrong_kind_is_named(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="fake", prompt="w1", temperature=-1)
    assert caught.value.param == "temperature"


@pytest.fixture
def of_bytes() -> Tokenizer:
    """Every byte is a token."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def test_parts_of_a_character_keep_their_bytes(of_bytes: Tokenizer) -> None:
    body = parse(
        b'{"messages":[{"role":"user","content":"a"}],"logprobs":true,"stream":true}', ChatRequest
    )
    token_bytes = ThreadedTokenizer(of_bytes).token_bytes
    call = ChatCall(body, "m", token_bytes)
    spelled = []
    for token_id in of_bytes.encode("a語").ids:
        (event,) = call.events(0, [Delta("", (TokenOut(token_id, -1.0),))], Completion())
        spelled += event["choices"][0]["logprobs"]["content"]
    assert [one["bytes"] for one in spelled] == [[ord("a")], *([byte] for byte in "語".encode())]
    assert [one["token"] for one in spelled] == ["a", "\ufffd", "\ufffd", "\ufffd"]


def test_parts_of_a_character_are_keys_of_their_own(of_bytes: Tokenizer) -> None:
    body = parse(b'{"prompt":"a","logprobs":2,"stream":true}', CompletionRequest)
    call = TextCompletionCall(body, "m", ThreadedTokenizer(of_bytes).token_bytes)
    first, second, third = of_bytes.encode("語").ids
    after = of_bytes.encode("b").ids[0]
    top = ((first, -1.0), (second, -2.0))
    logprobs = []
    for token_id in (first, second, third, after):
        (event,) = call.events(0, [Delta("", (TokenOut(token_id, -1.0, top),))], Completion())
        logprobs.append(event["choices"][0]["logprobs"])
    told = ["bytes:\\xe8", "bytes:\\xaa", "bytes:\\x9e", "b"]
    assert [one["tokens"] for one in logprobs] == [[token] for token in told]
    assert logprobs[0]["top_logprobs"] == [{"bytes:\\xe8": -1.0, "bytes:\\xaa": -2.0}]
    assert [one["text_offset"] for one in logprobs] == [[0], [1], [1], [1]]
