"""OpenAI's /v1/responses, without storage: a body has the whole conversation.

A body becomes the same chat as a body of /v1/chat/completions, and its answer the items and events
of this route's clients.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from kvflow.http.aborts import ABORT
from kvflow.http.sse import NamedEvent
from kvflow.serve.http.completion import Completion, Delta
from kvflow.serve.http.pipeline import CompletionPipeline
from kvflow.serve.http.schemas import (
    ChatRequest,
    Rendezvous,
    Share,
    Signed64,
    Temperature,
    Tokens,
)
from kvflow.serve.http.structured import nested
from kvflow.serve.http.tools.choice import MAX_NAME, converted
from kvflow.serve.http.tools.conversation import decoded_arguments
from kvflow.serve.http.tools.conversion import ConvertedCall, rendezvous_of
from kvflow.serve.http.tools.parts import Part
from kvflow.telemetry.requests import CURRENT


class _InputText(msgspec.Struct, frozen=True, tag="input_text"):
    text: str


class _OutputText(msgspec.Struct, frozen=True, tag="output_text"):
    text: str


class _ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text"):
    text: str


class _Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    refusal: str


_Content = str | list[_InputText | _OutputText | _Refusal]


class _Message(msgspec.Struct, frozen=True, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content


class _Call(msgspec.Struct, frozen=True, tag="function_call"):
    call_id: str
    name: str
    arguments: str


class _CallOutput(msgspec.Struct, frozen=True, tag="function_call_output"):
    call_id: str
    output: str | list[_InputText | _OutputText | _Refusal]


class _Reasoning(msgspec.Struct, frozen=True, tag="reasoning"):
    content: list[_ReasoningText] | None = None


_Item = _Message | _Call | _CallOutput | _Reasoning


class _Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ToolChoice(msgspec.Struct, frozen=True):
    type: Literal["function"]
    name: str


class _TextFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = msgspec.field(default=None, name="schema")


class _TextConfig(msgspec.Struct, frozen=True):
    format: _TextFormat | None = None


class _ReasoningConfig(msgspec.Struct, frozen=True):
    effort: str | None = None


class ResponsesRequest(Rendezvous, frozen=True, kw_only=True):
    """The body of POST /v1/responses."""

    letter: ClassVar[str] = "r"

    model: str | None = None
    # `_item` decodes the items, because only messages may leave out their type.
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    instructions: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: _ReasoningConfig | None = None
    text: _TextConfig | None = None
    max_output_tokens: Tokens | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    priority: Signed64 | None = None


_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    ".function.name": ".name",
}


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """Return the chat that a body describes. Raises: RequestError that names the field."""
    items = body.input
    if isinstance(items, str):
        messages = [{"role": "user", "content": items}]
    else:
        messages = list(_messages([_item(i, item) for i, item in enumerate(items)]))
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    choice: Any = body.tool_choice
    if isinstance(choice, _ToolChoice):
        choice = {"type": "function", "function": {"name": choice.name}}
    return ChatRequest(
        messages=messages,
        tools=[_tool(tool) for tool in body.tools or ()],
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        response_format=nested(body.text.format if body.text else None),
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        priority=body.priority,
        **rendezvous_of(body),
    )


def _item(index: int, given: dict[str, Any]) -> _Item:
    # Clients leave out the type of a message.
    typed = given if "type" in given else {"type": "message", **given}
    item: _Item = converted(typed, _Item, f"input[{index}]")
    if isinstance(item, _Call):
        decoded_arguments(f"input[{index}].arguments", item.arguments)
    return item


def _messages(items: list[_Item]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat. Adjacent items of one answer are one message."""
    answer = _Answer()
    for item in items:
        of_answer = isinstance(item, _Call | _Reasoning) or (
            isinstance(item, _Message) and item.role == "assistant"
        )
        # A text or reasoning after a call begins another answer.
        if answer.begun and (not of_answer or (answer.calls and not isinstance(item, _Call))):
            yield answer.message()
            answer = _Answer()
        if of_answer:
            answer.add(item)
        elif isinstance(item, _CallOutput):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
        elif isinstance(item, _Message):
            role = "system" if item.role == "developer" else item.role
            yield {"role": role, "content": _text(item.content)}
    if answer.begun:
        yield answer.message()


class _Answer:
    """The adjacent items of one answer. Copying them for each item would take quadratic time."""

    def __init__(self) -> None:
        self.begun = False
        self.calls: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._reasoning = ""

    def add(self, item: _Item) -> None:
        self.begun = True
        if isinstance(item, _Call):
            function = {"name": item.name, "arguments": item.arguments}
            self.calls.append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, _Reasoning):
            text = "".join(part.text for part in item.content or ())
            self._reasoning = text or self._reasoning
        elif isinstance(item, _Message):
            self._texts.append(_text(item.content))

    def message(self) -> dict[str, Any]:
        found: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts)}
        if self._reasoning:
            found["reasoning_content"] = self._reasoning
        return {**found, "tool_calls": self.calls} if self.calls else found


def _text(content: _Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, _Refusal) else part.text for part in content)


