"""The messages between prefill and decode.

One frame is one message: a msgpack array that begins with its tag. A ZMQ message carries one or
more frames.

Wire history
    1   first version; later ChunkDone.checksum, Registered.asked
    2   Announce; Register.fresh_from instead of settled_below, echoed by Registered; PoolLayout.tag
        and .fingerprint; the rank of every message from prefill is checked; several frames in one
        ZMQ message; later Component.unit and .format, Buffer.unit, PoolLayout.num_rows: of a pool
        with rows, the last of Bootstrap.pages is the room's row, numbered on from the pages, and
        ChunkDone.pages counts it. A peer of before refuses such a pool: its components do not hold
        for it.
    3   Component.start and what follows it: a prefill may have a part of decode's pool.
        Registered.served: decode must check that all ranks together have all of it; one of before
        would not, so a prefill refuses it.
    4   Goodbye and GoodbyeAck: a node that closes ends what the other one holds for it. An older
        node counts both as malformed, and would keep its loans for ever. Heartbeat.settled. Begun:
        a decode may hold its pages back until every rank has sent it; an older prefill never does.

Arrays grow at the end only: a reader ignores elements it does not know, and a new element has a
default. What cannot be expressed that way takes a new version; `Register` carries it, and a prefill
with another version refuses with both.

Every message names the incarnation it comes from and the one it is meant for. An incarnation is a
random u64 that a process draws at start; it is also the routing id of the link. `source` is always
prefill's, `target` always decode's.
"""

from __future__ import annotations

import operator
from typing import Annotated, NewType

import msgspec
from msgspec import Meta

from kvflow.protocols.errors import Cause, MisuseError
from kvflow.protocols.pages.coverage import Served
from kvflow.protocols.pages.layout import MAX_COMPONENTS, PoolLayout
from kvflow.protocols.ports import PlaneAddress

WIRE_VERSION = 1

MAX_FRAME_BYTES = 8 << 20
# Work on so many pages at once takes the event loop some 3 ms. A context of a million tokens needs
# pages of 2 tokens.
MAX_PAGES_PER_ROOM = 1 << 19
MAX_HANDOFF_BYTES = 1 << 20
MAX_BELIEFS = 4096
MAX_RANKS = 1024
MAX_UNPROVEN = 1 << 17
MAX_SETTLED_RANGES = 1024
MAX_TEXT = 4096

RoomId = NewType("RoomId", int)
"""Drawn by whoever pairs the two legs of a request (a router); an unsigned 64-bit integer."""
GrantId = NewType("GrantId", int)
"""Counts up within one decode incarnation: which promise of pages, and which life of a room."""
Incarnation = NewType("Incarnation", int)
"""One life of one process."""
Rank = NewType("Rank", int)


def room_id(value: object) -> RoomId:
    """A room id given by a user, of any integer type. Raises: MisuseError."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise MisuseError(f"room id {value!r} is not an integer") from None
    if not 0 <= number < 1 << 64:
        raise MisuseError(f"room id {number} is not an unsigned 64-bit integer")
    return RoomId(number)


Room = Annotated[RoomId, Meta(ge=0)]  # msgpack itself ends at 2**64 - 1
Grant = Annotated[GrantId, Meta(ge=1)]
Life = Annotated[Incarnation, Meta(ge=1)]
RankNumber = Annotated[Rank, Meta(ge=0, lt=MAX_RANKS)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
GrantBound = Annotated[GrantId, Meta(ge=0, le=1 << 40)]
Seq = Annotated[int, Meta(ge=0, le=1 << 32)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
PackedPages = Annotated[bytes, Meta(max_length=4 * MAX_PAGES_PER_ROOM)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]


class Register(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=1):
    """decode -> prefill, once per pair and again while silent:
    this decode's identity and its pool.
    """

    source: Life
    target: Life
    wire_version: int
    layout: PoolLayout
    address: PlaneAddress
    fresh_from: GrantBound  # no grant below it may begin: prefill may have known and forgotten them


class Registered(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=2):
    """prefill -> decode: accepted (`refusal` empty), or what differs.

    `source` is who really answers here, `asked` who was asked: a decode that knows two lives of one
    address must not take the answer to one for that to the other. `fresh_from` is that of the
    newest Register that has come: acceptance of an older one brings no silent link up. `served`, of
    who accepts: what of decode's pool this rank sends."""

    source: Life
    target: Life
    wire_version: int
    rank: RankNumber
    refusal: Text
    address: PlaneAddress | None = None
    asked: Annotated[Incarnation, Meta(ge=0)] = Incarnation(0)
    fresh_from: GrantBound = GrantId(0)
    served: Annotated[tuple[Served, ...], Meta(max_length=MAX_COMPONENTS)] = ()


