"""The machine of decode's link to one incarnation of a prefill rank.

Rooms are opened on a link that is REGISTERING or UP. Silence ends rooms, and their loans wait for
proof. Prefill may have forgotten this decode during the silence, so a silent link keeps
registering, and is UP again as soon as prefill accepts. A Goodbye from prefill ends the loans that
it does not name. A Goodbye from decode lets prefill forget that decode.
"""

from __future__ import annotations

from enum import IntEnum

from kvflow.protocols.machines.tables import ERROR, IGNORE, Cell, Move, Table, rest


class LinkPhase(IntEnum):
    REGISTERING = 0
    UP = 1
    PARTING = 2  # this decode sent Goodbye, and repeats it until it is acknowledged
    SILENT = 3  # no heartbeat for too long; the same incarnation may come back
    # The link is closed and never reopens, for example because prefill refused, died, was replaced
    # or sent Goodbye.
    GONE = 4


class LinkKind(IntEnum):
    ACCEPTED = 0  # Registered arrived, without a refusal
    REFUSED = 1
    REPLACED = 2  # another incarnation, or another rank, answers at this address
    HEARD = 3  # a heartbeat arrived
    REPEAT_DUE = 4  # time to send Register, Heartbeat or Goodbye again
    SILENCE_DUE = 5  # no heartbeat for `lost_after_s`
    REGISTER_DUE = 6  # neither Registered nor a heartbeat for `register_s`
    REDIAL_DUE = 7  # still silent for another `lost_after_s`
    DIED = 8  # the data plane's fence observed that the process died
    DECLARED_DEAD = 9
    CLOSED = 10  # this node closes the link without a Goodbye
    LEAVE = 11  # this node closes, and sends Goodbye
    GOODBYE = 12  # prefill closes, and submits no more writes
    ACKNOWLEDGED = 13  # prefill received our Goodbye


class LinkCommand(IntEnum):
    SEND_REGISTER = 0
    SEND_HEARTBEAT = 1
    START_ROOMS = 2  # rooms that wait for this link may proceed
    LOSE_ROOMS = 3
    ASK_LOANS = 4  # the source answers again: repeat the Aborts for loans in doubt
    WATCH_WRITER = 5
    REDIAL = 6
    # Close the socket. If it stayed open, it would compete with the next link's socket for this
    # decode's routing id.
    HANG_UP = 7
    END_LOANS = 8  # the fence or an operator states that the writer writes no more
    SEND_GOODBYE = 9
    ACKNOWLEDGE = 10
    PART = 11  # end rooms, and the loans that prefill's Goodbye does not name


P, K, C = LinkPhase, LinkKind, LinkCommand
_GONE = Move(P.GONE, (C.HANG_UP, C.LOSE_ROOMS))
_DEAD = Move(P.GONE, (C.HANG_UP, C.LOSE_ROOMS, C.END_LOANS))
# For REGISTERING and SILENT: prefill may not acknowledge a Goodbye, so decode sends it once.
_LEFT = Move(P.GONE, (C.SEND_GOODBYE, C.HANG_UP, C.LOSE_ROOMS))
_ENDS: dict[LinkKind, Cell[LinkPhase, LinkCommand]] = {
    K.REPLACED: _GONE,
    K.DECLARED_DEAD: _DEAD,
    K.CLOSED: _GONE,
    K.GOODBYE: Move(P.GONE, (C.ACKNOWLEDGE, C.HANG_UP, C.PART)),
    K.ACKNOWLEDGED: IGNORE,
}

TABLE: Table[LinkPhase, LinkKind, LinkCommand] = Table(
    P,
    K,
    {
        P.REGISTERING: rest(K, ERROR)
        | _ENDS
        | {
            K.ACCEPTED: Move(P.UP, (C.WATCH_WRITER, C.START_ROOMS)),
            K.REFUSED: _GONE,
            # Prefill sends heartbeats while it opens its route to our pool. Each one restarts the
            # `register_s` deadline, which is kept outside this table.
            K.HEARD: IGNORE,
            K.REPEAT_DUE: Move(P.REGISTERING, (C.SEND_REGISTER,)),
            K.REGISTER_DUE: _GONE,
            K.LEAVE: _LEFT,
        },
        P.UP: rest(K, ERROR)
        | _ENDS
        | {
            K.DIED: _DEAD,
            K.ACCEPTED: IGNORE,  # the answer to a repeated Register
            K.REFUSED: IGNORE,
            K.HEARD: IGNORE,
            K.REPEAT_DUE: Move(P.UP, (C.SEND_HEARTBEAT,)),
            K.SILENCE_DUE: Move(P.SILENT, (C.LOSE_ROOMS, C.SEND_REGISTER)),
            K.LEAVE: Move(P.PARTING, (C.SEND_GOODBYE,)),
        },
        P.PARTING: rest(K, ERROR)
        | _ENDS
        | {
            K.DIED: _DEAD,
            K.ACCEPTED: IGNORE,
            K.REFUSED: IGNORE,
            K.HEARD: IGNORE,
            K.REPEAT_DUE: Move(P.PARTING, (C.SEND_GOODBYE,)),
            K.ACKNOWLEDGED: _GONE,
        },
        P.SILENT: rest(K, ERROR)
        | _ENDS
        | {
            K.DIED: _DEAD,
            K.ACCEPTED: Move(P.UP, (C.ASK_LOANS,)),
            # A prefill that refuses is alive, and may know how its writes ended.
            K.REFUSED: Move(P.SILENT, (C.ASK_LOANS,)),
            # A heartbeat does not show that prefill still knows this decode; only ACCEPTED does.
            K.HEARD: IGNORE,
            K.REPEAT_DUE: Move(P.SILENT, (C.SEND_REGISTER,)),
            K.REDIAL_DUE: Move(P.SILENT, (C.REDIAL, C.SEND_REGISTER)),
            K.LEAVE: _LEFT,
        },
        P.GONE: rest(K, ERROR)
        | {
            **dict.fromkeys((K.ACCEPTED, K.REFUSED, K.REPLACED, K.HEARD, K.CLOSED), IGNORE),
            **dict.fromkeys((K.GOODBYE, K.ACKNOWLEDGED), IGNORE),
            K.DIED: Move(P.GONE, (C.END_LOANS,)),
            K.DECLARED_DEAD: Move(P.GONE, (C.END_LOANS,)),
        },
    },
)
