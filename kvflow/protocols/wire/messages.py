"""The messages between prefill and decode.

One frame is one message: a msgpack array that begins with its tag. A ZMQ message carries one or
more frames. Version 1 is the first wire version.

Arrays grow at the end only: a reader ignores unknown elements, and a new element has a default. A
change that cannot be made in this way needs a new version. `Register` carries the version, and a
prefill that speaks another version refuses it, and names both versions.

Every message names two incarnations: `source` is always prefill's, `target` always decode's,
whichever of them sends it. An incarnation is a random u64 that a process draws at start. Decode's
incarnation also determines the routing id of the link (`codec.routing_id`).

A pool may have several spaces (see `pages.spaces`). `Bootstrap.pages` lists the room's places of
all of them, and `ChunkDone.pages` counts them by space. A prefill rank may have only a part of
decode's pool. `Registered` names this part, and decode checks that all ranks together have all of
the pool.
"""

from __future__ import annotations

from typing import Annotated, NewType

import msgspec
from msgspec import Meta

from kvflow.protocols.errors import Cause
from kvflow.protocols.pages.coverage import Served
from kvflow.protocols.pages.layout import MAX_COMPONENTS, PoolLayout
from kvflow.protocols.pages.spaces import MAX_SPACES
from kvflow.protocols.ports import PlaneAddress

WIRE_VERSION = 1

MAX_FRAME_BYTES = 8 << 20
# Work on this many pages blocks the event loop for some 3 ms. They are enough for a context of a
# million tokens in pages of 2 tokens.
MAX_PAGES_PER_ROOM = 1 << 19
MAX_HANDOFF_BYTES = 1 << 20
MAX_BELIEFS = 4096
MAX_RANKS = 1024
MAX_UNPROVEN = 1 << 17
MAX_SETTLED_RANGES = 1024
MAX_TEXT = 4096
MAX_PACE_MS = 60_000

RoomId = NewType("RoomId", int)
"""The number of a room, an unsigned 64-bit integer. The router, or another party that pairs the two
halves, draws it.
"""
GrantId = NewType("GrantId", int)
"""The number of a grant. It counts up within one decode incarnation. A room that is opened again
under the same number has another grant.
"""
Incarnation = NewType("Incarnation", int)
"""A random number that identifies one life of a process."""
Rank = NewType("Rank", int)


# msgpack integers end at 2**64 - 1, so a room needs no upper bound.
Room = Annotated[RoomId, Meta(ge=0)]
Grant = Annotated[GrantId, Meta(ge=1)]
Life = Annotated[Incarnation, Meta(ge=1)]
RankNumber = Annotated[Rank, Meta(ge=0, lt=MAX_RANKS)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
GrantBound = Annotated[GrantId, Meta(ge=0, le=1 << 40)]
Seq = Annotated[int, Meta(ge=0, le=1 << 32)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
PackedPages = Annotated[bytes, Meta(max_length=4 * MAX_PAGES_PER_ROOM)]
PlaceCounts = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_SPACES)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]


class Register(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=1):
    """decode -> prefill: describes this decode and its pool. Decode sends it when it opens a link,
    and again while prefill does not answer.
    """

    source: Life
    target: Life
    wire_version: int
    layout: PoolLayout
    address: PlaneAddress
    # Prefill begins no grant below this one, because it may have known and forgotten such grants.
    fresh_from: GrantBound


class Registered(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=2):
    """prefill -> decode: the answer to Register. If `refusal` is empty, prefill accepts. Otherwise
    it is the reason for the refusal.

    `source` is the incarnation that answers, and `asked` the one to which Register was addressed.
    Decode may know two incarnations at one address, and must not take the answer about one for an
    answer about the other. `fresh_from` repeats that field of the newest Register that prefill
    received. Only an answer with decode's latest `fresh_from` brings a silent link up. `served` is
    the part of decode's pool that this rank sends; it is empty in a refusal. If the two pools have
    pages of different sizes, `page_sizes` has the smaller size of each space (0 for rows): this
    rank counts the pages of its chunks in pages of these sizes.
    """

    source: Life
    target: Life
    wire_version: int
    rank: RankNumber
    refusal: Text
    address: PlaneAddress | None = None
    asked: Annotated[Incarnation, Meta(ge=0)] = Incarnation(0)
    fresh_from: GrantBound = GrantId(0)
    served: Annotated[tuple[Served, ...], Meta(max_length=MAX_COMPONENTS)] = ()
    page_sizes: Annotated[tuple[Count, ...], Meta(max_length=MAX_SPACES)] = ()


