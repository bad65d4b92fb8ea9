"""litellm: completions, tools, typed answers, streams, by OpenAI's route and by Anthropic's."""

from __future__ import annotations

from typing import Any

import litellm

from tests.clients.programs.served import (
    AGENT,
    AGENT_URL,
    BRIEF,
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
    WEATHER_TOOL,
    WRITER,
    WRITER_URL,
    Topic,
    adds_up,
    calls_weather,
    is_topic,
    refused,
    run,
    same,
)


def asked(name: str, url: str, **given: Any) -> Any:
    base = f"{url}/v1"
    return litellm.completion(
        **{"model": f"openai/{name}", "api_base": base, "api_key": KEY, "max_retries": 0} | given
    )


def by_messages(name: str, url: str, **given: Any) -> Any:
    """The same, by Anthropic's route."""
    return asked(name, url, model=f"anthropic/{name}", api_base=url, **given)


def completion_is_streamed() -> None:
    given: Any = {"messages": [SUBJECT], "temperature": 0, "max_tokens": 24}
    for ask in (asked, by_messages):
        answer = ask(WRITER, WRITER_URL, **given)
        adds_up(answer.usage)
        same(answer.usage.completion_tokens, given["max_tokens"])
        same(answer.choices[0].finish_reason, "length")
        chunks = list(ask(WRITER, WRITER_URL, stream=True, **given))
        streamed = litellm.stream_chunk_builder(chunks)
        same(streamed.choices[0].message.content, answer.choices[0].message.content)
        assert len(chunks) > 2


def tools_are_called_and_answered() -> None:
    for ask in (asked, by_messages):
        given: Any = {"tools": [WEATHER_TOOL], "temperature": 0, "max_tokens": 100}
        answer = ask(AGENT, AGENT_URL, messages=[QUESTION], **given)
        streamed = litellm.stream_chunk_builder(
            list(ask(AGENT, AGENT_URL, messages=[QUESTION], stream=True, **given))
        )
        for found in (answer, streamed):
            [choice] = found.choices
            message = choice.message
            [call] = message.tool_calls
            calls_weather(call.function.name, call.function.arguments)
            same((message.content, message.reasoning_content), (TEXT, REASONING))
            same(choice.finish_reason, "tool_calls")
        message = answer.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        last = ask(AGENT, AGENT_URL, messages=[QUESTION, message, result], **given)
        same((last.choices[0].message.content, last.choices[0].finish_reason), (REPLY, "stop"))


def answers_have_their_type() -> None:
    answer = asked(WRITER, WRITER_URL, messages=[SUBJECT], response_format=Topic, **BRIEF)
    is_topic(Topic.model_validate_json(answer.choices[0].message.content))
    tool = {
        "type": "function",
        "function": {"name": "note", "parameters": Topic.model_json_schema()},
    }
    forced = asked(
        WRITER, WRITER_URL, messages=[SUBJECT], tools=[tool], tool_choice="required", **BRIEF
    )
    [call] = forced.choices[0].message.tool_calls
    is_topic(Topic.model_validate_json(call.function.arguments))


def refusals_are_the_errors_of_the_client() -> None:
    def asking(**given: Any) -> Any:
        return lambda: asked(WRITER, WRITER_URL, **{"messages": [SUBJECT], "max_tokens": 4} | given)

    refused(litellm.NotFoundError, asking(model=f"openai/{UNKNOWN}"), UNKNOWN)
    refused(litellm.AuthenticationError, asking(api_key="another"), "API key")
    long = [{"role": "user", "content": TOO_LONG}]
    refused(litellm.ContextWindowExceededError, asking(messages=long), TOO_LONG_TEXT, LIMIT)


run(
    completion_is_streamed,
    tools_are_called_and_answered,
    answers_have_their_type,
    refusals_are_the_errors_of_the_client,
)
