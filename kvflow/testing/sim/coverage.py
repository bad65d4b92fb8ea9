"""Which cells of the shipped tables a simulation has been through, and which it must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from kvflow.protocols.machines import decode_room, grants, link, loan, peer, prefill_room
from kvflow.protocols.machines.tables import ERROR, Moves
from kvflow.testing.sim.swap import swapped

TABLES: dict[str, ModuleType] = {
    "decode": decode_room,
    "prefill": prefill_room,
    "loan": loan,
    "link": link,
    "peer": peer,
    "grant": grants,
}

Cell = tuple[str, int, int]
"""Table, phase, kind."""

NEVER_FED = frozenset(
    {
        # `note_alive` feeds HEARD to silent peers only, and it wakes a peer before REGISTERED is fed.
        *("peer OPENING x HEARD", "peer UP x HEARD", "peer DEAD x HEARD", "peer SILENT x REGISTERED"),
        # IDLE is fed to dead peers only.
        *("peer OPENING x IDLE", "peer UP x IDLE", "peer SILENT x IDLE"),
        # Nothing is due of a link that is gone, and a writer is watched from the moment it has accepted.
        *(f"link GONE x {kind}_DUE" for kind in ("REPEAT", "SILENCE", "REGISTER", "REDIAL")),
        "link REGISTERING x DIED",
        # Tasks skip rooms that have ended; `settle` walks ended grants and those no room answers for.
        *("prefill DRAINING x TARGET_LOST", "grant OPEN x SETTLE", "grant BELOW x SETTLE"),
    }
)
"""Legal cells that the endpoints never look up; the walk and the tests of the tables do."""


@contextmanager
def covered(visits: Counter[Cell]) -> Iterator[None]:
    """Count every look into the tables."""
    with ExitStack() as swaps:
        for name, module in TABLES.items():
            swaps.enter_context(swapped(module.TABLE, "moves", _Counting(name, module.TABLE.moves, visits)))
        yield


class _Counting(Moves[Any, Any, Any]):
    def __init__(self, name: str, moves: Moves[Any, Any, Any], visits: Counter[Cell]) -> None:
        super().__init__(moves)
        self._name, self._visits = name, visits

    def __getitem__(self, key: tuple[Any, Any]) -> Any:
        self._visits[self._name, *key] += 1
        return super().__getitem__(key)


def report(visits: Counter[Cell]) -> dict[str, Any]:
    """How many cells were visited; legal ones that endpoints can feed and were not, and impossible ones that were."""
    visited, missing, error = 0, [], []
    for name, module in TABLES.items():
        table = module.TABLE
        for phase in table.phases:
            for kind in table.kinds:
                count = visits[name, phase, kind]
                what = f"{name} {phase.name} x {kind.name}"
                if what in NEVER_FED and not count:
                    continue
                if table.cell(phase, kind) is ERROR:
                    error += [what] if count else []
                elif count:
                    visited += 1
                else:
                    missing.append(what)
    return {"visited": visited, "missing": missing, "error": error}