class Announce(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=10):
    """decode -> every prefill rank: a room will be offered under this grant as soon as there are
    pages, or aborted.
    """

    room: Room
    grant: Grant
    source: Life
    target: Life


class Bootstrap(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=3):
    """decode -> every prefill rank: these pages are on loan to you for this room.

    The first `prefix_tokens` of the prompt are at decode already: a whole number of pages, or the
    whole prompt.
    """

    room: Room
    grant: Grant
    source: Life
    target: Life
    pages: PackedPages
    prompt_tokens: Count
    prompt_digest: Digest
    prefix_tokens: Count = 0


class ChunkDone(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=4):
    """prefill -> decode: every write of chunk `seq` has landed; it filled `pages` pages.

    `last` is the rank's proof.

    `checksum` is that of the source pages (see `ports.Checksums`), empty where transfers are not
    verified.
    """

    room: Room
    grant: Grant
    source: Life
    target: Life
    rank: RankNumber
    seq: Seq
    pages: Count
    last: bool = False
    handoff: Annotated[bytes, Meta(max_length=MAX_HANDOFF_BYTES)] = b""
    checksum: Annotated[bytes, Meta(max_length=32)] = b""


class RoomFailed(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=5):
    """prefill -> decode: this room will not succeed.

    Proves nothing about writes; an AbortAck follows.
    """

    room: Room
    grant: Grant
    source: Life
    target: Life
    rank: RankNumber
    cause: Cause


class Abort(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=6):
    """decode -> prefill: stop writing for this grant, or forget its announcement, and acknowledge;
    repeated until acknowledged."""

    room: Room
    grant: Grant
    source: Life
    target: Life
    cause: Cause


class AbortAck(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=7):
    """prefill -> decode: nothing of this grant runs any more; `drained` when all that was submitted
    has landed.
    """

    room: Room
    grant: Grant
    source: Life
    target: Life
    rank: RankNumber
    drained: bool


class Belief(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One open room as one side sees it; `next_seq` is the first chunk
    that has not been received.
    """

    room: Room
    grant: Grant
    next_seq: Seq


class Resync(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=8):
    """decode -> prefill: rooms that made no progress; what they missed is sent again. prefill ->
    decode: grants asked about that prefill does not know; their Bootstrap is sent again."""

    source: Life
    target: Life
    rooms: Annotated[tuple[Belief, ...], Meta(max_length=MAX_BELIEFS)]


class Begun(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=13):
    """prefill -> decode: the engine's half of an announced room has a place for its whole prompt,
    so pages that decode lends from here on wait for no other room. Sent again with every repetition
    of the announcement."""

    room: Room
    grant: Grant
    source: Life
    target: Life
    rank: RankNumber


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=9):
    """Both ways.

    From decode: every grant of this pair below `settled_below` has ended there, and nothing of it
    need be sent again. The same holds for the grants in `settled`, ranges above the first grant
    that has not ended: from a grant to below another. Of many ranges some stand in one heartbeat,
    and the others in the next ones."""

    source: Life
    target: Life
    settled_below: GrantBound = GrantId(0)
    settled: Annotated[
        tuple[tuple[GrantBound, GrantBound], ...], Meta(max_length=MAX_SETTLED_RANGES)
    ] = ()


class Goodbye(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=11):
    """Both ways, repeated until acknowledged: this incarnation closes, and begins nothing with the
    other one any more.

    From prefill it is proof for every grant of this decode, also for one that prefill has never
    received: each write that was submitted has landed, and none will be submitted. It proves
    nothing about the grants in `unproven`. From decode it says that decode asks about no grant any
    more.
    """

    source: Life
    target: Life
    unproven: Annotated[tuple[Grant, ...], Meta(max_length=MAX_UNPROVEN)] = ()


class GoodbyeAck(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=12):
    """Both ways: the other one's Goodbye has come. Proves nothing about writes."""

    source: Life
    target: Life


Message = (
    Register
    | Registered
    | Announce
    | Begun
    | Bootstrap
    | ChunkDone
    | RoomFailed
    | Abort
    | AbortAck
    | Resync
    | Heartbeat
    | Goodbye
    | GoodbyeAck
)
ToPrefill = Register | Announce | Bootstrap | Abort | Resync | Heartbeat | Goodbye | GoodbyeAck
ToDecode = (
    Registered
    | Begun
    | ChunkDone
    | RoomFailed
    | AbortAck
    | Resync
    | Heartbeat
    | Goodbye
    | GoodbyeAck
)
