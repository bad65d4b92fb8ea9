"""A model that calls a tool, behind a whole fleet, by the three routes of chats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from tests.e2e.agent_model import CITY, REASONING, REPLY, TEXT, save_agent
from tests.e2e.fleet import ask, is_home, running

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleets")]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}
QUESTION: Any = {"role": "user", "content": "Weather?"}


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield save_agent(tmp_path_factory.mktemp("agent"))


async def test_a_tool_is_called_and_its_result_is_answered(agent: Path) -> None:
    async with (
        running(
            model_path=str(agent), served_model_name="agent", reasoning_parser="qwen3"
        ) as fleet,
        aiohttp.ClientSession() as session,
        openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client,
    ):
        await by_chat(client)
        await by_responses(client)
        await by_messages(session, fleet.url)
        for role in await roles(session, fleet.url):
            assert is_home(role), role


async def roles(session: aiohttp.ClientSession, url: str) -> list[Any]:
    workers = (await ask(session, f"{url}/server_info"))["workers"]
    return [await ask(session, f"{worker['url']}/server_info") for worker in workers]


async def by_chat(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "agent", "tools": [CHAT_TOOL], "temperature": 0}
    answer = await client.chat.completions.create(messages=[QUESTION], **asked)
    async with client.chat.completions.stream(messages=[QUESTION], **asked) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_completion()
    choices: list[Any] = [answer.choices[0], streamed.choices[0]]
    for choice in choices:
        message = choice.message
        (call,) = message.tool_calls
        assert (choice.finish_reason, message.content) == ("tool_calls", TEXT)
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "get_weather",
            {"city": CITY},
        )
    first = choices[0].message
    assert first.model_extra == {"reasoning_content": REASONING}
    result: Any = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}
    last = await client.chat.completions.create(messages=[QUESTION, first, result], **asked)
    assert (last.choices[0].message.content, last.choices[0].finish_reason) == (REPLY, "stop")
    # Left alone, this prompt would have an answer without a call.
    forced: Any = await client.chat.completions.create(
        messages=[QUESTION, first, result], tool_choice="required", **asked
    )
    (call,) = forced.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": ""},
    )


async def by_responses(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "agent", "tools": [TOOL], "temperature": 0}
    answer = await client.responses.create(input=[QUESTION], **asked)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    call: Any = answer.output[-1]
    assert json.loads(call.arguments) == {"city": CITY}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    async with client.responses.stream(input=[QUESTION, *answer.output, result], **asked) as stream:
        async for _ in stream:
            pass
        last = await stream.get_final_response()
    assert (last.output_text, last.status) == (REPLY, "completed")


async def by_messages(session: aiohttp.ClientSession, url: str) -> None:
    asked = {
        "model": "agent",
        "max_tokens": 100,
        "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
        "messages": [QUESTION],
    }
    async with session.post(f"{url}/v1/messages", json=asked) as http:
        answer = await http.json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    use = answer["content"][-1]
    assert (use["input"], answer["stop_reason"]) == ({"city": CITY}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "sunny"}
    asked["messages"] = [
        QUESTION,
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result]},
    ]
    async with session.post(f"{url}/v1/messages", json=asked) as http:
        answer = await http.json()
    assert answer["content"] == [{"type": "text", "text": REPLY}]
    assert answer["stop_reason"] == "end_turn"
