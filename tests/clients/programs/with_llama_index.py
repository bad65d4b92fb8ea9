"""llama-index: completions, chats, streams, function calling, and answers of a type."""

from __future__ import annotations

from typing import Any

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.clients.programs.served import (
    AGENT,
    AGENT_URL,
    BRIEF,
    CITY,
    CONTEXT,
    KEY,
    QUESTION,
    REPLY,
    SUBJECT,
    TEXT,
    UNKNOWN,
    WRITER,
    WRITER_URL,
    Topic,
    get_weather,
    is_topic,
    refused,
    run,
    same,
)

ASKED = [ChatMessage(role="user", content=SUBJECT["content"])]


def model(name: str, url: str, key: str = KEY, **given: Any) -> Any:
    return OpenAILike(
        model=name,
        api_base=f"{url}/v1",
        api_key=key,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=CONTEXT,
        max_retries=0,
        **{"temperature": 0} | given,
    )


def typed(structured: bool) -> Any:
    """A model for answers of a type: by a schema, or by a tool that it must call."""
    penalty = {"frequency_penalty": BRIEF["frequency_penalty"]}
    return model(
        WRITER,
        WRITER_URL,
        max_tokens=BRIEF["max_tokens"],
        additional_kwargs=penalty,
        should_use_structured_outputs=structured,
    )


def chat_is_streamed() -> None:
    llm = model(WRITER, WRITER_URL, max_tokens=24)
    answer = llm.chat(ASKED)
    *_, last = pieces = list(llm.stream_chat(ASKED))
    same("".join(piece.delta or "" for piece in pieces), answer.message.content)
    same(last.message.content, answer.message.content)
    usage = answer.raw.usage
    same(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
    same(llm.complete(SUBJECT["content"]).text, answer.message.content)
    bare = OpenAILike(
        model=WRITER, api_base=f"{WRITER_URL}/v1", api_key=KEY, max_tokens=16, temperature=0
    )
    *_, last = pieces = list(bare.stream_complete("A class is"))
    same(last.text, bare.complete("A class is").text)
    assert len(pieces) > 1


def tools_are_called_and_answered() -> None:
    llm, tool = model(AGENT, AGENT_URL), FunctionTool.from_defaults(get_weather)
    question = ChatMessage(role="user", content=QUESTION["content"])
    answer = llm.chat_with_tools([tool], chat_history=[question])
    *_, streamed = list(llm.stream_chat_with_tools([tool], chat_history=[question]))
    for found in (answer, streamed):
        [call] = llm.get_tool_calls_from_response(found)
        same((call.tool_name, call.tool_kwargs), ("get_weather", {"city": CITY}))
        same(found.message.content, TEXT)
    [call] = llm.get_tool_calls_from_response(answer)
    result = ChatMessage(
        role="tool", content="sunny", additional_kwargs={"tool_call_id": call.tool_id}
    )
    last = llm.chat_with_tools([tool], chat_history=[question, answer.message, result])
    same(last.message.content, REPLY)
    same(llm.predict_and_call([tool], user_msg=QUESTION["content"]).response, "sunny")


def answers_have_their_type() -> None:
    for structured in (False, True):
        llm = typed(structured)
        is_topic(llm.as_structured_llm(Topic).complete(SUBJECT["content"]).raw)
        is_topic(llm.as_structured_llm(Topic).chat(ASKED).raw)
        is_topic(llm.structured_predict(Topic, PromptTemplate("What is a {what}?"), what="class"))


def refusals_are_the_errors_of_the_client() -> None:
    unknown, stranger = model(UNKNOWN, WRITER_URL), model(WRITER, WRITER_URL, "another")
    refused(openai.NotFoundError, lambda: unknown.chat(ASKED), UNKNOWN)
    refused(openai.AuthenticationError, lambda: stranger.chat(ASKED), "API key")


run(
    chat_is_streamed,
    tools_are_called_and_answered,
    answers_have_their_type,
    refusals_are_the_errors_of_the_client,
)
