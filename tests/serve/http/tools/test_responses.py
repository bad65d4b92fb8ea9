"""OpenAI's /v1/responses, streamed and not, through the router, asked by the official client."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import openai
import pydantic
import pytest

from kvflow.serve.http.openai_responses import ResponsesRequest, chat_of
from kvflow.serve.http.tools.answers import formats_of
from tests.fakes.written import Written, byte_tokenizer, writing

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather",
    "parameters": SCHEMA,
    "strict": True,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
THOUGHT = f"<think>It asks.</think>I look.\n{CALL}\n{CALL}"
ASKED: dict[str, Any] = {
    "model": "fake",
    "input": "Weather?",
    "instructions": "Be brief.",
    "tools": [WEATHER],
}


@pytest.fixture
async def written() -> AsyncIterator[Written]:
    async with writing(formats_of("auto", "qwen3", byte_tokenizer())) as made:
        yield made


@pytest.fixture
async def asked(written: Written) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{written.front.url}/v1", api_key="none", max_retries=0
    ) as made:
        yield made


def shown(items: Any) -> list[Any]:
    """The kinds and texts of output items, which all have ids and ended."""
    found = []
    for item in items:
        assert (item.status, bool(item.id)) == ("completed", True)
        if item.type == "function_call":
            assert item.call_id
            found.append((item.name, json.loads(item.arguments)))
        else:
            (part,) = item.content
            found.append((part.type, part.text))
    assert len({item.id for item in items}) == len(items)
    return found


OUTPUT = [
    ("reasoning_text", "It asks."),
    ("output_text", "I look."),
    ("get_weather", {"city": "Bern"}),
    ("get_weather", {"city": "Bern"}),
]


async def test_an_answer_is_items(written: Written, asked: openai.AsyncOpenAI) -> None:
    written.writes(THOUGHT)
    written.decode.service.cached_tokens = 16
    answer = await asked.responses.create(**ASKED, metadata={"a": "b"}, temperature=0)
    assert shown(answer.output) == OUTPUT
    assert (answer.status, answer.output_text) == ("completed", "I look.")
    assert answer.id.startswith("resp_") and answer.metadata == {"a": "b"}
    assert answer.model_extra is not None and answer.model_extra["store"] is False
    (tool,) = answer.tools
    assert tool.to_dict() == WEATHER
    usage = answer.usage
    (request,) = written.decode.service.requests
    assert usage is not None
    assert usage.input_tokens == len(request.prompt)
    assert usage.input_tokens_details.cached_tokens == 16
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    # One token for the first tag, and one for each letter of the rest.
    assert usage.output_tokens_details.reasoning_tokens == 1 + len("It asks.</think>")
    assert "<|im_start|>system\nBe brief.<|im_end|>" in written.prompt()


async def test_a_stream_has_the_same_items(written: Written, asked: openai.AsyncOpenAI) -> None:
    written.writes(THOUGHT)
    # The client's helper joins the pieces, and refuses events that are out of order.
    async with asked.responses.stream(**ASKED) as stream:
        events: list[Any] = [event async for event in stream]
        final = await stream.get_final_response()
    assert shown(final.output) == OUTPUT
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    added = [event for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in added] == [0, 1, 2, 3]
    assert shown([event.item for event in done]) == OUTPUT
    for kind, pieces in (
        ("reasoning_text", ["It asks."]),
        ("output_text", ["I look."]),
        ("function_call_arguments", ['{"city": "Bern"}'] * 2),
    ):
        texts: dict[int, str] = {}
        for event in events:
            if event.type == f"response.{kind}.delta":
                texts[event.output_index] = texts.get(event.output_index, "") + event.delta
        assert list(texts.values()) == pieces
        ends = [event for event in events if event.type == f"response.{kind}.done"]
        assert [getattr(end, "text", None) or getattr(end, "arguments", None) for end in ends] == (
            pieces
        )


async def test_an_answer_that_is_too_long_is_incomplete(
    written: Written, asked: openai.AsyncOpenAI
) -> None:
    written.writes("It rains.")
    answer = await asked.responses.create(**ASKED, max_output_tokens=4)
    assert (answer.status, answer.output_text) == ("incomplete", "It r")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    stream = await asked.responses.create(**ASKED, max_output_tokens=4, stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.incomplete"
    assert last.response.output[0].status == "incomplete"


async def test_a_conversation_goes_on_with_all_its_items(
    written: Written, asked: openai.AsyncOpenAI
) -> None:
    written.writes(THOUGHT)
    first = await asked.responses.create(**ASKED)
    written.writes("Fine.")
    items: list[Any] = [
        {"role": "developer", "content": "Answer."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        *(item.to_dict() for item in first.output),
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "cold"}],
        },
        {"role": "assistant", "content": "Sun."},
        {"role": "user", "content": "So?"},
    ]
    answer = await asked.responses.create(model="fake", input=items, tools=[WEATHER])
    assert answer.output_text == "Fine."
    assert written.prompt().endswith(
        "<|im_start|>system\nAnswer.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
        f"<|im_start|>assistant\nI look.{CALL}{CALL}<|im_end|>\n"
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>tool\ncold<|im_end|>\n"
        "<|im_start|>assistant\nSun.<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
async def test_a_forced_call(written: Written, asked: openai.AsyncOpenAI, choice: Any) -> None:
    written.writes('[{"name": "get_weather", "parameters": {"city": "Bern"}}]')
    answer = await asked.responses.create(**ASKED, tool_choice=choice)
    assert shown(answer.output) == OUTPUT[2:3]
    assert written.decode.service.requests[0].params.grammar is not None


async def test_an_answer_is_parsed(written: Written, asked: openai.AsyncOpenAI) -> None:
    class Place(pydantic.BaseModel):
        city: str

    written.writes('{"city": "Bern"}')
    answer = await asked.responses.parse(model="fake", input="Where?", text_format=Place)
    assert answer.output_parsed == Place(city="Bern")
    grammar = written.decode.service.requests[0].params.grammar
    assert grammar is not None and json.loads(grammar.text)["required"] == ["city"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}]},
            "input[0].arguments",
        ),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
async def test_what_is_wrong_is_named(written: Written, more: dict[str, Any], param: str) -> None:
    error = await written.front.refused(400, "/v1/responses", {**ASKED, **more})
    assert error["param"] == param, error


async def test_a_stream_that_fails_raises_at_the_client(
    written: Written, asked: openai.AsyncOpenAI
) -> None:
    written.writes("It rains.")
    written.decode.service.fail_after = 3
    stream = await asked.responses.create(**ASKED, stream=True)
    with pytest.raises(openai.APIError, match="step failed"):
        async for _ in stream:
            pass


@pytest.mark.parametrize(
    "item",
    [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"role": "assistant", "content": "hello " * 8},
    ],
)
def test_many_items_of_one_answer_take_linear_time(item: dict[str, Any]) -> None:
    def seconds(count: int) -> float:
        body = msgspec.convert({"input": [item] * count}, ResponsesRequest)
        began = time.process_time()
        (message,) = chat_of(body).messages
        took = time.process_time() - began
        assert len(message.get("tool_calls", ())) in (0, count)
        return took

    assert seconds(20_000) < 30 * max(seconds(2_000), 0.002)
