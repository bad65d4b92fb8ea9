"""One residency: where the state of a request is, whose pages have landed.

On the device it is in pages and a row of the pool. A retract copies it out and gives them back; a
resume takes others and copies it in again. What a copy reads or writes is given to nobody before
the copy has ended, and host memory is freed once, whatever happens in between.
"""

from __future__ import annotations

from enum import IntEnum

from kvflow.protocols.machines.tables import ERROR, IGNORE, Move, Table, rest


class ResidencyPhase(IntEnum):
    RESIDENT = 0  # in pages and a row of the pool
    LEAVING = 1  # being copied out; still owns its pages and row
    AWAY = 2  # owns a snapshot, or nothing at all when its state was dropped
    RETURNING = 3  # being copied into new pages and a new row; owns its snapshot, too
    ENDED = 4


class ResidencyKind(IntEnum):
    RETRACT = 0
    DROP = 1  # leave without a copy: who owns the request can compute its state again
    COPIED_OUT = 2
    RESUME = 3  # pages and a row have been taken
    COPIED_IN = 4  # or there was nothing to copy
    COPY_ENDED = 5  # in an error, or cancelled
    CLOSE = 6


class ResidencyCommand(IntEnum):
    STOP_COPY = 0
    GIVE_BACK = 1  # pages and row; they become free when no copy or step uses them any more
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
            # It was ready in the turn in which it was to be stopped.
            K.COPIED_OUT: Move(P.ENDED, (C.FREE_SNAPSHOT,)),
            K.COPIED_IN: IGNORE,
            K.COPY_ENDED: IGNORE,
            K.CLOSE: IGNORE,
        },
    },
)
