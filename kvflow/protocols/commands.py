"""What an endpoint asks its shell to do.

Shells run commands in order; none of them decides anything.

An engine without an event loop that drives an endpoint by itself does the same: see
`examples/bare_endpoints.py`.
"""

from __future__ import annotations

import msgspec

from kvflow.protocols.errors import Cause
from kvflow.protocols.pages.coverage import Served
from kvflow.protocols.pages.layout import PageIndices, PoolLayout
from kvflow.protocols.ports import PlaneAddress
from kvflow.protocols.wire.messages import GrantId, Incarnation


class PeerKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """One prefill rank as decode knows it: who it says it is, and where.

    Either alone can be claimed by another.
    """

    incarnation: Incarnation
    control: str  # "tcp://host:port"


# --- decode


class SendToPrefill(msgspec.Struct, frozen=True, gc=False):
    peer: PeerKey
    frame: bytes
    # An Abort, for whose answer pages wait: send it before what follows is run.
    at_once: bool = False


class Dial(msgspec.Struct, frozen=True, gc=False):
    """Connect to `peer.control`; what is received there is fed in with this key."""

    peer: PeerKey


class HangUp(msgspec.Struct, frozen=True, gc=False):
    """Close the connection; what was sent just before still goes out."""

    peer: PeerKey


class WatchWriter(msgspec.Struct, frozen=True):
    """Await the data plane's fence for this writer, then call `writer_died`."""

    peer: PeerKey
    address: PlaneAddress


class StopWatch(msgspec.Struct, frozen=True, gc=False):
    """The peer owes nothing any more; from here on `writer_died` is not to be called."""

    peer: PeerKey


class WatchEarlierWriter(msgspec.Struct, frozen=True):
    """Await the data plane's fence for a writer to which an earlier node over this pool lent pages,
    then call `earlier_writer_died`. Both endpoints ask for it."""

    writer: int
    address: PlaneAddress


class StopEarlierWatch(msgspec.Struct, frozen=True):
    """This writer's loans have all ended: end its watch, if there is one, and tell other nodes over
    the pool.
    """

    writer: int
    incarnation: Incarnation
    address: PlaneAddress | None


class Linked(msgspec.Struct, frozen=True, gc=False):
    """Every rank of the room is registered: take its pages and call `lend`, or `close_room` when
    there are none.
    """

    grant: GrantId


class VerifyChunk(msgspec.Struct, frozen=True, gc=False):
    """Compute the checksum of what the rank has `served` of pages `first` to `first + count` of the
    room, and bring it to where it is used when that is not where prefill writes; then call
    `chunk_summed`."""

    grant: GrantId
    rank: int  # index among the room's ranks
    seq: int
    first: int
    count: int
    served: tuple[Served, ...]


class StopVerifying(msgspec.Struct, frozen=True, gc=False):
    """The room has ended: its checksums are of no use."""

    grant: GrantId


class RoomBegun(msgspec.Struct, frozen=True, gc=False):
    """Every rank has a place for the whole prompt of a room that was announced: its pages may be
    lent.
    """

    grant: GrantId


class RoomLanded(msgspec.Struct, frozen=True, gc=False):
    """Every page from every rank is there: the room's user may read them."""

    grant: GrantId
    handoff: bytes


class RoomFailed(msgspec.Struct, frozen=True, gc=False):
    """The room's user has its error; the room itself may still wait for its loans."""

    grant: GrantId
    cause: Cause


class RoomEnded(msgspec.Struct, frozen=True, gc=False):
    """The room is in no table any more."""

    grant: GrantId


class QuarantinePages(msgspec.Struct, frozen=True, gc=False):
    """The room has ended, and some rank may still write into its pages."""

    grant: GrantId


class FreePages(msgspec.Struct, frozen=True, gc=False):
    """Nothing can write into the room's pages any more.

    The only way back for a page that was lent, by this node or by an earlier one over the same
    pool."""

    grant: GrantId


DecodeCommand = (
    SendToPrefill
    | Dial
    | HangUp
    | WatchWriter
    | StopWatch
    | WatchEarlierWriter
    | StopEarlierWatch
    | Linked
    | VerifyChunk
    | StopVerifying
    | RoomBegun
    | RoomLanded
    | RoomFailed
    | RoomEnded
    | QuarantinePages
    | FreePages
)


# --- prefill


class SendToDecode(msgspec.Struct, frozen=True, gc=False):
    peer_id: bytes  # its routing id
    frame: bytes
    at_once: bool = False  # an AbortAck, for which pages wait: send it before what follows is run


class OpenRoute(msgspec.Struct, frozen=True):
    """Connect the data plane to a decode's pool, then call `route_opened`, `route_refused` or
    `route_short`. Where `route_opened` returns False, close the route."""

    peer: Incarnation
    address: PlaneAddress
    layout: PoolLayout


class CloseRoute(msgspec.Struct, frozen=True, gc=False):
    """No write runs on it. The watch of this decode's process ends too."""

    peer: Incarnation


class WatchProcess(msgspec.Struct, frozen=True):
    """Await the end of a decode's process, then call `peer_died`."""

    peer: Incarnation
    address: PlaneAddress


class StartWrite(msgspec.Struct, frozen=True, gc=False):
    """Write the source pages, which are held, onto the target's pages, then let go of them and call
    `write_ended`.
    """

    write: int
    serial: int  # of the room
    peer: Incarnation
    source_pages: PageIndices
    target_pages: PageIndices


class CancelWrite(msgspec.Struct, frozen=True, gc=False):
    """Submit nothing more of it; `write_ended` follows all the same."""

    write: int


class RoomMatched(msgspec.Struct, frozen=True, gc=False):
    """Decode's half is here; it has the first `prefix_tokens` of the prompt already."""

    serial: int
    prefix_tokens: int


class RoomDone(msgspec.Struct, frozen=True, gc=False):
    """Every write has landed."""

    serial: int


class RoomStopped(msgspec.Struct, frozen=True, gc=False):
    """The engine has its error; nothing more can be sent, though writes may still be draining."""

    serial: int
    cause: Cause


class RoomReleased(msgspec.Struct, frozen=True, gc=False):
    """The room is in no table any more, and none of its writes runs: its source pages are free to
    be used.
    """

    serial: int


PrefillCommand = (
    SendToDecode
    | OpenRoute
    | CloseRoute
    | WatchProcess
    | StartWrite
    | CancelWrite
    | RoomMatched
    | RoomDone
    | RoomStopped
    | RoomReleased
    | WatchEarlierWriter
    | StopEarlierWatch
    | FreePages
)
