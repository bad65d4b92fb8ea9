"""Whatever arrives, decoding ends in a message of this side or in a WireError, in memory bounded by
what was sent.
"""

from __future__ import annotations

import itertools
import random
import tracemalloc
from typing import Any, get_args

import msgspec
import pytest

from kvflow.protocols.errors import WireError
from kvflow.protocols.wire.codec import encode, parse_at_decode, parse_at_prefill
from kvflow.protocols.wire.messages import MAX_FRAME_BYTES, ToDecode, ToPrefill
from tests.hostile.frames import COMMON, ODD, bent, huge
from tests.protocols.wire import ALL, GOOD
from tests.soak import sized

SIDES: list[tuple[Any, Any]] = [(parse_at_prefill, ToPrefill), (parse_at_decode, ToDecode)]
OVERHEAD_BYTES = 32 << 10


def decoded(decode: Any, union: Any, frame: bytes) -> bool:
    """Whether it is a message; fails for anything but one or a WireError."""
    try:
        message = decode(frame)
    except WireError as error:
        assert len(str(error)) < 500, "a log line, not a copy of the frame"
        return False
    assert isinstance(message, get_args(union))
    encode(message)  # what was taken in can be said again
    return True


@pytest.mark.parametrize("bend", [*COMMON, huge], ids=lambda bend: bend.__name__)
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_a_bent_message_is_refused_or_is_one(kind: type, bend: Any, seed: int) -> None:
    rng = random.Random(f"{seed} {kind.__name__} {bend.__name__}")
    frame = encode(GOOD[kind])
    refused = 0
    for _ in range(5 if bend is huge else 300):
        mutant = bend(rng, frame)
        refused += sum(not decoded(decode, union, mutant) for decode, union in SIDES)
    assert refused


@pytest.mark.parametrize(
    ("kind", "place"),
    [(kind, i + 1) for kind in ALL for i in range(len(msgspec.structs.fields(kind)))],
)
def test_odd_values_in_every_field(kind: type, place: int) -> None:
    body = msgspec.msgpack.decode(encode(GOOD[kind]))
    for odd in ODD:
        frame = msgspec.msgpack.encode([*body[:place], odd, *body[place + 1 :]])
        for decode, union in SIDES:
            decoded(decode, union, frame)


def test_memory_is_bounded_by_what_was_sent(seed: int) -> None:
    """A frame may be a few times as large as objects as it was as bytes, and nothing of it stays
    behind.
    """
    frames = bent(random.Random(seed), GOOD, huge_share=0)
    tracemalloc.start()
    try:
        for _ in range(300):
            frame = next(frames)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            for decode, union in SIDES:
                decoded(decode, union, frame)
            after, peak = tracemalloc.get_traced_memory()
            assert peak - before < 60 * len(frame) + OVERHEAD_BYTES, frame[:100]
            assert after - before < OVERHEAD_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_many_bent_frames_of_any_kind(seed: int) -> None:
    count = sized(100_000, 500_000)
    frames = bent(random.Random(seed), GOOD, huge_share=1e-5)
    messages = sum(
        decoded(decode, union, frame)
        for frame in itertools.islice(frames, count)
        for decode, union in SIDES
    )
    print(f"{messages} of {2 * count} bent frames are messages all the same")
    assert messages


def test_a_frame_over_the_limit_is_not_looked_at() -> None:
    for decode, _ in SIDES:
        with pytest.raises(WireError, match="over the limit"):
            decode(bytes(MAX_FRAME_BYTES + 1))
