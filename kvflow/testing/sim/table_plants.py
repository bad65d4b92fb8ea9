"""Bugs that somebody has had, put into the tables from outside: the exhaustive walk must find each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from kvflow.protocols.machines import decode_room, prefill_room
from kvflow.protocols.machines import loan as loans
from kvflow.protocols.machines.decode_room import DecodeCommand, DecodeEvent, DecodeKind, DecodePhase, DecodeRoom
from kvflow.protocols.machines.loan import LoanCommand, LoanKind, LoanPhase
from kvflow.protocols.machines.prefill_room import PrefillCommand, PrefillKind, PrefillPhase
from kvflow.protocols.machines.tables import IGNORE, Move, Table
from kvflow.protocols.ports import Landing


class Plant(NamedTuple):
    """`install` puts the bug in for a while; `invariant` is what it breaks."""

    name: str
    text: str
    install: Callable[[], AbstractContextManager[object]]
    invariant: str


def _cells(module: Any, changes: dict[tuple[Any, Any], Any]) -> Callable[[], AbstractContextManager[object]]:
    """Other cells in a module's table."""

    def install() -> AbstractContextManager[object]:
        table = module.TABLE
        rows = {phase: {kind: table.cell(phase, kind) for kind in table.kinds} for phase in table.phases}
        for (phase, kind), cell in changes.items():
            rows[phase][kind] = cell
        return patch.object(module, "TABLE", Table(table.phases, table.kinds, rows))

    return install


_count_chunk, _step, _end_of_write = decode_room._count_chunk, decode_room.step, prefill_room._end_of_write
_RETURN = Move(LoanPhase.RETURNED, (LoanCommand.RETURN,))


def _all_said(room: DecodeRoom, event: DecodeEvent) -> tuple[DecodeRoom, DecodeKind, DecodeEvent]:
    """The last chunk of one rank counted for all."""
    counted, kind, event = _count_chunk(room, event)
    return counted, DecodeKind.ALL_LANDED if event.last and kind is DecodeKind.CHUNK_LANDED else kind, event


@contextmanager
def _gap_ignored() -> Iterator[None]:
    """Whatever chunk comes is the next one."""
    from kvflow.testing.sim import explore_decode

    step = decode_room.step

    def any_order(room: DecodeRoom, event: DecodeEvent) -> tuple[DecodeRoom, tuple[DecodeCommand, ...]]:
        if event.kind is DecodeKind.CHUNK_LANDED:
            event = DecodeEvent(event.kind, event.rank, room.next_seq[event.rank], event.pages, event.last, event.cause)
        return step(room, event)

    with patch.object(decode_room, "step", any_order), patch.object(explore_decode, "in_order", lambda *_: True):
        yield


def _taken_for_landed(phase: PrefillPhase, landing: Landing | None, **rest: Any) -> PrefillKind:
    return _end_of_write(phase, Landing.LANDED, **rest | {"doubt": False})


def _no_doubt(phase: PrefillPhase, landing: Landing | None, **rest: Any) -> PrefillKind:
    return _end_of_write(phase, landing, **rest | {"doubt": False})


def _forgets_cause(room: DecodeRoom, event: DecodeEvent) -> tuple[DecodeRoom, tuple[DecodeCommand, ...]]:
    step = _step(room, event)
    if event.cause is None or step[0].phase is room.phase:
        return step
    fresh = DecodeRoom(room.pages, room.ranks, room.phase, room.next_seq, room.filled, room.finished)
    return _step(fresh, event)


_HURRY = Move(
    PrefillPhase.ABORTED,
    (PrefillCommand.CANCEL_WRITES, PrefillCommand.SEND_DRAINED, PrefillCommand.TELL_ENDED, PrefillCommand.END),
)

PLANTS: tuple[Plant, ...] = (
    Plant(
        "free on timer",
        "a loan that was not answered in time is over",
        _cells(loans, {(LoanPhase.RECALLED, LoanKind.REPEAT_DUE): _RETURN}),
        "I2",
    ),
    Plant(
        "ack before drain",
        "Abort is answered while writes still run",
        _cells(prefill_room, {(PrefillPhase.TRANSFERRING, PrefillKind.ABORT_RECEIVED): _HURRY}),
        "I2",
    ),
    Plant(
        "abort never retried",
        "Abort is said once",
        _cells(loans, {(LoanPhase.RECALLED, LoanKind.REPEAT_DUE): IGNORE}),
        "rest",
    ),
    Plant(
        "restart taken for death",
        "a lost source is a dead one: its loans are over",
        _cells(
            loans,
            {
                (phase, LoanKind.SOURCE_LOST): _RETURN
                for phase in (LoanPhase.LENT, LoanPhase.RECALLED, LoanPhase.DOUBTFUL)
            },
        ),
        "I2",
    ),
    Plant(
        "failed handle taken for landed",
        "a write that ended in error counts like one that landed",
        lambda: patch.object(prefill_room, "_end_of_write", _taken_for_landed),
        "I3",
    ),
    Plant(
        "doubt forgotten",
        "a drain that ends well forgets the write before it that did not",
        lambda: patch.object(prefill_room, "_end_of_write", _no_doubt),
        "I2",
    ),
    Plant(
        "unproven taken for drained",
        "any answer to Abort ends the loan",
        _cells(
            loans,
            {(phase, LoanKind.UNPROVEN): _RETURN for phase in (LoanPhase.LENT, LoanPhase.RECALLED, LoanPhase.DOUBTFUL)},
        ),
        "I2",
    ),
    Plant(
        "room failed ends the loan",
        "a room that failed is taken for one that has drained: its loans are over, not recalled",
        _cells(loans, {(LoanPhase.LENT, LoanKind.RECALL): _RETURN}),
        "I2",
    ),
    Plant(
        "success before all ranks",
        "the last chunk of one rank is success",
        lambda: patch.object(decode_room, "_count_chunk", _all_said),
        "I8",
    ),
    Plant("chunk gap ignored", "a chunk out of order is counted as the next", _gap_ignored, "I8"),
    Plant(
        "resurrect after terminal",
        "a failed room that is closed again drains again",
        _cells(
            decode_room,
            {(DecodePhase.FAILED, DecodeKind.ENDED_LOCALLY): Move(DecodePhase.DRAINING, (DecodeCommand.RECALL_LOANS,))},
        ),
        "I6",
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
        lambda: patch.object(decode_room, "step", _forgets_cause),
        "I4",
    ),
    Plant(
        "success without the last word",
        "a room that lost its source is told to its client as a success",
        _cells(
            decode_room,
            {
                (DecodePhase.TRANSFERRING, DecodeKind.SOURCE_LOST): Move(
                    DecodePhase.SUCCESS, (DecodeCommand.TELL_LANDED, DecodeCommand.END)
                )
            },
        ),
        "I8",
    ),
)
