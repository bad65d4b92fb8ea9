"""One run of cached pages in one tier: whether its bytes are there, on their way there, or neither.

Every node of the index has one such phase per tier (device, host, storage). A copy is between two
tiers: it begins in the tier it writes to, and the run cannot leave the tier it reads from before it
has ended.
"""

from __future__ import annotations

from enum import IntEnum

from kvflow.protocols.machines.tables import ERROR, Move, Table, rest


class RunPhase(IntEnum):
    ABSENT = 0
    ARRIVING = 1  # a copy writes it: it has page numbers here, and nobody may read them
    PRESENT = 2


class RunKind(IntEnum):
    GIVEN = 0  # a finished request hands over pages that hold these tokens
    BEGIN = 1  # a copy into this tier begins
    ACK = 2
    FAIL = 3  # the copy has ended, and what it left behind is unknown
    EVICT = 4


class RunCommand(IntEnum):
    FREE = 0  # the pages that the run has had in this tier
    RETURN_DUPLICATE = 1  # the pages given: the run has others already, or will


P, K, C = RunPhase, RunKind, RunCommand

TABLE: Table[RunPhase, RunKind, RunCommand] = Table(
    P,
    K,
    {
        P.ABSENT: rest(K, ERROR) | {K.GIVEN: Move(P.PRESENT), K.BEGIN: Move(P.ARRIVING)},
        P.ARRIVING: rest(K, ERROR)
        | {
            K.GIVEN: Move(P.ARRIVING, (C.RETURN_DUPLICATE,)),
            K.ACK: Move(P.PRESENT),
            K.FAIL: Move(P.ABSENT, (C.FREE,)),
        },
        P.PRESENT: rest(K, ERROR)
        | {
            K.GIVEN: Move(P.PRESENT, (C.RETURN_DUPLICATE,)),
            K.EVICT: Move(P.ABSENT, (C.FREE,)),
        },
    },
)
