"""Anthropic's /v1/messages, streamed and not, and its count of tokens, through the router."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from kvflow.http.app import MAX_BODY_BYTES
from kvflow.http.authorization import Keys
from kvflow.http.large_bodies import MAX_ADDED_BYTES
from kvflow.protocols.errors import Cause, Code
from kvflow.serve.http.tools.answers import formats_of
from tests.fakes.servers import Client, Front
from tests.fakes.service import FakeService, Meeting, Role
from tests.fakes.written import Written, byte_tokenizer, writing

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Weather", "input_schema": SCHEMA}
ASKED: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 400,
    "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": [WEATHER],
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
THOUGHT = f"<think>It asks.</think>I look.\n{CALL}"
BLOCKS = [
    {"type": "thinking", "thinking": "It asks.", "signature": ""},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "get_weather", "input": {"city": "Bern"}},
]


@pytest.fixture
async def written() -> AsyncIterator[Written]:
    async with writing(formats_of("auto", "qwen3", byte_tokenizer())) as made:
        yield made


async def named_events(front: Front, document: Any) -> list[tuple[str, Any]]:
    answer = await front.call("POST", "/v1/messages", {**document, "stream": True})
    assert answer.status == 200, answer.text
    found = []
    for event in answer.text.strip("\n").split("\n\n"):
        name, _, data = event.strip("\n").partition("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in found)
    return found


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert all(block["id"] for block in blocks if block["type"] == "tool_use")
    return [{name: one for name, one in block.items() if name != "id"} for block in blocks]


async def test_an_answer_is_blocks(written: Written) -> None:
    written.writes(THOUGHT)
    written.decode.service.cached_tokens = 16
    answer = await written.front.post("/v1/messages", ASKED)
    assert without_ids(answer["content"]) == BLOCKS
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "fake")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert answer["id"].startswith("msg_")
    (request,) = written.decode.service.requests
    usage = answer["usage"]
    assert usage["cache_read_input_tokens"] == 16
    assert usage["input_tokens"] + 16 == len(request.prompt)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in written.prompt()


async def test_the_prompt_is_that_of_the_same_chat(written: Written) -> None:
    written.writes("a")
    await written.front.post("/v1/messages", ASKED)
    first = written.prompt()
    function = {"name": "get_weather", "description": "Weather", "parameters": SCHEMA}
    chat = {
        "messages": [{"role": "system", "content": "Be brief."}, *ASKED["messages"]],
        "tools": [{"type": "function", "function": function}],
    }
    await written.front.post("/v1/chat/completions", chat)
    assert written.prompt() == first


async def test_a_stream_has_the_same_blocks(written: Written) -> None:
    written.writes(THOUGHT)
    written.decode.service.cached_tokens = 16
    whole = await written.front.post("/v1/messages", ASKED)
    events = await named_events(written.front, ASKED)
    names = [name for name, _ in events]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    start, end = events[0][1]["message"], events[-2][1]
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert start["usage"]["cache_read_input_tokens"] == 16
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    blocks: list[dict[str, Any]] = []
    inputs = ""
    opened = None
    for name, event in events[1:-2]:
        if name == "content_block_start":
            assert (opened, event["index"]) == (None, len(blocks))
            opened = event["index"]
            blocks.append(event["content_block"])
        elif name == "content_block_stop":
            assert event["index"] == opened
            opened = None
        else:
            delta = event["delta"]
            kind = delta["type"].removesuffix("_delta")
            if kind == "input_json":
                inputs += delta["partial_json"]
            else:
                assert blocks[event["index"]]["type"] == kind
                blocks[event["index"]][kind] += delta[kind]
    assert opened is None
    blocks[-1]["input"] = json.loads(inputs)
    assert without_ids(blocks) == BLOCKS


@pytest.mark.parametrize(
    ("more", "reason", "sequence", "text"),
    [
        ({}, "end_turn", None, "It rains."),
        ({"max_tokens": 4}, "max_tokens", None, "It r"),
        ({"stop_sequences": ["ins"]}, "stop_sequence", "ins", "It ra"),
    ],
)
async def test_why_an_answer_ends(
    written: Written, more: dict[str, Any], reason: str, sequence: str | None, text: str
) -> None:
    written.writes("It rains.")
    answer = await written.front.post("/v1/messages", {**ASKED, **more})
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    assert answer["content"] == [{"type": "text", "text": text}]
    events = await named_events(written.front, {**ASKED, **more})
    assert events[-2][1]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


async def test_a_conversation_goes_on_with_results(written: Written) -> None:
    written.writes("Fine.")
    messages = [
        *ASKED["messages"],
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "It asks.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Bern"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "cold"}],
                },
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    await written.front.post("/v1/messages", {**ASKED, "messages": messages})
    assert written.prompt().endswith(
        f"<|im_start|>assistant\nI look.{CALL}<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>\n"
        "<|im_start|>tool\ncold<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    only_results = [*messages[:-1], {"role": "user", "content": messages[-1]["content"][:1]}]
    await written.front.post("/v1/messages", {**ASKED, "messages": only_results})
    assert "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant" in written.prompt()


async def test_tokens_are_counted_without_an_answer(written: Written) -> None:
    asked = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    counted = await written.front.post("/v1/messages/count_tokens", asked)
    assert written.decode.service.requests == []
    written.writes("a")
    answer = await written.front.post("/v1/messages", ASKED)
    assert counted == {"input_tokens": answer["usage"]["input_tokens"]}
    error = await written.front.refused(400, "/v1/messages/count_tokens", {"messages": []})
    assert error["param"] == "messages"
    await written.front.refused(404, "/v1/messages/count_tokens", {**asked, "model": "other"})


async def test_thinking_that_is_disabled_is_not_shown(written: Written) -> None:
    written.writes(THOUGHT)
    answer = await written.front.post("/v1/messages", {**ASKED, "thinking": {"type": "disabled"}})
    assert without_ids(answer["content"]) == BLOCKS[1:]


async def test_one_tool_use_where_they_must_not_be_parallel(written: Written) -> None:
    written.writes(f"{CALL}\n{CALL}")
    for parallel, count in ((True, 2), (False, 1)):
        choice = {"type": "auto", "disable_parallel_tool_use": not parallel}
        answer = await written.front.post("/v1/messages", {**ASKED, "tool_choice": choice})
        assert len(answer["content"]) == count


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
async def test_a_forced_tool_use(written: Written, choice: dict[str, Any]) -> None:
    written.writes('[{"name": "get_weather", "parameters": {"city": "Bern"}}]')
    answer = await written.front.post("/v1/messages", {**ASKED, "tool_choice": choice})
    assert without_ids(answer["content"]) == BLOCKS[2:]
    assert answer["stop_reason"] == "tool_use"
    assert written.decode.service.requests[0].params.grammar is not None


async def test_an_answer_of_a_schema(written: Written) -> None:
    written.writes('{"city": "Bern"}')
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = await written.front.post("/v1/messages", {**ASKED, "output_config": config})
    assert answer["content"] == [{"type": "text", "text": '{"city": "Bern"}'}]
    grammar = written.decode.service.requests[0].params.grammar
    assert grammar is not None and json.loads(grammar.text) == SCHEMA


async def test_an_input_that_is_cut_off_is_empty(written: Written) -> None:
    written.writes(CALL)
    answer = await written.front.post("/v1/messages", {**ASKED, "max_tokens": 50})
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][0]["input"] == {}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"stop_sequences": ["s" * 5000]}, "stop_sequences"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [*ASKED["messages"], {"role": "assistant", "content": "So"}]},
            "messages",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "a"}]}, "tools[0].type"),
        ({"tools": [{"name": "a"}]}, "tools[0]"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"tools": None, "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"system": 5}, "system"),
    ],
)
async def test_what_is_wrong_is_named(written: Written, more: dict[str, Any], param: str) -> None:
    error = await written.front.refused(400, "/v1/messages", {**ASKED, **more})
    assert error["param"] == param, error
    # The leg that reads the body first ends the room. The router then drops the other one.
    assert written.prefill.service.refused or written.decode.service.refused


class Refused(NamedTuple):
    """One error as a client of Anthropic's API reads it."""

    status: int
    kind: str
    message: str


