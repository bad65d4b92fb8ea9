"""The fields that restrict an answer to a grammar."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvflow.http.errors import RequestError
from kvflow.serve.http.anthropic import MessagesRequest
from kvflow.serve.http.openai_responses import ResponsesRequest
from kvflow.serve.http.schemas import ChatRequest, CompletionRequest, GenerateRequest
from kvflow.serve.http.structured import field_with_grammar, grammar_of

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
SCHEMA = {"type": "json_schema", "name": "a", "schema": {}}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("kind", "body", "name"),
    [
        (ChatRequest, {**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
        (
            ChatRequest,
            {**CHAT, "response_format": {"type": "text"}, "guided_choice": ["a"]},
            "guided_choice",
        ),
        (ChatRequest, {**CHAT, "tools": [TOOL], "tool_choice": "required"}, "tools"),
        (
            CompletionRequest,
            {"prompt": "a", "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        (GenerateRequest, {"text": "a", "sampling_params": {"regex": "a"}}, "sampling_params"),
        (ResponsesRequest, {"input": "a", "text": {"format": SCHEMA}}, "text.format"),
        (MessagesRequest, {**CHAT, "output_config": {"format": SCHEMA}}, "output_config.format"),
    ],
)
def test_the_field_of_a_grammar(kind: Any, body: dict[str, Any], name: str) -> None:
    assert field_with_grammar(msgspec.convert(body, kind)) == name


@pytest.mark.parametrize("given", [{}, {"xml": "a"}])
def test_structured_outputs_without_a_kind_are_refused(given: dict[str, Any]) -> None:
    """An answer without the restriction would be worse than none."""
    body = msgspec.convert({"prompt": "a", "structured_outputs": given}, CompletionRequest)
    text = "structured_outputs: it has none of json, regex, choice, grammar, json_object, "
    with pytest.raises(RequestError, match=text) as caught:
        grammar_of(body)
    assert caught.value.param == "structured_outputs"
