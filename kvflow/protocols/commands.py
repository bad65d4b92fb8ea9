"""Commands that an endpoint returns to its shell, which runs them in order and decides nothing.

An engine without an event loop can drive an endpoint directly and run the commands itself: see
`examples/bare_endpoints.py`.
"""

from __future__ import annotations

import msgspec

from kvflow.protocols.errors import Cause
from kvflow.protocols.pages.coverage import Served
from kvflow.protocols.pages.fine import FinePages
from kvflow.protocols.pages.layout import PageIndices, PoolLayout
from kvflow.protocols.pages.spaces import Counts, Span
from kvflow.protocols.ports import PlaneAddress
from kvflow.protocols.wire.messages import GrantId, Incarnation


class PeerKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """Identifies one prefill rank at decode. Another process could claim the same incarnation or
    the same control endpoint, so the key has both.
    """

    incarnation: Incarnation
    control: str  # "tcp://host:port"


# --- decode


class SendToPrefill(msgspec.Struct, frozen=True, gc=False):
    peer: PeerKey
    frame: bytes
    # True for an Abort: pages wait for its answer, so it is sent before the next command runs.
    at_once: bool = False


class Dial(msgspec.Struct, frozen=True, gc=False):
    """Connect to `peer.control`. Pass every frame received there to `receive`, with `peer`."""

    peer: PeerKey


class HangUp(msgspec.Struct, frozen=True, gc=False):
    """Close the connection. Frames that were sent before still go out."""

    peer: PeerKey


class WatchWriter(msgspec.Struct, frozen=True):
    """Await the data plane's fence for this writer, then call `writer_died`."""

    peer: PeerKey
    address: PlaneAddress


class StopWatch(msgspec.Struct, frozen=True, gc=False):
    """Stop watching a peer that has no more loans. Do not call `writer_died` afterwards."""

    peer: PeerKey


class WatchEarlierWriter(msgspec.Struct, frozen=True):
    """Await the data plane's fence for this writer, then call `earlier.writer_died` on the
    endpoint. An earlier node over this pool lent pages to the writer. Both decode and prefill issue
    this command.
    """

    writer: int
    address: PlaneAddress


class StopEarlierWatch(msgspec.Struct, frozen=True):
    """Stop watching this writer, if it is watched, and notify other nodes over the pool that the
    writer ended.
    """

    writer: int
    incarnation: Incarnation
    address: PlaneAddress | None


class Linked(msgspec.Struct, frozen=True, gc=False):
    """Take pages for the room and call `lend`: every rank of the room is linked now. If no pages
    are free, call `close_room` instead.
    """

    grant: GrantId


class VerifyChunk(msgspec.Struct, frozen=True, gc=False):
    """Compute the checksum of what this rank wrote, then call `chunk_summed`. The rank wrote the
    parts `served` of the places at the positions `spans` in the room's list. A decode that lends
    host memory also copies these parts to the room's own pages. If `fine` is given, prefill's pages
    have another size, and `spans` are positions among the room's fine pages.
    """

    grant: GrantId
    rank: int  # index among the room's ranks
    seq: int
    spans: tuple[Span, ...]
    served: tuple[Served, ...]
    fine: FinePages | None = None


class StopVerifying(msgspec.Struct, frozen=True, gc=False):
    """Cancel the checksums of a room that ended."""

    grant: GrantId


class RoomBegun(msgspec.Struct, frozen=True, gc=False):
    """Report that every rank has a place for the whole prompt of an announced room."""

    grant: GrantId


class RoomLanded(msgspec.Struct, frozen=True, gc=False):
    """Report that every page from every rank landed, so the room's user may read the pages."""

    grant: GrantId
    handoff: bytes


class RoomFailed(msgspec.Struct, frozen=True, gc=False):
    """Report the error to the room's user. The room itself may still wait for its loans to end."""

    grant: GrantId
    cause: Cause


class RoomEnded(msgspec.Struct, frozen=True, gc=False):
    """Forget the room: the endpoint removed it from its tables."""

    grant: GrantId


class QuarantinePages(msgspec.Struct, frozen=True, gc=False):
    """Keep the pages of a room that ended: some rank may still write into them."""

    grant: GrantId


class FreePages(msgspec.Struct, frozen=True, gc=False):
    """Free the room's pages: no rank can write into them any more. No other command frees pages
    lent by this node, or by an earlier node over the same pool.
    """

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
    peer_id: bytes  # routing id of decode's connection
    frame: bytes
    # True for an AbortAck: decode's pages wait for it, so it is sent before the next command runs.
    at_once: bool = False


class OpenRoute(msgspec.Struct, frozen=True):
    """Connect the data plane to a decode's pool, then call `route_opened`, `route_refused` or
    `route_short`. If `route_opened` returns False, close the route.
    """

    peer: Incarnation
    address: PlaneAddress
    layout: PoolLayout


class CloseRoute(msgspec.Struct, frozen=True, gc=False):
    """Close the route to a decode and stop watching its process. No write runs on the route."""

    peer: Incarnation


class WatchProcess(msgspec.Struct, frozen=True):
    """Await the end of a decode's process, then call `peer_died`."""

    peer: Incarnation
    address: PlaneAddress


class StartWrite(msgspec.Struct, frozen=True, gc=False):
    """Write the source pages to the target's pages. When the write ends, release the hold on the
    source pages and call `write_ended`.

    If the two pools have pages of different sizes, both lists number fine pages of `page_sizes`
    tokens (see `pages.fine`), and `held_pages` are the pages of our pool that they are in.
    """

    write: int
    serial: int  # the room's serial number
    peer: Incarnation
    source_pages: PageIndices
    target_pages: PageIndices
    page_sizes: Counts = ()
    held_pages: PageIndices | None = None


class CancelWrite(msgspec.Struct, frozen=True, gc=False):
    """Submit no more blocks of the write. `write_ended` must still be called."""

    write: int


class RoomMatched(msgspec.Struct, frozen=True, gc=False):
    """Report that decode's half arrived. Decode already has the first `prefix_tokens` tokens."""

    serial: int
    prefix_tokens: int


class RoomDone(msgspec.Struct, frozen=True, gc=False):
    """Report success to the engine: every write landed."""

    serial: int


class RoomStopped(msgspec.Struct, frozen=True, gc=False):
    """Report the error to the engine. No chunk can be sent any more; writes may still drain."""

    serial: int
    cause: Cause


class RoomReleased(msgspec.Struct, frozen=True, gc=False):
    """Report that all writes ended: none reads the room's source pages any more."""

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
