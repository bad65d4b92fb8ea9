"""The model's turn in a chat: its prompt, and its answers as reasoning, text and calls."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from kvflow.http.errors import RequestError
from kvflow.http.prompt_fields import PromptIds, template_variables
from kvflow.protocols.errors import MisuseError
from kvflow.serve.engine.model.grammars import Grammar
from kvflow.serve.http.completion import Delta
from kvflow.serve.http.completion_service import GenerationRequest
from kvflow.serve.http.generation_requests import generation_requests, params_of_chat
from kvflow.serve.http.schemas import ChatRequest
from kvflow.serve.http.tools.answers import PLAIN, AnswerReading, AnswerSoFar, check_use
from kvflow.serve.http.tools.choice import tool_use
from kvflow.serve.http.tools.parts import Part
from kvflow.serve.http.tools.reasoning import PROMPT_END

if TYPE_CHECKING:
    from kvflow.serve.http.pipeline import CompletionPipeline

PartOfBlock = tuple[int, Part]


async def read_chat(
    body: ChatRequest, pipeline: CompletionPipeline
) -> tuple[PromptIds, AnswerReading]:
    """Return a chat's prompt, and how its answers are read. Raises: RequestError."""
    use = tool_use(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
    formats = pipeline.formats
    prompt = await pipeline.tokenizer.encode_chat(
        body.messages, template_variables(body), use.given
    )
    check_use(use, formats)
    if body.separate_reasoning is False:
        formats = msgspec.structs.replace(formats, reasoning=None)
    prompt_end = ""
    if formats.reasoning is not None:
        prompt_end = await pipeline.tokenizer.decode(
            prompt[-PROMPT_END:].tolist(), skip_special_tokens=False
        )
    reading = AnswerReading(
        formats=formats,
        use=use,
        prompt_end=prompt_end,
        earlier_calls=sum(len(one.get("tool_calls") or ()) for one in body.messages),
        shows_reasoning=body.include_reasoning is not False,
        streams_reasoning=body.stream_reasoning is not False,
    )
    return prompt, reading


async def chat_requests(
    body: ChatRequest, pipeline: CompletionPipeline
) -> tuple[list[GenerationRequest], AnswerReading]:
    """Return a request for each choice of a chat, and how their answers are read.

    Raises: RequestError.
    """
    limits, choices = pipeline.request_limits, body.n or 1
    prompt, reading = await read_chat(body, pipeline)
    bad_words = await pipeline.tokenizer.encode_words(body.bad_words or ())
    params = params_of_chat(body, prompt, bad_words, limits)
    if reading.needs_marks:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    if reading.use.forced:
        if params.grammar is not None:
            text = "tool_choice: it and another field both restrict the answer; send one of them"
            raise RequestError(text, param="tool_choice")
        try:
            grammar = Grammar("json_schema", reading.use.forced_schema_text())
        except MisuseError as error:
            raise RequestError(f"tools: {error}", param="tools") from None
        params = msgspec.structs.replace(params, grammar=grammar)
    elif params.grammar is not None:
        # The grammar holds from the first token on, so neither reasoning nor a call precedes it.
        reading = msgspec.structs.replace(reading, formats=PLAIN)
    return generation_requests(body, [prompt], [params], choices, limits), reading


class Turns:
    """The choices of one request, each parsed as it grows."""

    def __init__(self, reading: AnswerReading, choices: int, *, stream: bool) -> None:
        self._parsers = [reading.parser() for _ in range(choices)]
        self._found = [AnswerSoFar(reading) for _ in range(choices)]
        self.reasoning_tokens = 0  # those that wrote reasoning and its tags, in all choices
        # Parts of the deltas that a stream has not sent yet, by choice.
        self._unsent: list[deque[list[PartOfBlock]]] | None = None
        if stream:
            self._unsent = [deque() for _ in range(choices)]

    def add(self, index: int, delta: Delta) -> None:
        parser = self._parsers[index]
        reasons = parser.reasons
        parts = parser.feed(delta.text)
        if reasons or parser.reasons:
            self.reasoning_tokens += len(delta.tokens)
        if delta.finish is not None:
            parts += parser.finish()
        found = [(self._found[index].add(part), part) for part in parts]
        if self._unsent is not None:
            self._unsent[index].append(found)

    def next_parts(self, index: int) -> list[PartOfBlock]:
        """Return the parts of a stream's next delta, each with the index of its block."""
        assert self._unsent is not None
        return self._unsent[index].popleft()

    def so_far(self, index: int) -> AnswerSoFar:
        return self._found[index]

    def finish(self, index: int, reason: str | None) -> str | None:
        """Return OpenAI's reason for the end of a choice."""
        return "tool_calls" if reason == "stop" and self._found[index].calls else reason


def chat_delta(parts: list[PartOfBlock], found: AnswerSoFar) -> dict[str, Any]:
    """Return the delta of a chat's chunk. `found` includes the parts."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for _, part in parts:
        if part.kind == "call":
            function = {"name": part.text, "arguments": ""}
            call_id = found.calls[part.call].id
            calls[part.call] = {
                "index": part.call,
                "id": call_id,
                "type": "function",
                "function": function,
            }
        elif part.kind == "arguments":
            entry = calls.setdefault(part.call, {"index": part.call, "function": {"arguments": ""}})
            entry["function"]["arguments"] += part.text
        else:
            name = "content" if part.kind == "content" else "reasoning_content"
            delta[name] = delta.get(name, "") + part.text
    return {**delta, "tool_calls": list(calls.values())} if calls else delta


def chat_message(found: AnswerSoFar) -> dict[str, Any]:
    """Return the message of a chat that is not streamed."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": found.text("content") or (None if found.calls else ""),
        "refusal": None,
    }
    if reasoning := found.text("reasoning"):
        message["reasoning_content"] = reasoning
    if found.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.text},
            }
            for call in found.calls
        ]
    return message
