"""instructor: types by a tool, by a schema and by an object of JSON, partial ones, retries."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from instructor.core.exceptions import InstructorRetryException

from tests.clients.programs.served import (
    BRIEF,
    KEY,
    SUBJECT,
    WRITER,
    WRITER_URL,
    Loose,
    Topic,
    is_topic,
    refused,
    run,
    same,
)

SERVER = openai.OpenAI(base_url=f"{WRITER_URL}/v1", api_key=KEY, max_retries=0)
ASKED: Any = {"model": WRITER, "messages": [SUBJECT], "max_retries": 0, **BRIEF}


def client(mode: instructor.Mode, server: openai.OpenAI = SERVER) -> Any:
    return instructor.from_openai(server, mode=mode)


def by_a_tool_and_by_a_schema() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        found = client(mode).chat.completions.create(response_model=Topic, **ASKED)
        is_topic(found)
        _, raw = client(mode).chat.completions.create_with_completion(response_model=Topic, **ASKED)
        same(raw.usage.total_tokens, raw.usage.prompt_tokens + raw.usage.completion_tokens)


def parts_of_an_answer() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        parts = list(client(mode).chat.completions.create_partial(response_model=Topic, **ASKED))
        assert len(parts) > 1
        is_topic(parts[-1])


def by_an_object_of_json() -> None:
    # This mode sends no schema: the server owes an object of JSON, and not these fields.
    found = client(instructor.Mode.JSON).chat.completions.create(response_model=Loose, **ASKED)
    assert isinstance(found, Loose)


def refusals_are_the_errors_of_the_client() -> None:
    stranger = client(instructor.Mode.TOOLS, SERVER.with_options(api_key="another"))
    refused(
        InstructorRetryException,
        lambda: stranger.chat.completions.create(response_model=Topic, **ASKED),
        "API key",
    )


run(
    by_a_tool_and_by_a_schema,
    parts_of_an_answer,
    by_an_object_of_json,
    refusals_are_the_errors_of_the_client,
)
