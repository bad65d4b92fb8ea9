"""The bytes of single tokens: joined, they are the text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import AutoTokenizer

from kvflow.demo_model import DEMO_MODEL_DIR
from kvflow.engine.scheduler.token_bytes import TokenBytes

TEXTS = ["plain words", "naïve café", "日本語のテキスト", "a🙂b👩‍👩‍👧c", " two  spaces\n\tand lines "]


def byte_level() -> Tokenizer:
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    found = Tokenizer(BPE(vocabulary, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(["<end of text>"])
    return found


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Gemma have it: spaces are marked, and characters without a token are bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    found = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    found.decoder = decoders.Sequence(steps)
    return found


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
    end = tokenizer.get_vocab()["<end of text>"]
    assert (bytes_of(end), bytes_of(end + 1)) == (b"<end of text>", b"")


def test_words_are_their_text() -> None:
    assert TokenBytes(Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))(1) == b"b"
