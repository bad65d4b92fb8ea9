"""Answers in OpenAI's harmony format: channels and calls, whole and in every split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.serve.http.tools.formats import TOOL_FORMATS
from kvflow.serve.http.tools.harmony import HarmonyParser
from kvflow.serve.http.tools.parts import Part, joined
from kvflow.serve.http.tools.readers import Tools

TOOLS = Tools({"f": {}, "g": {}})
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
F, G = ("call", "f", 0), ("call", "g", 1)


def call(name: str, arguments: str) -> str:
    recipient = f"to=functions.{name} <|constrain|>json"
    return f"<|channel|>commentary {recipient}<|message|>{arguments}<|call|>"


def content(text: str) -> tuple[str, str, int]:
    return "content", text, 0


def reasoning(text: str) -> tuple[str, str, int]:
    return "reasoning", text, 0


def arguments(text: str, number: int = 0) -> tuple[str, str, int]:
    return "arguments", text, number


TEXTS: list[tuple[str, list[tuple[str, str, int]]]] = [
    (
        f"{ANALYSIS}It asks. {NEXT}{FINAL} It rains.\n",
        [reasoning("It asks. "), content(" It rains.\n")],
    ),
    # A preamble, and a call.
    (
        f"{ANALYSIS}a{NEXT}<|channel|>commentary<|message|>I look.{NEXT}"
        + call("f", '{"x": "<|call|>"}'),
        [reasoning("a"), content("I look."), F, arguments('{"x": "<|call|>"}')],
    ),
    # As chat templates write a call, and one call after the other.
    (
        ' to=functions.f<|channel|>commentary json<|message|> {"x": 1} <|call|><|start|>assistant'
        + call("g", "{}"),
        [F, arguments('{"x": 1}'), G, arguments("{}", 1)],
    ),
    ("<|channel|>analysis to=functions.f code<|message|>{}", [F, arguments("{}")]),
    (call("f", ""), [F, arguments("{}")]),
    ("<|channel|>commentary to=g<|message|>{}<|call|>", [("call", "g", 0), arguments("{}")]),
    # Messages of one kind.
    (
        f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c{NEXT}{FINAL}d",
        [reasoning("a\nb"), content("c\nd")],
    ),
    (f"{ANALYSIS}{NEXT}{FINAL}{NEXT}{FINAL}d", [content("d")]),
    # No header, and one that is cut off or longer than any.
    ("to be or not", [content("to be or not")]),
    ("  ", [content("  ")]),
    ("<<|message|>a", [content("<<|message|>a")]),
    (f"{FINAL}a<|end|>\n", [content("a")]),
    (f"{FINAL}a<|end|>b", [content("a\nb")]),
    ("<|channel|>analys", [content("<|channel|>analys")]),
    (f"{ANALYSIS}a{NEXT}", [reasoning("a"), content("<|start|>assistant")]),
    (f"<|channel|>{'n' * 600}{FINAL}", [content(f"<|channel|>{'n' * 600}{FINAL}")]),
    (f"<|start|>{'n' * 600}{NEXT}{FINAL}a", [content(f"<|start|>{'n' * 600}\na")]),
    # Messages that end within their headers.
    (f"<|channel|>final So.{NEXT}{FINAL}a", [content("<|channel|>final So.\na")]),
    (f"<|channel|>final So.<|start|>assistant{FINAL}a", [content("<|channel|>final So.\na")]),
    # A message that does not end.
    (f"{ANALYSIS}a<|start|>assistant{FINAL}b", [reasoning("a"), content("b")]),
    # Not a function, not an object, text after the object.
    (
        "<|channel|>commentary to=python<|message|>x = {}<|call|>",
        [content("<|channel|>commentary to=python<|message|>x = {}")],
    ),
    (
        "<|channel|>commentary to=functions.<|message|>{}",
        [content("<|channel|>commentary to=functions.<|message|>{}")],
    ),
    (
        "<|channel|>commentary to=functions.f{<|message|>{}",
        [F, arguments("{}")],
    ),
    (
        call("f", "x = 1") + f"<|start|>assistant{FINAL}b",
        [content(call("f", "x = 1").removesuffix("<|call|>") + "\nb")],
    ),
    (call("f", "x"), [content(call("f", "x").removesuffix("<|call|>"))]),
    (
        "<|channel|>commentary to=functions.f<|message|>x",
        [content("<|channel|>commentary to=functions.f<|message|>x")],
    ),
    (call("f", "{} so"), [F, arguments("{}"), content("so")]),
    (call("f", '{"x": 1'), [F, arguments('{"x": 1')]),
    (
        f"<|channel|>commentary to=functions.{'n' * 300}<|message|>{{}}",
        [content(f"<|channel|>commentary to=functions.{'n' * 300}<|message|>{{}}")],
    ),
]


def read(pieces: list[str], **more: bool) -> list[Part]:
    parser = HarmonyParser(TOOL_FORMATS["gpt_oss"], TOOLS, **more)
    found = [part for piece in pieces for part in parser.feed(piece)]
    return joined([*found, *parser.finish()])


@pytest.mark.parametrize(("text", "expected"), TEXTS)
def test_channels_in_every_split(text: str, expected: list[tuple[str, str, int]]) -> None:
    assert read([text]) == expected
    for at in range(1, len(text)):
        assert read([text[:at], text[at:]]) == expected, text[:at]
    assert read(list(text)) == expected


PIECES = st.sampled_from(
    [
        *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"),
        *(
            "assistant",
            "analysis",
            "commentary",
            "final",
            " to=functions.f",
            " to=g",
            "to=",
            "json",
        ),
        *('{"x": ', *' \n{}"<|>ab1', "n" * 300, "n" * 600),
    ]
)


@given(st.lists(PIECES, max_size=25), st.booleans())
def test_a_split_changes_nothing(pieces: list[str], inside: bool) -> None:
    text = "".join(pieces)
    whole = read([text], inside=inside)
    assert read(pieces, inside=inside) == whole
    assert read(list(text), inside=inside) == whole


def test_without_parallel_calls_the_first_remains() -> None:
    text = call("f", "{}") + f"<|start|>assistant{call('g', '{}')}<|start|>assistant{FINAL}b"
    assert read([text], parallel=False) == [F, arguments("{}"), content("b")]


def test_reasoning_may_stay_in_the_text() -> None:
    text = f"{ANALYSIS}a{NEXT}{FINAL}b"
    assert read([text], separates=False) == [content("a\nb")]


def test_a_prompt_may_begin_the_reasoning() -> None:
    assert read([f"a{NEXT}{FINAL}b"], inside=True) == [reasoning("a"), content("b")]


@pytest.mark.parametrize(("text", "reasons"), [(f"{ANALYSIS}a", True), (f"{FINAL}a", False)])
def test_reasoning_is_counted(text: str, reasons: bool) -> None:
    parser = HarmonyParser(None, TOOLS)
    parser.feed(text)
    assert parser.reasons == reasons


def test_calls_that_no_one_reads_are_text() -> None:
    parser = HarmonyParser(None, Tools())
    text = call("f", "{}")
    assert joined([*parser.feed(text), *parser.finish()]) == [
        content(text.removesuffix("<|call|>"))
    ]


def test_parts_arrive_piece_by_piece() -> None:
    parser = HarmonyParser(TOOL_FORMATS["gpt_oss"], TOOLS)
    assert parser.feed(f"{ANALYSIS}a ") == [reasoning("a ")]
    assert parser.feed("b<|e") == [reasoning("b")]
    assert parser.feed(f"nd|><|start|>assistant{FINAL}c") == [content("c")]
    assert parser.feed("<|end|><|start|>assistant") == []
    assert parser.feed(call("f", '{"x')[:-8]) == [F, arguments('{"x')]
    assert parser.feed('": 1}') == [arguments('": 1}')]
