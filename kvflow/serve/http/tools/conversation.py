"""The messages of a chat as chat templates expect them, with tool calls and their results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from kvflow.http.errors import RequestError
from kvflow.protocols.errors import WireError
from kvflow.protocols.wire.json_text import check_nesting


def for_template(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message for a chat template. Raises: RequestError that names the field.

    Text parts are joined, because templates of text models expect a string. The arguments of tool
    calls become objects, which templates write in the form of their model.
    """
    role = message.get("role")
    where = f"messages[{index}]"
    if not isinstance(role, str):
        raise RequestError(f"{where}.role must be a string", param=f"{where}.role")
    found = {**message, "content": _plain_content(where, message.get("content"))}
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        text = f"{where}.tool_call_id must be the id of the call that this message answers"
        raise RequestError(text, param=f"{where}.tool_call_id")
    calls = message.get("tool_calls")
    if calls is None:
        return found
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
    # Templates test whether the field exists, so an empty list would look like a call.
    if not calls:
        del found["tool_calls"]
        return found
    return {
        **found,
        "tool_calls": [
            _call_for_template(f"{where}.tool_calls[{i}]", one) for i, one in enumerate(calls)
        ],
    }


def _plain_content(where: str, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of parts", param="messages")
    texts: list[str] = []
    for part in content:
        if (
            not isinstance(part, dict)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise RequestError(
                f"{where}.content: only parts of type text are supported", param="messages"
            )
        texts.append(part["text"])
    return "".join(texts)


def _call_for_template(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        param = f"{where}.function.name"
        raise RequestError(f"{param} must be a string", param=param)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = decoded_arguments(f"{where}.function.arguments", arguments)
    elif arguments is not None and not isinstance(arguments, dict):
        param = f"{where}.function.arguments"
        raise RequestError(f"{param} must be a string of JSON", param=param)
    return {**call, "function": {**function, "arguments": arguments or {}}}


def with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of `for_template` with its content at the end of its reasoning, if it calls.

    The template of gpt-oss writes either of them before a call, and refuses both.
    """
    content, reasoning = message["content"], message.get("reasoning_content")
    if not content or not isinstance(reasoning, str) or "tool_calls" not in message:
        return message
    return {**message, "content": "", "reasoning_content": f"{reasoning}\n{content}"}


def with_arguments_as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of `for_template` with the arguments of calls as JSON."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def decoded_arguments(where: str, text: str) -> dict[str, Any]:
    """Decode a call's arguments. Raises: RequestError that names the field `where`."""
    # Clients send an empty text for a function without parameters.
    if not text.strip():
        return {}
    raw = text.encode("utf-8", "surrogatepass")
    try:
        check_nesting(raw)
        return msgspec.json.decode(raw, type=dict[str, Any])
    except WireError as error:
        raise RequestError(f"{where} is {error}", param=where) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RequestError(f"{where} is not the JSON of an object", param=where) from None
