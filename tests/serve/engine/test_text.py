"""Text as it comes: split characters, stop strings, what is held back."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer

from kvflow.protocols.errors import MisuseError
from kvflow.serve.engine.scheduler.text import TextStream
from tests.serve.engine.tiny_tokenizers import byte_level


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


def feed(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...] = ()
) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, stop)
    pieces = [stream.feed(t) for t in tokenizer.encode(text).ids]
    return [*pieces, stream.finish()], stream


@pytest.mark.parametrize(
    "text", ["plain", "naïve café", "日本語のテキスト", "a🙂b👩‍👩‍👧c", " two  spaces\n\tand lines "]
)
def test_split_characters_come_out_whole(tokenizer: Tokenizer, text: str) -> None:
    pieces, stream = feed(tokenizer, text)
    assert "".join(pieces) == text and stream.stopped is None
    assert not any("\ufffd" in p for p in pieces)


def test_a_character_that_never_ends_is_replaced(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    ids = tokenizer.encode("ok🙂").ids
    text = "".join(stream.feed(t) for t in ids[:-1])
    assert text == "ok" and stream.finish() == "\ufffd"


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("<end>")
    assert end is not None
    stream = TextStream(tokenizer)
    assert [stream.feed(t) for t in (*tokenizer.encode("a").ids, end)] == [
        "a",
        "",
    ] and stream.finish() == ""
    shown = TextStream(tokenizer, skip_special_tokens=False)
    assert shown.feed(end) == "<end>"


def test_text_ends_before_the_stop_string(tokenizer: Tokenizer) -> None:
    pieces, stream = feed(tokenizer, "one STOP two", ("STOP",))
    assert "".join(pieces) == "one " and stream.stopped == "STOP"
    assert pieces[4:] == [""] * (len(pieces) - 4)


def test_any_cut_of_any_text_is_the_text_before_the_stop(tokenizer: Tokenizer, seed: int) -> None:
    chooser = random.Random(seed)
    for _ in range(200):
        text = "".join(chooser.choice("ab🙂é ") for _ in range(chooser.randrange(1, 30)))
        stop = "".join(chooser.choice("ab🙂") for _ in range(chooser.randrange(1, 4)))
        pieces, stream = feed(tokenizer, text, (stop,))
        assert "".join(pieces) == text.split(stop)[0]
        assert (stream.stopped is not None) == (stop in text)


def test_no_fast_tokenizer_no_stream() -> None:
    with pytest.raises(MisuseError, match="fast tokenizer"):
        TextStream(object())


def test_stop_strings_before_the_least_length_are_text(tokenizer: Tokenizer) -> None:
    """As in vLLM, they do not even count as the beginning of one that ends later."""
    text = "xabab-ab"
    for least, want in (
        (0, "x"),
        (2, "xab"),
        (3, "xab"),
        (4, "xabab-"),
        (5, "xabab-"),
        (7, text),
        (8, text),
    ):
        stream = TextStream(tokenizer, ("ab",), min_tokens=least)
        pieces = [stream.feed(t) for t in tokenizer.encode(text).ids]
        assert "".join([*pieces, stream.finish()]) == want
        assert pieces[:least] == list(text[:least])
        assert (stream.stopped is None) == (want == text)