class Announce(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=10):
    """decode -> every prefill rank: decode will offer pages for a room under this grant as soon as
    it has them, or abort the room.
    """

    room: Room
    grant: Grant
    source: Life
    target: Life


class Bootstrap(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=3):
    """decode -> every prefill rank: these pages are on loan to the receiving rank, for this room.

    Decode already has the first `prefix_tokens` of the prompt: a whole number of pages, or the
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
    """prefill -> decode: every write of chunk `seq` landed, and filled `pages` places of each
    space, in pages of the sizes that `Registered.page_sizes` names.

    `last` proves that the rank writes no more for this grant. `checksum` is the checksum of the
    source pages (see `ports.Checksums`). It is empty if transfers are not verified.
    """

    room: Room
    grant: Grant
    source: Life
    target: Life
    rank: RankNumber
    seq: Seq
    pages: PlaceCounts
    last: bool = False
    handoff: Annotated[bytes, Meta(max_length=MAX_HANDOFF_BYTES)] = b""
    checksum: Annotated[bytes, Meta(max_length=32)] = b""


class RoomFailed(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=5):
    """prefill -> decode: this room will not succeed. Writes may still run. An AbortAck follows."""

    room: Room
    grant: Grant
    source: Life
    target: Life
    rank: RankNumber
    cause: Cause


class Abort(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=6):
    """decode -> prefill, repeated until acknowledged: stop writing for this grant, or forget its
    announcement, and acknowledge.
    """

    room: Room
    grant: Grant
    source: Life
    target: Life
    cause: Cause


class AbortAck(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=7):
    """prefill -> decode: no write for this grant runs. If `drained`, all submitted bytes landed."""

    room: Room
    grant: Grant
    source: Life
    target: Life
    rank: RankNumber
    drained: bool


class Belief(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A room that decode asks about. `next_seq` is the number of the first chunk it lacks."""

    room: Room
    grant: Grant
    next_seq: Seq


class Resync(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=8):
    """decode -> prefill: rooms that make no progress. Prefill sends their missing messages again.

    prefill -> decode: the rooms of such a Resync whose grants prefill does not know. Decode sends
    Bootstrap for them again.
    """

    source: Life
    target: Life
    rooms: Annotated[tuple[Belief, ...], Meta(max_length=MAX_BELIEFS)]


class Begun(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=13):
    """prefill -> decode: the engine's half of an announced room has a place for its whole prompt,
    so pages that decode lends now do not lie idle until another room ends. From then on, prefill
    answers every repeated Announce of the room with this message.
    """

    room: Room
    grant: Grant
    source: Life
    target: Life
    rank: RankNumber


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=9):
    """Both ways: the sender is alive.

    From decode: every grant of this pair below `settled_below` has ended at decode, and prefill
    need not repeat any message about it. The same holds for the grants in `settled`, half-open
    ranges above the first grant that has not ended. If there are too many ranges, the next
    heartbeats carry the others.

    From prefill: while decode has no room on this link, a heartbeat every `pace_ms` milliseconds
    is enough, and prefill's own come no sooner. 0 means that prefill asks for nothing.
    """

    source: Life
    target: Life
    settled_below: GrantBound = GrantId(0)
    settled: Annotated[
        tuple[tuple[GrantBound, GrantBound], ...], Meta(max_length=MAX_SETTLED_RANGES)
    ] = ()
    pace_ms: Annotated[int, Meta(ge=0, le=MAX_PACE_MS)] = 0


class Goodbye(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=11):
    """Both ways, repeated until acknowledged: this incarnation closes, and begins no more rooms
    with the other one.

    From prefill it proves, for every grant of this decode except those in `unproven`, that every
    submitted write landed and no other will be submitted. That includes grants that prefill never
    received. From decode it means that decode awaits no more proof.
    """

    source: Life
    target: Life
    unproven: Annotated[tuple[Grant, ...], Meta(max_length=MAX_UNPROVEN)] = ()


class GoodbyeAck(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=12):
    """Both ways: the sender received the other's Goodbye. It does not prove that writes ended."""

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
