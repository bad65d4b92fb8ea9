"""Page hashes as the subscribers of KV events know them: SHA256(previous digest || token ids as u32
little-endian).
"""

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
    """Prompts of different namespaces share nothing, whatever their tokens."""

    salt: str = ""
    lora: str = ""


ANY = Namespace()  # of all requests that name neither salt nor LoRA


def token_bytes(ids: Sequence[int] | NDArray[np.integer[Any]]) -> bytes:
    """Token ids as u32 little-endian, 4 bytes each. Raises: MisuseError."""
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
    """What stands before the first page in its hash: nothing, or 32 bytes that no other namespace
    has.
    """
    if namespace == ANY:
        return b""
    salt, lora = namespace.salt.encode(), namespace.lora.encode()
    return sha256(b"kvflow namespace" + len(salt).to_bytes(8, "little") + salt + lora).digest()


def page_hashes(tokens: bytes, page_size: int, previous: bytes = b"") -> list[bytes]:
    """The digest of every whole page of `tokens`; `previous` is the digest before them, or
    `chain_root`.
    """
    size = page_size * TOKEN_BYTES
    # bytes of each, cut in one call.
    pages = np.frombuffer(tokens, f"V{size}", len(tokens) // size).tolist()
    return [previous := sha256(previous + page).digest() for page in pages]


def event_hash(digest: bytes) -> int:
    """The first 64 bits of a digest as a signed number: what events call a block's hash."""
    return int.from_bytes(digest[:8], "big", signed=True)
