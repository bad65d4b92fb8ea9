"""Bugs in the tables and steps of rooms, planted in the shipped code from outside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import msgspec

from kvflow.proof.sim.swap import swapped, swapped_cells, swapped_item
from kvflow.proof.walk.world import Bounds
from kvflow.protocols.decode import core as decode_core
from kvflow.protocols.decode import endpoint as decode_endpoint
from kvflow.protocols.machines import decode_room, prefill_room
from kvflow.protocols.machines.decode_room import (
    DecodeCommand,
    DecodeEvent,
    DecodeKind,
    DecodePhase,
    DecodeRoomState,
)
from kvflow.protocols.machines.prefill_room import PrefillCommand, PrefillKind, PrefillPhase
from kvflow.protocols.machines.tables import Move
from kvflow.protocols.ports import WriteOutcome
from kvflow.protocols.wire import messages as wire

Install = Callable[[], AbstractContextManager[object]]

ONE = Bounds(chunks=2, in_flight=2, drops=1, duplicates=1, doubts=1, silences=0, restarts=False)
CALM = ONE._replace(drops=0, duplicates=0, crashes=0, aborts=0, doubts=0)
TINY = CALM._replace(chunks=1)
LOSSY = TINY._replace(drops=1)


class Plant(NamedTuple):
    """A bug that breaks `invariant` in the world `bounds` while it is installed."""

    name: str
    text: str
    install: Install
    invariant: str
    bounds: Bounds = ONE


def _cells(module: Any, changes: dict[tuple[Any, Any], Any]) -> Install:
    return lambda: swapped_cells(module.TABLE, changes)


def _attribute(owner: Any, name: str, value: Any) -> Install:
    return lambda: swapped(owner, name, value)


_count_chunk, _step = decode_room._count_chunk, decode_room.step
_end_of_write = prefill_room._end_of_write


def _all_said(
    room: DecodeRoomState, event: DecodeEvent
) -> tuple[DecodeRoomState, DecodeKind, DecodeEvent]:
    counted, kind, event = _count_chunk(room, event)
    if event.last and kind is DecodeKind.CHUNK_LANDED:
        kind = DecodeKind.ALL_LANDED
    return counted, kind, event


def _gap_ignored() -> AbstractContextManager[object]:
    on_chunk_done = decode_endpoint.HANDLERS[wire.ChunkDone]

    def any_order(core: Any, peer: Any, message: Any, now: float) -> None:
        record = core.rooms.get(message.grant)
        if record is not None:
            seq = record.next_seq[record.peers.index(peer)]
            message = msgspec.structs.replace(message, seq=seq)
        on_chunk_done(core, peer, message, now)

    return swapped_item(decode_endpoint.HANDLERS, wire.ChunkDone, any_order)


def _taken_for_landed(
    phase: PrefillPhase, outcome: WriteOutcome | None, **rest: Any
) -> PrefillKind:
    return _end_of_write(phase, WriteOutcome.LANDED, **rest | {"doubt": False})


def _no_doubt(phase: PrefillPhase, outcome: WriteOutcome | None, **rest: Any) -> PrefillKind:
    return _end_of_write(phase, outcome, **rest | {"doubt": False})


def _forgets_cause(
    room: DecodeRoomState, event: DecodeEvent
) -> tuple[DecodeRoomState, tuple[DecodeCommand, ...]]:
    step = _step(room, event)
    if event.cause is None or step[0].phase is room.phase:
        return step
    return _step(msgspec.structs.replace(room, cause=None), event)


# --- in the endpoints, the links and the grants


def _room_kept(core: Any, record: Any, now: float) -> None:
    decode_core._end(core, record, now)
    core.rooms[record.grant] = record


taken_for_landed = _attribute(prefill_room, "_end_of_write", _taken_for_landed)
doubt_forgotten = _attribute(prefill_room, "_end_of_write", _no_doubt)
success_of_one_rank = _attribute(decode_room, "_count_chunk", _all_said)

TABLES: tuple[Plant, ...] = (
    Plant(
        "failed handle taken for landed",
        "a write that ended in error counts like one that landed",
        taken_for_landed,
        "I3",
    ),
    Plant(
        "doubt forgotten",
        "a drain that ends well forgets the write before it that did not",
        doubt_forgotten,
        "I2",
    ),
    Plant(
        "success before all ranks",
        "the last chunk of one rank is success",
        success_of_one_rank,
        "I8",
        TINY._replace(ranks=2),
    ),
    Plant("chunk gap ignored", "a chunk out of order is counted as the next", _gap_ignored, "I8"),
    Plant(
        "resurrect after terminal",
        "a room that has ended stays where words find it",
        lambda: swapped_item(decode_core._RUN, DecodeCommand.END, _room_kept),
        "I5",
    ),
    Plant(
        "double ending",
        "an Abort that comes while prefill drains tells the engine again",
        _cells(
            prefill_room,
            {
                (PrefillPhase.DRAINING, PrefillKind.ABORT_RECEIVED): Move(
                    PrefillPhase.DRAINING, (PrefillCommand.TELL_ENDED,)
                )
            },
        ),
        "I4",
    ),
    Plant(
        "last cause kept",
        "a later cause replaces the first",
        _attribute(decode_core, "step", _forgets_cause),
        "I4",
    ),
    Plant(
        "success without the last word",
        "a room that lost its source is told to its client as a success",
        _cells(
            decode_room,
            {
                (DecodePhase.TRANSFERRING, DecodeKind.SOURCE_LOST): Move(
                    DecodePhase.SUCCESS,
                    (DecodeCommand.TELL_LANDED, DecodeCommand.RECALL_LOANS, DecodeCommand.END),
                )
            },
        ),
        "I8",
    ),
)
"""Bugs in rooms and loans. The seeded simulation finds most of them too."""
