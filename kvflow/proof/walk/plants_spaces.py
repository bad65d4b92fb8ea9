"""Bugs in the counts of places by space, each of which the exhaustive walk must find."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import msgspec

from kvflow.proof.sim.swap import swapped_item
from kvflow.proof.walk import decode_side
from kvflow.proof.walk.decode_side import DecodeSide, Owner
from kvflow.proof.walk.plants_tables import TINY, Plant, _attribute
from kvflow.protocols.commands import FreePages, QuarantinePages
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.machines import decode_room
from kvflow.protocols.machines.decode_room import DecodeEvent, DecodeKind, DecodeRoomState

_TWO = TINY._replace(chunks=2, fills=((1, 0), (1, 1)), doubts=1)

_lend = DecodeEndpoint.lend
_count_chunk = decode_room._count_chunk


def _lends_less(endpoint: DecodeEndpoint, grant: Any, pages: Any, now: float) -> bool:
    lent = _lend(endpoint, grant, pages, now)
    if lent:
        lease = endpoint.rooms[grant].lease
        # A pool of one space keeps its count, so that only later spaces are dropped.
        if len(lease.counts) > 1:
            lease.counts = (*lease.counts[:-1], 0)
    return lent


def _counts_elsewhere(
    room: DecodeRoomState, event: DecodeEvent
) -> tuple[DecodeRoomState, DecodeKind, DecodeEvent]:
    return _count_chunk(room, msgspec.structs.replace(event, pages=event.pages[::-1]))


def _frees_one_space(side: DecodeSide, command: QuarantinePages) -> None:
    side._quarantine(command)
    owners = side.grants[command.grant - 1].target
    side.grant(command.grant, target=(*owners[:-1], Owner.STORE))


def _frees_the_rest(side: DecodeSide, command: FreePages) -> None:
    owners = side.grants[command.grant - 1].target
    # The other spaces return now. The store would refuse a second return of the last one.
    if owners[0] is Owner.ROOM:
        side.grant(command.grant, target=(Owner.ROOM,) * len(owners))
    side._free(command)


def _freed_early() -> AbstractContextManager[object]:
    stack = ExitStack()
    stack.enter_context(swapped_item(decode_side._RUN, QuarantinePages, _frees_one_space))
    stack.enter_context(swapped_item(decode_side._RUN, FreePages, _frees_the_rest))
    return stack


drops_a_space = _attribute(DecodeEndpoint, "lend", _lends_less)
counts_in_another_space = _attribute(decode_room, "_count_chunk", _counts_elsewhere)

SPACES: tuple[Plant, ...] = (
    Plant(
        "drops a space from a loan",
        "a lease counts no places of the last space, so that less is in quarantine than was lent",
        drops_a_space,
        "I2",
        _TWO,
    ),
    Plant(
        "frees one space of a room early",
        "places of the last space are free once their room ends, whatever may still write there",
        _freed_early,
        "I2",
        _TWO,
    ),
    Plant(
        "counts a chunk's places in the wrong space",
        "the places of a chunk fill another space of its room than that in which they have landed",
        counts_in_another_space,
        "I8",
        _TWO,
    ),
)
