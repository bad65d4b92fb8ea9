"""One loan: decode's pages in the hands of one prefill rank, under one grant (I2).

Rooms end in time, loans end on proof. A loan outlives its room where proof is missing; while it
does, its pages are in quarantine. Proof is a landed last chunk, a drained acknowledgement, or the
data plane's fence; nothing else is. Before its pages are offered a loan is only announced: no rank
can write, so nothing has to be proven.
"""

from __future__ import annotations

from enum import IntEnum

from kvflow.protocols.machines.tables import ERROR, IGNORE, Move, Table, rest


class LoanPhase(IntEnum):
    ANNOUNCED = 0  # the rank knows of the room; no page has been offered
    LENT = 1
    WITHDRAWN = 2  # ended before any page was offered; Abort sent and repeated until acknowledged
    RECALLED = 3  # Abort sent and repeated until acknowledged
    DOUBTFUL = 4  # the source cannot say, or is gone: only late proof or the fence ends it
    # The rank has ended the grant, and every write has landed; why, the room has not been told yet.
    PROVEN = 5
    RETURNED = 6


class LoanKind(IntEnum):
    LEND = 0  # Bootstrap is sent
    RECALL = 1  # the room ended without this rank's proof
    LANDED = 2  # ChunkDone(last)
    DRAINED = 3  # AbortAck(drained)
    UNPROVEN = 4  # AbortAck(unproven), about pages that can be written
    SOURCE_LOST = 5
    SOURCE_BACK = 6  # the same incarnation answers again after it was lost
    REPEAT_DUE = 7
    FENCED = 8


class LoanCommand(IntEnum):
    SEND_ABORT = 0
    RETURN = 1


P, K, C = LoanPhase, LoanKind, LoanCommand
# Pages were offered, and nothing has proven an end of it yet.
WRITABLE = frozenset({P.LENT, P.RECALLED, P.DOUBTFUL})
_RETURN = Move(P.RETURNED, (C.RETURN,))

TABLE: Table[LoanPhase, LoanKind, LoanCommand] = Table(
    P,
    K,
    {
        P.ANNOUNCED: rest(K, ERROR)
        | {
            K.LEND: Move(P.LENT),
            K.RECALL: Move(P.WITHDRAWN, (C.SEND_ABORT,)),
            K.DRAINED: IGNORE,  # prefill has refused; its RoomFailed ends the room
        },
        # What happens to a source ends its rooms first, and that recalls their loans; only recalled
        # ones are repeated. No room is opened on a source that is lost, and a recalled loan is in
        # doubt from then on.
        P.LENT: rest(K, ERROR)
        | {
            K.RECALL: Move(P.RECALLED, (C.SEND_ABORT,)),
            K.LANDED: _RETURN,
            # Its RoomFailed was lost, and must be asked for: the grant is not settled.
            K.DRAINED: Move(P.PROVEN),
            K.UNPROVEN: Move(P.DOUBTFUL),
        },
        P.WITHDRAWN: rest(K, ERROR)
        | {
            K.DRAINED: _RETURN,
            K.SOURCE_LOST: _RETURN,
            K.REPEAT_DUE: Move(P.WITHDRAWN, (C.SEND_ABORT,)),
        },
        P.RECALLED: rest(K, ERROR)
        | {
            K.LANDED: _RETURN,
            K.DRAINED: _RETURN,
            K.UNPROVEN: Move(P.DOUBTFUL),
            K.SOURCE_LOST: Move(P.DOUBTFUL),
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
        P.PROVEN: rest(K, ERROR)
        | {
            K.RECALL: _RETURN,
            K.DRAINED: IGNORE,
        },
        P.RETURNED: rest(K, ERROR),  # out of the ledger
    },
)
