"""Anthropic's routes: messages, and the count of a prompt's tokens.

A body becomes the same chat as a body of /v1/chat/completions, and its answer the blocks and events
of Anthropic's clients.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from kvflow.http.errors import RequestError
from kvflow.http.paths import COUNT_PATH
from kvflow.http.responses import json_response
from kvflow.http.sse import NamedEvent
from kvflow.serve.http.completion import Completion, Delta
from kvflow.serve.http.pipeline import CompletionPipeline
from kvflow.serve.http.schemas import (
    Body,
    ChatRequest,
    Rendezvous,
    Share,
    Signed64,
    Temperature,
    Tokens,
    TopK,
)
from kvflow.serve.http.structured import nested
from kvflow.serve.http.tokenize import read_body
from kvflow.serve.http.tools.answers import Block
from kvflow.serve.http.tools.choice import MAX_NAME
from kvflow.serve.http.tools.conversion import (
    ConvertedCall,
    as_object,
    renamed,
    rendezvous_of,
)
from kvflow.serve.http.tools.parts import Part
from kvflow.serve.http.tools.turns import read_chat
from kvflow.telemetry.requests import CURRENT


class _Text(msgspec.Struct, frozen=True, tag="text"):
    text: str


class _Thinking(msgspec.Struct, frozen=True, tag="thinking"):
    thinking: str


class _Redacted(msgspec.Struct, frozen=True, tag="redacted_thinking"):
    pass


class _ToolUse(msgspec.Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(msgspec.Struct, frozen=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text] | None = None
    is_error: bool | None = None


_Block = _Text | _Thinking | _Redacted | _ToolUse | _ToolResult


class _Message(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class _ToolChoice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _OutputFormat(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = msgspec.field(name="schema")


class _OutputConfig(msgspec.Struct, frozen=True):
    effort: str | None = None
    format: _OutputFormat | None = None


class _ThinkingConfig(msgspec.Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive"]


class CountTokensRequest(Body, frozen=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens."""

    letter: ClassVar[str] = "e"

    model: str | None = None
    messages: Annotated[list[_Message], Meta(min_length=1)]
    system: str | list[_Text] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _ThinkingConfig | None = None
    output_config: _OutputConfig | None = None


class MessagesRequest(Rendezvous, frozen=True, kw_only=True):
    """The body of POST /v1/messages."""

    letter: ClassVar[str] = "m"

    model: str | None = None
    messages: Annotated[list[_Message], Meta(min_length=1)]
    system: str | list[_Text] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _ThinkingConfig | None = None
    output_config: _OutputConfig | None = None
    max_tokens: Tokens
    stop_sequences: list[str] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    stream: bool | None = None
    priority: Signed64 | None = None


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    ".function.name": ".name",
}
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}


def chat_of(body: MessagesRequest | CountTokensRequest) -> ChatRequest:
    """Return the chat that a body describes. Raises: RequestError that names the field."""
    if body.messages[-1].role == "assistant":
        text = "messages: the last one must be the user's; this server does not continue another's"
        raise RequestError(text, param="messages")
    messages = [one for message in body.messages for one in _messages(message)]
    if body.system:
        messages.insert(0, {"role": "system", "content": _joined(body.system)})
    choice, thinking = body.tool_choice, body.thinking
    output = body.output_config or _OutputConfig()
    without = thinking is not None and thinking.type == "disabled"
    chat = ChatRequest(
        messages=messages,
        tools=[_tool(tool) for tool in body.tools or ()],
        tool_choice=_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        # The variable by which templates with a switch for reasoning call it.
        chat_template_kwargs={"enable_thinking": False} if without else None,
        include_reasoning=not without,
        reasoning_effort=output.effort,
        response_format=nested(output.format),
    )
    if not isinstance(body, MessagesRequest):
        return chat
    return msgspec.structs.replace(
        chat,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        priority=body.priority,
        **rendezvous_of(body),
    )


def _joined(content: str | list[_Text] | None) -> str:
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


