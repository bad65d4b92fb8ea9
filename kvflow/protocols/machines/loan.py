"""One loan: decode's pages in the hands of one prefill rank, under one grant (I2).

Rooms end in time, loans end on proof. A loan outlives its room where proof is missing; while it does, its pages are in
quarantine. Proof is a landed last chunk, a drained acknowledgement, or the data plane's fence; nothing else is.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from kvflow.protocols.machines.tables import ERROR, IGNORE, Move, Table, rest


class LoanKey(NamedTuple):
    """Who may write, and under which promise."""

    source: int
    rank: int
    grant: int


class LoanPhase(IntEnum):
    LENT = 0
    RECALLED = 1  # Abort sent and repeated until answered
    DOUBTFUL = 2  # the source cannot say, or is gone: only late proof or the fence ends it
    RETURNED = 3


class LoanKind(IntEnum):
    RECALL = 0  # the room ended without this rank's proof
    LANDED = 1  # ChunkDone(last)
    DRAINED = 2  # AbortAck(drained)
    UNPROVEN = 3  # AbortAck(unproven)
    SOURCE_LOST = 4
    SOURCE_BACK = 5  # the same incarnation answers again after it was lost
    REPEAT_DUE = 6
    FENCED = 7


class LoanCommand(IntEnum):
    SEND_ABORT = 0
    AWAIT_FENCE = 1
    RETURN = 2


P, K, C = LoanPhase, LoanKind, LoanCommand
_RETURN = Move(P.RETURNED, (C.RETURN,))

TABLE: Table[LoanPhase, LoanKind, LoanCommand] = Table(
    P,
    K,
    {
        # What happens to a source ends its rooms first, and that recalls their loans; only recalled ones are repeated.
        # No room is opened on a source that is lost, and a recalled loan is in doubt from then on.
        P.LENT: rest(K, ERROR)
        | {
            K.RECALL: Move(P.RECALLED, (C.SEND_ABORT,)),
            K.LANDED: _RETURN,
            K.DRAINED: _RETURN,
            K.UNPROVEN: Move(P.DOUBTFUL, (C.AWAIT_FENCE,)),
        },
        P.RECALLED: rest(K, ERROR)
        | {
            K.LANDED: _RETURN,
            K.DRAINED: _RETURN,
            K.UNPROVEN: Move(P.DOUBTFUL, (C.AWAIT_FENCE,)),
            K.SOURCE_LOST: Move(P.DOUBTFUL, (C.AWAIT_FENCE,)),
            K.REPEAT_DUE: Move(P.RECALLED, (C.SEND_ABORT,)),
        },
        P.DOUBTFUL: rest(K, ERROR)
        | {
            K.RECALL: IGNORE,
            K.DRAINED: _RETURN,
            K.UNPROVEN: IGNORE,
            K.SOURCE_LOST: IGNORE,
            K.SOURCE_BACK: Move(P.RECALLED, (C.SEND_ABORT,)),  # asked again until it answers
            K.FENCED: _RETURN,
        },
        P.RETURNED: rest(K, ERROR),  # out of the ledger
    },
)


def step(phase: LoanPhase, kind: LoanKind) -> tuple[LoanPhase, tuple[LoanCommand, ...]]:
    """Next phase and what to do now; a phase is the whole state of a loan."""
    move = TABLE.move(phase, kind)
    return (phase, ()) if move is None else move
