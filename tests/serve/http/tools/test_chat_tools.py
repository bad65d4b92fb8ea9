"""Tools and reasoning on /v1/chat/completions, through the router, asked by the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from kvflow.protocols.errors import MisuseError
from kvflow.serve.http.tools.answers import formats_of
from tests.fakes.service import Role
from tests.fakes.written import SPECIAL, TEMPLATE, Written, byte_tokenizer, writing

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS},
}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
HUGE: Any = {
    "type": "function",
    "function": {"name": "huge", "parameters": {"type": "object", "title": "a" * (1 << 18)}},
}
CHAT: Any = [{"role": "user", "content": "Weather?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
CALLS = f'I look.\n{CALL}\n<tool_call>\n{{"name": "get_time", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture
async def written() -> AsyncIterator[Written]:
    async with writing() as made:
        yield made


@pytest.fixture
async def asked(written: Written) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(written) as made:
        yield made


def client_of(written: Written) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{written.front.url}/v1", api_key="none", max_retries=0)


def functions(message: Any) -> list[Any]:
    return list(message.tool_calls or [])


async def test_calls_are_in_the_message(written: Written, asked: openai.AsyncOpenAI) -> None:
    written.writes(CALLS)
    answer = await asked.chat.completions.create(model="fake", messages=CHAT, tools=[WEATHER, TIME])
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    first, second = choice.message.tool_calls or []
    assert first.type == second.type == "function"
    assert (first.function.name, json.loads(first.function.arguments)) == (
        "get_weather",
        {"city": "Zürich"},
    )
    assert (second.function.name, second.function.arguments) == ("get_time", "{}")
    assert first.id.startswith("call_") and first.id != second.id
    assert json.dumps(WEATHER) in written.prompt()


async def test_a_call_alone_has_no_content(written: Written, asked: openai.AsyncOpenAI) -> None:
    written.writes(CALL)
    answer = await asked.chat.completions.create(model="fake", messages=CHAT, tools=[WEATHER])
    assert answer.choices[0].message.content is None


async def test_an_answer_without_a_call_is_text(
    written: Written, asked: openai.AsyncOpenAI
) -> None:
    written.writes("It rains.")
    answer = await asked.chat.completions.create(model="fake", messages=CHAT, tools=[WEATHER])
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "It rains.")
    assert choice.message.tool_calls is None


async def test_streamed_calls_are_the_same(written: Written, asked: openai.AsyncOpenAI) -> None:
    written.writes(CALLS)
    # The client's helper joins the pieces, and refuses a stream that is out of order.
    async with asked.chat.completions.stream(
        model="fake", messages=CHAT, tools=[WEATHER, TIME], n=2
    ) as stream:
        kinds = [event.type async for event in stream]
        answer = await stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 4
    assert kinds.count("tool_calls.function.arguments.delta") > 20
    for choice in answer.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        calls = choice.message.tool_calls or []
        assert [(call.function.name, call.function.arguments) for call in calls] == [
            ("get_weather", '{"city": "Zürich"}'),
            ("get_time", "{}"),
        ]
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or []]
    assert len(set(ids)) == 4


async def test_a_stream_begins_a_call_once_and_counts_every_token(
    written: Written, asked: openai.AsyncOpenAI
) -> None:
    written.writes(CALL)
    chunks = [
        chunk
        async for chunk in await asked.chat.completions.create(
            model="fake",
            messages=CHAT,
            tools=[WEATHER],
            stream=True,
            logprobs=True,
            stream_options={"include_usage": True},
        )
    ]
    assert chunks[-1].usage is not None
    deltas = [choice for chunk in chunks for choice in chunk.choices]
    calls = [call for choice in deltas for call in choice.delta.tool_calls or []]
    assert [call.id is not None for call in calls] == [True] + [False] * (len(calls) - 1)
    assert [call.function.name for call in calls if call.function and call.function.name] == [
        "get_weather"
    ]
    tokens = sum(len(choice.logprobs.content or []) for choice in deltas if choice.logprobs)
    assert tokens == chunks[-1].usage.completion_tokens
    assert deltas[-1].finish_reason == "tool_calls"


async def test_a_call_that_is_cut_off_ends_for_its_length(
    written: Written, asked: openai.AsyncOpenAI
) -> None:
    written.writes(CALL)
    answer = await asked.chat.completions.create(
        model="fake", messages=CHAT, tools=[WEATHER], max_tokens=50
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    (call,) = functions(choice.message)
    assert '{"city": "Zürich"}'.startswith(call.function.arguments)


async def test_one_call_where_calls_must_not_be_parallel(
    written: Written, asked: openai.AsyncOpenAI
) -> None:
    written.writes(CALLS)
    answer = await asked.chat.completions.create(
        model="fake", messages=CHAT, tools=[WEATHER, TIME], parallel_tool_calls=False
    )
    (call,) = functions(answer.choices[0].message)
    assert call.function.name == "get_weather"


async def test_none_means_that_the_model_is_offered_no_tool(
    written: Written, asked: openai.AsyncOpenAI
) -> None:
    written.writes(CALL)
    answer = await asked.chat.completions.create(
        model="fake", messages=CHAT, tools=[WEATHER], tool_choice="none"
    )
    assert answer.choices[0].message.content == CALL
    assert "get_weather" not in written.prompt()


NAMED: Any = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_forced_call_is_bound_to_its_schema(
    written: Written, asked: openai.AsyncOpenAI, choice: Any, stream: bool
) -> None:
    written.writes('[{"name": "get_time", "parameters": {"zone": "UTC"}}]')
    given: Any = {"messages": CHAT, "tools": [WEATHER, TIME], "tool_choice": choice}
    if stream:
        async with asked.chat.completions.stream(model="fake", **given) as chunks:
            async for _ in chunks:
                pass
            answer: Any = await chunks.get_final_completion()
    else:
        answer = await asked.chat.completions.create(model="fake", **given)
    (found,) = answer.choices
    (call,) = functions(found.message)
    assert (found.finish_reason, found.message.content or None) == ("tool_calls", None)
    assert (call.function.name, call.function.arguments) == ("get_time", '{"zone": "UTC"}')
    # Both legs mask with the same grammar: prefill the first token, decode the others.
    grammars = [role.service.requests[0].params.grammar for role in both(written)]
    assert grammars[0] == grammars[1] and grammars[0] is not None
    names = {"get_time"} if choice is NAMED else {"get_weather", "get_time"}
    assert {name for name in ("get_weather", "get_time") if name in grammars[0].text} == names


def both(written: Written) -> list[Role]:
    return [written.prefill, written.decode]


async def test_a_grammar_leaves_neither_reasoning_nor_calls_to_read() -> None:
    formats = formats_of("auto", "deepseek_r1", byte_tokenizer())
    async with writing(formats) as written, client_of(written) as asked:
        written.writes('{"a": 1}')
        answer = await asked.chat.completions.create(
            model="fake",
            messages=CHAT,
            tools=[WEATHER],
            response_format={"type": "json_object"},
        )
        assert answer.choices[0].message.content == '{"a": 1}'


async def test_the_results_of_calls_are_in_the_next_prompt(
    written: Written, asked: openai.AsyncOpenAI
) -> None:
    written.writes("Fine.")
    call: Any = {"name": "get_weather", "arguments": '{"city":"Bern"}'}
    await asked.chat.completions.create(
        model="fake",
        messages=[
            *CHAT,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
            },
            {
                "role": "tool",
                "tool_call_id": "call_1",
                "content": [{"type": "text", "text": "sunny"}],
            },
        ],
        tools=[WEATHER],
    )
    # The arguments are an object for the template, which writes them in the form of its model.
    assert '{"name": "get_weather", "arguments": {"city": "Bern"}}' in written.prompt()
    assert "<|im_start|>tool\nsunny<|im_end|>" in written.prompt()


@pytest.mark.parametrize(
    ("more", "param", "part"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]", "`function`"),
        ({"tools": [{"type": "browser"}]}, "tools[0].type", "browser"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function", "`name`"),
        (
            {"tools": [WEATHER, {"type": "function", "function": {"name": ""}}]},
            "tools[1].function.name",
            "length >= 1",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
            "object",
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "twice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice", "'sometimes'"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "tool_choice",
            "both restrict",
        ),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "other"}},
            },
            "tool_choice.function.name",
            "none of the tools (get_weather)",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice", "`function`"),
        (
            {"tools": [HUGE], "tool_choice": "required"},
            "tools",
            "limit 262144",
        ),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            "messages[0].tool_call_id",
            "id of the call",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": {}}]},
            "messages[0].tool_calls",
            "a list",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
            "a string",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            "JSON of an object",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[" * 129}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            "nested 129 levels deep, limit 128",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": 1}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            "string of JSON",
        ),
    ],
)
async def test_what_is_wrong_is_named(
    written: Written, more: dict[str, Any], param: str, part: str
) -> None:
    error = await written.front.refused(400, "/v1/chat/completions", {"messages": CHAT, **more})
    assert error["param"] == param
    assert part in error["message"], error["message"]
    # The leg that reads the body first ends the room. The router then drops the other one.
    assert written.prefill.service.refused or written.decode.service.refused


async def test_tools_need_a_template_and_a_parser() -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    document = {"messages": CHAT, "tools": [WEATHER]}
    async with writing(template=template) as written:
        error = await written.front.refused(400, "/v1/chat/completions", document)
        assert (error["param"], "chat template takes none" in error["message"]) == ("tools", True)
        # What asks for no call is served.
        written.writes("a")
        await written.front.post("/v1/chat/completions", {**document, "tool_choice": "none"})
    async with writing(template=f"{template}{{% if tools %}}{{% endif %}}") as written:
        error = await written.front.refused(400, "/v1/chat/completions", document)
        assert (error["param"], "--tool-call-parser" in error["message"]) == ("tools", True)


async def test_marks_that_are_special_tokens_are_read() -> None:
    assert "[TOOL_CALLS]" in SPECIAL
    formats = formats_of("mistral", "off", byte_tokenizer())
    async with writing(formats) as written, client_of(written) as asked:
        written.writes('[TOOL_CALLS]get_weather[ARGS]{"city": "Bern"}')
        answer = await asked.chat.completions.create(model="fake", messages=CHAT, tools=[WEATHER])
        (call,) = functions(answer.choices[0].message)
        assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Bern"}')
        # Mistral's templates accept no other ids.
        assert len(call.id) == 9 and call.id.isalnum()
        # Without tools, special tokens have no text.
        answer = await asked.chat.completions.create(model="fake", messages=CHAT)
        assert answer.choices[0].message.content == 'get_weather[ARGS]{"city": "Bern"}'


DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Bern"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city": "Bern"}<|tool_call_end|><|tool_calls_section_end|>'
)
GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>"
HARMONY = (
    "<|channel|>analysis<|message|>It asks.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
    '<|constrain|>json<|message|>{"city": "Bern"}'
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("tools", "reasoning", "answer"),
    [
        ("deepseek_v31", "deepseek_v3", f"<think>It asks.</think>I look.{DEEPSEEK}"),
        # Neither ends its reasoning before the call.
        ("kimi_k2", "kimi_k2", f"<think>It asks.</think>I look.{KIMI}"),
        ("kimi_k2", "kimi_k2", f"<think>It asks.{KIMI}"),
        ("glm47", "glm45", f"\n<think>It asks.\n{GLM}"),
        ("openai", "openai_gptoss", HARMONY),
    ],
)
async def test_families_whose_marks_are_special_tokens(
    tools: str, reasoning: str, answer: str, stream: bool
) -> None:
    formats = formats_of(tools, reasoning, byte_tokenizer())
    async with writing(formats) as written, client_of(written) as asked:
        written.writes(answer)
        given: Any = {"model": "fake", "messages": CHAT, "tools": [WEATHER, TIME]}
        if stream:
            async with asked.chat.completions.stream(**given) as chunks:
                thoughts = [
                    getattr(choice.delta, "reasoning_content", None) or ""
                    async for event in chunks
                    if event.type == "chunk"
                    for choice in event.chunk.choices
                ]
                found: Any = await chunks.get_final_completion()
        else:
            found = await asked.chat.completions.create(**given)
            thoughts = [found.choices[0].message.reasoning_content]
        (choice,) = found.choices
        (call,) = functions(choice.message)
        text = "I look." if "I look." in answer else None
        assert ("".join(thoughts), choice.message.content or None) == ("It asks.", text)
        assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Bern"}')
        assert choice.finish_reason == "tool_calls"
        # The model's template writes this id into the next prompt.
        assert (call.id == "functions.get_weather:0") == (tools == "kimi_k2")


async def test_ids_with_a_number_count_the_calls_of_the_chat() -> None:
    formats = formats_of("kimi_k2", "off", byte_tokenizer())
    async with writing(formats) as written, client_of(written) as asked:
        written.writes(KIMI)
        call: Any = {"name": "get_time", "arguments": "{}"}
        earlier: Any = [{"id": str(i), "type": "function", "function": call} for i in range(2)]
        answer = await asked.chat.completions.create(
            model="fake",
            messages=[*CHAT, {"role": "assistant", "tool_calls": earlier}],
            tools=[WEATHER],
        )
        (call,) = functions(answer.choices[0].message)
        assert call.id == "functions.get_weather:2"


@pytest.mark.parametrize(
    ("reasoning", "expected"), [("off", ("", "It asks.\nSo.")), ("gpt-oss", ("It asks.", "So."))]
)
async def test_channels_are_read_without_tools(reasoning: str, expected: tuple[str, str]) -> None:
    formats = formats_of("gpt-oss", reasoning, byte_tokenizer())
    async with writing(formats) as written, client_of(written) as asked:
        end = "<|end|><|start|>assistant<|channel|>final<|message|>So."
        written.writes(f"<|channel|>analysis<|message|>It asks.{end}")
        answer = await asked.chat.completions.create(model="fake", messages=CHAT)
        message: Any = answer.choices[0].message
        assert (getattr(message, "reasoning_content", ""), message.content) == expected


async def test_a_forced_call_needs_no_marks_of_a_family() -> None:
    formats = formats_of("gpt-oss", "gpt-oss", byte_tokenizer())
    async with writing(formats) as written, client_of(written) as asked:
        written.writes('[{"name": "get_time", "parameters": {}}]')
        answer = await asked.chat.completions.create(
            model="fake", messages=CHAT, tools=[WEATHER, TIME], tool_choice="required"
        )
        (call,) = functions(answer.choices[0].message)
        assert (call.function.name, call.function.arguments) == ("get_time", "{}")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"content": "I look.", "reasoning_content": "why"}, "why\nI look."),
        ({"content": "I look."}, "I look."),
        ({"reasoning_content": "why"}, "why"),
    ],
)
async def test_a_template_may_refuse_content_beside_reasoning(
    more: dict[str, Any], expected: str
) -> None:
    """The template of gpt-oss does, in a message with a call."""
    template = (
        "{% if tools %}{% endif %}{% for message in messages %}"
        "{% if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}"
        "{{ message.content or message.thinking }}{% endfor %}"
    )
    async with writing(template=template) as written:
        written.writes("Fine.")
        calls = [{"function": {"name": "get_weather", "arguments": "{}"}}]
        message = {"role": "assistant", "tool_calls": calls, **more}
        await written.front.post("/v1/chat/completions", {"messages": [message]})
        assert written.prompt() == expected


async def test_a_template_may_append_arguments_to_a_text() -> None:
    """DeepSeek's templates do."""
    template = (
        "{% if tools %}{% endif %}{% for message in messages %}{{ message.content }}"
        "{% for call in message.tool_calls or [] %}"
        "{{ call.function.name + call.function.arguments + LAST }}{% endfor %}{% endfor %}"
    )
    call = {"function": {"name": "get_weather", "arguments": '{"city":"Zürich"}'}}
    body = {"messages": [*CHAT, {"role": "assistant", "tool_calls": [call]}]}
    for last, ends in (("'!'", '{"city": "Zürich"}!'), ("1", None)):
        async with writing(template=template.replace("LAST", last)) as written:
            written.writes("Fine.")
            if ends is None:
                error = await written.front.refused(400, "/v1/chat/completions", body)
                assert "the chat template refused" in error["message"]
            else:
                await written.front.post("/v1/chat/completions", body)
                assert written.prompt() == f"Weather?get_weather{ends}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "reasoning", "content"),
    [
        ({}, "It asks.", "I look."),
        ({"include_reasoning": False}, None, "I look."),
        ({"separate_reasoning": False}, None, "<think>\nIt asks.\n</think>\n\nI look."),
        ({"stream_reasoning": False}, "It asks.", "I look."),
    ],
)
async def test_reasoning_is_apart(
    stream: bool, more: dict[str, Any], reasoning: str | None, content: str
) -> None:
    formats = formats_of("auto", "qwen3", byte_tokenizer())
    async with writing(formats) as written, client_of(written) as asked:
        written.writes(f"<think>\nIt asks.\n</think>\n\n{CALLS}")
        given: Any = {"model": "fake", "messages": CHAT, "tools": [WEATHER, TIME]}
        pieces: list[str] = []
        if stream:
            chunks = await asked.chat.completions.create(**given, stream=True, extra_body=more)
            deltas = [chunk.choices[0].delta async for chunk in chunks]
            pieces = [text for one in deltas if (text := getattr(one, "reasoning_content", None))]
            found = "".join(pieces) or None
            text = "".join(one.content or "" for one in deltas)
        else:
            answer = await asked.chat.completions.create(**given, extra_body=more)
            message = answer.choices[0].message
            found, text = getattr(message, "reasoning_content", None), message.content
    assert (found, text) == (reasoning, content)
    if pieces:
        assert (len(pieces) == 1) == ("stream_reasoning" in more)


