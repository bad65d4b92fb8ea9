"""The fields of a body that restrict the answer to a grammar: OpenAI's `response_format`, vLLM's
`structured_outputs` and `guided_*`, and SGLang's `json_schema`, `regex`, `ebnf` and
`structural_tag`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from kvflow.http.errors import RequestError
from kvflow.protocols.errors import MisuseError
from kvflow.serve.engine.model.grammars import Grammar, grammar_of_choices

Json = dict[str, Any] | bool
AllowedTexts = Annotated[list[str], Meta(min_length=1)]
_ANY_OBJECT = '{"type": "object"}'


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The `json_schema` object of OpenAI's `response_format`. Its other fields change nothing."""

    # Its name in OpenAI's bodies shadows a method of Struct.
    schema_: Json | None = msgspec.field(default=None, name="schema")


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The `response_format` object of OpenAI, with the additions of vLLM and SGLang."""

    type: str = "text"
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class FlatFormat(Protocol):
    """A format as the other routes of chats have it: the schema stands beside the type."""

    @property
    def type(self) -> str: ...

    @property
    def schema_(self) -> dict[str, Any] | None: ...


def nested(given: FlatFormat | None) -> ResponseFormat | None:
    """Return a format as chat completions have it."""
    if given is None:
        return None
    return ResponseFormat(type=given.type, json_schema=JsonSchemaFormat(schema_=given.schema_))


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """The `structured_outputs` object of vLLM."""

    json: Json | str | None = None
    regex: str | None = None
    choice: AllowedTexts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


def grammar_of(body: Any, where: str = "") -> Grammar | None:
    """Return the grammar that a body asks for, or None.

    `where` is the prefix of the names of its fields in errors.

    Raises: RequestError if a value is invalid, or if several fields ask for a grammar.
    """
    found: dict[str, Grammar] = {}
    for name, read in _READERS.items():
        value = getattr(body, name, None)
        if value is None or value in ("", [], {}):
            continue
        try:
            grammar = read(value)
        except (MisuseError, ValueError) as error:
            raise RequestError(f"{where}{name}: {error}", param=where + name) from None
        if grammar is not None:
            found[where + name] = grammar
    if len(found) > 1:
        raise RequestError(
            f"{' and '.join(found)} both restrict the answer; send one of them",
            param=list(found)[-1],
        )
    return next(iter(found.values()), None)


def field_with_grammar(body: Any) -> str:
    """Return the name of the field from which a body's grammar comes, for errors.

    `grammar_of` has read the body before. A call that is forced has the schemas of the tools.
    """
    for name in _READERS:
        value = getattr(body, name, None)
        if value is not None and getattr(value, "type", None) != "text":
            return name
    for name in ("text", "output_config"):
        given = getattr(body, name, None)
        if isinstance(given, msgspec.Struct) and getattr(given, "format", None) is not None:
            return f"{name}.format"
    return "tools" if getattr(body, "tools", None) else "sampling_params"


def _of_response_format(value: ResponseFormat) -> Grammar | None:
    if value.type == "text":
        return None
    if value.type == "json_object":
        return Grammar("json_schema", _ANY_OBJECT)
    if value.type == "json_schema":
        if value.json_schema is None or value.json_schema.schema_ is None:
            raise MisuseError("type json_schema needs json_schema.schema")
        return _of_schema(value.json_schema.schema_)
    if value.type == "structural_tag":
        return _of_tag({"structures": value.structures, "triggers": value.triggers})
    raise MisuseError(
        f"type {value.type[:40]!r} is none of text, json_object, json_schema, structural_tag"
    )


def _of_structured_outputs(value: StructuredOutputs) -> Grammar:
    given: dict[str, Any] = {
        name: each
        for name in value.__struct_fields__
        if (each := getattr(value, name)) not in (None, False, "")
    }
    if value.json is not None:
        given["json"] = value.json
    if len(given) > 1:
        raise MisuseError(f"{' and '.join(given)} both restrict the answer; send one of them")
    for name, one in given.items():
        return Grammar("json_schema", _ANY_OBJECT) if name == "json_object" else _VLLM[name](one)
    raise MisuseError(f"it has none of {', '.join(value.__struct_fields__)}")


def _of_schema(value: Json | str) -> Grammar:
    return Grammar("json_schema", value if isinstance(value, str) else json.dumps(value))


def _of_regex(value: str) -> Grammar:
    return Grammar("regex", value)


def _of_ebnf(value: str) -> Grammar:
    return Grammar("ebnf", value)


def _of_grammar(value: str) -> Grammar:
    # vLLM takes both forms here. Only EBNF defines rules with this sign.
    return Grammar("ebnf" if "::=" in value else "lark", value)


def _of_tag(value: str | dict[str, Any]) -> Grammar:
    return Grammar("structural_tag", value if isinstance(value, str) else json.dumps(value))


_VLLM: dict[str, Any] = {
    "json": _of_schema,
    "regex": _of_regex,
    "choice": grammar_of_choices,
    "grammar": _of_grammar,
    "structural_tag": _of_tag,
}
_READERS: dict[str, Any] = {
    "response_format": _of_response_format,
    "structured_outputs": _of_structured_outputs,
    "guided_json": _of_schema,
    "guided_regex": _of_regex,
    "guided_choice": grammar_of_choices,
    "guided_grammar": _of_grammar,
    "json_schema": _of_schema,
    "regex": _of_regex,
    "ebnf": _of_ebnf,
    "structural_tag": _of_tag,
}
