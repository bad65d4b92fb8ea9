"""The bytes of single tokens: joined, they are the text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer

from kvflow.serve.demo_model import DEMO_MODEL_DIR
from kvflow.serve.engine.scheduler import token_bytes
from kvflow.serve.engine.scheduler.token_bytes import TokenBytes
from tests.serve.engine.tiny_tokenizers import byte_fallback, byte_level

TEXTS = [
    "plain words",
    "naïve café",
    "日本語のテキスト",
    "a🙂b👩‍👩‍👧c",
    " two  spaces\n\tand lines ",
]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", TEXTS)
def test_joined_they_are_the_text(make: type, text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text).ids
    bytes_of = TokenBytes(tokenizer)
    assert b"".join(map(bytes_of, ids)) == text.encode()
    if not text.isascii():
        assert len(ids) > len(text), "no character is split: the test shows nothing"


@pytest.mark.parametrize("text", TEXTS)
def test_the_demo_models_tokenizer(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(TokenBytes(tokenizer), ids)) == str(tokenizer.decode(ids)).encode()


def test_added_tokens_are_themselves_and_unused_rows_are_empty() -> None:
    tokenizer = byte_level()
    bytes_of = TokenBytes(tokenizer)
    end = tokenizer.get_vocab()["<end>"]
    assert (bytes_of(end), bytes_of(end + 1)) == (b"<end>", b"")


def test_words_are_their_text() -> None:
    assert TokenBytes(Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))(1) == b"b"


def test_each_byte_has_a_character_of_its_own() -> None:
    """As GPT-2's `bytes_to_unicode`: printable ones are themselves."""
    alphabet = token_bytes._byte_alphabet()
    assert sorted(alphabet.values()) == list(range(0x100)) and len(alphabet) == 0x100
    assert alphabet["A"] == ord("A") and alphabet["Ġ"] == ord(" ") and alphabet["ÿ"] == 0xFF
