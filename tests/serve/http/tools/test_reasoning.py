"""Reasoning between tags, whole and in every split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.serve.http.tools.parts import MAX_SPACE, Part, joined
from kvflow.serve.http.tools.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
)

QWEN, R1 = REASONING_FORMATS["qwen3"], REASONING_FORMATS["deepseek_r1"]


KIMI = REASONING_FORMATS["kimi_k2"]


def read(pieces: list[str], *, inside: bool, form: ReasoningFormat = QWEN) -> list[tuple[str, str]]:
    parser = ReasoningParser(form, inside=inside)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return [(part.kind, part.text) for part in joined([*parts, *parser.finish()])]


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nwhy\n</think>\n\nso", False, "why", "so"),
        ("\n<think>why</think>so </think> <think>", False, "why", "so </think> <think>"),
        ("  so", False, "", "  so"),
        ("so <think>why</think>", False, "", "so <think>why</think>"),
        ("<think></think>\nso", False, "", "so"),
        ("<think>\n\n</think>\n\n", False, "", ""),
        ("why\n</think>so", True, "why", "so"),
        ("<think>why</think>so", True, "why", "so"),
        ("why < not </thin", True, "why < not </thin", ""),
        ("<thi", False, "", "<thi"),
        ("<thi", True, "<thi", ""),
        ("", True, "", ""),
    ],
)
def test_reasoning_in_every_split(text: str, inside: bool, reasoning: str, content: str) -> None:
    expected = [
        (kind, part) for kind, part in (("reasoning", reasoning), ("content", content)) if part
    ]
    assert read([text], inside=inside) == expected
    for at in range(1, len(text)):
        assert read([text[:at], text[at:]], inside=inside) == expected
    assert read(list(text), inside=inside) == expected


@pytest.mark.parametrize("end", ["", "</think>", "\n</think>\n"])
def test_a_call_ends_the_reasoning(end: str) -> None:
    call = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    text = f"<think>why{end}{call}"
    expected = [("reasoning", "why"), ("content", call)]
    assert read([text], inside=False, form=KIMI) == expected
    for at in range(1, len(text)):
        assert read([text[:at], text[at:]], inside=False, form=KIMI) == expected
    assert read(list(text), inside=False, form=KIMI) == expected


@pytest.mark.parametrize("inside", [False, True])
def test_white_space_has_a_limit(inside: bool) -> None:
    """White space that is held back is searched again with every token."""
    space = " " * (MAX_SPACE + 5)
    text = f"<think>a{space}</think>b"
    expected = [("reasoning", "a" + " " * 5), ("content", "b")]
    assert read([text], inside=inside) == read(list(text), inside=inside) == expected
    text = f"{space}<think>a"
    expected = [("reasoning" if inside else "content", text.lstrip() if inside else text)]
    assert read([text], inside=inside) == read(list(text), inside=inside) == expected


@given(
    st.booleans(),
    st.lists(st.sampled_from(["<think>", "</think>", "<", "/", " ", "\n", "a", "think>"])),
)
def test_a_split_changes_nothing(inside: bool, pieces: list[str]) -> None:
    text = "".join(pieces)
    assert read(pieces, inside=inside) == read([text], inside=inside)
    assert read(list(text), inside=inside) == read([text], inside=inside)


@pytest.mark.parametrize(
    ("end", "qwen", "r1"),
    [
        ("<|im_start|>assistant\n", False, True),
        ("<|im_start|>assistant\n<think>\n", True, True),
        # As templates end a prompt when thinking is switched off.
        ("assistant\n<think>\n\n</think>\n\n", False, False),
    ],
)
def test_the_prompt_says_whether_an_answer_begins_inside(end: str, qwen: bool, r1: bool) -> None:
    assert (QWEN.begins_inside(end), R1.begins_inside(end)) == (qwen, r1)


def test_reasoning_arrives_piece_by_piece() -> None:
    parser = ReasoningParser(QWEN, inside=False)
    assert parser.feed("<think>a b ") == [Part("reasoning", "a b")]
    assert parser.feed("c</th") == [Part("reasoning", " c")]
    assert parser.feed("ink>d") == [Part("content", "d")]
