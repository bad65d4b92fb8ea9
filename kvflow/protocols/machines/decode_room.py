"""The machine of a room at decode: chunks land in lent pages, and the room ends once (I4)."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machines.tables import ERROR, IGNORE, Cell, Move, Table, rest
from kvflow.protocols.pages.spaces import Counts, counts_fit, counts_sum


class DecodePhase(IntEnum):
    BOOTSTRAPPING = 0  # announced: links come up and pages are taken, but no page is lent yet
    WAITING_FOR_INPUT = 1  # Bootstrap was sent to every rank
    TRANSFERRING = 2  # at least one chunk landed
    DRAINING = 3  # decode ended it and recalled its loans
    SUCCESS = 4
    FAILED = 5  # prefill ended it, or was lost before pages were lent
    ABORTED = 6  # decode ended it, and no page is on loan any more
    LOST = 7  # ended, and some loan is in doubt


class DecodeKind(IntEnum):
    LENT = 0  # the shell lent pages, after every rank was linked
    CHUNK_LANDED = 1
    ALL_LANDED = 2  # the last chunk of every rank landed
    ROOM_FAILED = 3
    ENDED_LOCALLY = 4  # for example, the client left, or a deadline passed
    SOURCE_LOST = 5
    LOANS_ENDED = 6
    LOANS_DOUBTFUL = 7  # every open loan is in doubt


class DecodeCommand(IntEnum):
    SEND_BOOTSTRAP = 0
    RECALL_LOANS = 1
    TELL_LANDED = 2
    TELL_FAILED = 3  # report the error to the room's user
    END = 4


class DecodeEvent(msgspec.Struct, frozen=True, gc=False):
    """One event for a room. Chunks have `rank`, `seq`, `pages` and `last`; endings have `cause`."""

    kind: DecodeKind
    rank: int = 0
    seq: int = 0
    pages: Counts = ()
    last: bool = False
    cause: Cause | None = None


class DecodeRoomState(msgspec.Struct, frozen=True, gc=False):
    """The state that decides the next step: an immutable, hashable value."""

    pages: Counts  # places of each space that each rank must fill
    ranks: int = 1
    phase: DecodePhase = DecodePhase.BOOTSTRAPPING
    next_seq: tuple[int, ...] = (0,)
    filled: tuple[Counts, ...] = ((),)  # by rank
    finished: int = 0  # one bit per rank, set when its last chunk landed
    cause: Cause | None = None


P, K, C = DecodePhase, DecodeKind, DecodeCommand
_FAIL = Move(P.FAILED, (C.TELL_FAILED, C.RECALL_LOANS, C.END))
_RECEIVING: dict[DecodeKind, Cell[DecodePhase, DecodeCommand]] = rest(K, ERROR) | {
    K.CHUNK_LANDED: Move(P.TRANSFERRING),
    K.ALL_LANDED: Move(P.SUCCESS, (C.TELL_LANDED, C.END)),
    K.ROOM_FAILED: _FAIL,
    K.ENDED_LOCALLY: Move(P.DRAINING, (C.TELL_FAILED, C.RECALL_LOANS)),
    K.SOURCE_LOST: Move(P.LOST, (C.TELL_FAILED, C.RECALL_LOANS, C.END)),
}

TABLE: Table[DecodePhase, DecodeKind, DecodeCommand] = Table(
    P,
    K,
    {
        P.BOOTSTRAPPING: rest(K, ERROR)
        | {
            K.LENT: Move(P.WAITING_FOR_INPUT, (C.SEND_BOOTSTRAP,)),
            # No page is lent, so the room ends without draining. RECALL_LOANS withdraws its
            # announcements.
            K.ROOM_FAILED: _FAIL,
            K.ENDED_LOCALLY: Move(P.ABORTED, (C.TELL_FAILED, C.RECALL_LOANS, C.END)),
            K.SOURCE_LOST: _FAIL,
        },
        P.WAITING_FOR_INPUT: _RECEIVING,
        P.TRANSFERRING: _RECEIVING,
        P.DRAINING: rest(K, ERROR)
        | {
            K.ROOM_FAILED: IGNORE,
            K.ENDED_LOCALLY: IGNORE,
            K.SOURCE_LOST: IGNORE,
            K.LOANS_ENDED: Move(P.ABORTED, (C.END,)),
            K.LOANS_DOUBTFUL: Move(P.LOST, (C.END,)),
        },
        # The endpoint drops an ended room at once, so any later event is a mistake in our code.
        P.SUCCESS: rest(K, ERROR),
        P.FAILED: rest(K, ERROR),
        P.ABORTED: rest(K, ERROR),
        P.LOST: rest(K, ERROR),
    },
)

TERMINAL = frozenset({P.SUCCESS, P.FAILED, P.ABORTED, P.LOST})


def opened(pages: Counts, ranks: int) -> DecodeRoomState:
    """Return the initial state of a room."""
    return DecodeRoomState(pages, ranks, next_seq=(0,) * ranks, filled=((0,) * len(pages),) * ranks)


def step(
    room: DecodeRoomState, event: DecodeEvent
) -> tuple[DecodeRoomState, tuple[DecodeCommand, ...]]:
    """Return the next state and the commands to run.

    A repeated chunk, or one that follows a gap, changes nothing: Resync brings what is missing.
    """
    kind = event.kind
    if kind is K.CHUNK_LANDED:
        if (
            room.phase not in (P.WAITING_FOR_INPUT, P.TRANSFERRING)
            or event.seq != room.next_seq[event.rank]
        ):
            return room, ()
        room, kind, event = _count_chunk(room, event)
    move = TABLE.moves[room.phase, kind]
    if move is None:
        return room, ()
    # A room keeps the first cause (I4).
    cause = room.cause if room.cause is not None else event.cause
    return DecodeRoomState(
        room.pages, room.ranks, move.phase, room.next_seq, room.filled, room.finished, cause
    ), move.commands


def _count_chunk(
    room: DecodeRoomState, event: DecodeEvent
) -> tuple[DecodeRoomState, DecodeKind, DecodeEvent]:
    """Count a chunk that arrived in order. If its number of places does not fit in some space, the
    room ends (I8).
    """
    rank, filled = event.rank, event.pages
    if len(filled) == len(room.pages) == 1:
        # Most pools have one space, and the functions below cost as much as the rest of this one.
        count, most = room.filled[rank][0] + filled[0], room.pages[0]
        filled, fits = (count,), count == most if event.last else count <= most
    elif fits := len(filled) == len(room.pages):
        filled = counts_sum(room.filled[rank], filled)
        fits = filled == room.pages if event.last else counts_fit(filled, room.pages)
    if not fits:
        text = (
            f"rank {rank} filled {_said(filled)} pages of {_said(room.pages)} by chunk {event.seq}"
        )
        return (
            room,
            K.ENDED_LOCALLY,
            DecodeEvent(K.ENDED_LOCALLY, cause=Cause(Code.PROTOCOL_ERROR, text)),
        )
    finished = room.finished | (1 << rank if event.last else 0)
    next_seq = (*room.next_seq[:rank], event.seq + 1, *room.next_seq[rank + 1 :])
    counts = (*room.filled[:rank], filled, *room.filled[rank + 1 :])
    room = DecodeRoomState(
        room.pages, room.ranks, room.phase, next_seq, counts, finished, room.cause
    )
    done = finished == (1 << room.ranks) - 1
    return room, K.ALL_LANDED if done else K.CHUNK_LANDED, event


def _said(counts: Counts) -> str:
    """Return the counts of all spaces in words: "3", or "3 + 1" for two spaces."""
    return " + ".join(map(str, counts))
