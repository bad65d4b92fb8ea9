"""Planted bugs in the tables and in the functions that read them."""

from __future__ import annotations

from contextlib import ExitStack

from kvflow.handlers.decode import DecodeShell
from kvflow.handlers.rooms import DecodeRoom
from kvflow.proof.plant import Installed, Plant, planting
from kvflow.proof.sim.swap import swapped, swapped_cells
from kvflow.proof.walk.plants_tables import doubt_forgotten, success_of_one_rank, taken_for_landed
from kvflow.protocols.errors import Cause
from kvflow.protocols.machines import decode_room
from kvflow.protocols.machines import loan as loans
from kvflow.protocols.machines.decode_room import (
    DecodeCommand,
    DecodeEvent,
    DecodeKind,
    DecodePhase,
)
from kvflow.protocols.machines.loan import LoanCommand, LoanKind, LoanPhase
from kvflow.protocols.machines.tables import Move

PLANTS: list[Plant] = []
bug = planting(PLANTS)

bug(
    "failed handle taken for landed (table)",
    "A write that ended in error counts like one that landed.",
    nodes=(4, "I3"),
    bare=(4, "I3"),
)(taken_for_landed)
bug(
    "doubt forgotten",
    "A drain that ends well forgets the write before it that did not.",
    nodes=(4, "I2"),
    bare=(4, "I2"),
)(doubt_forgotten)
bug(
    "success before all ranks",
    "One rank's last chunk is enough.",
    nodes=(5, "I8"),
    bare=(1, "I8"),
)(success_of_one_rank)


@bug(
    "resurrect after terminal",
    nodes=(4, "I4"),
    unseen="decode's shell closes a room that has ended",
)
def _drains_again() -> Installed:
    """A failed room that is closed again drains again."""
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


@bug("success without the last word", nodes=(5, "I8"), bare=(12, "I8"))
def _success_without_the_last_chunk() -> Installed:
    """A room that lost its source is told to its client as a success."""
    # The loan outlives the room, so it becomes doubtful instead of breaking the table.
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
