"""Prefill's end of the link to one decode incarnation: the way into its pool, from opening to its end.

A decode is kept through silence, because what its rooms still need may be asked for later. It is forgotten when its
process has died, or when its place is needed while it is silent and nothing of it is open or in doubt.
"""

from __future__ import annotations

from enum import IntEnum

from kvflow.protocols.machines.tables import ERROR, IGNORE, Move, Table, rest


class PeerPhase(IntEnum):
    OPENING = 0  # the route into its pool is being opened
    UP = 1
    SILENT = 2
    DEAD = 3  # its process has ended; its rooms are, and then its route is closed
    FORGOTTEN = 4


class PeerKind(IntEnum):
    REGISTERED = 0  # Register was received
    ROUTE_OPENED = 1
    ROUTE_REFUSED = 2  # the pools do not fit, or its memory cannot be reached
    HEARD = 3
    SILENCE_DUE = 4
    DIED = 5
    IDLE = 6  # none of its grants is open any more
    DISPLACED = 7  # its place is needed


class PeerCommand(IntEnum):
    SEND_ACCEPTED = 0
    SEND_REFUSED = 1
    SEND_HEARTBEAT = 2  # the route is being opened, and that can take a while
    WATCH_PROCESS = 3
    LOSE_ROOMS = 4
    CLOSE_ROUTE = 5
    FORGET = 6


P, K, C = PeerPhase, PeerKind, PeerCommand

TABLE: Table[PeerPhase, PeerKind, PeerCommand] = Table(
    P,
    K,
    {
        P.OPENING: rest(K, ERROR)
        | {
            K.REGISTERED: Move(P.OPENING, (C.SEND_HEARTBEAT,)),
            K.ROUTE_OPENED: Move(P.UP, (C.WATCH_PROCESS, C.SEND_ACCEPTED)),
            K.ROUTE_REFUSED: Move(P.FORGOTTEN, (C.SEND_REFUSED, C.LOSE_ROOMS, C.FORGET)),
        },
        P.UP: rest(K, ERROR)
        | {
            K.REGISTERED: Move(P.UP, (C.SEND_ACCEPTED,)),
            K.SILENCE_DUE: Move(P.SILENT, (C.LOSE_ROOMS,)),
            K.DIED: Move(P.DEAD, (C.LOSE_ROOMS,)),
        },
        P.SILENT: rest(K, ERROR)
        | {
            K.HEARD: Move(P.UP),  # whatever it says, Register too
            K.DIED: Move(P.DEAD, (C.LOSE_ROOMS,)),
            K.DISPLACED: Move(P.FORGOTTEN, (C.CLOSE_ROUTE, C.FORGET)),
        },
        P.DEAD: rest(K, ERROR)
        | {
            K.REGISTERED: IGNORE,  # sent before it died
            K.IDLE: Move(P.FORGOTTEN, (C.CLOSE_ROUTE, C.FORGET)),  # a route is closed when no write runs on it
        },
        P.FORGOTTEN: rest(K, ERROR),
    },
)
