"""Readers of one tool call: what stands between two marks of a format, read as it arrives.

Each reader takes text up to the end of its call, and adds parts once they are certain. A call is
certain when its function's name is. If the text turns out to be no call before that, the reader is
`broken`, and its text belongs to the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from kvflow.serve.http.tools.json_values import JsonValue
from kvflow.serve.http.tools.parts import Part, first_mark, mark_begins

_SPACE = " \t\r\n"
_LONGEST_HEAD = 256  # characters of a name with its separators
_DEEPEST_CHOICE = 16  # choices of types within each other
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_PLAIN_NAME = re.compile(r"[^\s<>{}\"]+")


class Reader(Protocol):
    """One call. After `take`, it is `done`, or `broken`, or needs more text."""

    done: bool
    broken: bool

    def take(self, text: str, parts: list[Part]) -> str:
        """Add the parts that `text` makes certain, and return the text after the call."""


class Tools(msgspec.Struct, frozen=True):
    """The functions of a request: the schema of the arguments by name."""

    parameters: Mapping[str, Mapping[str, Any]] = {}

    def properties(self, function: str) -> Mapping[str, Any]:
        found = self.parameters.get(function, {}).get("properties")
        return found if isinstance(found, dict) else {}


class ObjectCall:
    """A call as an object with a "name", and with "arguments" or "parameters"."""

    def __init__(self, call: int, accepts: Callable[[str], bool]) -> None:
        self.done = self.broken = False
        self._call, self._accepts = call, accepts
        self._expected = "{"  # the next character outside a value, "" before a value
        self._value: JsonValue | None = None
        self._key: str | None = None
        self._streams = False  # the value is passed on as it arrives
        self._text: list[str] = []  # of any other value
        self._name: str | None = None
        self._early: list[str] = []  # the arguments, while they precede the name
        self._has_arguments = False

    def take(self, text: str, parts: list[Part]) -> str:
        at = 0
        while at < len(text) and not (self.done or self.broken):
            if self._value is None:
                at += self._between(text[at], parts)
            else:
                at = self._in_value(text, at, parts)
        return text[at:]

    def _between(self, character: str, parts: list[Part]) -> int:
        """Handle a character between values. Return 1 if it belongs to the object, or else 0."""
        if character in _SPACE:
            return 1
        if self._expected == "value" or (self._expected == "key" and character == '"'):
            self._value = JsonValue()
            # Arguments that are a string contain the JSON, which is known at their end.
            arguments = self._expected == "value" and self._key in ("arguments", "parameters")
            self._streams = arguments and character != '"'
            return 0
        if character == "}" and self._expected in ("key", "next"):
            self._end(parts)
            return 1
        follows = {("{", "{"): "key", (":", ":"): "value", ("next", ","): "key"}
        expected = follows.get((self._expected, character))
        if expected is None:
            # A model may forget the last brace. A call with a name and arguments is complete.
            self._end(parts)
            return 0
        self._expected = expected
        return 1

    def _in_value(self, text: str, at: int, parts: list[Part]) -> int:
        value, start = self._value, at
        assert value is not None
        while at < len(text) and not value.done:
            at += value.take(text[at])
        if self._streams:
            self._pass_on(text[start:at], parts)
        else:
            self._text.append(text[start:at])
        if value.done:
            self._value = None
            self._complete(parts)
        return at

    def _complete(self, parts: list[Part]) -> None:
        text = "".join(self._text)
        self._text.clear()
        if self._expected == "key":
            self._key, self._expected = _string(text), ":"
            return
        if self._key == "name":
            self._name_is(_string(text), parts)
        elif self._key in ("arguments", "parameters") and text:
            self._pass_on(_string(text) or "", parts)
        self._expected = "next"

    def _name_is(self, name: str | None, parts: list[Part]) -> None:
        if self._name is not None:
            return
        if not name or not self._accepts(name):
            self.broken = True
            return
        self._name = name
        parts.append(Part("call", name, self._call))
        early, self._early = "".join(self._early), []
        self._pass_on(early, parts)

    def _pass_on(self, piece: str, parts: list[Part]) -> None:
        if self._name is None:
            self._early.append(piece)
        elif piece:
            self._has_arguments = True
            parts.append(Part("arguments", piece, self._call))

    def _end(self, parts: list[Part]) -> None:
        if self._name is None:
            self.broken = True
            return
        if not self._has_arguments:
            parts.append(Part("arguments", "{}", self._call))
        self.done = True


class NamedCall:
    """A call as a name, a separator such as `[ARGS]` that may be missing, and an object."""

    def __init__(self, call: int, accepts: Callable[[str], bool]) -> None:
        self.done = self.broken = False
        self._call, self._accepts = call, accepts
        self._head = ""
        self._value: JsonValue | None = None

    def take(self, text: str, parts: list[Part]) -> str:
        at = 0
        while self._value is None and at < len(text) and self._is_head(text[at], parts):
            at += 1
        if self._value is None:
            return text[at:]
        start = at
        while at < len(text) and not self._value.done:
            at += self._value.take(text[at])
        parts.append(Part("arguments", text[start:at], self._call))
        self.done = self._value.done
        return text[at:]

    def _is_head(self, character: str, parts: list[Part]) -> bool:
        """Return True if a character belongs to the name. The first brace begins the arguments."""
        if character != "{":
            self._head += character
            self.broken = character in "\n<" or len(self._head) > _LONGEST_HEAD
            return not self.broken
        name = self._head.partition("[")[0].strip()
        self.broken = not name or not self._accepts(name)
        if not self.broken:
            parts.append(Part("call", name, self._call))
            self._value = JsonValue()
        return False


class HeadedCall:
    """A call as a head that names the function, and an object.

    `head` matches all of the text before the object, and its only group that matches is the name.
    `marks` end a head without an object, which is a call without arguments. Characters of `tail`
    after the object belong to the call.
    """

    def __init__(
        self,
        call: int,
        accepts: Callable[[str], bool],
        *,
        head: re.Pattern[str],
        marks: Sequence[str],
        tail: str = "",
    ) -> None:
        self.done = self.broken = False
        self._call, self._accepts = call, accepts
        self._pattern, self._marks, self._tail = head, marks, tail
        self._head = ""
        self._value: JsonValue | None = None

    def take(self, text: str, parts: list[Part]) -> str:
        if self._value is None:
            text = self._read_head(text, parts)
        return text if self._value is None else self._read_value(text, parts)

    def _read_head(self, text: str, parts: list[Part]) -> str:
        for at, character in enumerate(text):
            if character == "{":
                self.broken = not self._is_named(self._head, parts)
                self._value = None if self.broken else JsonValue()
                return text[at:]
            self._head += character
            mark = next((mark for mark in self._marks if self._head.endswith(mark)), "")
            if mark:
                self.done = self._is_named(self._head.removesuffix(mark), parts)
                self.broken = not self.done
                if self.done:
                    parts.append(Part("arguments", "{}", self._call))
                # A mark may begin another call, so it belongs to the text after this one.
                return mark + text[at + 1 :]
            if len(self._head) > _LONGEST_HEAD:
                self.broken = True
                return text[at + 1 :]
        return ""

    def _is_named(self, head: str, parts: list[Part]) -> bool:
        found = self._pattern.fullmatch(head)
        name = found and found[found.lastindex or 0]
        if not name or not self._accepts(name):
            return False
        parts.append(Part("call", name, self._call))
        return True

    def _read_value(self, text: str, parts: list[Part]) -> str:
        value, at = self._value, 0
        assert value is not None
        while at < len(text) and not value.done:
            at += value.take(text[at])
        parts.append(Part("arguments", text[:at], self._call))
        if not value.done:
            return ""
        rest = text[at:].lstrip(self._tail) if self._tail else text[at:]
        # Until another character arrives, more of the tail may follow.
        self.done = bool(rest) or not self._tail
        return rest


class TypedArguments:
    """The JSON of arguments whose values a model writes as plain text, one after the other.

    Values get the types of the function's schema. A value that does not fit is a string.
    """

    def __init__(self, call: int, properties: Mapping[str, Any]) -> None:
        self._call, self._properties = call, properties
        self._count = 0

    def add(self, name: str, raw: str, parts: list[Part]) -> None:
        value = _typed(raw, self._properties.get(name))
        opening = ", " if self._count else "{"
        self._count += 1
        parts.append(Part("arguments", f"{opening}{_encoded(name)}: {_encoded(value)}", self._call))

    def end(self, parts: list[Part]) -> None:
        parts.append(Part("arguments", "}" if self._count else "{}", self._call))


class _PlainCall:
    """A call whose arguments are plain text between tags. `_read` reads one part of it."""

    def __init__(
        self, call: int, accepts: Callable[[str], bool], tools: Tools | None = None
    ) -> None:
        self.done = self.broken = False
        self._call, self._accepts, self._tools = call, accepts, tools or Tools()
        self._text = ""
        self._pieces: list[str] = []  # of the text that ends at a tag
        self._arguments = TypedArguments(call, {})

    def take(self, text: str, parts: list[Part]) -> str:
        self._text += text
        while not (self.done or self.broken) and self._read(parts):
            pass
        rest, self._text = self._text, ""
        if self.done or self.broken:
            return rest
        self._text = rest
        return ""

    def _read(self, parts: list[Part]) -> bool:
        """Read one part. Return False until all of it is there."""
        raise NotImplementedError

    def _name_is(self, name: str, parts: list[Part]) -> None:
        parts.append(Part("call", name, self._call))
        self._arguments = TypedArguments(self._call, self._tools.properties(name))

    def _until(self, tag: str) -> str | None:
        """Return the text before `tag`, and continue after the tag. None until it is there."""
        text, found, rest = self._text.partition(tag)
        if not found:
            # Only the end may belong to the tag. Searching all again would take quadratic time.
            cut = mark_begins(text, (tag,))
            self._pieces.append(text[:cut])
            self._text = text[cut:]
            return None
        whole = "".join((*self._pieces, text))
        self._pieces.clear()
        self._text = rest
        return whole


class TaggedCall(_PlainCall):
    """A call as a tag for the function, and one for each parameter with its plain value."""

    _name: str | None = None
    _parameter: str | None = None

    def _read(self, parts: list[Part]) -> bool:
        return self._read_tag(parts) if self._parameter is None else self._read_value(parts)

    def _read_value(self, parts: list[Part]) -> bool:
        assert self._parameter is not None
        if (value := self._until(_PARAMETER_END)) is None:
            return False
        self._arguments.add(self._parameter, value.removeprefix("\n").removesuffix("\n"), parts)
        self._parameter = None
        return True

    def _read_tag(self, parts: list[Part]) -> bool:
        """Read one tag. Return False until all of it is there."""
        # White space between tags would be searched again with every piece.
        self._text = text = self._text.lstrip()
        tags = (_FUNCTION,) if self._name is None else (_PARAMETER, _FUNCTION_END)
        tag = next((tag for tag in tags if text.startswith(tag)), None)
        if tag is None:
            if any(tag.startswith(text) for tag in tags):
                return False
            # Some models leave the end tag of the function out.
            self._end(parts)
            return True
        if tag == _FUNCTION_END:
            self._text = text[len(tag) :]
            self._end(parts)
            return True
        name, end, rest = text[len(tag) :].partition(">")
        if len(name) > _LONGEST_HEAD:
            self._end(parts)
            return True
        if not end:
            return False
        if tag == _PARAMETER:
            self._parameter, self._text = name.strip(), rest
        elif (name := name.strip()) and self._accepts(name):
            self._name, self._text = name, rest
            self._name_is(name, parts)
        else:
            self.broken = True
        return True

    def _end(self, parts: list[Part]) -> None:
        if self._name is None:
            self.broken = True
            return
        self._arguments.end(parts)
        self.done = True


class KeyedCall(_PlainCall):
    """A call as the function's name, and two tags for each parameter: its key and its value."""

    _named = False
    _key: str | None = None
    _ends = ""  # the tag that ends the key or the value that is being read

    def _read(self, parts: list[Part]) -> bool:
        if not self._named:
            return self._read_name(parts)
        return self._read_text(parts) if self._ends else self._read_tag(parts)

    def _read_name(self, parts: list[Part]) -> bool:
        """Read the name, which ends with its line or at a tag."""
        at, _ = first_mark(self._text, ("<", "\n"))
        if max(at, len(self._text) if at < 0 else 0) > _LONGEST_HEAD:
            self.broken = True
        if at < 0 or self.broken:
            return False
        found = self._text[:at].strip()
        self.broken = not _PLAIN_NAME.fullmatch(found) or not self._accepts(found)
        if self.broken:
            return False
        self._name_is(found, parts)
        self._named, self._text = True, self._text[at:]
        return True

    def _read_tag(self, parts: list[Part]) -> bool:
        """Read the tag that begins a key or a value. Return False until all of it is there."""
        tag, ends = (_KEY, _KEY_END) if self._key is None else (_VALUE, _VALUE_END)
        # White space between tags would be searched again with every piece.
        self._text = self._text.lstrip()
        if self._text.startswith(tag):
            self._text, self._ends = self._text[len(tag) :], ends
            return True
        if tag.startswith(self._text):
            return False
        # A key without a value is none: acting on a half of it could do harm.
        self._arguments.end(parts)
        self.done = True
        return True

    def _read_text(self, parts: list[Part]) -> bool:
        if (found := self._until(self._ends)) is None:
            return False
        self._ends = ""
        if self._key is None:
            self._key = found.strip()
        else:
            self._arguments.add(self._key, found, parts)
            self._key = None
        return True


def _encoded(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _typed(raw: str, schema: Any) -> Any:
    types = _types(schema)
    if not types or "string" in types:
        return None if raw == "null" and "null" in types else raw
    if "boolean" in types and raw.strip().lower() in ("true", "false"):
        return raw.strip().lower() == "true"
    try:
        return msgspec.json.decode(raw.encode("utf-8", "surrogatepass"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw


def _types(schema: Any, depth: int = 0) -> set[str]:
    """Return the types that a schema names. A client wrote it, so it may hold anything."""
    if not isinstance(schema, dict) or depth > _DEEPEST_CHOICE:
        return set()
    declared, values = schema.get("type"), schema.get("enum")
    found = {one for one in _list(declared) or [declared] if isinstance(one, str) and one}
    for choice in (*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))):
        found |= _types(choice, depth + 1)
    if "enum" in schema and all(isinstance(one, str) for one in _list(values)):
        found.add("string")
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _string(text: str) -> str | None:
    try:
        return msgspec.json.decode(text.encode("utf-8", "surrogatepass"), type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
