"""Splits an answer in OpenAI's harmony format, which gpt-oss writes: messages in channels.

A message is a header, the mark `<|message|>`, and its text up to a mark that ends it. The header
names the channel, and the recipient of a call, such as `to=functions.get_weather`.
"""

from __future__ import annotations

import re
from typing import Literal

from kvflow.serve.http.tools.formats import HARMONY_ENDS, ToolFormat
from kvflow.serve.http.tools.parts import Part, first_mark, joined, mark_begins
from kvflow.serve.http.tools.readers import Reader, Tools

_MESSAGE, _START, _CHANNEL = "<|message|>", "<|start|>", "<|channel|>"
_BEGINNINGS = (_CHANNEL, _MESSAGE, "to=", "<|constrain|>", *HARMONY_ENDS)
_LONGEST_HEADER = 512  # characters, with the mark that ends it
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<{]+)")


class HarmonyParser:
    """Implements `Parser` for a whole answer.

    The channel `analysis` is reasoning, or text without `separates`. A message to a function is a
    call if `calls` is given. Any other message is text, and so is what has no header, or one that
    cannot be read. Texts of one kind have a line break between messages.

    `inside` says that the answer begins within the text of a message of the channel `analysis`.
    """

    def __init__(
        self,
        calls: ToolFormat | None,
        tools: Tools,
        *,
        parallel: bool = True,
        separates: bool = True,
        inside: bool = False,
    ) -> None:
        self._format, self._tools = calls, tools
        self._parallel, self._separates = parallel, separates
        self._state: Literal["header", "text", "call"] = "header"
        self._kind: Literal["content", "reasoning"] = "content"
        self._begins = True  # the message has no text yet
        self._after_call = False  # white space after the arguments of a call is no text
        self._written: set[str] = set()  # the kinds that have text
        self._held = ""
        self._reader: Reader | None = None
        self._raw: list[str] = []  # of a call whose name is not known yet
        self._calls = 0
        if inside:
            self._begin("reasoning")

    @property
    def reasons(self) -> bool:
        """True within a message that is reasoning."""
        return self._state == "text" and self._kind == "reasoning"

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        text, self._held = self._held + text, ""
        steps = {"header": self._read_header, "text": self._read_text, "call": self._read_call}
        while text:
            text = steps[self._state](text, parts)
        return self._counted(parts)

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._state == "call":
            self._begin("content")
            self._add("".join(self._raw), parts)
            self._raw.clear()
        elif self._state == "header":
            # White space after a message is no text.
            if not self._held.strip() and (self._written or self._calls):
                self._held = ""
            self._begin("content")
        held, self._held = self._held, ""
        self._add(held, parts)
        return self._counted(parts)

    def _counted(self, parts: list[Part]) -> list[Part]:
        if not self._parallel:
            parts = [
                part for part in parts if part.kind in ("content", "reasoning") or not part.call
            ]
        return joined(parts)

    def _begin(self, kind: Literal["content", "reasoning"]) -> None:
        self._state = "text"
        self._kind, self._begins, self._after_call = kind, True, False

    def _add(self, text: str, parts: list[Part]) -> None:
        """Add a piece of the text of a message."""
        if self._after_call:
            text = text.lstrip()
        if not text:
            return
        if self._begins and self._kind in self._written:
            parts.append(Part(self._kind, "\n"))
        self._begins = self._after_call = False
        self._written.add(self._kind)
        parts.append(Part(self._kind, text))

    def _read_header(self, text: str, parts: list[Part]) -> str:
        at, mark = _end_of_header(text[:_LONGEST_HEADER])
        header = text[:at] if mark else text
        if not _may_be_header(header, complete=bool(mark)):
            self._begin("content")
            return text
        if not mark and len(text) < _LONGEST_HEADER:
            self._held = text
            return ""
        if not mark:
            # This may begin with a mark, which would begin the same header again.
            self._begin("content")
            self._add(text[:_LONGEST_HEADER], parts)
            return text[_LONGEST_HEADER:]
        if mark == _MESSAGE:
            self._open(header, parts)
        elif header.strip():
            # A message that ends before it begins. What it is cannot be known.
            self._begin("content")
            self._add(header, parts)
            self._state = "header"
        return text[at:] if mark == _START else text[at + len(mark) :]

    def _open(self, header: str, parts: list[Part]) -> None:
        channels, recipients = _CHANNEL_NAME.findall(header), _RECIPIENT.findall(header)
        if not recipients:
            reasons = self._separates and channels[-1:] == ["analysis"]
            self._begin("reasoning" if reasons else "content")
            return
        recipient = recipients[-1]
        if self._format is None or not self._is_function(recipient):
            # A call that no one reads stays as it is.
            self._begin("content")
            self._add(header + _MESSAGE, parts)
            return
        self._state, self._raw = "call", [header, _MESSAGE]
        self._reader = self._format.reader(self._calls, lambda _: True, self._tools)
        self._reader.take(recipient + _MESSAGE, parts)

    def _is_function(self, recipient: str) -> bool:
        prefix, _, name = recipient.partition(".")
        return (prefix == "functions" and bool(name)) or recipient in self._tools.parameters

    def _read_call(self, text: str, parts: list[Part]) -> str:
        assert self._reader is not None
        found: list[Part] = []
        rest = self._reader.take(text, found)
        if self._raw and not found and not self._reader.broken:
            self._raw.append(text)
        elif self._reader.broken:
            raw = "".join((*self._raw, text))
            self._begin("content")
            self._add(raw[: len(raw) - len(rest)], parts)
            self._raw.clear()
        else:
            self._raw.clear()
            parts += found
        if self._reader.done:
            self._calls += 1
            self._begin("content")
            self._after_call = True
        return rest

    def _read_text(self, text: str, parts: list[Part]) -> str:
        at, mark = first_mark(text, HARMONY_ENDS)
        if mark:
            self._add(text[:at], parts)
            self._state = "header"
            return text[at:] if mark == _START else text[at + len(mark) :]
        cut = mark_begins(text, HARMONY_ENDS)
        self._add(text[:cut], parts)
        self._held = text[cut:]
        return ""


def _end_of_header(text: str) -> tuple[int, str]:
    """Return the position of the mark that ends a header, and the mark, or (-1, "")."""
    at, mark = first_mark(text, (_MESSAGE, *HARMONY_ENDS[:-1]))
    # The mark of a beginning also begins the header itself.
    again = text.find(_START, len(text) - len(text.lstrip()) + 1)
    return (again, _START) if again >= 0 and (not mark or again < at) else (at, mark)


def _may_be_header(text: str, *, complete: bool) -> bool:
    """Return True if `text` is a header, or can become one where it is not `complete`."""
    start = text.lstrip()
    return not start or any(
        start.startswith(mark) or (not complete and mark.startswith(start)) for mark in _BEGINNINGS
    )
