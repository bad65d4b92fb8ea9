"""One answer as it grows: from text to reasoning, content and tool calls."""

from __future__ import annotations

import io
import re
import secrets
import string
import uuid
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgspec

from kvflow.http.errors import RequestError
from kvflow.protocols.errors import MisuseError
from kvflow.serve.http.tools.choice import NO_TOOLS, ToolUse
from kvflow.serve.http.tools.formats import FORCED, TOOL_FORMATS, ToolFormat, ToolParser
from kvflow.serve.http.tools.harmony import HarmonyParser
from kvflow.serve.http.tools.parts import Parser, Part, joined
from kvflow.serve.http.tools.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
)

# Other names that vLLM and SGLang have for the same formats.
_OTHER_NAMES = {
    "qwen25": "hermes",
    "llama3": "llama3_json",
    "deepseek-r1": "deepseek_r1",
    "deepseekv3": "deepseek_v3",
    "deepseek-v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
    "deepseekv31": "deepseek_v3",
    "glm47": "glm45",
    "openai": "gpt_oss",
    "openai_gptoss": "gpt_oss",
    "gpt-oss": "gpt_oss",
}
_ALPHANUMERIC = string.ascii_letters + string.digits


class OutputFormats(msgspec.Struct, frozen=True):
    """How the served model writes tool calls and reasoning. None means that it writes none."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def channels(self) -> bool:
        """True if answers consist of messages in channels."""
        return any(form is not None and form.channels for form in (self.tools, self.reasoning))


PLAIN = OutputFormats()


def formats_of(tool_parser: str, reasoning_parser: str, tokenizer: Any) -> OutputFormats:
    """Return the formats of these names. "off" is none, and "auto" fits the chat template.

    Raises: MisuseError if only one of them has channels, which mark calls and reasoning alike.
    """
    template = template_text(tokenizer)
    tools = TOOL_FORMATS.get(_OTHER_NAMES.get(tool_parser, tool_parser))
    if tool_parser == "auto":
        tools = _fitting(TOOL_FORMATS.values(), template)
    reasoning = REASONING_FORMATS.get(_OTHER_NAMES.get(reasoning_parser, reasoning_parser))
    if reasoning_parser == "auto":
        reasoning = _fitting(REASONING_FORMATS.values(), template)
    if tools is not None and reasoning is not None and tools.channels != reasoning.channels:
        text = f"--reasoning-parser {reasoning.name} does not fit --tool-call-parser {tools.name}"
        raise MisuseError(f"{text}: gpt_oss marks both by channels")
    return OutputFormats(tools, reasoning)


Format = TypeVar("Format", ToolFormat, ReasoningFormat)


def _fitting(forms: Iterable[Format], template: str) -> Format | None:
    """Return the format that a chat template shows with the most marks."""
    fitting = [
        form for form in forms if form.shows and all(mark in template for mark in form.shows)
    ]
    return max(fitting, key=lambda form: len(form.shows), default=None)


def template_text(tokenizer: Any) -> str:
    """Return the chat template that a tokenizer uses with tools, or an empty text."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        found = found.get("tool_use") or found.get("default")
    return found if isinstance(found, str) else ""


def takes_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def check_use(use: ToolUse, formats: OutputFormats) -> None:
    """Raise RequestError if tools are offered to a model whose calls cannot be read."""
    if use.functions and formats.tools is None:
        text = (
            "tools: the format in which this model calls tools is not known; start the workers "
            "with --tool-call-parser"
        )
        raise RequestError(text, param="tools")


