"""The bytes of single tokens, which are needed if a character is split over several tokens."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of byte-level BPE stands for.

    Printable bytes are written as themselves, other bytes as characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }


class TokenBytes:
    """A callable that returns the bytes of a token id.

    The joined bytes of a completion's tokens are the bytes of its text. This holds for byte-level
    BPE and for SentencePiece with byte fallback. For other tokenizers, the bytes are those of the
    token decoded alone.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a tokenizers.Tokenizer, or a fast transformers tokenizer around one."""
        self._tokenizer: Tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        decoder = self._tokenizer.decoder
        steps = [] if decoder is None else _steps(json.loads(decoder.__getstate__()))
        kinds = {step["type"] for step in steps}
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        self._spaces = [mark for step in steps if (mark := _space_mark(step))]

    def __call__(self, token_id: int) -> bytes:
        piece = self._tokenizer.id_to_token(token_id)
        # The embedding may have rows that no token uses.
        if piece is None:
            return b""
        if self._alphabet is not None:
            if all(character in self._alphabet for character in piece):
                return bytes(map(self._alphabet.__getitem__, piece))
            # Only an added token has characters outside the alphabet.
            return piece.encode()
        if self._byte_fallback and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        if not self._spaces:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        for mark in self._spaces:
            piece = piece.replace(mark, " ")
        return piece.encode()


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    inner = decoder.get("decoders")
    return [step for one in inner for step in _steps(one)] if inner else [decoder]


def _space_mark(step: dict[str, Any]) -> str:
    """Return the string that a step of the decoder turns into a space; empty for any other step."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    if step["type"] == "Replace" and step["content"] == " ":
        return str(step["pattern"].get("String", ""))
    return ""
