"""The machine of a room at prefill, where the engine's half and decode's half meet.

A room ends only after its writes end (I12).
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from kvflow.protocols.errors import Cause
from kvflow.protocols.machines.tables import ERROR, IGNORE, Move, Table, rest
from kvflow.protocols.ports import WriteOutcome


class PrefillPhase(IntEnum):
    EXPECTED = 0  # the engine's half arrived; decode has sent no message about the room yet
    ANNOUNCED = 1  # the engine's half arrived, and decode announced that it will offer pages
    BOOTSTRAPPED = 2  # decode offered pages; the engine's half has not arrived yet
    WAITING_FOR_INPUT = 3  # both halves arrived, and no write runs
    TRANSFERRING = 4
    DRAINING = 5  # stopped, and the writes that still run are awaited
    SUCCESS = 6
    FAILED = 7  # ended by this side while no write ran
    ABORTED = 8  # ended by either side, and every write is drained
    LOST = 9  # ended, and some write is unproven


class PrefillKind(IntEnum):
    ANNOUNCED = 0
    MATCHED = 1
    MISMATCHED = 2  # the halves do not agree on the prompt, or decode's offer cannot be used
    CHUNK_QUEUED = 3
    # A chunk landed while other writes run. In DRAINING, the write may have had any outcome.
    CHUNK_LANDED = 4
    IDLE = 5  # a chunk landed, no write runs, and more chunks will come
    ALL_LANDED = 6
    WRITE_FAILED = 7  # a write was cancelled or is unproven, while others run
    ALL_STOPPED = 8  # the last running write was cancelled, and no write is unproven
    ALL_DOUBTFUL = 9  # the last running write ended, and some write is unproven
    ABORT_RECEIVED = 10
    ENDED_LOCALLY = 11
    TARGET_LOST = 12
    DRAINED = 13
    UNPROVEN = 14


class PrefillCommand(IntEnum):
    TELL_MATCHED = 0
    START_WRITE = 1
    SEND_CHUNK_DONE = 2
    CANCEL_WRITES = 3
    SEND_FAILED = 4
    SEND_DRAINED = 5
    SEND_UNPROVEN = 6
    TELL_SUCCESS = 7
    TELL_ENDED = 8
    END = 9


class PrefillEvent(msgspec.Struct, frozen=True, gc=False):
    """One event for a room. `last` is True when the room's last chunk is queued.

    When a write ends, `kind` is None, and `step` derives it from `outcome` and the state of the
    room.
    """

    kind: PrefillKind | None
    last: bool = False
    outcome: WriteOutcome | None = None
    cause: Cause | None = None


class PrefillRoomState(msgspec.Struct, frozen=True, gc=False):
    """The state that decides the next step: an immutable, hashable value."""

    phase: PrefillPhase
    queued: int = 0
    ended: int = 0  # writes that ended, whatever their outcome
    last_queued: bool = False
    doubt: bool = False
    cause: Cause | None = None


P, K, C = PrefillPhase, PrefillKind, PrefillCommand
_REFUSE = Move(P.FAILED, (C.SEND_FAILED, C.SEND_DRAINED, C.TELL_ENDED, C.END))
_ABORT = Move(P.ABORTED, (C.SEND_DRAINED, C.TELL_ENDED, C.END))

TABLE: Table[PrefillPhase, PrefillKind, PrefillCommand] = Table(
    P,
    K,
    {
        P.EXPECTED: rest(K, ERROR)
        | {
            K.ANNOUNCED: Move(P.ANNOUNCED),
            K.MATCHED: Move(P.WAITING_FOR_INPUT, (C.TELL_MATCHED,)),
            K.MISMATCHED: _REFUSE,
            K.ENDED_LOCALLY: Move(P.FAILED, (C.TELL_ENDED, C.END)),
        },
        P.ANNOUNCED: rest(K, ERROR)
        | {
            K.MATCHED: Move(P.WAITING_FOR_INPUT, (C.TELL_MATCHED,)),
            K.MISMATCHED: _REFUSE,
            K.ABORT_RECEIVED: _ABORT,
            K.ENDED_LOCALLY: _REFUSE,
            K.TARGET_LOST: _REFUSE,
        },
        P.BOOTSTRAPPED: rest(K, ERROR)
        | {
            K.MATCHED: Move(P.WAITING_FOR_INPUT, (C.TELL_MATCHED,)),
            K.MISMATCHED: _REFUSE,
            K.ABORT_RECEIVED: Move(P.ABORTED, (C.SEND_DRAINED, C.END)),
            K.ENDED_LOCALLY: Move(P.FAILED, (C.SEND_FAILED, C.SEND_DRAINED, C.END)),
            K.TARGET_LOST: Move(P.FAILED, (C.SEND_FAILED, C.SEND_DRAINED, C.END)),
        },
        P.WAITING_FOR_INPUT: rest(K, ERROR)
        | {
            K.CHUNK_QUEUED: Move(P.TRANSFERRING, (C.START_WRITE,)),
            K.ABORT_RECEIVED: _ABORT,
            K.ENDED_LOCALLY: _REFUSE,
            K.TARGET_LOST: _REFUSE,
        },
        P.TRANSFERRING: rest(K, ERROR)
        | {
            K.CHUNK_QUEUED: Move(P.TRANSFERRING, (C.START_WRITE,)),
            K.CHUNK_LANDED: Move(P.TRANSFERRING, (C.SEND_CHUNK_DONE,)),
            K.IDLE: Move(P.WAITING_FOR_INPUT, (C.SEND_CHUNK_DONE,)),
            K.ALL_LANDED: Move(P.SUCCESS, (C.SEND_CHUNK_DONE, C.TELL_SUCCESS, C.END)),
            K.WRITE_FAILED: Move(P.DRAINING, (C.SEND_FAILED, C.TELL_ENDED, C.CANCEL_WRITES)),
            K.ALL_STOPPED: Move(P.ABORTED, (C.SEND_FAILED, C.SEND_DRAINED, C.TELL_ENDED, C.END)),
            K.ALL_DOUBTFUL: Move(P.LOST, (C.SEND_FAILED, C.SEND_UNPROVEN, C.TELL_ENDED, C.END)),
            K.ABORT_RECEIVED: Move(P.DRAINING, (C.TELL_ENDED, C.CANCEL_WRITES)),
            K.ENDED_LOCALLY: Move(P.DRAINING, (C.SEND_FAILED, C.TELL_ENDED, C.CANCEL_WRITES)),
            # Decode may merely be silent, so prefill still issues RoomFailed, keeps it, and repeats
            # it if decode comes back.
            K.TARGET_LOST: Move(P.DRAINING, (C.SEND_FAILED, C.TELL_ENDED, C.CANCEL_WRITES)),
        },
        P.DRAINING: rest(K, ERROR)
        | {
            K.CHUNK_LANDED: IGNORE,
            K.ABORT_RECEIVED: IGNORE,
            K.ENDED_LOCALLY: IGNORE,
            K.DRAINED: Move(P.ABORTED, (C.SEND_DRAINED, C.END)),
            K.UNPROVEN: Move(P.LOST, (C.SEND_UNPROVEN, C.END)),
        },
        # The endpoint drops an ended room at once, so an event for one is a mistake in our code.
        P.SUCCESS: rest(K, ERROR),
        P.FAILED: rest(K, ERROR),
        P.ABORTED: rest(K, ERROR),
        P.LOST: rest(K, ERROR),
    },
)

TERMINAL = frozenset({P.SUCCESS, P.FAILED, P.ABORTED, P.LOST})


def step(
    room: PrefillRoomState, event: PrefillEvent
) -> tuple[PrefillRoomState, tuple[PrefillCommand, ...]]:
    """Return the next state and the commands to run."""
    queued, ended, last = room.queued, room.ended, room.last_queued
    doubt, kind = room.doubt, event.kind
    if kind is K.CHUNK_QUEUED:
        queued, last = queued + 1, last or event.last
    elif kind is None:
        ended += 1
        doubt = doubt or event.outcome is WriteOutcome.UNPROVEN
        kind = _end_of_write(
            room.phase, event.outcome, running=queued - ended, last=last, doubt=doubt
        )
    move = TABLE.moves[room.phase, kind]
    if move is None:
        return PrefillRoomState(room.phase, queued, ended, last, doubt, room.cause), ()
    # A room keeps the first cause (I4).
    cause = room.cause if room.cause is not None else event.cause
    return PrefillRoomState(move.phase, queued, ended, last, doubt, cause), move.commands


def _end_of_write(
    phase: PrefillPhase, outcome: WriteOutcome | None, *, running: int, last: bool, doubt: bool
) -> PrefillKind:
    """Return the kind of the event for a write that ended. The endpoint reports ended writes in the
    order in which they were queued.
    """
    if phase is P.DRAINING:
        if running:
            return K.CHUNK_LANDED
        return K.UNPROVEN if doubt else K.DRAINED
    if outcome is not WriteOutcome.LANDED:
        if running:
            return K.WRITE_FAILED
        return K.ALL_DOUBTFUL if doubt else K.ALL_STOPPED
    if running:
        return K.CHUNK_LANDED
    return K.ALL_LANDED if last else K.IDLE
