"""Page hashes are what subscribers of KV events compute."""

from __future__ import annotations

import hashlib
import struct

import pytest

from kvflow.protocols.cache.hashes import (
    ANY,
    Namespace,
    chain_root,
    event_hash,
    page_hashes,
    token_bytes,
)
from kvflow.protocols.errors import MisuseError


def test_chain_equals_an_independent_computation() -> None:
    ids = [5, 70_000, 2**32 - 1, 0, 9, 1, 2]
    first = hashlib.sha256(struct.pack("<3I", *ids[:3])).digest()
    second = hashlib.sha256(first + struct.pack("<3I", *ids[3:6])).digest()
    assert page_hashes(token_bytes(ids), 3, chain_root(ANY)) == [first, second]
    assert page_hashes(token_bytes(ids[3:]), 3, first) == [second]


def test_event_hash_is_the_first_16_hex_digits_as_a_signed_number() -> None:
    for seed in range(20):
        digest = hashlib.sha256(bytes([seed])).digest()
        number = int(digest.hex()[:16], 16)
        assert event_hash(digest) == (number - (1 << 64) if number >> 63 else number)


def test_namespaces_have_chains_of_their_own() -> None:
    names = [ANY, Namespace("a"), Namespace("", "a"), Namespace("ab", "c"), Namespace("a", "bc")]
    chains = {page_hashes(token_bytes([1, 2]), 2, chain_root(name))[0] for name in names}
    assert len(chains) == len(names)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([-1], "token id -1 is not an unsigned 32-bit integer"),
        ([1 << 32], "token id 4294967296 is not an unsigned 32-bit integer"),
        ([[1]], "tokens must be a list of integers, not shape (1, 1) of int64"),
        ([0.5], "tokens must be a list of integers, not shape (1,) of float64"),
    ],
)
def test_bad_tokens(ids: list[int], text: str) -> None:
    with pytest.raises(MisuseError) as error:
        token_bytes(ids)
    assert str(error.value) == text
