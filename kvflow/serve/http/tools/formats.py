"""The formats in which families of models write tool calls, and the parser for all of them.

A format has marks before and after a call, and a reader of what stands between them. Names are
those of vLLM's and SGLang's parsers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from kvflow.serve.http.tools.parts import (
    MAX_SPACE,
    Part,
    first_mark,
    held_from,
    joined,
    space_begins,
)
from kvflow.serve.http.tools.readers import (
    HeadedCall,
    KeyedCall,
    NamedCall,
    ObjectCall,
    Reader,
    TaggedCall,
    Tools,
)

MakeReader = Callable[[int, Callable[[str], bool], Tools], Reader]


def _object(call: int, accepts: Callable[[str], bool], _: Tools) -> Reader:
    return ObjectCall(call, accepts)


def _named(call: int, accepts: Callable[[str], bool], _: Tools) -> Reader:
    return NamedCall(call, accepts)


def _headed(call: int, accepts: Callable[[str], bool], _: Tools, **more: Any) -> Reader:
    return HeadedCall(call, accepts, **more)


class ToolFormat(NamedTuple):
    """How a family of models writes tool calls.

    A call begins at one of the marks `opens`, and one of the marks `inner` may follow at once. With
    `bare`, it may also begin without one, at the first character of the answer. Characters of
    `skipped` stand between a mark and its call. After a call, `between` may stand before the next
    mark or the end, and where a format is `several`, another call may follow there without a mark.

    `special` says that marks are special tokens, which have no text unless it is asked for.
    `channels` says that the whole answer consists of messages in channels (see `harmony`).
    `shows` are texts in a chat template for which the format fits.
    """

    name: str
    reader: MakeReader
    opens: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    skipped: str = " \t\r\n"
    between: str = " \t\r\n"
    bare: bool = False
    several: bool = False
    special: bool = False
    channels: bool = False
    id_length: int = 0  # characters of a call's id, or 0 for ids as OpenAI's
    numbered: bool = False  # ids are the names of functions, with the number of the call in a chat
    shows: tuple[str, ...] = ()


# DeepSeek's marks, with a full-width bar and a space that is a character of its own.
_SEPARATOR = "<｜tool▁sep｜>"
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
# V3 and R1 write a type, the separator, the name and a block of code. V3.1 writes the name and the
# separator, so that a word after it would be no name.
_DEEPSEEK_HEAD = re.compile(
    rf"\s*(?:[^<]*{_SEPARATOR}\s*([^\s<`]+)\s*```\w*|function{_SEPARATOR}\s*([^\s<`]+)"
    rf"|([^\s<`]+)\s*{_SEPARATOR}\s*(?:```\w*)?)\s*"
)
_deepseek = functools.partial(
    _headed, head=_DEEPSEEK_HEAD, marks=(_CALL_END, _CALLS_END, _CALL, _CALLS), tail=" \t\r\n`"
)
# Kimi writes the id of a call, which contains the name and a number.
_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_HEAD = re.compile(
    r"\s*(?:functions\.)?([^\s<:]+)(?::[^\s<]*)?\s*<\|tool_call_argument_begin\|>\s*"
)
_kimi = functools.partial(
    _headed, head=_KIMI_HEAD, marks=(_KIMI_END, _SECTION_END, _KIMI, _SECTION)
)
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_harmony = functools.partial(
    _headed,
    head=re.compile(r"(?:functions\.)?([^\s<]+)<\|message\|>\s*"),
    marks=HARMONY_ENDS,
)


def _mistral(call: int, accepts: Callable[[str], bool], _: Tools) -> Reader:
    return MistralCall(call, accepts)


class MistralCall:
    """A call of either of Mistral's formats: an object, or a name and its arguments."""

    def __init__(self, call: int, accepts: Callable[[str], bool]) -> None:
        self.done = self.broken = False
        self._call, self._accepts = call, accepts
        self._reader: Reader | None = None

    def take(self, text: str, parts: list[Part]) -> str:
        if self._reader is None:
            kind = ObjectCall if text[0] == "{" else NamedCall
            self._reader = kind(self._call, self._accepts)
        rest = self._reader.take(text, parts)
        self.done, self.broken = self._reader.done, self._reader.broken
        return rest