def _tool(tool: _Tool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    shaped = {} if tool.parameters is None else {"parameters": tool.parameters}
    return {"type": "function", "function": {"name": tool.name, **described, **shaped}}


class ResponsesCall(ConvertedCall):
    """One body of /v1/responses and its answer."""

    def __init__(self, body: ResponsesRequest, model: str) -> None:
        self._hex = CURRENT.get().request_id or uuid.uuid4().hex
        answer_id = f"resp_{self._hex}"
        super().__init__(lambda: chat_of(body), _NAMES, answer_id, stream=bool(body.stream))
        self.body = body
        self._head = {
            "id": answer_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }
        self._opened: int | None = None  # the index of the item that is open in the stream
        self._sent = 0  # events of the stream

    def answer(self, completions: list[Completion]) -> Any:
        return self._response(completions[0])

    def opening(self) -> list[Any]:
        begun = self._response(None)
        return [self._event(name, response=begun) for name in ("created", "in_progress")]

    def events(self, index: int, deltas: list[Delta], completion: Completion) -> list[Any]:
        return [
            event
            for _ in deltas
            for block, part in self.turns.next_parts(0)
            for event in self._of_part(block, part)
        ]

    def closing(self, completions: list[Completion]) -> list[Any]:
        response = self._response(completions[0])
        last = self._closed(response["status"])
        return [*last, self._event(response["status"], response=response)]

    def _of_part(self, index: int, part: Part) -> Iterator[NamedEvent]:
        if index != self._opened:
            yield from self._closed("completed")
            self._opened = index
            yield self._event(
                "output_item.added", output_index=index, item=self._shown(index, "in_progress")
            )
            if part.kind != "call":
                yield self._event("content_part.added", **self._place(0), part=_part(part.kind, ""))
        if part.kind == "arguments":
            yield self._event("function_call_arguments.delta", **self._place(), delta=part.text)
        elif part.kind == "content":
            yield self._event("output_text.delta", **self._place(0), delta=part.text, logprobs=[])
        elif part.kind == "reasoning":
            yield self._event("reasoning_text.delta", **self._place(0), delta=part.text)

    def _closed(self, status: str) -> Iterator[NamedEvent]:
        """Yield the events that end the open item."""
        if (index := self._opened) is None:
            return
        block = self.turns.so_far(0).blocks[index]
        text = block.text
        if block.kind == "call":
            yield self._event(
                "function_call_arguments.done", **self._place(), arguments=text, name=block.name
            )
        else:
            kind = "output_text" if block.kind == "content" else "reasoning_text"
            more: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
            yield self._event(f"{kind}.done", **self._place(0), text=text, **more)
            yield self._event("content_part.done", **self._place(0), part=_part(block.kind, text))
        yield self._event(
            "output_item.done", output_index=index, item=self._shown(index, status, text)
        )

    def _place(self, part: int | None = None) -> dict[str, Any]:
        assert self._opened is not None
        found = {"item_id": self._item_id(self._opened), "output_index": self._opened}
        return found if part is None else {**found, "content_index": part}

    def _event(self, name: str, /, **fields: Any) -> NamedEvent:
        kind = f"response.{name}"
        event = NamedEvent(kind, {"type": kind, "sequence_number": self._sent, **fields})
        self._sent += 1
        return event

    def _item_id(self, index: int) -> str:
        prefix = _PREFIXES[self.turns.so_far(0).blocks[index].kind]
        return f"{prefix}_{self._hex}_{index}"

    def _shown(self, index: int, status: str, text: str | None = None) -> dict[str, Any]:
        """Return an item of the output. Without `text` it has only begun."""
        block = self.turns.so_far(0).blocks[index]
        item: dict[str, Any] = {"id": self._item_id(index), "status": status}
        parts = [] if text is None else [_part(block.kind, text)]
        if block.kind == "content":
            return {**item, "type": "message", "role": "assistant", "content": parts}
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": parts}
        call = {"type": "function_call", "call_id": block.id, "name": block.name}
        return {**item, **call, "arguments": text or ""}

    def _output(self, status: str) -> list[dict[str, Any]]:
        blocks = self.turns.so_far(0).blocks
        last = len(blocks) - 1
        return [
            self._shown(i, status if i == last else "completed", block.text)
            for i, block in enumerate(blocks)
        ]

    def _response(self, completion: Completion | None) -> dict[str, Any]:
        """Return the response. Without a completion it has only begun."""
        body, status = self.body, "in_progress"
        cut = None
        if completion is not None:
            reason = _INCOMPLETE.get(completion.finish or "")
            status = "completed" if reason is None else "incomplete"
            cut = reason and {"reason": reason}
        return {
            **self._head,
            "status": status,
            "output": [] if completion is None else self._output(status),
            "usage": None if completion is None else self._usage(completion),
            "error": None,
            "incomplete_details": cut,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": body.text if body.text and body.text.format else _PLAIN_TEXT,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
        }

    def _usage(self, completion: Completion) -> dict[str, Any]:
        prompt = self.prompt_tokens
        cached = {"cached_tokens": completion.cached_tokens, "cache_write_tokens": 0}
        return {
            "input_tokens": prompt,
            "input_tokens_details": cached,
            "output_tokens": completion.generated,
            "output_tokens_details": {"reasoning_tokens": self.turns.reasoning_tokens},
            "total_tokens": prompt + completion.generated,
        }


_PLAIN_TEXT = {"format": {"type": "text"}}
_INCOMPLETE = {"length": "max_output_tokens", ABORT: "aborted"}
_PREFIXES = {"content": "msg", "reasoning": "rs", "call": "fc"}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def routes(pipeline: CompletionPipeline) -> list[web.RouteDef]:
    name = pipeline.service.card.name

    async def responses(http: web.Request) -> web.StreamResponse:
        body = await pipeline.read(http, ResponsesRequest)
        return await pipeline.serve(http, ResponsesCall(body, name))

    return [web.post("/v1/responses", responses)]
