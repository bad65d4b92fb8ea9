"""The table of request fields: what it says of a field is what happens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import openai.types
import openai.types.chat
import openai.types.responses
import pytest

from kvflow.http.errors import RequestError
from kvflow.serve.http import anthropic, fields, openai_responses, schemas
from kvflow.serve.http.fields import BODIES, HARMLESS, REFUSED, SOURCES, TABLE, WORKS, Field

STRUCTS: dict[str, type[msgspec.Struct]] = {
    "c": schemas.ChatRequest,
    "t": schemas.CompletionRequest,
    "g": schemas.GenerateRequest,
    "s": schemas.GenerateSampling,
    "o": schemas.StreamOptions,
    "k": schemas.TokenizeRequest,
    "d": schemas.DetokenizeRequest,
    "m": anthropic.MessagesRequest,
    "e": anthropic.CountTokensRequest,
    "r": openai_responses.ResponsesRequest,
}
MINIMAL: dict[str, dict[str, Any]] = {
    "c": {"messages": [{"role": "user", "content": "a"}]},
    "t": {"prompt": "a"},
    "g": {"text": "a"},
    "k": {"prompt": "a"},
    "d": {"tokens": [1]},
    "m": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "e": {"messages": [{"role": "user", "content": "a"}]},
    "r": {"input": "a"},
}
OUTER = {"s": ("g", "sampling_params"), "o": ("c", "stream_options")}


# By hand, and not by the table: who takes a value out of it has to say so twice.
DEFAULTS: dict[tuple[str, str], tuple[Any, ...]] = {
    ("c", "modalities"): (None, [], ["text"]),
    ("ct", "response_format"): (None, {}, {"type": "text"}),
    ("k", "tool_choice"): (None, "", "auto", "none"),
    ("c", "function_call"): (None, "", "auto", "none"),
    ("c", "verbosity"): (None, "medium"),
    ("c", "add_generation_prompt"): (None, True),
    ("t", "best_of"): (None, 1),
    ("s", "beam_width"): (None, 1),
    ("ct", "thinking_token_budget"): (None, -1),
    ("cts", "stop_regex"): (None, False, 0, "", [], {}),
}


def rows(standing: str) -> list[Any]:
    pairs = [(field, body) for field in TABLE[standing] for body in field.bodies]
    return [pytest.param(field, body, id=f"{body}-{field.name}") for field, body in pairs]


def parsed(field: Field, body: str, value: Any) -> Any:
    outer, where = OUTER.get(body, (body, ""))
    added = {field.name: value}
    document = {**MINIMAL[outer], **({where: added} if where else added)}
    kind: Any = STRUCTS[outer]
    return schemas.parse(msgspec.json.encode(document), kind)


def test_every_row_of_the_page_is_a_field() -> None:
    page = Path(fields.__file__).with_name("FIELDS.md").read_text(encoding="utf-8")
    named = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert list(TABLE) == [WORKS, REFUSED, HARMLESS]
    assert [field.name for rows in TABLE.values() for field in rows] == named


@pytest.mark.parametrize("body", BODIES)
def test_what_works_is_what_is_parsed(body: str) -> None:
    works = {field.name for field in TABLE[WORKS] if body in field.bodies}
    assert works == set(STRUCTS[body].__struct_fields__)


@pytest.mark.parametrize(
    ("body", "module"),
    [
        ("c", openai.types.chat.completion_create_params),
        ("t", openai.types.completion_create_params),
        ("r", openai.types.responses.response_create_params),
    ],
)
def test_every_field_of_the_official_client_is_in_the_table(body: str, module: Any) -> None:
    base = "ResponseCreateParamsBase" if body == "r" else "CompletionCreateParamsBase"
    official = set(getattr(module, base).__annotations__) | {"stream"}
    assert len(official) > 15
    assert official <= {
        field.name for rows in TABLE.values() for field in rows if body in field.bodies
    }


def test_a_field_stands_once_in_a_body() -> None:
    seen = Counter(
        (field.name, body) for rows in TABLE.values() for field in rows for body in field.bodies
    )
    assert [row for row, count in seen.items() if count > 1] == []
    letters = {letter for rows in TABLE.values() for field in rows for letter in field.known_to}
    assert letters == set(SOURCES)


@pytest.mark.parametrize(("field", "body"), rows(REFUSED))
def test_a_refused_field_is_named(field: Field, body: str) -> None:
    where = f"{OUTER[body][1]}." if body in OUTER else ""
    with pytest.raises(RequestError, match=field.name) as caught:
        parsed(field, body, field.example)
    assert caught.value.param == where + field.name
    for value in field.accepts:
        parsed(field, body, value)


@pytest.mark.parametrize(
    ("body", "name", "value"),
    [(*key, value) for key, values in DEFAULTS.items() for value in values],
)
def test_clients_that_send_every_default_are_served(body: str, name: str, value: Any) -> None:
    for letter in body:
        parsed(Field(name, letter, "O"), letter, value)


@pytest.mark.parametrize(("field", "body"), rows(HARMLESS))
def test_a_harmless_field_is_accepted(field: Field, body: str) -> None:
    parsed(field, body, field.example)


def test_false_is_not_zero() -> None:
    field = Field("a", "c", "O", accepts=(None, 1))
    assert [field.changes_nothing(value) for value in (None, 1, 1.0, True, 0)] == [
        True,
        True,
        True,
        False,
        False,
    ]
