"""The functions that a request offers to the model, and the request's choice among them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvflow.http.errors import RequestError
from kvflow.serve.http.tools.readers import Tools

MAX_NAME = 128  # characters
# The event loop checks tools and writes their schemas, in some 10 ms at these limits.
MAX_TOOLS = 1024
MAX_TOOLS_BYTES = 1 << 20  # of JSON, all tools of a request together
_PLACE = re.compile(r" - at `\$([^`]*)`$")  # the path of a value, at the end of msgspec's errors


class Function(msgspec.Struct, frozen=True):
    """One function. `parameters` is a JSON schema of the object that it takes."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: Function


class ToolUse(msgspec.Struct, frozen=True):
    """The functions that a request offers, and those among which the answer must call one."""

    functions: tuple[Function, ...] = ()
    given: tuple[dict[str, Any], ...] = ()  # as the request has them, for the chat template
    forced: tuple[Function, ...] = ()  # empty if the model may choose
    parallel: bool = True

    @property
    def tools(self) -> Tools:
        return Tools({one.name: one.parameters or {} for one in self.functions})

    def forced_schema(self) -> dict[str, Any]:
        """Return the JSON schema of an answer that calls the forced functions.

        It is an array of calls, as vLLM and SGLang force it: one call, or several if they may be
        parallel. Each function's schema is a definition, which its references point into.
        """
        definitions = {
            str(i): _moved(_of_object(one.parameters), f"#/$defs/{i}")
            for i, one in enumerate(self.forced)
        }
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": one.name},
                    "parameters": {"$ref": f"#/$defs/{i}"},
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for i, one in enumerate(self.forced)
        ]
        several = {} if self.parallel and len(self.forced) > 1 else {"maxItems": 1}
        return {
            "type": "array",
            "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
            "minItems": 1,
            **several,
            "$defs": definitions,
        }

    def forced_schema_text(self) -> str:
        """Return `forced_schema` as JSON."""
        return json.dumps(self.forced_schema(), ensure_ascii=False, separators=(",", ":"))


def _of_object(parameters: dict[str, Any] | None) -> dict[str, Any]:
    return parameters or {"type": "object", "properties": {}}


def _moved(schema: Any, root: str) -> Any:
    """Return a schema whose local references begin at `root`, where it is now."""
    if isinstance(schema, dict):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, root)
            for key, value in schema.items()
        }
    return [_moved(one, root) for one in schema] if isinstance(schema, list) else schema


NO_TOOLS = ToolUse()


def tool_use(
    tools: Sequence[dict[str, Any]] | None, choice: Any, *, parallel: bool | None
) -> ToolUse:
    """Check the tools of a chat and its choice. Raises: RequestError that names the field."""
    functions = functions_of(tools)
    forced = _forced(choice, functions)
    # The model does not know of functions that it must not call.
    if choice == "none" or not functions:
        return NO_TOOLS
    return ToolUse(functions, tuple(tools or ()), forced, parallel is not False)


def functions_of(tools: Sequence[dict[str, Any]] | None) -> tuple[Function, ...]:
    """Return the functions of the tools of a chat. Raises: RequestError that names the field."""
    _check_size(tools or ())
    found = converted(tools or [], list[_Tool], "tools")
    functions = tuple(one.function for one in found)
    check_names(functions, "tools[{}].function.name")
    return functions


def _check_size(tools: Sequence[dict[str, Any]]) -> None:
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools: {len(tools)} tools, limit {MAX_TOOLS}", param="tools")
    size = len(msgspec.json.encode(tools))
    if size > MAX_TOOLS_BYTES:
        text = f"tools: {size} bytes of JSON, limit {MAX_TOOLS_BYTES}"
        raise RequestError(text, param="tools")


def check_names(functions: Sequence[Function], place: str) -> None:
    """Raise RequestError if two functions have one name. `place` is the path of a name."""
    seen: set[str] = set()
    for i, one in enumerate(functions):
        if one.name in seen:
            where = place.format(i)
            raise RequestError(f"{where}: {one.name!r} is given twice", param=where)
        seen.add(one.name)


def converted(value: Any, kind: Any, where: str) -> Any:
    """Convert a part of a body. Raises: RequestError that names its place under `where`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PLACE.search(text)
        param = where + (found[1] if found else "")
        raise RequestError(f"{param}: {_PLACE.sub('', text)}", param=param) from None


def _forced(choice: Any, functions: tuple[Function, ...]) -> tuple[Function, ...]:
    if choice in (None, "", "auto", "none"):
        return ()
    if isinstance(choice, str) and choice != "required":
        text = f"tool_choice: {choice[:40]!r} is none of auto, none, required, or an object"
        raise RequestError(f"{text} that names a function", param="tool_choice")
    if not functions:
        text = "tool_choice: the request has no tools to choose from"
        raise RequestError(text, param="tool_choice")
    if choice == "required":
        return functions
    name = converted(choice, _Tool, "tool_choice").function.name
    return (named_function(name, functions, "tool_choice.function.name"),)


def named_function(name: str, functions: Sequence[Function], where: str) -> Function:
    """Return the function with this name. Raises: RequestError that names the field `where`."""
    for one in functions:
        if one.name == name:
            return one
    known = ", ".join(one.name for one in functions)[:200]
    raise RequestError(f"{where}: {name[:80]!r} is none of the tools ({known})", param=where)
