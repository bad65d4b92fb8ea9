"""Page hashes as subscribers of KV events expect them: SHA256(previous digest || ids as u32 LE)."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import MisuseError

TOKEN_BYTES = 4
DIGEST_BYTES = 32


class Namespace(NamedTuple):
    """A part of the cache. Prompts in different namespaces share no page, even for equal tokens."""

    salt: str = ""
    lora: str = ""


ANY = Namespace()  # for requests with neither salt nor LoRA


def token_bytes(ids: Sequence[int] | NDArray[np.integer[Any]]) -> bytes:
    """Return token ids as u32 little-endian, 4 bytes each. Raises: MisuseError."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise MisuseError(
            f"tokens must be a list of integers, not shape {array.shape} of {array.dtype}"
        )
    if array.size and ((low := int(array.min())) < 0 or int(array.max()) >= 1 << 32):
        raise MisuseError(
            f"token id {low if low < 0 else int(array.max())} is not an unsigned 32-bit integer"
        )
    return array.astype("<u4").tobytes()


def chain_root(namespace: Namespace) -> bytes:
    """Return the digest that precedes the first page: empty for `ANY`, otherwise 32 bytes that are
    unique to the namespace.
    """
    if namespace == ANY:
        return b""
    salt, lora = namespace.salt.encode(), namespace.lora.encode()
    # Without the length, salt "ab" with LoRA "c" would give the same digest as salt "a" with LoRA
    # "bc".
    return sha256(b"kvflow namespace" + len(salt).to_bytes(8, "little") + salt + lora).digest()


def page_hashes(tokens: bytes, page_size: int, previous: bytes = b"") -> list[bytes]:
    """Return the digest of every whole page of `tokens`. `previous` is the digest of the page
    before the first one, or the `chain_root`.
    """
    size = page_size * TOKEN_BYTES
    # One numpy call cuts all pages. That costs less than slicing `tokens` for each page.
    pages = np.frombuffer(tokens, f"V{size}", len(tokens) // size).tolist()
    return [previous := sha256(previous + page).digest() for page in pages]


def event_hash(digest: bytes) -> int:
    """Return the event hash of a page: the first 64 bits of its digest, as a signed integer."""
    return int.from_bytes(digest[:8], "big", signed=True)
