"""Cells of the shipped tables that a simulation visited, and those that it must visit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvflow.proof.sim.swap import swaps
from kvflow.protocols.machines import (
    cached_run,
    decode_room,
    grants,
    group,
    link,
    loan,
    peer,
    prefill_room,
    residency,
)
from kvflow.protocols.machines.tables import ERROR, Moves, Table

AnyTable = Table[Any, Any, Any]
TABLES: dict[str, AnyTable] = {
    "decode": decode_room.TABLE,
    "prefill": prefill_room.TABLE,
    "loan": loan.TABLE,
    "link": link.TABLE,
    "peer": peer.TABLE,
    "grant": grants.TABLE,
}
TABLES_OF_NODES = TABLES | {"residency": residency.TABLE}
"""Tables of whole nodes, whose requests can also leave the device and return."""
TABLES_OF_GROUPS = TABLES | {"group member": group.MEMBER, "group leader": group.LEADER}
TABLES_OF_CACHES = TABLES | {"cached run": cached_run.TABLE}
ALL_TABLES = TABLES_OF_NODES | TABLES_OF_GROUPS | TABLES_OF_CACHES

Cell = tuple[str, int, int]
"""Name of a table, number of a phase and number of an event kind."""


@contextmanager
def covered(visits: Counter[Cell], tables: Mapping[str, AnyTable] = ALL_TABLES) -> Iterator[None]:
    """Count every lookup in the tables while the context lasts, and add the counts to `visits`."""
    # Lists by index are faster than a Counter in the busiest lookups of a run.
    counts = {n: [[0 for _ in table.kinds] for _ in table.phases] for n, table in tables.items()}
    with swaps((t, "moves", _Counting(t.moves, counts[name])) for name, t in tables.items()):
        try:
            yield
        finally:
            for name, rows in counts.items():
                for phase, row in enumerate(rows):
                    visits.update(
                        {(name, phase, kind): count for kind, count in enumerate(row) if count}
                    )


class _Counting(Moves[Any, Any, Any]):
    def __init__(self, moves: Moves[Any, Any, Any], counts: list[list[int]]) -> None:
        super().__init__(moves)
        self._counts = counts

    def __getitem__(self, key: tuple[Any, Any]) -> Any:
        self._counts[key[0]][key[1]] += 1
        return super().__getitem__(key)


def report(
    visits: Counter[Cell], tables: Mapping[str, AnyTable] = TABLES_OF_NODES
) -> dict[str, Any]:
    """Count the legal cells that were visited.

    Also list the legal cells that were not visited, and the impossible cells that were.
    """
    visited, missing, error = 0, [], []
    for name, table in tables.items():
        for phase in table.phases:
            for kind in table.kinds:
                count = visits[name, phase, kind]
                what = f"{name} {phase.name} x {kind.name}"
                if table.cell(phase, kind) is ERROR:
                    error += [what] if count else []
                elif count:
                    visited += 1
                else:
                    missing.append(what)
    return {"visited": visited, "missing": missing, "error": error}
