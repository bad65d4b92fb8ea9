"""Planted bugs of the tables and of the functions that read them, as far as whole nodes can meet
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

from kvflow.handlers.decode import DecodeShell
from kvflow.handlers.rooms import DecodeRoom
from kvflow.proof.sim.plants_decode import success_before_all_ranks
from kvflow.proof.sim.swap import swapped, swapped_cells
from kvflow.protocols.errors import Cause
from kvflow.protocols.machines import decode_room, prefill_room
from kvflow.protocols.machines import loan as loans
from kvflow.protocols.machines.decode_room import (
    DecodeCommand,
    DecodeEvent,
    DecodeKind,
    DecodePhase,
)
from kvflow.protocols.machines.loan import LoanCommand, LoanKind, LoanPhase
from kvflow.protocols.machines.prefill_room import PrefillCommand, PrefillKind, PrefillPhase
from kvflow.protocols.machines.tables import IGNORE, Move, Table
from kvflow.protocols.ports import WriteOutcome

Install = Callable[[], AbstractContextManager[object]]


class TablePlant(NamedTuple):
    """Fields of a `plants.Plant`."""

    name: str
    text: str
    install: Install
    invariant: str


def _cells(table: Table[Any, Any, Any], cells: Mapping[tuple[Any, Any], Any]) -> Install:
    return lambda: swapped_cells(table, cells)


_end_of_write = prefill_room._end_of_write
_RETURN = Move(LoanPhase.RETURNED, (LoanCommand.RETURN,))
_HURRY = Move(
    PrefillPhase.ABORTED,
    (
        PrefillCommand.CANCEL_WRITES,
        PrefillCommand.SEND_DRAINED,
        PrefillCommand.TELL_ENDED,
        PrefillCommand.END,
    ),
)
_IN_DOUBT = (LoanPhase.RECALLED, LoanPhase.DOUBTFUL)


def _taken_for_landed() -> AbstractContextManager[object]:
    def end_of_write(phase: PrefillPhase, outcome: WriteOutcome | None, **rest: Any) -> PrefillKind:
        return _end_of_write(phase, WriteOutcome.LANDED, **rest | {"doubt": False})

    return swapped(prefill_room, "_end_of_write", end_of_write)


def _doubt_forgotten() -> AbstractContextManager[object]:
    def end_of_write(phase: PrefillPhase, outcome: WriteOutcome | None, **rest: Any) -> PrefillKind:
        return _end_of_write(phase, outcome, **rest | {"doubt": False})

    return swapped(prefill_room, "_end_of_write", end_of_write)


def _drains_again() -> AbstractContextManager[object]:
    """Let the shell close a room that is over, and let the table move it on."""
    original = DecodeShell.close_room

    def close_room(self: DecodeShell, room: DecodeRoom, cause: Cause) -> None:
        if room.record is not None and room.phase is DecodePhase.FAILED:
            ended = DecodeEvent(DecodeKind.ENDED_LOCALLY, cause=cause)
            self.endpoint.core.feed_room(room.record, ended, self.now())
        original(self, room, cause)

    again = Move(DecodePhase.DRAINING, (DecodeCommand.RECALL_LOANS,))
    swaps = ExitStack()
    swaps.enter_context(swapped(DecodeShell, "close_room", close_room))
    swaps.enter_context(
        swapped_cells(decode_room.TABLE, {(DecodePhase.FAILED, DecodeKind.ENDED_LOCALLY): again})
    )
    return swaps


def _success_without_the_last_chunk() -> AbstractContextManager[object]:
    """Let a room that lost its source succeed, and let its loan, which has no room any more, move
    on.
    """
    success = Move(DecodePhase.SUCCESS, (DecodeCommand.TELL_LANDED, DecodeCommand.END))
    in_doubt: Move[LoanPhase, LoanCommand] = Move(LoanPhase.DOUBTFUL)
    swaps = ExitStack()
    swaps.enter_context(
        swapped_cells(
            decode_room.TABLE, {(DecodePhase.TRANSFERRING, DecodeKind.SOURCE_LOST): success}
        )
    )
    swaps.enter_context(
        swapped_cells(loans.TABLE, {(LoanPhase.LENT, LoanKind.SOURCE_LOST): in_doubt})
    )
    return swaps


PLANTS = (
    TablePlant(
        "free on timer (table)",
        "a loan that was not answered in time is over",
        _cells(loans.TABLE, {(LoanPhase.RECALLED, LoanKind.REPEAT_DUE): _RETURN}),
        "I2",
    ),
    TablePlant(
        "ack before drain (table)",
        "Abort is answered while writes still run",
        _cells(
            prefill_room.TABLE, {(PrefillPhase.TRANSFERRING, PrefillKind.ABORT_RECEIVED): _HURRY}
        ),
        "I12",
    ),
    TablePlant(
        "abort never retried (table)",
        "Abort is sent once",
        _cells(loans.TABLE, {(LoanPhase.RECALLED, LoanKind.REPEAT_DUE): IGNORE}),
        "I5",
    ),
    TablePlant(
        "restart taken for death (table)",
        "a lost source is a dead one: its loans are over",
        _cells(loans.TABLE, {(phase, LoanKind.SOURCE_LOST): _RETURN for phase in _IN_DOUBT}),
        "I2",
    ),
    TablePlant(
        "failed handle taken for landed (table)",
        "a write that ended in error counts like one that landed",
        _taken_for_landed,
        "I3",
    ),
    TablePlant(
        "doubt forgotten",
        "a drain that ends well forgets the write before it that did not",
        _doubt_forgotten,
        "I2",
    ),
    TablePlant(
        "unproven taken for drained",
        "any answer to Abort ends the loan",
        _cells(loans.TABLE, {(phase, LoanKind.UNPROVEN): _RETURN for phase in loans.WRITABLE}),
        "I2",
    ),
    TablePlant(
        "room failed ends the loan",
        "a room that failed is taken for one that has drained: its loans are over, not recalled",
        _cells(loans.TABLE, {(LoanPhase.LENT, LoanKind.RECALL): _RETURN}),
        "I2",
    ),
    TablePlant(
        "success before all ranks (table)",
        "the last chunk of one rank is success",
        success_before_all_ranks,
        "I8",
    ),
    TablePlant(
        "resurrect after terminal",
        "a failed room that is closed again drains again",
        _drains_again,
        "I4",
    ),
    TablePlant(
        "success without the last word",
        "a room that lost its source is told to its client as a success",
        _success_without_the_last_chunk,
        "I8",
    ),
)