async def refused(client: Client, document: Any, path: str = "/v1/messages") -> Refused:
    # aiohttp warns of a large body that is not a file.
    data, named = io.BytesIO(json.dumps(document).encode()), {"X-Request-ID": "req-7"}
    answer = await client.call("POST", path, data=data, headers=named)
    found = answer.json
    assert (found["type"], found["request_id"]) == ("error", "req-7")
    assert answer.headers["request-id"] == "req-7"
    return Refused(answer.status, found["error"]["type"], found["error"]["message"])


async def test_errors_have_the_form_of_this_api_at_every_role(written: Written) -> None:
    workers = written.prefill, written.decode
    for client in (written.front, *workers):
        found = await refused(client, {**ASKED, "model": "other"})
        assert found[:2] == (404, "not_found_error") and "'other' is not served" in found.message
        found = await refused(client, {**ASKED, "max_tokens": 0})
        assert found[:2] == (400, "invalid_request_error") and "max_tokens" in found.message
    for client in (written.front, written.decode):
        found = await refused(client, {"messages": []}, "/v1/messages/count_tokens")
        assert found[:2] == (400, "invalid_request_error") and "messages" in found.message
    huge = {**ASKED, "metadata": {"user_id": "a" * (MAX_BODY_BYTES + MAX_ADDED_BYTES)}}
    for client in (written.front, written.decode):
        assert (await refused(client, huge))[:2] == (413, "request_too_large")
    written.front.router.stop()
    assert (await refused(written.front, ASKED))[:2] == (503, "overloaded_error")


