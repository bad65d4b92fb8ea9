"""The machine of prefill's link to one decode incarnation, with the route into the decode's pool.

Prefill keeps a silent decode, because it may come back and ask for messages that its rooms need.
Prefill forgets a decode that died, sent Goodbye, or acknowledged prefill's Goodbye. It also forgets
a silent decode without open grants when another decode needs the place.
"""

from __future__ import annotations

from enum import IntEnum

from kvflow.protocols.machines.tables import ERROR, IGNORE, Move, Table, rest


class PeerPhase(IntEnum):
    OPENING = 0  # the route into its pool is being opened
    UP = 1
    SILENT = 2
    PARTING = 3  # this prefill sent Goodbye, and repeats it until it is acknowledged
    # The decode died, or will ask for no more messages. Its rooms end, then its route is closed.
    GONE = 4
    FORGOTTEN = 5


class PeerKind(IntEnum):
    REGISTERED = 0  # Register was received
    ROUTE_OPENED = 1
    ROUTE_REFUSED = 2  # pages cannot move into this decode's pool
    HEARD = 3
    SILENCE_DUE = 4
    DIED = 5
    IDLE = 6  # none of its grants is open or announced any more
    DISPLACED = 7  # another decode needs its place
    LEAVE = 8  # this prefill closes
    REPEAT_DUE = 9  # our Goodbye has not been acknowledged yet
    PARTED = 10  # decode sent Goodbye or acknowledged ours, and will ask for no more messages


class PeerCommand(IntEnum):
    SEND_ACCEPTED = 0
    SEND_REFUSED = 1
    SEND_HEARTBEAT = 2
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
            # Opening a route can take a long time. The heartbeat keeps decode from giving up while
            # it waits.
            K.REGISTERED: Move(P.OPENING, (C.SEND_HEARTBEAT,)),
            K.ROUTE_OPENED: Move(P.UP, (C.WATCH_PROCESS, C.SEND_ACCEPTED)),
            K.ROUTE_REFUSED: Move(P.FORGOTTEN, (C.SEND_REFUSED, C.LOSE_ROOMS, C.FORGET)),
            K.LEAVE: _SAY_GOODBYE,
            # If the route opens after this, it is closed at once.
            K.PARTED: _GONE,
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
            K.HEARD: Move(P.UP),  # any message, including Register
            K.DIED: _GONE,
            K.DISPLACED: Move(P.FORGOTTEN, (C.CLOSE_ROUTE, C.FORGET)),
            # A silent decode may come back in time to receive the Goodbye.
            K.LEAVE: _SAY_GOODBYE,
        },
        P.PARTING: rest(K, ERROR)
        | {
            # A decode that registers may not have received our Goodbye.
            K.REGISTERED: _SAY_GOODBYE,
            K.REPEAT_DUE: _SAY_GOODBYE,
            K.DIED: _GONE,
            K.PARTED: _GONE,
        },
        P.GONE: rest(K, ERROR)
        | {
            K.REGISTERED: IGNORE,  # sent before the decode died or left
            # The route must stay open while a write runs on it, so it closes with the last room.
            K.IDLE: Move(P.FORGOTTEN, (C.CLOSE_ROUTE, C.FORGET)),
        },
        P.FORGOTTEN: rest(K, ERROR),
    },
)
