"""pydantic-ai: tools, output types by a tool and by a schema, streams, by both of its models."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.programs.served import (
    AGENT,
    AGENT_URL,
    BRIEF,
    KEY,
    QUESTION,
    REPLY,
    SUBJECT,
    UNKNOWN,
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

MODELS = (OpenAIChatModel, OpenAIResponsesModel)


def model(kind: Any, name: str, url: str, key: str = KEY) -> Any:
    return kind(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))


def tools_are_called_and_answered() -> None:
    for kind in MODELS:
        found = Agent(
            model(kind, AGENT, AGENT_URL),
            system_prompt="Be brief.",
            tools=[get_weather],
            model_settings={"temperature": 0},
        )
        result = found.run_sync(QUESTION["content"])
        same(result.output, REPLY)
        parts = [part for message in result.all_messages() for part in message.parts]
        [call] = [part for part in parts if part.part_kind == "tool-call"]
        calls_weather(call.tool_name, call.args)
        assert {"thinking", "tool-return", "text"} <= {part.part_kind for part in parts}
        usage = result.usage
        same((usage.requests, usage.tool_calls), (2, 1))
        same(usage.total_tokens, usage.input_tokens + usage.output_tokens)


def outputs_have_their_type() -> None:
    for kind in MODELS:
        for output in (ToolOutput(Topic), NativeOutput(Topic)):
            settings = {"temperature": 0, "max_tokens": 1500}
            found = Agent(
                model(kind, WRITER, WRITER_URL),
                output_type=output,
                model_settings=settings,
                retries=0,
            )
            is_topic(found.run_sync(SUBJECT["content"]).output)


def text_and_outputs_are_streamed() -> None:
    async def streamed(output: Any, **settings: Any) -> Any:
        found = Agent(
            model(OpenAIChatModel, WRITER, WRITER_URL), output_type=output, model_settings=settings
        )
        async with found.run_stream(SUBJECT["content"]) as result:
            pieces = [piece async for piece in result.stream_output(debounce_by=None)]
            last = await result.get_output()
        assert len(pieces) > 1
        plain = await found.run(SUBJECT["content"])
        same((pieces[-1], last), (plain.output, plain.output))
        return last

    asyncio.run(streamed(str, temperature=0, max_tokens=24))
    is_topic(asyncio.run(streamed(NativeOutput(Topic), **BRIEF)))


def refusals_are_the_errors_of_the_client() -> None:
    def asking(name: str, key: str) -> Any:
        return lambda: Agent(model(OpenAIChatModel, name, WRITER_URL, key)).run_sync("Hello")

    refused(ModelHTTPError, asking(UNKNOWN, KEY), "404", UNKNOWN)
    refused(ModelHTTPError, asking(WRITER, "another"), "401", "API key")


run(
    tools_are_called_and_answered,
    outputs_have_their_type,
    text_and_outputs_are_streamed,
    refusals_are_the_errors_of_the_client,
)