async def test_a_prompt_that_opens_the_reasoning_needs_no_tag_in_the_answer() -> None:
    formats = formats_of("off", "qwen3", byte_tokenizer())
    async with writing(formats) as written, client_of(written) as asked:
        written.writes("It asks.</think>Yes.")
        for thinking, expected in ((True, "Yes."), (False, "It asks.</think>Yes.")):
            answer = await asked.chat.completions.create(
                model="fake",
                messages=CHAT,
                extra_body={"chat_template_kwargs": {"thinking": thinking}},
            )
            assert answer.choices[0].message.content == expected


@pytest.mark.parametrize(
    ("template", "tools"),
    [
        (TEMPLATE, "hermes"),
        ("{{ tools }}<tool_call><function=name>", "qwen3_coder"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<|python_tag|>", "llama3_json"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("{{ tools }}<|tool_calls_section_begin|>", "kimi_k2"),
        ("{{ tools }}<tool_call>{name}<arg_key>", "glm45"),
        ("{{ tools }}<|channel|>analysis<|channel|>commentary<|channel|>final", "gpt_oss"),
        ("{{ messages }}", None),
    ],
)
def test_the_template_tells_the_format(template: str, tools: str | None) -> None:
    tokenizer = byte_tokenizer(template)
    found = formats_of("auto", "auto", tokenizer)
    assert (found.tools and found.tools.name) == tools
    assert formats_of("off", "off", tokenizer).tools is None
    named = formats_of("qwen25", "deepseek-r1", tokenizer)
    assert named.tools is not None and named.reasoning is not None
    assert (named.tools.name, named.reasoning.name) == ("hermes", "deepseek_r1")
    thinks = formats_of("auto", "auto", byte_tokenizer(f"{template}</think>"))
    own = tools if tools in ("kimi_k2", "glm45", "gpt_oss") else None
    assert (found.reasoning and found.reasoning.name) == (own if own == "gpt_oss" else None)
    assert (thinks.reasoning and thinks.reasoning.name) == (own or "qwen3")


@pytest.mark.parametrize("names", [("gpt_oss", "qwen3"), ("hermes", "gpt_oss")])
def test_channels_mark_calls_and_reasoning_alike(names: tuple[str, str]) -> None:
    with pytest.raises(MisuseError, match=f"{names[1]} does not fit --tool-call-parser {names[0]}"):
        formats_of(*names, byte_tokenizer())


async def test_tokenize_counts_the_tools(written: Written) -> None:
    body = {"messages": CHAT}
    plain = await written.front.post("/tokenize", body)
    more = await written.front.post("/tokenize", {**body, "tools": [WEATHER]})
    written.writes("a")
    answer = await written.front.post("/v1/chat/completions", {**body, "tools": [WEATHER]})
    assert plain["count"] < more["count"] == answer["usage"]["prompt_tokens"]