TOOL_FORMATS = {
    found.name: found
    for found in (
        ToolFormat(
            "hermes",
            _object,
            opens=("<tool_call>",),
            closes=("</tool_call>",),
            # A brace too many is a frequent error of small models.
            between=" \t\r\n}",
            shows=("<tool_call>",),
        ),
        ToolFormat(
            "qwen3_coder",
            TaggedCall,
            opens=("<tool_call>",),
            closes=("</tool_call>",),
            shows=("<tool_call>", "<function="),
        ),
        ToolFormat(
            "llama3_json",
            _object,
            opens=("<|python_tag|>",),
            between=" \t\r\n;",
            bare=True,
            several=True,
            special=True,
            shows=("<|python_tag|>",),
        ),
        ToolFormat(
            "mistral",
            _mistral,
            opens=("[TOOL_CALLS]",),
            skipped=" \t\r\n[",
            between=" \t\r\n,]",
            several=True,
            special=True,
            id_length=9,
            shows=("[TOOL_CALLS]",),
        ),
        ToolFormat(
            "deepseek_v3",
            _deepseek,
            opens=(_CALLS, _CALL),
            inner=(_CALL,),
            closes=(_CALL_END, _CALLS_END),
            special=True,
            shows=(_CALLS,),
        ),
        ToolFormat(
            "kimi_k2",
            _kimi,
            opens=(_SECTION, _KIMI),
            inner=(_KIMI,),
            closes=(_KIMI_END, _SECTION_END),
            special=True,
            numbered=True,
            shows=(_SECTION,),
        ),
        ToolFormat(
            "glm45",
            KeyedCall,
            opens=("<tool_call>",),
            closes=("</tool_call>",),
            special=True,
            shows=("<tool_call>", "<arg_key>"),
        ),
        ToolFormat(
            "gpt_oss",
            _harmony,
            special=True,
            channels=True,
            shows=("<|channel|>analysis", "<|channel|>commentary"),
        ),
    )
}
# The format of an answer that a grammar forces to be a call: the array of `choice.forced_schema`.
FORCED = ToolFormat(
    "forced",
    _object,
    skipped=" \t\r\n[",
    between=" \t\r\n,]",
    bare=True,
    several=True,
)


class ToolParser:
    """Implements `Parser` for the calls of one answer.

    What looks like a call and is none is text. White space next to a call belongs to no text.
    """

    def __init__(self, form: ToolFormat, tools: Tools, *, parallel: bool = True) -> None:
        self._format, self._tools, self._parallel = form, tools, parallel
        self._state = "beginning" if form.bare else "text"
        self._held = ""
        self._reader: Reader | None = None
        self._calls = 0
        self._raw: list[str] = []  # of a call whose name is not known yet

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        text, self._held = self._held + text, ""
        steps = {
            "beginning": self._begin,
            "text": self._text,
            "opened": self._open,
            "call": self._call,
            "after": self._after,
        }
        while text:
            text = steps[self._state](text, parts)
        return self._counted(parts)

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._state in ("opened", "call"):
            parts.append(Part("content", "".join(self._raw) + self._held))
        elif self._state != "after":
            parts.append(Part("content", self._held))
        self._held = ""
        self._raw.clear()
        return self._counted(parts)

    def _counted(self, parts: list[Part]) -> list[Part]:
        if not self._parallel:
            parts = [part for part in parts if part.kind == "content" or not part.call]
        return joined(parts)

    def _begin(self, text: str, parts: list[Part]) -> str:
        start = text.lstrip(self._format.skipped)
        skipped = len(text) - len(start)
        if skipped <= MAX_SPACE and (not start or self._may_be_mark(start)):
            self._held = text
            return ""
        if skipped <= MAX_SPACE and start.startswith("{"):
            return self._opening(text[:skipped], start)
        self._state = "text"
        return text

    def _may_be_mark(self, text: str) -> bool:
        marks = (*self._format.opens, *self._format.closes)
        return any(mark.startswith(text) and mark != text for mark in marks)

    def _text(self, text: str, parts: list[Part]) -> str:
        at, mark = first_mark(text, self._format.opens)
        if mark:
            content, end = text[: space_begins(text, at)], at + len(mark)
            parts.append(Part("content", content))
            return self._opening(text[len(content) : end], text[end:])
        cut = held_from(text, self._format.opens)
        parts.append(Part("content", text[:cut]))
        self._held = text[cut:]
        return ""

    def _opening(self, raw: str, rest: str) -> str:
        self._raw = [raw]
        self._state = "opened"
        return rest

    def _open(self, text: str, parts: list[Part]) -> str:
        start = text.lstrip(self._format.skipped)
        self._raw.append(text[: len(text) - len(start)])
        for mark in self._format.inner:
            if start.startswith(mark):
                self._raw.append(mark)
                return start[len(mark) :]
            if start and mark.startswith(start):
                self._held = start
                return ""
        if start:
            self._reader = self._format.reader(self._calls, self._accepts, self._tools)
            self._state = "call"
        return start

    def _accepts(self, name: str) -> bool:
        # Without a mark, any JSON object that has a name would look like a call.
        return bool(self._format.opens and not self._format.bare) or name in self._tools.parameters

    def _call(self, text: str, parts: list[Part]) -> str:
        assert self._reader is not None
        known = not self._raw
        found: list[Part] = []
        rest = self._reader.take(text, found)
        if not known and not self._reader.broken and not found:
            self._raw.append(text)
        else:
            if self._reader.broken:
                raw = "".join((*self._raw, text))
                found = [Part("content", raw[: len(raw) - len(rest)])]
            self._raw.clear()
        parts += found
        if self._reader.broken:
            self._state = "text"
        elif self._reader.done:
            self._calls += 1
            self._state = "after"
        return rest

    def _after(self, text: str, parts: list[Part]) -> str:
        start = text.lstrip(self._format.between)
        for mark in (*self._format.closes, *self._format.opens):
            if start.startswith(mark):
                rest = start[len(mark) :]
                return self._opening(mark, rest) if mark in self._format.opens else rest
        if not start or self._may_be_mark(start):
            self._held = start
        elif self._format.several and start.startswith("{"):
            return self._opening("", start)
        else:
            self._state = "text"
            return start
        return ""
