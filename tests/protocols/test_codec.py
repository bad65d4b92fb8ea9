"""Bytes in, a message or a WireError out; never anything else (I7)."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvflow.protocols.arguments import prompt_digest
from kvflow.protocols.errors import WireError
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.codec import (
    encode,
    parse_at_decode,
    parse_at_prefill,
    routing_id,
)
from tests.protocols.wire import ALL, GOOD, to_decode, to_prefill

BOTH = (parse_at_prefill, parse_at_decode)
READERS: list[tuple[type, Any, Any]] = [
    *((kind, made, parse_at_prefill) for kind, made in to_prefill.items()),
    *((kind, made, parse_at_decode) for kind, made in to_decode.items()),
]
some = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(
    ("kind", "made", "decode"), READERS, ids=[f"{k.__name__}-{d.__name__}" for k, _, d in READERS]
)
@some
@given(data=st.data())
def test_round_trip(
    kind: type, made: st.SearchStrategy[wire.Message], decode: Any, data: st.DataObject
) -> None:
    message = data.draw(made)
    found = decode(encode(message))
    assert type(found) is kind
    assert found == message


@pytest.mark.parametrize(
    ("kind", "decode"),
    [
        *(
            (kind, parse_at_prefill)
            for kind in (
                wire.Registered,
                wire.Begun,
                wire.ChunkDone,
                wire.RoomFailed,
                wire.AbortAck,
            )
        ),
        *((kind, parse_at_decode) for kind in (wire.Announce, wire.Bootstrap, wire.Abort)),
    ],
    ids=lambda value: value.__name__,
)
def test_a_message_for_the_other_side_is_refused(kind: type, decode: Any) -> None:
    with pytest.raises(WireError):
        decode(encode(GOOD[kind]))


@pytest.mark.parametrize("decode", BOTH, ids=lambda value: value.__name__)
@pytest.mark.parametrize("tag", [0, 14, -1, 2**64 - 1, "3", None, 3.0, [3], b"3"], ids=repr)
def test_unknown_tags(decode: Any, tag: object) -> None:
    body = msgspec.msgpack.decode(encode(GOOD[wire.Heartbeat]))
    with pytest.raises(WireError):
        decode(msgspec.msgpack.encode([tag, *body[1:]]))


@pytest.mark.parametrize("decode", BOTH, ids=lambda value: value.__name__)
@pytest.mark.parametrize(
    "value", [None, 1, "text", b"bytes", {}, {"tag": 9}, [], [9], [[]], [9, 1], 1.5], ids=repr
)
def test_no_message_at_all(decode: Any, value: object) -> None:
    with pytest.raises(WireError):
        decode(msgspec.msgpack.encode(value))


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_truncated_at_every_byte(kind: type) -> None:
    frame = encode(GOOD[kind])
    for decode in BOTH:
        for end in range(len(frame)):
            with pytest.raises(WireError):
                decode(frame[:end])
        with pytest.raises(WireError):
            decode(frame + b"\0")


@pytest.mark.parametrize(
    ("kind", "place"),
    [(kind, i + 1) for kind in ALL for i in range(len(msgspec.structs.fields(kind)))],
    ids=[f"{kind.__name__}.{field.name}" for kind in ALL for field in msgspec.structs.fields(kind)],
)
def test_wrong_types_in_every_field(kind: type, place: int) -> None:
    body = msgspec.msgpack.decode(encode(GOOD[kind]))
    decode = parse_at_prefill if kind in to_prefill else parse_at_decode
    odd: list[object] = [{"a": 1}, 1.5, float("nan"), [[[]]]]
    for wrong in odd:
        changed = [*body[:place], wrong, *body[place + 1 :]]
        with pytest.raises(WireError):
            decode(msgspec.msgpack.encode(changed))


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_random_bytes(frame: bytes) -> None:
    for decode in BOTH:
        try:
            decode(frame)
        except WireError:
            continue


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_mutations_raise_nothing_but_wire_errors(kind: type, seed: int) -> None:
    rng = random.Random(f"{seed} {kind.__name__}")
    frame = encode(GOOD[kind])
    refused = 0
    for _ in range(2_000):
        mutant = bytearray(frame)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(mutant))
            match rng.randrange(4):
                case 0:
                    mutant[at] = rng.randrange(256)
                case 1:
                    del mutant[at]
                case 2:
                    mutant.insert(at, rng.randrange(256))
                case _:
                    mutant[at] ^= 1 << rng.randrange(8)
            if not mutant:
                mutant.append(0xC0)
        for decode in BOTH:
            try:
                decode(bytes(mutant))
            except WireError as error:
                refused += 1
                assert len(str(error)) < 1_000
    assert refused > 2_000


def test_nesting_does_not_exhaust_the_stack() -> None:
    for opener in (b"\x91", b"\x81\x01", b"\xdd\x00\x00\x00\x01"):
        with pytest.raises(WireError):
            parse_at_prefill(opener * 100_000)


def test_a_length_that_lies_allocates_nothing() -> None:
    for frame in (
        b"\x9a\x03\x07\x01\x01\x02\xc6\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff\x03",
        b"\xdf\xff\xff\xff\xff",
    ):
        with pytest.raises(WireError):
            parse_at_prefill(frame)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_digest_is_sha256_of_little_endian_u32(prompt: list[int]) -> None:
    expected = hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in prompt)).digest()
    assert prompt_digest(prompt) == expected
    assert prompt_digest(np.array(prompt, dtype=np.int64)) == expected


def test_routing_ids_are_distinct_and_none_starts_with_zero() -> None:
    found = {routing_id(wire.Incarnation(n)) for n in (1, 255, 256, 2**63, 2**64 - 1)}
    assert len(found) == 5 and all(name[0] != 0 and len(name) == 9 for name in found)
