"""Prefill's end of the link to one decode incarnation: the way into its pool, from opening to its
end.

A decode is kept through silence, because what its rooms still need may be asked for later. It is
forgotten when its process has died, when it has said goodbye or has acknowledged ours, or when its
place is needed while it is silent and nothing of it is open.
"""

from __future__ import annotations

from enum import IntEnum

from kvflow.protocols.machines.tables import ERROR, IGNORE, Move, Table, rest


class PeerPhase(IntEnum):
    OPENING = 0  # the route into its pool is being opened
    UP = 1
    SILENT = 2
    PARTING = 3  # this prefill has said goodbye, and repeats it until it is acknowledged
    # Its process has ended, or it asks for nothing any more; its rooms end, and then its route is
    # closed.
    GONE = 4
    FORGOTTEN = 5


class PeerKind(IntEnum):
    REGISTERED = 0  # Register was received
    ROUTE_OPENED = 1
    ROUTE_REFUSED = 2  # the pools do not fit, or its memory cannot be reached
    HEARD = 3
    SILENCE_DUE = 4
    DIED = 5
    IDLE = 6  # none of its grants is open any more
    DISPLACED = 7  # its place is needed
    LEAVE = 8  # this prefill closes, and says goodbye
    REPEAT_DUE = 9  # the goodbye is not acknowledged
    PARTED = 10  # it has said goodbye, or has acknowledged ours: it asks for nothing any more


class PeerCommand(IntEnum):
    SEND_ACCEPTED = 0
    SEND_REFUSED = 1
    SEND_HEARTBEAT = 2  # the route is being opened, and that can take a while
    WATCH_PROCESS = 3
    LOSE_ROOMS = 4
    CLOSE_ROUTE = 5
    FORGET = 6
    SEND_GOODBYE = 7


P, K, C = PeerPhase, PeerKind, PeerCommand
_GONE = Move(P.GONE, (C.LOSE_ROOMS,))
_SAY_GOODBYE = Move(P.PARTING, (C.SEND_GOODBYE,))

TABLE: Table[PeerPhase, PeerKind, PeerCommand] = Table(
    P,
    K,
    {
        P.OPENING: rest(K, ERROR)
        | {
            K.REGISTERED: Move(P.OPENING, (C.SEND_HEARTBEAT,)),
            K.ROUTE_OPENED: Move(P.UP, (C.WATCH_PROCESS, C.SEND_ACCEPTED)),
            K.ROUTE_REFUSED: Move(P.FORGOTTEN, (C.SEND_REFUSED, C.LOSE_ROOMS, C.FORGET)),
            K.LEAVE: _SAY_GOODBYE,
            K.PARTED: _GONE,  # a route that is opened later is closed at once
        },
        P.UP: rest(K, ERROR)
        | {
            K.REGISTERED: Move(P.UP, (C.SEND_ACCEPTED,)),
            K.SILENCE_DUE: Move(P.SILENT, (C.LOSE_ROOMS,)),
            K.DIED: _GONE,
            K.LEAVE: _SAY_GOODBYE,
            K.PARTED: _GONE,
        },
        P.SILENT: rest(K, ERROR)
        | {
            K.HEARD: Move(P.UP),  # whatever it says, Register too
            K.DIED: _GONE,
            K.DISPLACED: Move(P.FORGOTTEN, (C.CLOSE_ROUTE, C.FORGET)),
            K.LEAVE: _SAY_GOODBYE,  # it may come back in time to receive it
        },
        P.PARTING: rest(K, ERROR)
        | {
            K.REGISTERED: _SAY_GOODBYE,  # it has not received the last one
            K.REPEAT_DUE: _SAY_GOODBYE,
            K.DIED: _GONE,
            K.PARTED: _GONE,
        },
        P.GONE: rest(K, ERROR)
        | {
            K.REGISTERED: IGNORE,  # sent before its end
            # A route is closed when no write runs on it.
            K.IDLE: Move(P.FORGOTTEN, (C.CLOSE_ROUTE, C.FORGET)),
        },
        P.FORGOTTEN: rest(K, ERROR),
    },
)
