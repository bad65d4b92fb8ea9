"""OpenAI's own client: chats, tools, parsed answers, responses, completions, streams, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from pydantic import BaseModel

from tests.clients.programs.served import (
    AGENT,
    AGENT_URL,
    BRIEF,
    CITY,
    CONTEXT,
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

agent = openai.OpenAI(base_url=f"{AGENT_URL}/v1", api_key=KEY, max_retries=0)
writer = openai.OpenAI(base_url=f"{WRITER_URL}/v1", api_key=KEY, max_retries=0)
PLAIN: Any = {"model": WRITER, "messages": [SUBJECT], "temperature": 0, "max_tokens": 24}
CALLING: Any = {"model": AGENT, "tools": [WEATHER_TOOL], "temperature": 0}
RESPONSE_TOOL: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER}
RESPONDING: Any = {"model": AGENT, "tools": [RESPONSE_TOOL | {"strict": False}], "temperature": 0}


class GetWeather(BaseModel):
    """The arguments of the tool, as `pydantic_function_tool` sends them."""

    city: str


def models() -> None:
    same([model.id for model in agent.models.list()], [AGENT])
    same(writer.models.retrieve(WRITER).id, WRITER)


def chat_is_streamed() -> None:
    answer = writer.chat.completions.create(**PLAIN)
    usage = answer.usage
    adds_up(usage)
    assert usage is not None and usage.completion_tokens == PLAIN["max_tokens"]
    same(answer.choices[0].finish_reason, "length")
    pieces, last = [], None
    for chunk in writer.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **PLAIN
    ):
        last = chunk
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    same("".join(pieces), answer.choices[0].message.content)
    assert len([piece for piece in pieces if piece]) > 1
    same(last and last.usage and last.usage.total_tokens, usage.total_tokens)


def chat_is_streamed_asynchronously() -> None:
    async def text() -> str:
        async with openai.AsyncOpenAI(base_url=f"{WRITER_URL}/v1", api_key=KEY) as client:
            stream = await client.chat.completions.create(stream=True, **PLAIN)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    same(asyncio.run(text()), writer.chat.completions.create(**PLAIN).choices[0].message.content)


def several_and_logprobs() -> None:
    asked: Any = PLAIN | {"temperature": 1, "seed": 5, "max_tokens": 6}
    answers = [
        writer.chat.completions.create(n=3, logprobs=True, top_logprobs=2, **asked)
        for _ in range(2)
    ]
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    same(texts[0], texts[1])  # by the seed
    assert len(set(texts[0])) > 1
    for choice in answers[0].choices:
        found = (choice.logprobs and choice.logprobs.content) or []
        assert len(found) == 6 and all(
            each.logprob <= 0 and len(each.top_logprobs) == 2 for each in found
        )


def tools_are_called_and_answered() -> None:
    answer = agent.chat.completions.create(messages=[QUESTION], **CALLING)
    [choice] = answer.choices
    message: Any = choice.message
    same((choice.finish_reason, message.content), ("tool_calls", TEXT))
    same(message.reasoning_content, REASONING)
    [call] = message.tool_calls
    calls_weather(call.function.name, call.function.arguments)
    adds_up(answer.usage)
    with agent.chat.completions.stream(messages=[QUESTION], **CALLING) as stream:
        deltas = [
            event.arguments_delta
            for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        streamed: Any = stream.get_final_completion().choices[0]
    same("".join(deltas), call.function.arguments)
    [again] = streamed.message.tool_calls
    same(again.function.arguments, call.function.arguments)
    same((streamed.finish_reason, streamed.message.content), ("tool_calls", TEXT))
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    last = agent.chat.completions.create(messages=[QUESTION, message, result], **CALLING)
    same((last.choices[0].message.content, last.choices[0].finish_reason), (REPLY, "stop"))


def tools_are_parsed_and_forced() -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    parsed = agent.chat.completions.parse(
        model=AGENT, messages=[QUESTION], tools=[tool], temperature=0
    )
    [call] = parsed.choices[0].message.tool_calls or []
    same(call.function.parsed_arguments, GetWeather(city=CITY))
    topic = openai.pydantic_function_tool(Topic, name="note")
    named: Any = {"type": "function", "function": {"name": "note"}}
    for choice in ("required", named):
        forced = writer.chat.completions.parse(
            model=WRITER, messages=[SUBJECT], tools=[topic], tool_choice=choice, **BRIEF
        )
        [call] = forced.choices[0].message.tool_calls or []
        same(call.function.name, "note")
        is_topic(call.function.parsed_arguments)
    none = agent.chat.completions.create(messages=[QUESTION], tool_choice="none", **CALLING)
    assert not none.choices[0].message.tool_calls


def answers_are_parsed() -> None:
    asked: Any = {"model": WRITER, "messages": [SUBJECT], "response_format": Topic, **BRIEF}
    answer = writer.chat.completions.parse(**asked)
    is_topic(answer.choices[0].message.parsed)
    adds_up(answer.usage)
    with writer.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0]
    same(streamed.message.parsed, answer.choices[0].message.parsed)
    for seed in range(2):
        drawn = writer.chat.completions.parse(**asked | {"temperature": 1.0, "seed": seed})
        is_topic(drawn.choices[0].message.parsed)


def an_object_of_json() -> None:
    answer = writer.chat.completions.create(
        model=WRITER, messages=[SUBJECT], response_format={"type": "json_object"}, **BRIEF
    )
    same(answer.choices[0].finish_reason, "stop")
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def responses_call_tools() -> None:
    answer = agent.responses.create(input=[QUESTION], **RESPONDING)
    same([item.type for item in answer.output], ["reasoning", "message", "function_call"])
    same(answer.output_text, TEXT)
    call: Any = answer.output[-1]
    calls_weather(call.name, call.arguments)
    usage: Any = answer.usage
    same(usage.total_tokens, usage.input_tokens + usage.output_tokens)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    conversation: Any = [QUESTION, *answer.output, result]
    plain = agent.responses.create(input=conversation, **RESPONDING)
    same((plain.output_text, plain.status), (REPLY, "completed"))
    with agent.responses.stream(input=conversation, **RESPONDING) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        last = stream.get_final_response()
    same("".join(deltas), REPLY)
    same(last.output_text, REPLY)
    same(last.usage and last.usage.total_tokens, plain.usage and plain.usage.total_tokens)


def responses_are_parsed() -> None:
    answer = writer.responses.parse(
        model=WRITER,
        instructions="Be brief.",
        input="What is a class?",
        text_format=Topic,
        temperature=0,
    )
    is_topic(answer.output_parsed)
    same(answer.status, "completed")


def completions() -> None:
    asked: Any = {"model": WRITER, "prompt": "A class is", "max_tokens": 16, "temperature": 0}
    answer = writer.completions.create(**asked)
    adds_up(answer.usage)
    pieces = [chunk.choices[0].text for chunk in writer.completions.create(stream=True, **asked)]
    same("".join(pieces), answer.choices[0].text)
    several = writer.completions.create(**asked | {"prompt": ["A class", "A module"], "n": 2})
    same([choice.index for choice in several.choices], [0, 1, 2, 3])


def refusals_are_the_errors_of_the_client() -> None:
    def asking(**changes: Any) -> Any:
        return lambda: writer.chat.completions.create(**PLAIN | changes)

    refused(openai.NotFoundError, asking(model=UNKNOWN), UNKNOWN)
    refused(openai.NotFoundError, lambda: writer.models.retrieve(UNKNOWN), UNKNOWN)
    bad: Any = {"type": "json_schema", "json_schema": {"name": "bad", "schema": UNKNOWN_TYPE}}
    refused(openai.BadRequestError, asking(response_format=bad), "json_schema", "nothing")
    long = [{"role": "user", "content": TOO_LONG}]
    error = refused(openai.BadRequestError, asking(messages=long), TOO_LONG_TEXT, LIMIT)
    same(error.code, "context_length_exceeded")
    refused(openai.BadRequestError, asking(max_tokens=CONTEXT), str(CONTEXT))
    refused(openai.BadRequestError, asking(temperature=-1), "temperature")
    stranger = writer.with_options(api_key="another")
    refused(openai.AuthenticationError, lambda: stranger.chat.completions.create(**PLAIN), "401")
    refused(openai.AuthenticationError, stranger.models.list, "API key")


run(
    models,
    chat_is_streamed,
    chat_is_streamed_asynchronously,
    several_and_logprobs,
    tools_are_called_and_answered,
    tools_are_parsed_and_forced,
    answers_are_parsed,
    an_object_of_json,
    responses_call_tools,
    responses_are_parsed,
    completions,
    refusals_are_the_errors_of_the_client,
)
