"""A header vouches for every bit of a page, and for whose it is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.serve.cache.storage.record import HEADER_BYTES, flaw_in, header_of

IDENTITY, KEY = bytes(range(32)), bytes(range(32, 64))
VALUE = random.Random(1).randbytes(300)


def check(header: bytes, value: bytes = VALUE, identity: bytes = IDENTITY, key: bytes = KEY) -> str:
    return flaw_in(header, identity, key, memoryview(value))


@pytest.fixture(scope="module")
def header() -> bytes:
    return header_of(IDENTITY, KEY, memoryview(VALUE))


def test_what_was_written_is_right(header: bytes) -> None:
    assert len(header) == HEADER_BYTES
    assert check(header) == ""


@pytest.mark.parametrize("offset", range(HEADER_BYTES))
def test_a_flipped_bit_of_the_header_is_found(header: bytes, offset: int) -> None:
    for bit in range(8):
        changed = bytearray(header)
        changed[offset] ^= 1 << bit
        assert check(bytes(changed)).startswith("not as expected: ")


@pytest.mark.parametrize("size", range(HEADER_BYTES))
def test_a_short_header_is_found(header: bytes, size: int) -> None:
    assert check(header[:size]) == f"the header has {size} of {HEADER_BYTES} bytes"


@given(offset=st.integers(0, len(VALUE) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_of_the_page_is_found(offset: int, bit: int) -> None:
    changed = bytearray(VALUE)
    changed[offset] ^= 1 << bit
    found = check(header_of(IDENTITY, KEY, memoryview(VALUE)), bytes(changed))
    assert found == "not as expected: checksum of the bytes"


@given(size=st.integers(0, len(VALUE) - 1))
def test_a_page_of_another_length_is_found(size: int) -> None:
    assert "length" in check(header_of(IDENTITY, KEY, memoryview(VALUE)), VALUE[:size])


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_other_bytes_are_no_header(noise: bytes) -> None:
    assert check(noise)


def test_what_belongs_to_another_model_or_prefix_is_named(header: bytes) -> None:
    assert check(header, identity=KEY) == "not as expected: identity"
    assert check(header, key=IDENTITY) == "not as expected: key"
