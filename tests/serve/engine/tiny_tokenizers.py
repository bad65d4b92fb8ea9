"""Tokenizers whose tokens are bytes, so every character beyond ASCII is split."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE


def byte_level() -> Tokenizer:
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    found = Tokenizer(BPE(vocabulary, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(["<end>"])
    return found


def byte_fallback() -> Tokenizer:
    """A tokenizer like Llama 2's: spaces are marked, other unknown characters are bytes."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz",
    ]
    found = Tokenizer(
        BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    found.decoder = decoders.Sequence(steps)
    return found
