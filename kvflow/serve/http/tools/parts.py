"""The parts of an answer: text, reasoning and tool calls, in the order of the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

MAX_SPACE = 1024  # characters of white space next to a call or reasoning that are no text
Kind = Literal["content", "reasoning", "call", "arguments"]


class Part(NamedTuple):
    """A piece of an answer. Joining the pieces of one kind gives the whole, however it was split.

    A "call" part begins a call, and its text is the name of the function. The "arguments" parts
    with the same `call` number follow it. Their texts, joined, are the JSON of its arguments.
    """

    kind: Kind
    text: str
    call: int = 0


class Parser(Protocol):
    """An incremental parser of one answer."""

    def feed(self, text: str) -> list[Part]:
        """Return the parts that become certain with `text`."""

    def finish(self) -> list[Part]:
        """Return the parts that were held back, at the end of the answer."""


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return the parts without empty pieces, and with adjacent pieces of one kind joined."""
    found: list[Part] = []
    for part in parts:
        if part.kind != "call" and found and found[-1][::2] == part[::2]:
            found[-1] = part._replace(text=found[-1].text + part.text)
        elif part.kind == "call" or part.text:
            found.append(part)
    return found


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Return the position of the first of `marks` in `text`, and the mark, or (-1, "")."""
    return min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=(-1, ""))


def held_from(text: str, marks: Sequence[str]) -> int:
    """Return where the end of `text` begins that may belong to a mark.

    That end is the beginning of a mark, with the white space before it. It is empty if the text
    cannot continue as a mark.
    """
    return space_begins(text, mark_begins(text, marks))


def space_begins(text: str, end: int) -> int:
    """Return where the white space before `end` begins, or where its last `MAX_SPACE` do.

    White space that is held back is searched again with every token, so it must have a limit.
    """
    first = max(0, end - MAX_SPACE)
    return first + len(text[first:end].rstrip())


def mark_begins(text: str, marks: Sequence[str]) -> int:
    """Return where the end of `text` begins that is the beginning of a mark."""
    longest = max((len(mark) for mark in marks), default=1)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return at
    return len(text)
