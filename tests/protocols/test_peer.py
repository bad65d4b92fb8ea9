"""Prefill's peer table, cell by cell, against rules written down apart from it (I4, I6)."""

from __future__ import annotations

from kvflow.protocols.machines.peer import TABLE, PeerCommand, PeerKind, PeerPhase
from kvflow.protocols.machines.tables import ERROR, IGNORE, Move
from tests.protocols.cells import cells, check_cell

P, K, C = PeerPhase, PeerKind, PeerCommand
HAS_ROUTE = (P.UP, P.SILENT, P.PARTING, P.GONE)
GOODBYE = Move(P.PARTING, (C.SEND_GOODBYE,))


def expected(phase: PeerPhase, kind: PeerKind) -> object:
    if phase is P.FORGOTTEN:  # in no table any more
        return ERROR
    if kind is K.REGISTERED:
        return {
            P.OPENING: Move(P.OPENING, (C.SEND_HEARTBEAT,)),
            P.UP: Move(P.UP, (C.SEND_ACCEPTED,)),
            P.SILENT: ERROR,  # it is heard first
            P.PARTING: GOODBYE,  # it has not received the last one
        }.get(phase, IGNORE)
    if kind is K.HEARD:  # by a silent peer only; an open one has nothing to do about it
        return Move(P.UP) if phase is P.SILENT else ERROR
    if kind is K.IDLE:  # the last room of one that is gone has ended
        return Move(P.FORGOTTEN, (C.CLOSE_ROUTE, C.FORGET)) if phase is P.GONE else ERROR
    if kind is K.DIED:  # observed once, of a process whose memory is mapped
        return Move(P.GONE, (C.LOSE_ROOMS,)) if phase in (P.UP, P.SILENT, P.PARTING) else ERROR
    if kind is K.PARTED:  # a silent one is heard first
        return Move(P.GONE, (C.LOSE_ROOMS,)) if phase in (P.OPENING, P.UP, P.PARTING) else ERROR
    if kind is K.LEAVE:  # said to whoever may have lent something
        return GOODBYE if phase in (P.OPENING, P.UP, P.SILENT) else ERROR
    if kind is K.REPEAT_DUE:
        return GOODBYE if phase is P.PARTING else ERROR
    return {
        (P.OPENING, K.ROUTE_OPENED): Move(P.UP, (C.WATCH_PROCESS, C.SEND_ACCEPTED)),
        (P.OPENING, K.ROUTE_REFUSED): Move(P.FORGOTTEN, (C.SEND_REFUSED, C.LOSE_ROOMS, C.FORGET)),
        (P.UP, K.SILENCE_DUE): Move(P.SILENT, (C.LOSE_ROOMS,)),
        (P.SILENT, K.DISPLACED): Move(P.FORGOTTEN, (C.CLOSE_ROUTE, C.FORGET)),
    }.get((phase, kind), ERROR)


@cells(TABLE)
def test_cell(phase: PeerPhase, kind: PeerKind) -> None:
    check_cell(TABLE, phase, kind, expected(phase, kind))


@cells(TABLE)
def test_rules(phase: PeerPhase, kind: PeerKind) -> None:
    cell = TABLE.cell(phase, kind)
    if not isinstance(cell, Move):
        return
    forgotten = cell.phase is P.FORGOTTEN
    assert (C.FORGET in cell.commands) == forgotten
    # With the peer, and never before.
    assert (C.CLOSE_ROUTE in cell.commands) == (forgotten and phase in HAS_ROUTE)
    assert (C.SEND_ACCEPTED in cell.commands) == (cell.phase is P.UP and kind is not K.HEARD)
    if phase is P.UP and cell.phase in (P.SILENT, P.GONE):
        assert C.LOSE_ROOMS in cell.commands, "its rooms end with it"
    # One watch a peer.
    assert (C.WATCH_PROCESS in cell.commands) == (phase is P.OPENING and cell.phase is P.UP)
