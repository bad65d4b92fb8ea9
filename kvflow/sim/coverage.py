"""Which cells of the shipped tables a simulation has been through, and which it must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from kvflow.protocols import decode_room, loans, prefill_room
from kvflow.protocols.loans import LoanKind, LoanPhase
from kvflow.protocols.tables import ERROR
from kvflow.sim.swap import swapped

TABLES: dict[str, ModuleType] = {"decode": decode_room, "prefill": prefill_room, "loan": loans}

Cell = tuple[str, int, int]
"""Table, phase, kind."""


GUARDED: frozenset[Cell] = frozenset(
    {
        # a silent source's rooms have ended, and its recalled loans are in doubt
        ("loan", LoanPhase.LENT, LoanKind.SOURCE_BACK),
        ("loan", LoanPhase.RECALLED, LoanKind.SOURCE_BACK),
        # a prefill that cannot vouch for a write never says that its last chunk has landed
        ("loan", LoanPhase.DOUBTFUL, LoanKind.LANDED),
    }
)
"""Legal cells no whole node comes to, because its handlers settle the matter before. The exhaustive walk and the
machines' own tests go through them; a simulation that comes to one says so."""


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
                    guarded_visited += [what] if (name, phase, kind) in GUARDED else []
                elif (name, phase, kind) not in GUARDED:
                    missing.append(what)
    guarded = sum(TABLES[name].TABLE.cell(phase, kind) is not ERROR for name, phase, kind in GUARDED)
    return {
        "visited": visited,
        "missing": missing,
        "guarded": guarded,
        "guarded_visited": guarded_visited,
        "error": error,
    }
