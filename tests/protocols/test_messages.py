"""The shape of every message: frozen, tagged, with limits that can be reached."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args

import msgspec
import pytest

from kvflow.protocols.errors import CapacityError, Cause, Code, WireError, room_error
from kvflow.protocols.machinery import parsed
from kvflow.protocols.pages.spaces import MAX_SPACES
from kvflow.protocols.wire import messages
from kvflow.protocols.wire.codec import encode, parse_at_decode, parse_at_prefill
from kvflow.protocols.wire.messages import (
    MAX_BELIEFS,
    MAX_FRAME_BYTES,
    MAX_HANDOFF_BYTES,
    MAX_PAGES_PER_ROOM,
    MAX_RANKS,
    MAX_TEXT,
    Abort,
    AbortAck,
    Announce,
    Begun,
    Belief,
    Bootstrap,
    ChunkDone,
    Goodbye,
    GoodbyeAck,
    GrantId,
    Heartbeat,
    Incarnation,
    Message,
    Register,
    Registered,
    Resync,
    RoomFailed,
    RoomId,
    ToPrefill,
)
from tests.protocols.wire import ALL, GOOD, U64


def read(message: Message) -> Message:
    """As the side it is meant for reads it."""
    if isinstance(message, get_args(messages.ToPrefill)):
        return parse_at_prefill(encode(message))
    return parse_at_decode(encode(message))


def changed(kind: type, **fields: object) -> Any:
    return msgspec.structs.replace(GOOD[kind], **fields)


def belief(room: int, grant: int, next_seq: int = 0) -> Belief:
    return Belief(RoomId(room), GrantId(grant), next_seq)


def test_every_message_stands_in_a_union() -> None:
    assert set(ALL) == set(GOOD)
    assert set(get_args(messages.ToPrefill)) | set(get_args(messages.ToDecode)) == set(ALL)
    assert set(get_args(messages.ToPrefill)) & set(get_args(messages.ToDecode)) == BOTH_WAYS


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_frozen_hashable_tagged_and_named_by_both_incarnations(
    kind: type[msgspec.Struct],
) -> None:
    message = GOOD[kind]
    config = kind.__struct_config__
    assert config.frozen and config.array_like
    assert hash(message) == hash(changed(kind))
    with pytest.raises(AttributeError):
        message.source = 5
    assert {"source", "target"} <= {field.name for field in msgspec.structs.fields(kind)}


def test_tags_are_distinct_and_the_first_element() -> None:
    tags = [msgspec.msgpack.decode(encode(GOOD[kind]))[0] for kind in ALL]
    assert sorted(tags) == list(range(1, len(ALL) + 1))


@pytest.mark.parametrize(
    "kind",
    [k for k in ALL if "room" in {f.name for f in msgspec.structs.fields(k)}],
    ids=lambda kind: kind.__name__,
)
@pytest.mark.parametrize("room", [0, 1, 2**63 - 1, 2**63, U64])
def test_room_is_any_u64(kind: type, room: int) -> None:
    assert read(changed(kind, room=room)) == changed(kind, room=room)


OF_A_ROOM = (Announce, Begun, Bootstrap, ChunkDone, RoomFailed, Abort, AbortAck)
BOTH_WAYS = {Resync, Heartbeat, Goodbye, GoodbyeAck}
BOUNDS = ((Register, "fresh_from"), (Heartbeat, "settled_below"))
LIMITS: list[tuple[type, str, Any, Any]] = [
    *((kind, name, U64, 0) for kind in ALL for name in ("source", "target")),
    *((kind, "grant", U64, 0) for kind in OF_A_ROOM),
    *((kind, "room", U64, -1) for kind in OF_A_ROOM),
    *(
        (kind, "rank", MAX_RANKS - 1, MAX_RANKS)
        for kind in (Registered, Begun, ChunkDone, RoomFailed, AbortAck)
    ),
    *((kind, "rank", 0, -1) for kind in (Registered, Begun, ChunkDone, RoomFailed, AbortAck)),
    (Registered, "refusal", "x" * MAX_TEXT, "x" * (MAX_TEXT + 1)),
    (Bootstrap, "pages", b"\0" * 4 * MAX_PAGES_PER_ROOM, b"\0" * (4 * MAX_PAGES_PER_ROOM + 1)),
    (Bootstrap, "prompt_digest", b"x" * 32, b"x" * 31),
    (Bootstrap, "prompt_digest", b"x" * 32, b"x" * 33),
    (Bootstrap, "prompt_tokens", 1 << 40, (1 << 40) + 1),
    (Bootstrap, "prefix_tokens", 1 << 40, -1),
    (ChunkDone, "handoff", b"x" * MAX_HANDOFF_BYTES, b"x" * (MAX_HANDOFF_BYTES + 1)),
    (ChunkDone, "seq", 1 << 32, (1 << 32) + 1),
    (ChunkDone, "seq", 0, -1),
    (ChunkDone, "pages", (3, 1 << 40), (3, (1 << 40) + 1)),
    (ChunkDone, "pages", (0, 0), (0, -1)),
    (ChunkDone, "pages", (1,), ()),
    (ChunkDone, "pages", (1,) * MAX_SPACES, (1,) * (MAX_SPACES + 1)),
    *((kind, name, 1 << 40, (1 << 40) + 1) for kind, name in BOUNDS),
    *((kind, name, 0, -1) for kind, name in BOUNDS),
    (Registered, "asked", 0, -1),
    (ChunkDone, "checksum", b"x" * 32, b"x" * 33),
    (Resync, "rooms", (belief(7, 1),) * MAX_BELIEFS, (belief(7, 1),) * (MAX_BELIEFS + 1)),
    (Resync, "rooms", (belief(0, 1),), (belief(-1, 1),)),
    (Resync, "rooms", (belief(0, 1),), (belief(0, 0),)),
]


@pytest.mark.parametrize(
    ("kind", "name", "allowed", "refused"),
    LIMITS,
    ids=[f"{k.__name__}.{n}-{i}" for i, (k, n, *_) in enumerate(LIMITS)],
)
def test_limits_hold_exactly(kind: type, name: str, allowed: object, refused: object) -> None:
    assert read(changed(kind, **{name: allowed})) == changed(kind, **{name: allowed})
    with pytest.raises(WireError):
        read(changed(kind, **{name: refused}))


def test_frames_over_the_limit_are_refused_before_they_are_read() -> None:
    with pytest.raises(WireError, match=str(MAX_FRAME_BYTES)):
        parse_at_prefill(b"\0" * (MAX_FRAME_BYTES + 1))


def test_an_endpoint_reads_no_frame_over_the_limit() -> None:
    """A newer peer may append fields to a message, so a longer frame could be decoded."""
    message = GoodbyeAck(source=Incarnation(1), target=Incarnation(2))
    fields, decoder = msgspec.msgpack.decode(encode(message)), msgspec.msgpack.Decoder(ToPrefill)

    def padded(size: int) -> bytes:
        longest = msgspec.msgpack.encode([*fields, bytes(MAX_FRAME_BYTES)])
        more = bytes(MAX_FRAME_BYTES - len(longest) + size)
        frame = msgspec.msgpack.encode([*fields, more])
        assert len(frame) == size
        return frame

    assert parsed(decoder, padded(MAX_FRAME_BYTES)) == message
    assert parsed(decoder, padded(MAX_FRAME_BYTES + 1)) is None


def test_the_largest_messages_fit_in_a_frame() -> None:
    assert len(encode(changed(Bootstrap, pages=b"\0" * 4 * MAX_PAGES_PER_ROOM))) <= MAX_FRAME_BYTES
    assert len(encode(changed(ChunkDone, handoff=b"\0" * MAX_HANDOFF_BYTES))) <= MAX_FRAME_BYTES
    beliefs = (belief(U64, U64, 1 << 32),) * MAX_BELIEFS
    assert len(encode(changed(Resync, rooms=beliefs))) <= MAX_FRAME_BYTES


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_a_newer_peer_may_say_more(kind: type) -> None:
    longer = msgspec.msgpack.encode(
        [*msgspec.msgpack.decode(encode(GOOD[kind])), "from the future"]
    )
    decode = parse_at_prefill if kind in get_args(messages.ToPrefill) else parse_at_decode
    assert decode(longer) == GOOD[kind]


def test_importing_the_protocols_loads_no_framework() -> None:
    program = (
        "import sys, kvflow.protocols.wire.codec;"
        "import kvflow.protocols.machines.decode_room, kvflow.protocols.machines.prefill_room;"
        "print(*({'torch', 'zmq', 'uvloop', 'aiohttp'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == []


@pytest.mark.parametrize("code", list(Code))
@pytest.mark.parametrize("text", ["", "decode had no free pages", "capacity"])
def test_a_cause_survives_being_raised(code: Code, text: str) -> None:
    cause = Cause(code, text)
    assert room_error(room_error(cause).cause()).cause() == cause


def test_an_error_that_was_raised_here_is_its_own_cause() -> None:
    assert CapacityError("rooms", 3, 2).cause() == Cause(
        Code.CAPACITY, "rooms: asked for 3, limit 2"
    )
