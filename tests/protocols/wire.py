"""One good message of every class, and strategies for all values that may stand on the wire."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import strategies as st

from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.pages.components import Buffer, Component
from kvflow.protocols.pages.layout import PoolLayout, build_layout
from kvflow.protocols.ports import PlaneAddress, ProcessIdentity
from kvflow.protocols.wire import messages as wire

U64 = 2**64 - 1
ALL: tuple[type, ...] = get_args(wire.Message)
CAUSE = Cause(Code.CLIENT_GONE, "gone")
LAYOUT = build_layout([("k", "uint8", (8,))], page_size=4, num_pages=8)
ADDRESS = PlaneAddress("fake", "a", ProcessIdentity("b", "n", 1, 2))
_ROOM: dict[str, Any] = {"room": 7, "grant": 1, "source": 1, "target": 2}
_LIVES: dict[str, Any] = {"source": 1, "target": 2}
GOOD: dict[type, Any] = {
    wire.Register: wire.Register(
        wire_version=wire.WIRE_VERSION, layout=LAYOUT, address=ADDRESS, fresh_from=0, **_LIVES
    ),
    wire.Registered: wire.Registered(
        wire_version=wire.WIRE_VERSION, rank=0, refusal="", address=ADDRESS, **_LIVES
    ),
    wire.Announce: wire.Announce(**_ROOM),
    wire.Begun: wire.Begun(rank=0, **_ROOM),
    wire.Bootstrap: wire.Bootstrap(
        pages=b"\0\0\0\0", prompt_tokens=4, prompt_digest=b"d" * 32, **_ROOM
    ),
    wire.ChunkDone: wire.ChunkDone(rank=0, seq=0, pages=1, last=True, handoff=b"h", **_ROOM),
    wire.RoomFailed: wire.RoomFailed(rank=0, cause=CAUSE, **_ROOM),
    wire.Abort: wire.Abort(cause=CAUSE, **_ROOM),
    wire.AbortAck: wire.AbortAck(rank=0, drained=True, **_ROOM),
    wire.Resync: wire.Resync(rooms=(wire.Belief(7, 1, 0),), **_LIVES),
    wire.Heartbeat: wire.Heartbeat(settled=((3, 5),), **_LIVES),
    wire.Goodbye: wire.Goodbye(unproven=(3,), **_LIVES),
    wire.GoodbyeAck: wire.GoodbyeAck(**_LIVES),
}


rooms = st.one_of(st.sampled_from([0, 1, 2**63, U64]), st.integers(0, U64))
ids = st.one_of(st.sampled_from([1, 2**63, U64]), st.integers(1, U64))
ranks = st.integers(0, wire.MAX_RANKS - 1)
counts = st.integers(0, 1 << 40)
seqs = st.integers(0, 1 << 32)
texts = st.text(max_size=40)
numbers = st.integers(-(2**63), U64)
identities = st.builds(ProcessIdentity, texts, texts, numbers, numbers)
addresses = st.builds(PlaneAddress, texts, texts, identities)
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
beliefs = st.builds(wire.Belief, rooms, ids, seqs)
packed = st.binary(max_size=64)
digests = st.binary(min_size=32, max_size=32)
lives: dict[str, Any] = {"source": ids, "target": ids}
header: dict[str, Any] = {"room": rooms, "grant": ids, **lives}

to_prefill: dict[type, st.SearchStrategy[wire.Message]] = {
    wire.Register: st.builds(
        wire.Register,
        wire_version=numbers,
        layout=layouts,
        address=addresses,
        fresh_from=counts,
        **lives,
    ),
    wire.Announce: st.builds(wire.Announce, **header),
    wire.Bootstrap: st.builds(
        wire.Bootstrap,
        pages=packed,
        prompt_tokens=counts,
        prompt_digest=digests,
        prefix_tokens=counts,
        **header,
    ),
    wire.Abort: st.builds(wire.Abort, cause=causes, **header),
    wire.Resync: st.builds(wire.Resync, rooms=st.lists(beliefs, max_size=5).map(tuple), **lives),
    wire.Heartbeat: st.builds(
        wire.Heartbeat,
        settled_below=counts,
        settled=st.lists(st.tuples(counts, counts), max_size=3).map(tuple),
        **lives,
    ),
    wire.Goodbye: st.builds(wire.Goodbye, unproven=st.lists(ids, max_size=5).map(tuple), **lives),
    wire.GoodbyeAck: st.builds(wire.GoodbyeAck, **lives),
}
to_decode: dict[type, st.SearchStrategy[wire.Message]] = {
    wire.Registered: st.builds(
        wire.Registered,
        wire_version=st.integers(0, 99),
        rank=ranks,
        refusal=texts,
        address=st.none() | addresses,
        asked=rooms,
        **lives,
    ),
    wire.Begun: st.builds(wire.Begun, rank=ranks, **header),
    wire.ChunkDone: st.builds(
        wire.ChunkDone,
        rank=ranks,
        seq=seqs,
        pages=counts,
        last=st.booleans(),
        handoff=st.binary(max_size=64),
        checksum=st.binary(max_size=32),
        **header,
    ),
    wire.RoomFailed: st.builds(wire.RoomFailed, rank=ranks, cause=causes, **header),
    wire.AbortAck: st.builds(wire.AbortAck, rank=ranks, drained=st.booleans(), **header),
    wire.Resync: to_prefill[wire.Resync],
    wire.Heartbeat: to_prefill[wire.Heartbeat],
    wire.Goodbye: to_prefill[wire.Goodbye],
    wire.GoodbyeAck: to_prefill[wire.GoodbyeAck],
}
