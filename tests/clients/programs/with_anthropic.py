"""Anthropic's own client: messages, thinking, tools and their runner, streams, counts, errors."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import anthropic
from pydantic import BaseModel

from tests.clients.programs.served import (
    AGENT,
    AGENT_URL,
    CITY,
    KEY,
    LIMIT,
    QUESTION,
    REASONING,
    REPLY,
    SUBJECT,
    TEXT,
    TOO_LONG,
    TOO_LONG_TEXT,
    UNKNOWN,
    UNKNOWN_TYPE,
    WEATHER,
    WRITER,
    WRITER_URL,
    Topic,
    calls_weather,
    get_weather,
    is_topic,
    refused,
    run,
    same,
)

agent = anthropic.Anthropic(base_url=AGENT_URL, api_key=KEY, max_retries=0)
writer = anthropic.Anthropic(base_url=WRITER_URL, api_key=KEY, max_retries=0)
# The client has no argument for it since its version 2.
GREEDY: Any = {"extra_body": {"temperature": 0}}
TOOL: Any = {"name": "get_weather", "description": "Weather", "input_schema": WEATHER}
CALLING: Any = {"model": AGENT, "max_tokens": 100, "tools": [TOOL], **GREEDY}
PLAIN: Any = {"model": WRITER, "messages": [SUBJECT], "max_tokens": 24, **GREEDY}
LONG: Any = {"model": WRITER, "messages": [SUBJECT], "max_tokens": 1500, **GREEDY}


class Kind(BaseModel):
    """The kind of a topic."""

    kind: Literal["class", "module", "function"]
    known: bool


def message_is_streamed() -> None:
    answer = writer.messages.create(system="Be brief.", **PLAIN)
    [block] = answer.content
    same((block.type, answer.role, answer.stop_reason), ("text", "assistant", "max_tokens"))
    same(answer.usage.output_tokens, PLAIN["max_tokens"])
    with writer.messages.stream(system="Be brief.", **PLAIN) as stream:
        pieces = list(stream.text_stream)
        last = stream.get_final_message()
    assert len(pieces) > 1
    same("".join(pieces), block.text)
    same((last.stop_reason, last.usage.output_tokens), ("max_tokens", PLAIN["max_tokens"]))


def message_is_streamed_asynchronously() -> None:
    async def text() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=WRITER_URL, api_key=KEY) as client,
            client.messages.stream(**PLAIN) as stream,
        ):
            return str(await stream.get_final_text())

    same(asyncio.run(text()), writer.messages.create(**PLAIN).content[0].text)


def stop_sequences() -> None:
    text = writer.messages.create(**PLAIN).content[0].text
    stop = text[len(text) // 2 :].split()[0]
    stopped = writer.messages.create(stop_sequences=[stop], **PLAIN)
    same((stopped.stop_reason, stopped.stop_sequence), ("stop_sequence", stop))
    same(stopped.content[0].text, text[: text.index(stop)])


def tools_are_called_and_answered() -> None:
    answer = agent.messages.create(messages=[QUESTION], **CALLING)
    same([block.type for block in answer.content], ["thinking", "text", "tool_use"])
    same((answer.content[0].thinking, answer.content[1].text), (REASONING, TEXT))
    use = answer.content[-1]
    calls_weather(use.name, use.input)
    same(answer.stop_reason, "tool_use")
    with agent.messages.stream(messages=[QUESTION], **CALLING) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    calls_weather("get_weather", "".join(pieces))
    for found, block in zip(streamed.content, answer.content, strict=True):
        same(found.model_dump(exclude={"id"}), block.model_dump(exclude={"id"}))
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turns = [
        QUESTION,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    last = agent.messages.create(messages=turns, **CALLING)
    same(([block.text for block in last.content], last.stop_reason), ([REPLY], "end_turn"))


def tools_are_run_by_the_client() -> None:
    tool = anthropic.beta_tool(get_weather)
    turns = list(
        agent.beta.messages.tool_runner(
            model=AGENT, max_tokens=100, tools=[tool], messages=[QUESTION], **GREEDY
        )
    )
    same([turn.stop_reason for turn in turns], ["tool_use", "end_turn"])
    same(turns[-1].content[0].text, REPLY)


def tools_are_forced() -> None:
    tool: Any = {"name": "note", "input_schema": Topic.model_json_schema()}
    for choice in ({"type": "any"}, {"type": "tool", "name": "note"}):
        answer = writer.messages.create(tools=[tool], tool_choice=choice, **LONG)
        [use] = answer.content
        same((use.type, use.name), ("tool_use", "note"))
        is_topic(Topic.model_validate(use.input))
    none = agent.messages.create(messages=[QUESTION], tool_choice={"type": "none"}, **CALLING)
    assert not [block for block in none.content if block.type == "tool_use"]


def answers_are_parsed() -> None:
    # The client takes the limits of Topic's texts and numbers out of the schema.
    found = writer.messages.parse(output_format=Kind, **LONG).parsed_output
    assert isinstance(found, Kind)
    with writer.messages.stream(output_format=Kind, **LONG) as stream:
        same(stream.get_final_message().parsed_output, found)


def tokens_are_counted() -> None:
    for client, asked in (
        (writer, {"model": WRITER, "messages": [SUBJECT]}),
        (writer, {"model": WRITER, "messages": [SUBJECT], "system": f"You live in {CITY}."}),
        (agent, {"model": AGENT, "messages": [QUESTION], "tools": [TOOL]}),
    ):
        counted = client.messages.count_tokens(**asked)
        usage = client.messages.create(max_tokens=4, **asked).usage
        cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        same(counted.input_tokens, usage.input_tokens + cached)


def refusals_are_the_errors_of_the_client() -> None:
    def asking(**changes: Any) -> Any:
        return lambda: writer.messages.create(**PLAIN | changes)

    refused(anthropic.NotFoundError, asking(model=UNKNOWN), UNKNOWN)
    bad = {"format": {"type": "json_schema", "schema": UNKNOWN_TYPE}}
    error = refused(anthropic.BadRequestError, asking(output_config=bad), "nothing")
    assert error.type == "invalid_request_error" and error.request_id
    long = [{"role": "user", "content": TOO_LONG}]
    refused(anthropic.BadRequestError, asking(messages=long), TOO_LONG_TEXT, LIMIT)
    refused(anthropic.BadRequestError, asking(extra_body={"temperature": -1}), "temperature")
    stranger = writer.with_options(api_key="another")
    refused(anthropic.AuthenticationError, lambda: stranger.messages.create(**PLAIN), "API key")
    counted = {"model": WRITER, "messages": [SUBJECT]}
    refused(
        anthropic.AuthenticationError, lambda: stranger.messages.count_tokens(**counted), "API key"
    )


run(
    message_is_streamed,
    message_is_streamed_asynchronously,
    stop_sequences,
    tools_are_called_and_answered,
    tools_are_run_by_the_client,
    tools_are_forced,
    answers_are_parsed,
    tokens_are_counted,
    refusals_are_the_errors_of_the_client,
)