async def test_errors_of_a_router_alone_have_that_form_too(written: Written) -> None:
    await written.decode.stop()
    found = await refused(written.front, ASKED)
    assert found[:2] == (502, "api_error") and "cannot be reached" in found.message
    found = await refused(written.front, ASKED)
    assert found[:2] == (503, "overloaded_error")


async def test_a_leg_that_fails_alone_answers_in_that_form(written: Written) -> None:
    written.prefill.service.failure = Cause(Code.ENGINE_ERROR, "no step")
    written.decode.service.gate.clear()
    for stream in (False, True):
        found = await refused(written.front, {**ASKED, "stream": stream})
        assert found[:2] == (500, "api_error") and "no step" in found.message


async def test_a_stream_that_fails_ends_with_the_event_that_its_clients_read(
    written: Written,
) -> None:
    written.writes("It rains.")
    written.decode.service.fail_after = 3
    events = await named_events(written.front, ASKED)
    name, error = events[-1]
    assert (name, error["error"]["code"]) == ("error", "engine_error")
    assert error["error"]["type"] == "api_error" and error["request_id"]
    assert "step failed" in error["error"]["message"]


async def test_an_error_event_before_the_first_token_is_the_only_event() -> None:
    """The router reads it in this route's form, so it may try another pair."""
    async with writing(headers_after_s=0.0) as written:
        service = written.decode.service
        service.failure = Cause(Code.CAPACITY, "no pages")
        service.gate.clear()
        async with written.front.opened("/v1/messages", {**ASKED, "stream": True}) as answer:
            await answer.content.readline()
            service.gate.set()
            raw = await answer.read()
        assert raw.strip().startswith(b"event: error\ndata: ") and b"no pages" in raw
        assert raw.count(b"event:") == 1
        assert 'code="capacity"' in await written.front.metrics()


async def test_the_key_may_be_in_the_header_of_these_clients() -> None:
    keys, path = Keys(api="secret"), "/v1/messages/count_tokens"
    body = {"messages": [{"role": "user", "content": "w1"}]}
    async with (
        Role(FakeService("decode", Meeting()), keys=keys) as decode,
        Client(decode.port) as client,
    ):
        await client.post(path, body, headers={"x-api-key": "secret"})
        error = await client.refused(401, path, body, headers={"x-api-key": "other"})
        assert error["type"] == "authentication_error"
        # A key in the usual header counts alone.
        both = {"x-api-key": "secret", "Authorization": "Bearer other"}
        await client.refused(401, path, body, headers=both)
