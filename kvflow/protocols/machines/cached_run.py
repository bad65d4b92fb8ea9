"""The machine of a run of cached pages in one tier: absent, arriving, or present.

Every node of the index has one such phase per tier (device, host, storage). A copy moves bytes
between two tiers. Its events belong to the tier that it writes to. Until the copy ends, the run
cannot leave the tier that the copy reads from.
"""

from __future__ import annotations

from enum import IntEnum

from kvflow.protocols.machines.tables import ERROR, Move, Table, rest


class RunPhase(IntEnum):
    ABSENT = 0
    ARRIVING = 1  # a copy is writing the run's pages in this tier; they must not be read yet
    PRESENT = 2


class RunKind(IntEnum):
    GIVEN = 0  # a caller inserts pages that hold the tokens of the run
    BEGIN = 1
    ACK = 2
    FAIL = 3  # the copy ended in an error: its target pages may contain anything
    EVICT = 4


class RunCommand(IntEnum):
    FREE = 0  # free the run's pages in this tier
    RETURN_DUPLICATE = 1  # return the given pages: the run has pages, or a copy brings them


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
