"""One good message of every class, and hypothesis strategies for all values that may stand on the wire."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import strategies as st

from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.pages.layout import Buffer, Component, PoolLayout, build_layout
from kvflow.protocols.ports import Endpoint, Witness
from kvflow.protocols.wire.messages import (
    MAX_RANKS,
    WIRE_VERSION,
    Abort,
    AbortAck,
    Belief,
    Bootstrap,
    ChunkDone,
    Heartbeat,
    Message,
    Register,
    Registered,
    Resync,
    RoomFailed,
)

U64 = 2**64 - 1
ALL: tuple[type, ...] = get_args(Message)
CAUSE = Cause(Code.CLIENT_GONE, "gone")
LAYOUT = build_layout([("k", "uint8", (8,))], page_size=4, num_pages=8)
ENDPOINT = Endpoint("fake", "a", Witness("b", "n", 1, 2))
GOOD: dict[type, Any] = {
    Register: Register(1, 2, WIRE_VERSION, LAYOUT, ENDPOINT),
    Registered: Registered(1, 2, WIRE_VERSION, 0, "", ENDPOINT),
    Bootstrap: Bootstrap(7, 1, 1, 2, b"\0\0\0\0", 4, b"d" * 32),
    ChunkDone: ChunkDone(7, 1, 1, 2, 0, 0, 1, True, b"h"),
    RoomFailed: RoomFailed(7, 1, 1, 2, 0, CAUSE),
    Abort: Abort(7, 1, 1, 2, CAUSE),
    AbortAck: AbortAck(7, 1, 1, 2, 0, True),
    Resync: Resync(1, 2, (Belief(7, 1, 0),)),
    Heartbeat: Heartbeat(1, 2),
}


rooms = st.one_of(st.sampled_from([0, 1, 2**63, U64]), st.integers(0, U64))
ids = st.one_of(st.sampled_from([1, 2**63, U64]), st.integers(1, U64))
ranks = st.integers(0, MAX_RANKS - 1)
counts = st.integers(0, 1 << 40)
seqs = st.integers(0, 1 << 32)
texts = st.text(max_size=40)
numbers = st.integers(-(2**63), U64)
witnesses = st.builds(Witness, texts, texts, numbers, numbers)
endpoints = st.builds(Endpoint, texts, texts, witnesses)
causes = st.builds(Cause, st.sampled_from(Code), texts)
shapes = st.lists(numbers, max_size=3).map(tuple)
components = st.builds(Component, texts, texts, shapes, numbers, numbers, numbers)
buffers = st.builds(Buffer, texts, numbers, numbers, numbers)
layouts = st.builds(
    PoolLayout,
    numbers,
    numbers,
    st.lists(components, max_size=2).map(tuple),
    st.lists(buffers, max_size=2).map(tuple),
)
beliefs = st.builds(Belief, rooms, ids, seqs)
packed = st.binary(max_size=64)
digests = st.binary(min_size=32, max_size=32)
who: tuple[Any, ...] = (rooms, ids, ids, ids)

to_prefill: dict[type, st.SearchStrategy[Message]] = {
    Register: st.builds(Register, ids, ids, numbers, layouts, endpoints, counts),
    Bootstrap: st.builds(Bootstrap, *who, packed, counts, digests, counts),
    Abort: st.builds(Abort, *who, causes),
    Resync: st.builds(Resync, ids, ids, st.lists(beliefs, max_size=5).map(tuple)),
    Heartbeat: st.builds(Heartbeat, ids, ids, counts),
}
to_decode: dict[type, st.SearchStrategy[Message]] = {
    Registered: st.builds(Registered, ids, ids, st.integers(0, 99), ranks, texts, st.none() | endpoints),
    ChunkDone: st.builds(ChunkDone, *who, ranks, seqs, counts, st.booleans(), st.binary(max_size=64)),
    RoomFailed: st.builds(RoomFailed, *who, ranks, causes),
    AbortAck: st.builds(AbortAck, *who, ranks, st.booleans()),
    Resync: to_prefill[Resync],
    Heartbeat: to_prefill[Heartbeat],
}
