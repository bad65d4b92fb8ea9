"""The schema of a forced call."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest

from kvflow.http.errors import RequestError
from kvflow.protocols.wire.json_text import MAX_NESTING
from kvflow.serve.engine.model.grammars import Grammar
from kvflow.serve.http.tools.answers import AnswerReading, AnswerSoFar
from kvflow.serve.http.tools.choice import (
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    NO_TOOLS,
    ToolUse,
    tool_use,
)
from tests.fakes.written import END, byte_tokenizer, grammars_of

TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}, "again": {"$ref": "#"}},
    "required": ["root"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/node"}, "n": {"type": "integer"}},
            "required": ["n"],
        }
    },
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "walk", "parameters": TREE}},
    {"type": "function", "function": {"name": "stop"}},
]


def use(choice: Any, *, parallel: bool | None = None) -> ToolUse:
    return tool_use(TOOLS, choice, parallel=parallel)


def test_a_named_function_is_called_once() -> None:
    chosen = use({"type": "function", "function": {"name": "stop"}})
    assert json.loads(chosen.forced_schema_text()) == {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"name": {"const": "stop"}, "parameters": {"$ref": "#/$defs/0"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        },
        "minItems": 1,
        "maxItems": 1,
        "$defs": {"0": {"type": "object", "properties": {}}},
    }


def tools_of(count: int, size: int) -> list[dict[str, Any]]:
    """Return `count` tools that are `size` bytes of JSON together."""
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]
    described: dict[str, Any] = tools[0]["function"]  # type: ignore[assignment]
    described["description"] = ""
    described["description"] = "a" * (size - len(msgspec.json.encode(tools)))
    return tools


def test_tools_have_a_limit_in_number_and_size() -> None:
    accepted = tools_of(MAX_TOOLS, MAX_TOOLS_BYTES)
    assert len(tool_use(accepted, "auto", parallel=None).functions) == MAX_TOOLS
    for tools, text in (
        (tools_of(MAX_TOOLS + 1, 1 << 19), "tools: 1025 tools, limit 1024"),
        (tools_of(2, MAX_TOOLS_BYTES + 1), "tools: 1048577 bytes of JSON, limit 1048576"),
    ):
        with pytest.raises(RequestError) as refusal:
            tool_use(tools, "none", parallel=None)
        assert (str(refusal.value), refusal.value.param) == (text, "tools")


def test_a_schema_that_is_nested_as_deep_as_a_body_may_be_is_forced() -> None:
    deep: dict[str, Any] = {}
    for _ in range(MAX_NESTING):
        deep = {"items": deep}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    text = tool_use(tools, "required", parallel=None).forced_schema_text()
    assert text.count("items") == MAX_NESTING + 1


# The library wants the fields of an object in the order of its schema.
NODE: dict[str, Any] = {"n": 1}
NODES = {"next": {"n": 2}, "n": 1}


@pytest.mark.parametrize(
    ("parallel", "answer", "fits"),
    [
        (None, [{"name": "stop", "parameters": {}}], True),
        (None, [{"name": "stop", "parameters": {"any": 1}}], True),
        (None, [{"name": "walk", "parameters": {"root": NODES}}], True),
        # References of a function's schema point into that schema.
        (None, [{"name": "walk", "parameters": {"root": {"next": {"n": "2"}, "n": 1}}}], False),
        (None, [{"name": "walk", "parameters": {"root": NODE, "again": {"root": NODE}}}], True),
        (None, [{"name": "walk", "parameters": {"root": NODE, "again": {}}}], False),
        (None, [{"name": "walk", "parameters": {}}], False),
        (None, [{"name": "run", "parameters": {}}], False),
        (None, [], False),
        (None, [{"name": "stop", "parameters": {}}] * 3, True),
        (False, [{"name": "stop", "parameters": {}}] * 2, False),
    ],
)
def test_required_calls_fit_one_of_the_functions(
    parallel: bool | None, answer: Any, fits: bool
) -> None:
    tokenizer = byte_tokenizer()
    with contextlib.closing(grammars_of(tokenizer)) as grammars:
        text = use("required", parallel=parallel).forced_schema_text()
        matcher = grammars.matcher(Grammar("json_schema", text))
        ids = tokenizer.encode(json.dumps(answer) + END)
        assert matcher.consume(ids) == fits, matcher.error


def test_what_the_schema_forces_is_read_as_calls() -> None:
    reading = AnswerReading(use=use("required"))
    parser, found = reading.parser(), AnswerSoFar(reading)
    answer = [
        {"name": "walk", "parameters": {"root": {"n": 1}}},
        {"name": "stop", "parameters": {}},
    ]
    for part in [*parser.feed(json.dumps(answer, indent=1)), *parser.finish()]:
        found.add(part)
    assert [(call.name, json.loads(call.text)) for call in found.calls] == [
        (call["name"], call["parameters"]) for call in answer
    ]
    assert found.text("content") == ""


@pytest.mark.parametrize("choice", [None, "", "auto", "none"])
def test_nothing_is_forced_where_the_model_may_choose(choice: str | None) -> None:
    assert use(choice).forced == ()
    assert (use(choice) == NO_TOOLS) == (choice == "none")
