"""Splits the reasoning that a model writes between tags from its answer."""

from __future__ import annotations

from typing import NamedTuple

from kvflow.serve.http.tools.parts import (
    MAX_SPACE,
    Part,
    first_mark,
    held_from,
    joined,
    space_begins,
)


class ReasoningFormat(NamedTuple):
    """How a family of models marks its reasoning.

    `assumed` says that an answer begins with reasoning if neither it nor the prompt has a tag. The
    reasoning also ends before one of the marks `until`, which begin a tool call. `channels` says
    that the whole answer consists of messages in channels (see `harmony`). `shows` are texts in a
    chat template for which the format fits.
    """

    name: str
    open: str = "<think>"
    close: str = "</think>"
    assumed: bool = False
    until: tuple[str, ...] = ()
    channels: bool = False
    shows: tuple[str, ...] = ()

    def begins_inside(self, prompt_end: str) -> bool:
        """Return True if the answer to a prompt that ends with this text begins with reasoning."""
        end = prompt_end.rstrip()
        return end.endswith(self.open) or (self.assumed and not end.endswith(self.close))


REASONING_FORMATS = {
    found.name: found
    for found in (
        ReasoningFormat("qwen3", shows=("</think>",)),
        ReasoningFormat("deepseek_r1", assumed=True),
        ReasoningFormat("deepseek_v3"),
        ReasoningFormat(
            "kimi_k2",
            until=("<|tool_calls_section_begin|>",),
            shows=("</think>", "<|tool_calls_section_begin|>"),
        ),
        ReasoningFormat("glm45", until=("<tool_call>",), shows=("</think>", "<arg_key>")),
        ReasoningFormat(
            "gpt_oss",
            open="<|channel|>analysis<|message|>",
            close="<|end|>",
            channels=True,
            shows=("<|channel|>analysis", "<|channel|>final"),
        ),
    )
}
PROMPT_END = 16  # tokens at the end of a prompt that may contain a tag


class ReasoningParser:
    """Implements `Parser`. White space around the reasoning is dropped.

    `inside` says that the answer begins with reasoning, with or without a tag. Only reasoning at
    the beginning counts. Tags in the answer are text.
    """

    def __init__(self, form: ReasoningFormat, *, inside: bool) -> None:
        self._format, self._inside = form, inside
        self._state = "beginning"
        self._held = ""
        self._empty = True  # the reasoning has no character yet

    @property
    def reasons(self) -> bool:
        """True after the tag that opens the reasoning, and before the one that closes it."""
        return self._state == "reasoning"

    def feed(self, text: str) -> list[Part]:
        text, self._held = self._held + text, ""
        if self._state == "beginning":
            text = self._begin(text)
        found = []
        if self._state == "reasoning":
            reasoning, text = self._reason(text)
            found.append(Part("reasoning", reasoning))
        if self._state == "between" and (text := text.lstrip()):
            self._state = "answer"
        if self._state == "answer":
            found.append(Part("content", text))
        return joined(found)

    def finish(self) -> list[Part]:
        inside = self._state == "reasoning" or (self._state == "beginning" and self._inside)
        held, self._held = self._held, ""
        return joined([Part("reasoning" if inside else "content", held)])

    def _begin(self, text: str) -> str:
        """Return the text after the tag, or hold it while it may be the beginning of one."""
        start, tag = text.lstrip(), self._format.open
        if len(text) - len(start) <= MAX_SPACE:
            if start.startswith(tag):
                self._state = "reasoning"
                return start[len(tag) :]
            if tag.startswith(start):
                self._held = text
                return ""
        self._state = "reasoning" if self._inside else "answer"
        return text

    def _reason(self, text: str) -> tuple[str, str]:
        """Return the reasoning that is certain, and the text after it."""
        if self._empty:
            text = text.lstrip()
            self._empty = not text
        marks = (self._format.close, *self._format.until)
        at, mark = first_mark(text, marks)
        if mark:
            self._state = "between"
            rest = text[at:]
            return text[: space_begins(text, at)], rest.removeprefix(self._format.close)
        cut = held_from(text, marks)
        self._held = text[cut:]
        return text[:cut], ""
