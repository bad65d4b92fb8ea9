"""Which cells of the shipped tables a simulation has been through, and which it must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from types import ModuleType
from typing import Any

from kvflow.protocols import decode_room, loans, prefill_room
from kvflow.protocols.decode_room import DecodeKind as D
from kvflow.protocols.decode_room import DecodePhase
from kvflow.protocols.loans import LoanKind as L
from kvflow.protocols.loans import LoanPhase
from kvflow.protocols.prefill_room import PrefillKind as P
from kvflow.protocols.prefill_room import PrefillPhase
from kvflow.protocols.tables import ERROR
from kvflow.sim.swap import swapped

TABLES: dict[str, ModuleType] = {"decode": decode_room, "prefill": prefill_room, "loan": loans}

Cell = tuple[str, int, int]
"""Table, phase, kind."""

_OPEN = (DecodePhase.WAITING_FOR_INPUT, DecodePhase.TRANSFERRING)
_CLOSED = tuple(phase for phase in DecodePhase if phase not in (DecodePhase.BOOTSTRAPPING, *_OPEN))

GUARDED: tuple[tuple[str, tuple[IntEnum, ...], tuple[IntEnum, ...]], ...] = (
    # a room at decode is opened in one synchronous call, which begins with REGISTERED and is no second time
    ("decode", (DecodePhase.BOOTSTRAPPING,), (D.ROOM_FAILED, D.ENDED_LOCALLY, D.SOURCE_LOST)),
    ("decode", (*_OPEN, *_CLOSED), (D.REGISTERED,)),
    # `step` answers for chunks of a room that takes none before it looks into the table
    ("decode", _CLOSED, (D.CHUNK_LANDED, D.ALL_LANDED)),
    # an ended room is in no table of its node: no word finds it, only its user can close it again
    ("decode", tuple(decode_room.TERMINAL), (D.ROOM_FAILED, D.SOURCE_LOST)),
    ("decode", (DecodePhase.SUCCESS, DecodePhase.ABORTED), (D.LOANS_ENDED, D.LOANS_DOUBTFUL)),
    ("prefill", tuple(prefill_room.TERMINAL), tuple(P)),
    # `_end_of_write` calls the end of a write by other names while a room drains
    ("prefill", (PrefillPhase.DRAINING,), (P.IDLE, P.ALL_LANDED, P.WRITE_FAILED, P.ALL_DOUBTFUL)),
    # whatever happens to a source ends its rooms first, and that recalls their loans; only recalled ones are repeated
    ("loan", (LoanPhase.LENT,), (L.SOURCE_LOST, L.SOURCE_BACK, L.REPEAT_DUE, L.FENCED)),
    ("loan", (LoanPhase.RECALLED,), (L.RECALL, L.SOURCE_BACK, L.FENCED)),
    # a chunk that lands late finds no room any more, and its loan waits for the acknowledgement
    ("loan", (LoanPhase.DOUBTFUL,), (L.LANDED, L.REPEAT_DUE)),
    # a loan that has ended is out of the ledger
    ("loan", (LoanPhase.RETURNED,), tuple(L)),
)
"""Legal cells no whole node comes to, because its handlers settle the matter before. The exhaustive walk and the
machines' own tests go through them; a simulation that comes to one says so."""

_GUARDED = frozenset((name, phase, kind) for name, phases, kinds in GUARDED for phase in phases for kind in kinds)


@contextmanager
def covered(visits: Counter[Cell]) -> Iterator[None]:
    """Count every look into the three tables."""
    with ExitStack() as swaps:
        for name, module in TABLES.items():
            swaps.enter_context(swapped(module.TABLE, "move", _counting(name, module.TABLE.move, visits)))
        yield


def _counting(name: str, move: Any, visits: Counter[Cell]) -> Any:
    def counted(phase: Any, kind: Any) -> Any:
        visits[name, phase, kind] += 1
        return move(phase, kind)

    return counted


def report(visits: Counter[Cell]) -> dict[str, Any]:
    """How many cells were visited; legal ones that were not, impossible ones that were, and what was never expected."""
    visited, missing, guarded_visited, error = 0, [], [], []
    for name, module in TABLES.items():
        table = module.TABLE
        for phase in table.phases:
            for kind in table.kinds:
                count = visits[name, phase, kind]
                what = f"{name} {phase.name} x {kind.name}"
                if table.cell(phase, kind) is ERROR:
                    error += [what] if count else []
                elif count:
                    visited += 1
                    guarded_visited += [what] if (name, phase, kind) in _GUARDED else []
                elif (name, phase, kind) not in _GUARDED:
                    missing.append(what)
    guarded = sum(TABLES[name].TABLE.cell(phase, kind) is not ERROR for name, phase, kind in _GUARDED)
    return {
        "visited": visited,
        "missing": missing,
        "guarded": guarded,
        "guarded_visited": guarded_visited,
        "error": error,
    }
