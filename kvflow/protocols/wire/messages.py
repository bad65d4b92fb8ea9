"""What prefill and decode say to each other. One ZMQ frame is one message: a msgpack array that begins with its tag.

Wire history
    1   first version; later ChunkDone.checksum, Registered.asked

Arrays grow at the end only: a reader ignores elements it does not know, and a new element has a default. What cannot
be said that way takes a new version; `Register` carries it, and a prefill that does not speak it refuses with both.

Every message names the incarnation it comes from and the one it is meant for. An incarnation is a random u64 that a
process draws at start; it is also the routing id of the link. `source` is always prefill's, `target` always decode's.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvflow.protocols.errors import Cause
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import Endpoint

WIRE_VERSION = 1

MAX_FRAME_BYTES = 8 << 20
MAX_PAGES_PER_ROOM = 1 << 20
MAX_HANDOFF_BYTES = 1 << 20
MAX_BELIEFS = 4096
MAX_RANKS = 1024
MAX_TEXT = 4096

Room = Annotated[int, Meta(ge=0)]  # u64, 0 is legal; msgpack itself ends at 2**64 - 1
Grant = Annotated[int, Meta(ge=1)]
Incarnation = Annotated[int, Meta(ge=1)]
Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Seq = Annotated[int, Meta(ge=0, le=1 << 32)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
PackedPages = Annotated[bytes, Meta(max_length=4 * MAX_PAGES_PER_ROOM)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]


class Register(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """decode -> prefill, once per pair and again after silence: who I am and what my pool looks like."""

    source: Incarnation
    target: Incarnation
    wire_version: int
    layout: PoolLayout
    endpoint: Endpoint
    settled_below: Count = 0  # no grant below this may begin: prefill may have known, and forgotten, this decode


class Registered(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """prefill -> decode: accepted (`refusal` empty), or what differs. `source` is who really answers here, `asked` who
    was asked: a decode that knows two lives of one address must not take the answer to one for that to the other."""

    source: Incarnation
    target: Incarnation
    wire_version: int
    rank: Rank
    refusal: Text
    endpoint: Endpoint | None = None
    asked: Annotated[int, Meta(ge=0)] = 0


class Bootstrap(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """decode -> every prefill rank: these pages are on loan to you for this room."""

    room: Room
    grant: Grant
    source: Incarnation
    target: Incarnation
    pages: PackedPages
    prompt_tokens: Count
    prompt_digest: Digest
    prefix_tokens: Count = 0


class ChunkDone(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """prefill -> decode: every write of chunk `seq` has landed; it filled `pages` pages. `last` is the rank's proof.

    `checksum` is that of the source pages (see `ports.Checksums`), empty where transfers are not verified.
    """

    room: Room
    grant: Grant
    source: Incarnation
    target: Incarnation
    rank: Rank
    seq: Seq
    pages: Count
    last: bool = False
    handoff: Annotated[bytes, Meta(max_length=MAX_HANDOFF_BYTES)] = b""
    checksum: Annotated[bytes, Meta(max_length=32)] = b""


class RoomFailed(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """prefill -> decode: this room will not succeed. Proves nothing about writes; an AbortAck follows."""

    room: Room
    grant: Grant
    source: Incarnation
    target: Incarnation
    rank: Rank
    cause: Cause


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """decode -> prefill: stop writing for this grant and say when you have; repeated until acknowledged."""

    room: Room
    grant: Grant
    source: Incarnation
    target: Incarnation
    cause: Cause


class AbortAck(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """prefill -> decode: nothing of this grant runs any more; `drained` when all that was submitted has landed."""

    room: Room
    grant: Grant
    source: Incarnation
    target: Incarnation
    rank: Rank
    drained: bool


class Belief(msgspec.Struct, frozen=True, array_like=True):
    """One open room as one side sees it; `next_seq` is the first chunk not heard of."""

    room: Room
    grant: Grant
    next_seq: Seq


class Resync(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """decode -> prefill: rooms that made no progress; what they missed is said again. prefill -> decode: grants asked
    about that prefill has never heard of; their Bootstrap is sent again."""

    source: Incarnation
    target: Incarnation
    rooms: Annotated[tuple[Belief, ...], Meta(max_length=MAX_BELIEFS)]


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Both ways. From decode: every grant below `settled_below` has ended there, nothing of it need be said again."""

    source: Incarnation
    target: Incarnation
    settled_below: Count = 0


Message = Register | Registered | Bootstrap | ChunkDone | RoomFailed | Abort | AbortAck | Resync | Heartbeat
ToPrefill = Register | Bootstrap | Abort | Resync | Heartbeat
ToDecode = Registered | ChunkDone | RoomFailed | AbortAck | Resync | Heartbeat
