"""What the programs beside this one ask of the servers, and how they report.

Each of them is a user of one client: it runs in an environment that has this client and no kvflow.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

KEY = "of-clients"
# The model at the first URL calls a tool by itself, and answers when it has the tool's result. The
# one at the second writes text, and whatever a grammar asks for.
AGENT_URL, WRITER_URL = os.environ.get("CLIENTS_URLS", "http://agent http://writer").split()
AGENT, WRITER = "agent", "writer"
CONTEXT = 2048  # tokens that both models take
CITY, REASONING = "Bern", "They ask for weather"
TEXT, REPLY = "I look it up.", "It is sunny in Bern."
QUESTION: Any = {"role": "user", "content": "Weather?"}
SUBJECT: Any = {"role": "user", "content": "What is a class? Answer in JSON."}
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER_TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER},
}
# The writer has a liking for blank lines between two tokens of JSON: a penalty ends them sooner.
BRIEF: Any = {"temperature": 0, "frequency_penalty": 1.0, "max_tokens": 1000}
UNKNOWN = "no-such-model"
UNKNOWN_TYPE = {"type": "object", "properties": {"city": {"type": "nothing"}}}
TOO_LONG = "a long word " * CONTEXT
# By this text several clients tell such an error from others.
TOO_LONG_TEXT, LIMIT = "prompt is too long", f"limit {CONTEXT - 1}"


class Topic(BaseModel):
    """A topic of the documentation. Without other fields: a schema allows them otherwise."""

    model_config = ConfigDict(extra="forbid")
    title: str = Field(min_length=3, max_length=24)
    kind: Literal["class", "module", "function"]
    level: int = Field(ge=1, le=5)


class Loose(BaseModel):
    """Any object is one of these: nothing in it is required."""

    title: str | None = None


def get_weather(city: str) -> str:
    """Look up the weather.

    Args:
        city: where
    """
    assert city == CITY
    return "sunny"


def same(found: object, expected: object) -> None:
    """Raise AssertionError with both if they differ."""
    assert found == expected, f"{found!r} is not {expected!r}"


def is_topic(found: object) -> None:
    """Raise AssertionError unless this is a Topic. The client's own types have validated it."""
    assert isinstance(found, Topic), f"{found!r} is no Topic"
    Topic.model_validate(found.model_dump())


def calls_weather(name: str | None, arguments: str | Mapping[str, Any]) -> None:
    """Raise AssertionError unless this call is the agent's."""
    read = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    same((name, read), ("get_weather", {"city": CITY}))


def adds_up(usage: Any) -> None:
    """Raise AssertionError unless the tokens of a usage, in OpenAI's names, add up."""
    assert usage.prompt_tokens > 0 and usage.completion_tokens > 0, usage
    same(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)


def refused(error: type[Exception], ask: Callable[[], object], *words: str) -> Any:
    """Return the error of `ask`. Raises: AssertionError if it lacks this class or a word."""
    try:
        answer = ask()
    except error as found:
        missing = [word for word in words if word not in str(found)]
        assert not missing, f"{missing} not in: {found}"
        return found
    raise AssertionError(f"no {error.__name__}, but {answer!r}")


def run(*checks: Callable[[], None]) -> None:
    """Run all checks, print how each ended, and exit with 1 if one failed."""
    failed = 0
    for check in checks:
        began = time.monotonic()
        try:
            check()
        except Exception:  # noqa: BLE001 - the others still run
            failed += 1
            print(f"FAILED {check.__name__}\n{traceback.format_exc(limit=-4)}")
        else:
            print(f"passed {check.__name__} in {time.monotonic() - began:.1f} s")
    sys.exit(failed > 0)
