"""JSON that grows is the JSON of the whole, and is written in steps of a bounded size."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from kvflow.http.growing import BLOCK_BYTES, GrowingArray, GrowingText, _steps, encode

CHARACTERS = st.characters(codec="utf-8")
TEXTS = st.lists(st.text(CHARACTERS, max_size=8), max_size=8)
ELEMENTS = st.lists(
    st.none() | st.integers(-5, 5) | st.text(max_size=3) | st.lists(st.booleans()), max_size=8
)


@given(TEXTS, ELEMENTS, st.text(CHARACTERS, max_size=8))
def test_it_encodes_as_the_whole_would(texts: list[str], elements: list[Any], name: str) -> None:
    text, array = GrowingText(), GrowingArray()
    for i in range(max(len(texts), len(elements))):
        for piece in texts[i : i + 1]:
            text.add(piece)
        for element in elements[i : i + 1]:
            array.add(element)
    answer = {"text": text, name + "!": [array, {"again": text}], "\0": "\0"}
    whole = {"text": "".join(texts), name + "!": [elements, {"again": "".join(texts)}], "\0": "\0"}
    assert b"".join(encode(answer)) == msgspec.json.encode(whole)
    if len(elements) == 1:
        assert b"".join(encode({"one": array.only()})) == msgspec.json.encode({"one": elements[0]})


@given(TEXTS, st.text(CHARACTERS, max_size=8), st.integers(0, 2 * BLOCK_BYTES))
def test_what_follows_a_text_leaves_it_as_it_is(texts: list[str], start: str, length: int) -> None:
    shared = GrowingText()
    shared.add(start + "x" * length)
    for text in texts:
        assert json.loads(b"".join(encode(shared.followed_by(text)))) == start + "x" * length + text
    assert json.loads(b"".join(encode(shared))) == start + "x" * length


def test_what_follows_a_text_copies_none_of_it() -> None:
    """A hundred choices of an echo just below a block took the event loop 15 ms."""
    shared = GrowingText()
    shared.add("x" * (BLOCK_BYTES - 1))
    followed = [shared.followed_by(end) for end in "ab"]
    large = [piece for text in followed for piece in text.pieces() if len(piece) > 1]
    assert large == [b"x" * (BLOCK_BYTES - 1)] * 2 and large[0] is large[1]
    assert any(piece is large[0] for piece in shared.pieces())


def test_full_blocks_are_neither_encoded_nor_copied_again() -> None:
    array = GrowingArray()
    for number in range(100_000):
        array.add(number)
    first, second = encode({"ids": array}), encode({"ids": array})
    assert json.loads(b"".join(first)) == {"ids": list(range(100_000))}
    again = [piece for piece in second if any(piece is other for other in first)]
    assert sum(map(len, again)) > sum(map(len, first)) - BLOCK_BYTES


@example([0, BLOCK_BYTES + 1, 0, BLOCK_BYTES + 1, 0])
@example([1, BLOCK_BYTES + 1] * 4)
@given(st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=8))
def test_steps_are_bounded_and_as_few_as_they_can_be(sizes: list[int]) -> None:
    pieces = [bytes([i]) * size for i, size in enumerate(sizes)]
    steps = [bytes(step) for step in _steps(pieces)]
    assert b"".join(steps) == b"".join(pieces)
    assert all(len(step) <= BLOCK_BYTES for step in steps)
    assert len(steps) <= 2 * sum(sizes) // BLOCK_BYTES + 2