def _messages(message: _Message) -> Iterator[dict[str, Any]]:
    """Yield a message as one or several of a chat: each tool result is a message of its own."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    text, calls, reasoning = [], [], []
    for block in message.content:
        if isinstance(block, _ToolResult):
            yield {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": _joined(block.content),
            }
        elif isinstance(block, _ToolUse):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, _Thinking):
            reasoning.append(block.thinking)
        elif isinstance(block, _Text):
            text.append(block.text)
    if not (text or calls) and any(isinstance(one, _ToolResult) for one in message.content):
        return
    found: dict[str, Any] = {"role": message.role, "content": "".join(text)}
    if reasoning:
        found["reasoning_content"] = "".join(reasoning)
    yield {**found, "tool_calls": calls} if calls else found


def _tool(tool: _Tool) -> dict[str, Any]:
    # In the order of OpenAI's clients, so that both have the same prompt.
    described = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name, **described, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _choice(choice: _ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None or choice.type in _CHOICES:
        return None if choice is None else _CHOICES[choice.type]
    if not choice.name:
        raise RequestError("tool_choice.name is missing", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


class MessagesCall(ConvertedCall):
    """One body of /v1/messages and its answer."""

    def __init__(self, body: MessagesRequest, model: str) -> None:
        answer_id = f"msg_{CURRENT.get().request_id or uuid.uuid4().hex}"
        super().__init__(lambda: chat_of(body), _NAMES, answer_id, stream=bool(body.stream))
        self.body = body
        self._model = model
        self._begun = False  # the stream has its first event
        self._opened = -1  # the index of the block that is open in the stream

    def answer(self, completions: list[Completion]) -> Any:
        (completion,) = completions
        blocks = [_block(block) for block in self.turns.so_far(0).blocks]
        return {**self._message(completion, completion.generated), "content": blocks} | self._end(
            completion
        )

    def opening(self) -> list[Any]:
        return []

    def events(self, index: int, deltas: list[Delta], completion: Completion) -> list[Any]:
        found: list[Any] = []
        # Only the first delta says how much of the prompt was cached.
        if not self._begun:
            self._begun = True
            found.append(_event("message_start", message=self._message(completion, 0)))
        for _ in deltas:
            for block, part in self.turns.next_parts(0):
                found += self._of_part(block, part)
        return found

    def closing(self, completions: list[Completion]) -> list[Any]:
        (completion,) = completions
        stop = [_event("content_block_stop", index=self._opened)] if self._opened >= 0 else []
        usage = {"output_tokens": completion.generated}
        return [
            *stop,
            _event("message_delta", delta=self._end(completion), usage=usage),
            _event("message_stop"),
        ]

    def _of_part(self, index: int, part: Part) -> Iterator[NamedEvent]:
        block = self.turns.so_far(0).blocks[index]
        if index != self._opened:
            if self._opened >= 0:
                yield _event("content_block_stop", index=self._opened)
            self._opened = index
            yield _event("content_block_start", index=index, content_block=_empty(block))
        if part.kind == "call":
            return
        kind, name = {
            "content": ("text_delta", "text"),
            "reasoning": ("thinking_delta", "thinking"),
            "arguments": ("input_json_delta", "partial_json"),
        }[part.kind]
        yield _event("content_block_delta", index=index, delta={"type": kind, name: part.text})

    def _message(self, completion: Completion, generated: int) -> dict[str, Any]:
        cached = completion.cached_tokens
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                # Anthropic counts cached tokens apart from the others.
                "input_tokens": self.prompt_tokens - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": generated,
            },
        }

    def _end(self, completion: Completion) -> dict[str, Any]:
        reason = self.turns.finish(0, completion.finish)
        matched = completion.matched if isinstance(completion.matched, str) else None
        if reason == "stop" and matched is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        return {"stop_reason": _STOP_REASONS.get(reason or "", "end_turn"), "stop_sequence": None}


def _event(name: str, **fields: Any) -> NamedEvent:
    return NamedEvent(name, {"type": name, **fields})


def _empty(block: Block) -> dict[str, Any]:
    """Return a block as its first event has it."""
    if block.kind == "content":
        return {"type": "text", "text": ""}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def _block(block: Block) -> dict[str, Any]:
    found = _empty(block)
    if block.kind == "call":
        return {**found, "input": as_object(block.text)}
    return {**found, found["type"]: block.text}


def routes(pipeline: CompletionPipeline) -> list[web.RouteDef]:
    name = pipeline.service.card.name

    async def messages(http: web.Request) -> web.StreamResponse:
        body = await pipeline.read(http, MessagesRequest)
        return await pipeline.serve(http, MessagesCall(body, name))

    async def count(http: web.Request) -> web.StreamResponse:
        body = await read_body(http, CountTokensRequest)
        pipeline.check_model(body.model)
        with renamed(_NAMES):
            prompt, _ = await read_chat(chat_of(body), pipeline)
        return json_response({"input_tokens": len(prompt)})

    return [web.post("/v1/messages", messages), web.post(COUNT_PATH, count)]
