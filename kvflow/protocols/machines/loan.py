"""The machine of a loan: decode's pages, lent to one prefill rank under one grant (I2).

A loan ends when there is proof that the rank writes no more. It may outlive its room: the pages are
then in quarantine until the loan ends. Proof is the last chunk, an AbortAck that states `drained`,
a Goodbye that does not name the grant, or the data plane's fence. An operator can end a loan
without proof, by declaring the writer dead. A loan whose pages have not been offered yet is only
announced. Its rank cannot write, so the loan needs no proof.
"""

from __future__ import annotations

from enum import IntEnum

from kvflow.protocols.machines.tables import ERROR, IGNORE, Move, Table, rest


class LoanPhase(IntEnum):
    ANNOUNCED = 0  # the rank may know of the room; no page has been offered
    LENT = 1
    WITHDRAWN = 2  # recalled before any page was offered; Abort is repeated until acknowledged
    RECALLED = 3  # recalled after pages were offered; Abort is repeated until acknowledged
    DOUBTFUL = 4  # the source is lost or has no proof; only later proof or an operator ends it
    # The rank ended the grant, and its writes are drained. Decode's room is still open, because the
    # RoomFailed that ends it has not arrived.
    PROVEN = 5
    RETURNED = 6


class LoanKind(IntEnum):
    LEND = 0  # Bootstrap is sent
    RECALL = 1  # the room ended without this rank's proof
    LANDED = 2  # ChunkDone(last)
    DRAINED = 3  # AbortAck(drained), or a Goodbye that does not name the grant
    UNPROVEN = 4  # AbortAck(unproven), or a Goodbye that names the grant; bytes may still arrive
    SOURCE_LOST = 5
    SOURCE_BACK = 6  # the same incarnation answers again after a silence
    REPEAT_DUE = 7
    FENCED = 8


class LoanCommand(IntEnum):
    SEND_ABORT = 0
    RETURN = 1


P, K, C = LoanPhase, LoanKind, LoanCommand
# Phases in which the rank may write: pages were offered, and the end of its writes is not proven.
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
            # Prefill refused the announcement; its RoomFailed ends the room and recalls the loan.
            K.DRAINED: IGNORE,
        },
        # SOURCE_LOST cannot happen here: the loss of a source first ends its rooms, which recalls
        # their loans. FENCED and SOURCE_BACK follow a loss, when the loans are in doubt. REPEAT_DUE
        # is for recalled loans only.
        P.LENT: rest(K, ERROR)
        | {
            K.RECALL: Move(P.RECALLED, (C.SEND_ABORT,)),
            K.LANDED: _RETURN,
            # Prefill sends RoomFailed before AbortAck, so RoomFailed was lost. The loan stays open,
            # because prefill would forget that message once the grant is settled, and decode has
            # yet to ask for it.
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
            # The source may know by now how its writes ended, so it is asked again.
            K.SOURCE_BACK: Move(P.RECALLED, (C.SEND_ABORT,)),
            K.FENCED: _RETURN,
        },
        P.PROVEN: rest(K, ERROR)
        | {
            K.RECALL: _RETURN,
            K.DRAINED: IGNORE,
        },
        # The ledger drops a returned loan at once.
        P.RETURNED: rest(K, ERROR),
    },
)
