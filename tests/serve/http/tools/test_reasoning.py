"""Reasoning between tags, whole and in every split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.serve.http.tools.parts import Part, joined
from kvflow.serve.http.tools.reasoning import REASONING_FORMATS, ReasoningParser

QWEN, R1 = REASONING_FORMATS["qwen3"], REASONING_FORMATS["deepseek_r1"]


def read(pieces: list[str], *, inside: bool) -> list[tuple[str, str]]:
    parser = ReasoningParser(QWEN, inside=inside)
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
