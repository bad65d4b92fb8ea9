"""One good message of every class, and strategies for all values that may stand on the wire."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from hypothesis import strategies as st

from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.pages.components import Buffer, Component
from kvflow.protocols.pages.coverage import Served
from kvflow.protocols.pages.layout import PoolLayout, build_layout
from kvflow.protocols.pages.spaces import MAX_SPACES, Space
from kvflow.protocols.ports import PlaneAddress, ProcessIdentity
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.messages import GrantId, Rank, RoomId

U64 = 2**64 - 1
ALL: tuple[type, ...] = get_args(wire.Message)
CAUSE = Cause(Code.CLIENT_GONE, "gone")
LAYOUT = build_layout([("k", "uint8", (8,))], page_size=4, num_pages=8)
ADDRESS = PlaneAddress("fake", "a", ProcessIdentity("b", "n", 1, 2))
_ROOM: dict[str, Any] = {"room": 7, "grant": 1, "source": 1, "target": 2}
_LIVES: dict[str, Any] = {"source": 1, "target": 2}
GOOD: dict[type, Any] = {
    wire.Register: wire.Register(
        wire_version=wire.WIRE_VERSION,
        layout=LAYOUT,
        address=ADDRESS,
        fresh_from=GrantId(0),
        **_LIVES,
    ),
    wire.Registered: wire.Registered(
        wire_version=wire.WIRE_VERSION, rank=Rank(0), refusal="", address=ADDRESS, **_LIVES
    ),
    wire.Announce: wire.Announce(**_ROOM),
    wire.Begun: wire.Begun(rank=Rank(0), **_ROOM),
    wire.Bootstrap: wire.Bootstrap(
        pages=b"\0\0\0\0", prompt_tokens=4, prompt_digest=b"d" * 32, **_ROOM
    ),
    wire.ChunkDone: wire.ChunkDone(
        rank=Rank(0), seq=0, pages=(1,), last=True, handoff=b"h", **_ROOM
    ),
    wire.RoomFailed: wire.RoomFailed(rank=Rank(0), cause=CAUSE, **_ROOM),
    wire.Abort: wire.Abort(cause=CAUSE, **_ROOM),
    wire.AbortAck: wire.AbortAck(rank=Rank(0), drained=True, **_ROOM),
    wire.Resync: wire.Resync(rooms=(wire.Belief(RoomId(7), GrantId(1), 0),), **_LIVES),
    wire.Heartbeat: wire.Heartbeat(settled=((GrantId(3), GrantId(5)),), **_LIVES),
    wire.Goodbye: wire.Goodbye(unproven=(GrantId(3),), **_LIVES),
    wire.GoodbyeAck: wire.GoodbyeAck(**_LIVES),
}


rooms = st.one_of(st.sampled_from([0, 1, 2**63, U64]), st.integers(0, U64))
ids = st.one_of(st.sampled_from([1, 2**63, U64]), st.integers(1, U64))
ranks = st.integers(0, wire.MAX_RANKS - 1)
counts = st.integers(0, 1 << 40)
place_counts = st.lists(counts, min_size=1, max_size=MAX_SPACES).map(tuple)
seqs = st.integers(0, 1 << 32)
texts = st.text(max_size=40)
numbers = st.integers(-(2**63), U64)
identities = st.builds(ProcessIdentity, texts, texts, numbers, numbers)
addresses = st.builds(PlaneAddress, texts, texts, identities)
causes = st.builds(Cause, st.sampled_from(Code), texts)
shapes = st.lists(numbers, max_size=3).map(tuple)
components = st.builds(Component, texts, texts, shapes, numbers, numbers, numbers)
buffers = st.builds(Buffer, texts, numbers, numbers, numbers, numbers)
spaces = st.builds(Space, texts, numbers, numbers, numbers)
layouts = st.builds(
    PoolLayout,
    st.lists(spaces, max_size=3).map(tuple),
    st.lists(components, max_size=2).map(tuple),
    st.lists(buffers, max_size=2).map(tuple),
    texts,
    texts,
)
beliefs = st.builds(wire.Belief, rooms, ids, seqs)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "address": addresses,
    "asked": rooms,
    "cause": causes,
    "checksum": st.binary(max_size=32),
    "drained": st.booleans(),
    "fresh_from": counts,
    "grant": ids,
    "handoff": st.binary(max_size=64),
    "last": st.booleans(),
    "layout": layouts,
    "pace_ms": st.integers(0, wire.MAX_PACE_MS),
    "page_sizes": st.just(()) | place_counts,
    "pages": st.binary(max_size=64),
    "prefix_tokens": counts,
    "prompt_digest": st.binary(min_size=32, max_size=32),
    "prompt_tokens": counts,
    "rank": ranks,
    "refusal": texts,
    "room": rooms,
    "rooms": st.lists(beliefs, max_size=5).map(tuple),
    "seq": seqs,
    "served": st.lists(st.builds(Served, texts, counts, counts), max_size=2).map(tuple),
    "settled": st.lists(st.tuples(counts, counts), max_size=3).map(tuple),
    "settled_below": counts,
    "source": ids,
    "target": ids,
    "unproven": st.lists(ids, max_size=5).map(tuple),
    "wire_version": numbers,
}


def made(kind: type, **others: st.SearchStrategy[Any]) -> st.SearchStrategy[wire.Message]:
    names = [field.name for field in msgspec.structs.fields(kind)]
    return st.builds(kind, **{name: (FIELDS | others)[name] for name in names})


to_prefill = {kind: made(kind) for kind in get_args(wire.ToPrefill)}
to_decode = {kind: made(kind) for kind in get_args(wire.ToDecode)} | {
    wire.ChunkDone: made(wire.ChunkDone, pages=place_counts),
    wire.Registered: made(wire.Registered, address=st.none() | addresses),
}
