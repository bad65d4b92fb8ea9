"""langchain-openai: bound tools, structured output by its three methods, streams, by both APIs."""

from __future__ import annotations

from typing import Any

import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.clients.programs.served import (
    AGENT,
    AGENT_URL,
    BRIEF,
    CITY,
    KEY,
    LIMIT,
    QUESTION,
    REPLY,
    SUBJECT,
    TEXT,
    TOO_LONG,
    UNKNOWN,
    WRITER,
    WRITER_URL,
    Loose,
    Topic,
    get_weather,
    is_topic,
    refused,
    run,
    same,
)

PLAIN: Any = {"temperature": 0, "max_tokens": 24}


def chat(name: str, url: str, key: str = KEY, **given: Any) -> Any:
    return ChatOpenAI(model=name, base_url=f"{url}/v1", api_key=key, max_retries=0, **given)


def joined(pieces: Any) -> Any:
    """The message that all pieces of a stream make, by the client's own addition."""
    first, *others = list(pieces)
    for piece in others:
        first += piece
    return first


def chat_is_streamed() -> None:
    for responses in (False, True):
        model = chat(WRITER, WRITER_URL, use_responses_api=responses, stream_usage=True, **PLAIN)
        answer, streamed = model.invoke([SUBJECT]), joined(model.stream([SUBJECT]))
        same(streamed.text, answer.text)
        usage = answer.usage_metadata
        same(usage["total_tokens"], usage["input_tokens"] + usage["output_tokens"])
        same(usage["output_tokens"], PLAIN["max_tokens"])
        same(streamed.usage_metadata["total_tokens"], usage["total_tokens"])
        same([each.text for each in model.batch([[SUBJECT], [SUBJECT]])], [answer.text] * 2)


def tools_are_called_and_answered() -> None:
    for responses in (False, True):
        model = chat(AGENT, AGENT_URL, temperature=0, use_responses_api=responses)
        bound = model.bind_tools([tool(get_weather)])
        answer, streamed = bound.invoke([QUESTION]), joined(bound.stream([QUESTION]))
        for message in (answer, streamed):
            [call] = message.tool_calls
            same((call["name"], call["args"]), ("get_weather", {"city": CITY}))
            same((message.text, message.invalid_tool_calls), (TEXT, []))
        [call] = answer.tool_calls
        result = ToolMessage(tool(get_weather).invoke(call["args"]), tool_call_id=call["id"])
        same(bound.invoke([QUESTION, answer, result]).text, REPLY)


def outputs_have_their_type() -> None:
    for method in ("function_calling", "json_schema"):
        model = chat(WRITER, WRITER_URL, **BRIEF).with_structured_output(Topic, method=method)
        is_topic(model.invoke([SUBJECT]))
    schema = Topic.model_json_schema()
    model = chat(WRITER, WRITER_URL, **BRIEF).with_structured_output(schema, strict=True)
    is_topic(Topic.model_validate(model.invoke([SUBJECT])))


def json_mode() -> None:
    # This method sends no schema: the server owes an object of JSON, and not these fields.
    model = chat(WRITER, WRITER_URL, **BRIEF).with_structured_output(None, method="json_mode")
    assert isinstance(model.invoke([SUBJECT]), dict)
    typed = chat(WRITER, WRITER_URL, **BRIEF).with_structured_output(Loose, method="json_mode")
    assert isinstance(typed.invoke([SUBJECT]), Loose)


def refusals_are_the_errors_of_the_client() -> None:
    unknown, stranger = chat(UNKNOWN, WRITER_URL), chat(WRITER, WRITER_URL, "another")
    refused(openai.NotFoundError, lambda: unknown.invoke([SUBJECT]), UNKNOWN)
    refused(openai.AuthenticationError, lambda: stranger.invoke([SUBJECT]), "API key")
    model, long = chat(WRITER, WRITER_URL), [("user", TOO_LONG)]
    refused(ContextOverflowError, lambda: model.invoke(long), LIMIT)


run(
    chat_is_streamed,
    tools_are_called_and_answered,
    outputs_have_their_type,
    json_mode,
    refusals_are_the_errors_of_the_client,
)
