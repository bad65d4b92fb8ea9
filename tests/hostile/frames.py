"""Bytes nobody should send: good messages bent in every way a wire,
a bug or an enemy bends them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from kvflow.protocols.wire.codec import encode
from kvflow.protocols.wire.messages import MAX_FRAME_BYTES

U64 = 2**64 - 1
NUMBERS = (-1, 0, 1, 2**31, 2**32 + 1, 2**53, U64, -(2**63))
FLOATS = (0.0, -0.0, float("nan"), float("inf"), 1e300)
TEXTS = ("", "x", "\0", "\ud7ff", "x" * 5000)
RAW = (b"", b"\0" * 3, b"\xff" * 5, b"\0" * 40_000)
NESTED: tuple[Any, ...] = ([], [[]], [1] * 5000, {}, {1: 2})
EXTENSIONS = [(5, b"x"), (-1, b"\0" * 12), (-1, b"")]
ODD: tuple[Any, ...] = (None, True, *NUMBERS, *FLOATS, *TEXTS, *RAW, *NESTED)
ODD += tuple(msgspec.msgpack.Ext(*each) for each in EXTENSIONS)
"""Values that stand in no message, or only elsewhere; msgpack's -1 extension is a timestamp."""

Bend = Callable[[random.Random, bytes], bytes]


def flipped(rng: random.Random, frame: bytes) -> bytes:
    bent = bytearray(frame)
    for _ in range(rng.randint(1, 8)):
        bent[rng.randrange(len(bent))] ^= 1 << rng.randrange(8)
    return bytes(bent)


def spliced(rng: random.Random, frame: bytes) -> bytes:
    """Bytes cut out, put in, or written over."""
    a, b = sorted(rng.randrange(len(frame) + 1) for _ in range(2))
    return frame[:a] + rng.randbytes(rng.choice((0, 1, 4, 30))) + frame[b:]


def truncated(rng: random.Random, frame: bytes) -> bytes:
    return frame[: rng.randrange(len(frame))]


def extended(rng: random.Random, frame: bytes) -> bytes:
    return frame + rng.choice((b"\0", b"\xc0", frame, rng.randbytes(rng.randint(1, 100))))


def swapped(rng: random.Random, frame: bytes) -> bytes:
    """One value, the tag included, replaced by an odd one; or one more or one fewer of them."""
    body = msgspec.msgpack.decode(frame)
    at = rng.randrange(len(body))
    match rng.randrange(8):
        case 0:
            del body[at]
        case 1:
            body.insert(at, rng.choice(ODD))
        case 2:
            body[0] = rng.randint(-2, 12)
        case _:
            body[at] = rng.choice(ODD)
    return msgspec.msgpack.encode(body)


def bombed(rng: random.Random, frame: bytes) -> bytes:
    """Lengths that lie and nesting without end, in the place of one value."""
    lengths = (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9", b"\xdc")
    nests = (b"\x91" * 5000, b"\x81\x01" * 5000, b"\xdd\0\0\0\1" * 2000)
    liars = (*(tag + b"\xff" * 4 for tag in lengths), *nests)
    return (
        frame[: rng.randrange(1, len(frame))]
        + rng.choice(liars)
        + frame[rng.randrange(len(frame)) :]
    )


def noise(rng: random.Random, frame: bytes) -> bytes:
    """What has nothing to do with us; the ASCII ones are what SGLang's ports were sent."""
    words = b"hello None ABORT WATERMARK STAGING_RSP AUX_DATA CHUNK_READY 12x".split()
    others = (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\0",
        b"\x80\x04\x95",
        b"cos\nsystem\n(S'id'\ntR.",
    )
    random_bytes = (rng.randbytes(rng.randint(1, 300)), rng.randbytes(len(frame)))
    return rng.choice((b"", b"\0", b"\xc1", b"\x90", *words, *others, *random_bytes))


def huge(rng: random.Random, frame: bytes) -> bytes:
    """At the limit of a frame, and just over it."""
    size = MAX_FRAME_BYTES + rng.choice((-6, 0, 1))
    return frame[: rng.randrange(len(frame))] + b"\x93" * size


COMMON: tuple[Bend, ...] = (flipped, spliced, truncated, extended, swapped, bombed, noise)


def bent(
    rng: random.Random, good: Mapping[type, Any], *, huge_share: float = 0.0005
) -> Iterator[bytes]:
    """Without end: a good message of a random class, bent in one way. Some are still messages."""
    frames = [encode(message) for message in good.values()]
    while True:
        bend = huge if rng.random() < huge_share else rng.choice(COMMON)
        yield bend(rng, rng.choice(frames))
