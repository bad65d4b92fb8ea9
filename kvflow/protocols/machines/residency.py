"""The machine of a residency: the place of a request's state after the request's pages land.

On the device, the state is in pages and a row of the pool. A retract copies the state out and
returns the pages and the row. A resume takes new pages and a new row, and copies the state back in.
Pages and memory that a copy uses go to no other request before the copy ends, and a snapshot is
freed exactly once.
"""

from __future__ import annotations

from enum import IntEnum

from kvflow.protocols.machines.tables import ERROR, IGNORE, Move, Table, rest


class ResidencyPhase(IntEnum):
    RESIDENT = 0  # in pages and a row of the pool
    LEAVING = 1  # being copied out; still owns its pages and row
    AWAY = 2  # owns a snapshot, unless its state was dropped
    RETURNING = 3  # being copied into new pages and a new row; still owns its snapshot
    ENDED = 4


class ResidencyKind(IntEnum):
    RETRACT = 0
    DROP = 1  # leave without a copy: the request's owner can compute the state again
    COPIED_OUT = 2
    RESUME = 3  # pages and a row were taken
    COPIED_IN = 4  # the copy succeeded, or there was no snapshot to copy
    COPY_ENDED = 5  # the copy failed or was cancelled
    CLOSE = 6


class ResidencyCommand(IntEnum):
    STOP_COPY = 0
    GIVE_BACK = 1  # return pages and row, which become free once no copy or step uses them
    FREE_SNAPSHOT = 2


P, K, C = ResidencyPhase, ResidencyKind, ResidencyCommand

TABLE: Table[ResidencyPhase, ResidencyKind, ResidencyCommand] = Table(
    P,
    K,
    {
        P.RESIDENT: rest(K, ERROR)
        | {
            K.RETRACT: Move(P.LEAVING),
            K.DROP: Move(P.AWAY, (C.GIVE_BACK,)),
            K.CLOSE: Move(P.ENDED, (C.GIVE_BACK,)),
        },
        P.LEAVING: rest(K, ERROR)
        | {
            K.COPIED_OUT: Move(P.AWAY, (C.GIVE_BACK,)),
            K.COPY_ENDED: Move(P.RESIDENT),
            K.CLOSE: Move(P.ENDED, (C.STOP_COPY, C.GIVE_BACK)),
        },
        P.AWAY: rest(K, ERROR)
        | {
            K.RESUME: Move(P.RETURNING),
            K.CLOSE: Move(P.ENDED, (C.FREE_SNAPSHOT,)),
        },
        P.RETURNING: rest(K, ERROR)
        | {
            K.COPIED_IN: Move(P.RESIDENT, (C.FREE_SNAPSHOT,)),
            K.COPY_ENDED: Move(P.AWAY, (C.GIVE_BACK,)),
            K.CLOSE: Move(P.ENDED, (C.STOP_COPY, C.GIVE_BACK, C.FREE_SNAPSHOT)),
        },
        P.ENDED: rest(K, ERROR)
        | {
            # The copy was complete before STOP_COPY took effect, so its snapshot is freed here.
            K.COPIED_OUT: Move(P.ENDED, (C.FREE_SNAPSHOT,)),
            K.COPIED_IN: IGNORE,
            K.COPY_ENDED: IGNORE,
            K.CLOSE: IGNORE,
        },
    },
)
