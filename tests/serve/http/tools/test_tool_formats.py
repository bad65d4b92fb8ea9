"""Tool calls as each family of models writes them, whole and in every split."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.serve.http.tools.formats import FORCED, TOOL_FORMATS, ToolParser
from kvflow.serve.http.tools.parts import MAX_SPACE, Part, joined
from kvflow.serve.http.tools.readers import KeyedCall, TaggedCall, Tools

FORMATS = {**TOOL_FORMATS, "forced": FORCED}
TOOLS = Tools(
    {
        "f": {"properties": {"x": {"type": "integer"}, "s": {"type": "string"}}},
        "g": {},
        "typed": {
            "properties": {
                "flag": {"type": "boolean"},
                "list": {"type": "array"},
                "maybe": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                "name": {"type": ["string", "null"]},
                "level": {"enum": ["low", "1"]},
                "odd": {"type": "integer"},
            }
        },
    }
)
F, G = ("call", "f", 0), ("call", "g", 1)


def content(text: str) -> tuple[str, str, int]:
    return "content", text, 0


def arguments(text: str, call: int = 0) -> tuple[str, str, int]:
    return "arguments", text, call


DEEPSEEK, DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
KIMI, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def v3(name: str, arguments: str) -> str:
    block = f"\n```json\n{arguments}\n```"
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}{block}<｜tool▁call▁end｜>"


def v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def kimi(head: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{head}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


# Format, text, and what it is.
TEXTS: list[tuple[str, str, list[tuple[str, str, int]]]] = [
    ("hermes", "just text ", [content("just text ")]),
    (
        "hermes",
        'Let me.\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1, "s": "</tool_call>"}}\n'
        '</tool_call>\n<tool_call>\n{"arguments": {"a": [1, {}]}, "name": "g"}\n</tool_call>\n',
        [
            content("Let me."),
            F,
            arguments('{"x": 1, "s": "</tool_call>"}'),
            ("call", "g", 1),
            arguments('{"a": [1, {}]}', 1),
        ],
    ),
    (
        "hermes",
        r'<tool_call>{"name": "f", "arguments": {"s": "\"}{\\"}}</tool_call>done',
        [F, arguments(r'{"s": "\"}{\\"}'), content("done")],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [F, arguments("{}")]),
    ("hermes", '<tool_call>{"name": "f", "id": 7, "arguments": {}}', [F, arguments("{}")]),
    (
        "hermes",
        r'<tool_call>{"name": "f", "arguments": "{\"x\": 1}"}</tool_call>',
        [F, arguments('{"x": 1}')],
    ),
    # A brace too few, and one too many.
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>tail',
        [F, arguments('{"x": 1}'), content("tail")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": 1}}}</tool_call>tail',
        [F, arguments('{"x": 1}'), content("tail")],
    ),
    # The model decides what it calls, also where no tool has that name.
    ("hermes", '<tool_call>{"name": "z", "arguments": {}}', [("call", "z", 0), arguments("{}")]),
    # What is no call stays in the text, to the last space.
    ("hermes", "a <tool_call>b</tool_call> c", [content("a <tool_call>b</tool_call> c")]),
    (
        "hermes",
        'a <tool_call>{"arguments": {"x": 1}}</tool_call>',
        [content('a <tool_call>{"arguments": {"x": 1}}</tool_call>')],
    ),
    ("hermes", '<tool_call>{"name": 7}', [content('<tool_call>{"name": 7}')]),
    # Cut off: before the name is known, within the arguments, within a mark.
    ("hermes", 'a <tool_call>{"na', [content('a <tool_call>{"na')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1', [F, arguments('{"x": 1')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": </tool_call>',
        [F, arguments('{"x": ')],
    ),
    ("hermes", "a <tool_c", [content("a <tool_c")]),
    ("hermes", "a <tool", [content("a <tool")]),
    (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=f>\n<parameter=x>\n3\n</parameter>\n<parameter=s>\n"
        'two\n"lines"</p>\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n'
        "</function>\n</tool_call>",
        [
            content("I look."),
            F,
            arguments('{"x": 3, "s": "two\\n\\"lines\\"</p>"}'),
            ("call", "g", 1),
            arguments("{}", 1),
        ],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=typed><parameter=flag>True</parameter><parameter=list>[1, 2]"
        "</parameter><parameter=maybe>null</parameter><parameter=name>null</parameter>"
        "<parameter=level>1</parameter><parameter=odd>many</parameter><parameter=new>1"
        "</parameter></function></tool_call>",
        [
            ("call", "typed", 0),
            arguments(
                '{"flag": true, "list": [1, 2], "maybe": null, "name": null, "level": "1", '
                '"odd": "many", "new": "1"}'
            ),
        ],
    ),
    # The end tag of the function is missing.
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=x>3</parameter></tool_call>b",
        [F, arguments('{"x": 3}'), content("b")],
    ),
    ("qwen3_coder", "<tool_call><fun></tool_call>", [content("<tool_call><fun></tool_call>")]),
    # A parameter that is cut off is no value: acting on a half of it could do harm.
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=x>3</parameter><parameter=s>hal",
        [F, arguments('{"x": 3')],
    ),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"x": "1"}}; {"name": "g", "parameters": {}}',
        [F, arguments('{"x": "1"}'), ("call", "g", 1), arguments("{}", 1)],
    ),
    (
        "llama3_json",
        'So: <|python_tag|>{"name": "f", "parameters": {}}',
        [content("So:"), F, arguments("{}")],
    ),
    # Without a tag, only an object with the name of a tool is a call, and only at the beginning.
    ("llama3_json", '{"name": "Bob", "age": 3}', [content('{"name": "Bob", "age": 3}')]),
    ("llama3_json", '{"x": [1, 2]} hm', [content('{"x": [1, 2]} hm')]),
    ("llama3_json", ' I say {"name": "f"}', [content(' I say {"name": "f"}')]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
        [F, arguments('{"x": 1}'), ("call", "g", 1), arguments("{}", 1)],
    ),
    (
        "mistral",
        'Well [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{"s": "}"}',
        [content("Well"), F, arguments('{"x": 1}'), ("call", "g", 1), arguments('{"s": "}"}', 1)],
    ),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]a1b2[ARGS]{"x": 1}', [F, arguments('{"x": 1}')]),
    ("mistral", "[TOOL_CALLS]no\ncall", [content("[TOOL_CALLS]no\ncall")]),
    (
        "mistral",
        f"[TOOL_CALLS]{'n' * 400}" + "{}",
        [content(f"[TOOL_CALLS]{'n' * 400}" + "{}")],
    ),
    (
        "deepseek_v3",
        f"I look.\n{DEEPSEEK}"
        + v3("f", '{"x": 1, "s": "``` }"}')
        + "\n"
        + v3("g", "{}")
        # The last mark is missing, as in many answers.
        + "\n",
        [content("I look."), F, arguments('{"x": 1, "s": "``` }"}'), G, arguments("{}", 1)],
    ),
    (
        "deepseek_v3",
        DEEPSEEK + v31("f", '{"x": {"y": "<｜tool▁call▁end｜>"}}') + v31("g", "") + DEEPSEEK_END,
        [F, arguments('{"x": {"y": "<｜tool▁call▁end｜>"}}'), G, arguments("{}", 1)],
    ),
    # No mark of a section, no type, no JSON, and text after a call.
    ("deepseek_v3", v31("f", "{}") + "`so`", [F, arguments("{}"), content("`so`")]),
    (
        "deepseek_v3",
        f"{DEEPSEEK}function<｜tool▁sep｜>f{{}}{DEEPSEEK_END}",
        [F, arguments("{}")],
    ),
    ("deepseek_v3", DEEPSEEK + v31("f", "[1]"), [content(DEEPSEEK + v31("f", "[1]"))]),
    ("deepseek_v3", f"{DEEPSEEK} hm{DEEPSEEK_END}", [content(f"{DEEPSEEK} hm{DEEPSEEK_END}")]),
    ("deepseek_v3", f"{DEEPSEEK}{'n' * 400}", [content(f"{DEEPSEEK}{'n' * 400}")]),
    # A call that does not end before the next one begins.
    (
        "deepseek_v3",
        "<｜tool▁call▁begin｜>f" + v31("g", '{"x": 1}'),
        [content("<｜tool▁call▁begin｜>f"), ("call", "g", 0), arguments('{"x": 1}')],
    ),
    (
        "deepseek_v3",
        DEEPSEEK + v3("f", '{"x": 1').removesuffix("\n```<｜tool▁call▁end｜>"),
        [F, arguments('{"x": 1')],
    ),
    ("deepseek_v3", "a <｜tool▁ca", [content("a <｜tool▁ca")]),
    (
        "kimi_k2",
        f"I look. {KIMI}\n"
        + kimi("functions.f:0", '{"s": "<|tool_call_end|>"}')
        + kimi("g:12", " ")
        + f"\n{KIMI_END}",
        [content("I look."), F, arguments('{"s": "<|tool_call_end|>"}'), G, arguments("{}", 1)],
    ),
    ("kimi_k2", KIMI + kimi("functions.f", '{"x": 1}'), [F, arguments('{"x": 1}')]),
    (
        "kimi_k2",
        KIMI + kimi("no name", "{}") + kimi("g:1", "{}") + KIMI_END,
        [
            content(KIMI + kimi("no name", "{}")),
            ("call", "g", 0),
            arguments("{}"),
        ],
    ),
    ("kimi_k2", "<|tool_call_begin|>functions.f:0", [content("<|tool_call_begin|>functions.f:0")]),
    (
        "glm45",
        "I look.\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>3</arg_value>\n<arg_key> s "
        '</arg_key>\n<arg_value>two\n"lines" </arg_value>\n</tool_call>\n'
        "<tool_call>g\n</tool_call>",
        [
            content("I look."),
            F,
            arguments('{"x": 3, "s": "two\\n\\"lines\\" "}'),
            G,
            arguments("{}", 1),
        ],
    ),
    # As GLM 4.7 writes it, cut off within a value.
    (
        "glm45",
        "<tool_call>f<arg_key>x</arg_key><arg_value>3</arg_value><arg_key>s</arg_key><arg_value>ha",
        [F, arguments('{"x": 3')],
    ),
    # A tag is missing.
    (
        "glm45",
        "<tool_call>f<arg_key>x</arg_key></tool_call>b",
        [F, arguments("{}"), content("b")],
    ),
    ("glm45", "<tool_call>a b</tool_call>", [content("<tool_call>a b</tool_call>")]),
    ("glm45", f"<tool_call>{'n' * 400}\n", [content(f"<tool_call>{'n' * 400}\n")]),
    ("glm45", "<tool_call>f", [content("<tool_call>f")]),
    (
        "forced",
        '[{"name": "f", "parameters": {"x": 1}},{"name": "g", "parameters": {}}]',
        [F, arguments('{"x": 1}'), ("call", "g", 1), arguments("{}", 1)],
    ),
]


def read(form: str, pieces: list[str], *, parallel: bool = True) -> list[Part]:
    parser = ToolParser(FORMATS[form], TOOLS, parallel=parallel)
    found = [part for piece in pieces for part in parser.feed(piece)]
    return joined([*found, *parser.finish()])


@pytest.mark.parametrize(
    ("form", "text", "expected"), TEXTS, ids=[f"{form}-{i}" for i, (form, _, _) in enumerate(TEXTS)]
)
def test_each_family_in_every_split_in_two_and_letter_by_letter(
    form: str, text: str, expected: list[tuple[str, str, int]]
) -> None:
    assert read(form, [text]) == expected
    for at in range(1, len(text)):
        assert read(form, [text[:at], text[at:]]) == expected, text[:at]
    assert read(form, list(text)) == expected


@given(st.data())
def test_any_split_gives_the_same_parts(data: st.DataObject) -> None:
    form, text, expected = data.draw(st.sampled_from(TEXTS))
    cuts = data.draw(st.sets(st.integers(0, len(text))))
    pieces = [text[a:b] for a, b in pairwise([0, *sorted(cuts), len(text)])]
    assert read(form, pieces) == expected


MARKS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=f>"),
        *("<parameter=x>", "</parameter>", "</function>", "[ARGS]", '{"name": "f", '),
        *(DEEPSEEK, DEEPSEEK_END, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        *(KIMI, KIMI_END, "<|tool_call_begin|>", "<|tool_call_end|>", "\n```json\n", "functions."),
        *("<|tool_call_argument_begin|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        *('"arguments": ', *'{}"\\ \n;,[]f1<:'),
    ]
)


@given(st.sampled_from(sorted(FORMATS)), st.lists(MARKS, max_size=25))
def test_whatever_a_model_writes_a_split_changes_nothing(form: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = read(form, [text])
    assert read(form, pieces) == whole
    assert read(form, list(text)) == whole
    calls = [part.call for part in whole if part.kind == "call"]
    assert calls == list(range(len(calls)))
    # Arguments come after their call, and before the next one.
    seen = -1
    for part in whole:
        seen = part.call if part.kind == "call" else seen
        assert part.kind != "arguments" or part.call == seen


def test_arguments_are_passed_on_as_they_arrive() -> None:
    parser = ToolParser(TOOL_FORMATS["hermes"], TOOLS)
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"s": "on') == [
        Part("call", "f"),
        Part("arguments", '{"s": "on'),
    ]
    assert parser.feed("ce") == [Part("arguments", "ce")]


def test_without_parallel_calls_the_first_remains() -> None:
    text = '[TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g{}'
    assert read("mistral", [text], parallel=False) == [F, arguments('{"x": 1}')]


def nested(depth: int) -> object:
    """A choice of one type within a choice, and so on."""
    found: object = {"type": "integer"}
    for _ in range(depth):
        found = {"anyOf": [found]}
    return found


@pytest.mark.parametrize(
    "schema",
    [
        {"type": [{"a": 1}, ["integer"]]},
        {"type": {"a": 1}},
        {"enum": 5},
        {"anyOf": True},
        {"oneOf": {"type": "integer"}},
        nested(1200),
    ],
)
def test_an_unusable_schema_gives_strings(schema: object) -> None:
    tools = Tools({"f": {"properties": {"x": schema}}})
    reader, parts = TaggedCall(0, lambda _: True, tools), list[Part]()
    reader.take("<function=f><parameter=x>a b</parameter></function>", parts)
    assert reader.done and [part.text for part in parts] == ["f", '{"x": "a b"', "}"]


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_white_space_that_is_held_back_has_a_limit(form: str) -> None:
    """White space that is held back is searched again with every token."""
    parser = ToolParser(FORMATS[form], TOOLS)
    space, found = " " * (3 * MAX_SPACE), parser.feed("a")
    for character in space:
        found += parser.feed(character)
        assert len(parser._held) <= MAX_SPACE
    assert joined([*found, *parser.finish()]) == [content("a" + space)]
    assert read(form, [space]) == read(form, list(space)) == [content(space)]
    for mark in FORMATS[form].opens[:1]:
        text = f"a{space}{mark}"
        assert read(form, [text]) == read(form, list(text)) == [content(text)]


def test_most_white_space_before_a_call_is_no_text() -> None:
    text = "a" + " " * (MAX_SPACE + 3) + '<tool_call>{"name": "f"}'
    expected = [content("a   "), F, arguments("{}")]
    assert read("hermes", [text]) == read("hermes", list(text)) == expected


def test_a_name_that_does_not_end_is_no_name() -> None:
    name = "n" * 400
    for text in (f"<tool_call><function={name}", f"<tool_call><function={name}>"):
        assert read("qwen3_coder", [text]) == read("qwen3_coder", list(text)) == [content(text)]
    text = f"<tool_call><function=f><parameter={name}>"
    expected = [F, arguments("{}"), content(f"<parameter={name}>")]
    assert read("qwen3_coder", [text]) == read("qwen3_coder", list(text)) == expected


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<function=f><parameter=s>", "</parameter></function>"),
        ("f<arg_key>s</arg_key><arg_value>", "</arg_value></tool_call>"),
    ],
)
def test_a_long_value_is_searched_once(opening: str, closing: str) -> None:
    """Searching a growing text from its beginning again would take quadratic time."""
    found: list[Part] = []
    kind = TaggedCall if opening.startswith("<") else KeyedCall
    call = kind(0, lambda _: True, TOOLS)
    call.take(opening, found)
    half = closing[:6]
    for _ in range(1000):
        assert call.take(f"some text {half}", found) == ""
        assert len(call._text) < 20
    call.take(closing[6:], found)
    text = "".join(part.text for part in found[1:])
    assert json.loads(text) == {"s": (f"some text {half}" * 1000).removesuffix(half)}
    assert call.done