class AnswerParser:
    """Implements `Parser` for a whole answer: reasoning first, then text and tool calls.

    With `shows_reasoning` off, the reasoning is dropped. With `streams_reasoning` off, it is one
    part.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | HarmonyParser | None,
        tools: Parser | None,
        *,
        shows_reasoning: bool = True,
        streams_reasoning: bool = True,
    ) -> None:
        self._reasoning, self._tools = reasoning, tools
        self._shows, self._streams = shows_reasoning, streams_reasoning
        self._kept: list[str] = []

    @property
    def reasons(self) -> bool:
        """True while the model writes reasoning."""
        return self._reasoning is not None and self._reasoning.reasons

    def feed(self, text: str) -> list[Part]:
        parts = self._reasoning.feed(text) if self._reasoning else [Part("content", text)]
        return self._seen([one for part in parts for one in self._with_calls(part)])

    def finish(self) -> list[Part]:
        parts = self._reasoning.finish() if self._reasoning else []
        found = [one for part in parts for one in self._with_calls(part)]
        found += self._tools.finish() if self._tools else []
        found = self._seen(found)
        return [*self._all_kept(), *found]

    def _with_calls(self, part: Part) -> list[Part]:
        if part.kind != "content" or self._tools is None:
            return [part]
        return self._tools.feed(part.text)

    def _seen(self, parts: list[Part]) -> list[Part]:
        if not self._shows:
            return joined(part for part in parts if part.kind != "reasoning")
        if self._streams:
            return joined(parts)
        found: list[Part] = []
        for part in parts:
            if part.kind == "reasoning":
                self._kept.append(part.text)
            else:
                found += (*self._all_kept(), part)
        return joined(found)

    def _all_kept(self) -> list[Part]:
        kept, self._kept = "".join(self._kept), []
        return [Part("reasoning", kept)] if kept else []


class AnswerReading(msgspec.Struct, frozen=True, kw_only=True):
    """How the answers to one request are read. It makes a parser for each choice."""

    formats: OutputFormats = PLAIN
    use: ToolUse = NO_TOOLS
    prompt_end: str = ""
    earlier_calls: int = 0  # in the messages of the chat
    shows_reasoning: bool = True
    streams_reasoning: bool = True

    @property
    def needs_marks(self) -> bool:
        """True if special tokens must be in the text, because calls or channels begin with them."""
        form = self.formats.tools
        calls = bool(self.use.functions and form is not None and form.special)
        return calls or self.formats.channels

    @property
    def is_plain(self) -> bool:
        """True if all text is content."""
        formats = self.formats
        return not (self.use.forced or self._reads_calls or formats.reasoning or formats.channels)

    @property
    def _reads_calls(self) -> bool:
        return bool(self.use.functions and self.formats.tools is not None)

    def parser(self) -> AnswerParser:
        tools: ToolParser | None = None
        reasoning: ReasoningParser | HarmonyParser | None = None
        if self.use.forced:
            # A forced call begins with the first token, so no reasoning precedes it.
            tools = ToolParser(FORCED, self.use.tools, parallel=self.use.parallel)
            return AnswerParser(None, tools)
        calls, form = self.formats.tools, self.formats.reasoning
        if self.use.functions and calls is not None and not calls.channels:
            tools = ToolParser(calls, self.use.tools, parallel=self.use.parallel)
        if self.formats.channels:
            reasoning = self._harmony()
        elif form is not None:
            reasoning = ReasoningParser(form, inside=form.begins_inside(self.prompt_end))
        return AnswerParser(
            reasoning,
            tools,
            shows_reasoning=self.shows_reasoning,
            streams_reasoning=self.streams_reasoning,
        )

    def _harmony(self) -> HarmonyParser:
        calls, form = self.formats.tools, self.formats.reasoning
        separates = form is not None and form.channels
        return HarmonyParser(
            calls if self.use.functions and calls is not None and calls.channels else None,
            self.use.tools,
            parallel=self.use.parallel,
            separates=separates,
            inside=separates and form is not None and form.begins_inside(self.prompt_end),
        )

    def new_call_id(self, name: str, call: int) -> str:
        """Return an id for a call of an answer. `call` is its number there."""
        length = self.formats.tools.id_length if self.formats.tools else 0
        if self.formats.tools is not None and self.formats.tools.numbered:
            # The chat template writes this id into the next prompt, and models imitate it.
            return f"functions.{name}:{self.earlier_calls + call}"
        # Templates of some models take ids of one length only.
        if length:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(length))
        return f"call_{uuid.uuid4().hex[:24]}"


class Block:
    """A run of parts of one kind: text, reasoning, or one call with its arguments as text."""

    def __init__(self, kind: Literal["content", "reasoning", "call"]) -> None:
        self.kind = kind
        self.id = self.name = ""  # of a call
        self._text = io.StringIO()

    @property
    def text(self) -> str:
        """The text so far. Each access copies it."""
        return self._text.getvalue()

    def add(self, piece: str) -> None:
        self._text.write(piece)


class AnswerSoFar:
    """The sum of an answer's parts."""

    def __init__(self, reading: AnswerReading) -> None:
        self._reading = reading
        self.blocks: list[Block] = []
        self.calls: list[Block] = []

    def text(self, kind: Literal["content", "reasoning"]) -> str:
        return "".join(block.text for block in self.blocks if block.kind == kind)

    def add(self, part: Part) -> int:
        """Add a part, and return the index of its block."""
        # The arguments of a call follow it without anything in between.
        kind = "call" if part.kind == "arguments" else part.kind
        if part.kind == "call" or not self.blocks or self.blocks[-1].kind != kind:
            self.blocks.append(Block(kind))
        block = self.blocks[-1]
        if part.kind == "call":
            block.name = part.text
            block.id = self._reading.new_call_id(part.text, part.call)
            self.calls.append(block)
        else:
            block.add(part.text)
        return len(self.blocks) - 1
