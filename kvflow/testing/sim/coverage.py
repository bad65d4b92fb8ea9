"""Which cells of the shipped tables a simulation has been through, and which it must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from kvflow.protocols.machines import decode_room, grants, link, loan, peer, prefill_room, residency
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
TABLES_OF_NODES = TABLES | {"residency": residency}
"""Endpoints are all of the protocol; whole nodes also have requests that leave the device and come back."""

Cell = tuple[str, int, int]
"""Table, phase, kind."""


@contextmanager
def covered(visits: Counter[Cell]) -> Iterator[None]:
    """Count every look into the tables."""
    tables = TABLES_OF_NODES.items()
    counts = {name: [[0] * len(module.TABLE.kinds) for _ in module.TABLE.phases] for name, module in tables}
    with ExitStack() as swaps:
        for name, module in tables:
            swaps.enter_context(swapped(module.TABLE, "moves", _Counting(module.TABLE.moves, counts[name])))
        try:
            yield
        finally:
            for name, rows in counts.items():
                for phase, row in enumerate(rows):
                    visits.update({(name, phase, kind): count for kind, count in enumerate(row) if count})


class _Counting(Moves[Any, Any, Any]):
    def __init__(self, moves: Moves[Any, Any, Any], counts: list[list[int]]) -> None:
        super().__init__(moves)
        self._counts = counts

    def __getitem__(self, key: tuple[Any, Any]) -> Any:
        self._counts[key[0]][key[1]] += 1
        return super().__getitem__(key)


def report(visits: Counter[Cell], tables: Mapping[str, ModuleType] = TABLES_OF_NODES) -> dict[str, Any]:
    """How many cells of `tables` were visited; legal ones that were not, and impossible ones that were."""
    visited, missing, error = 0, [], []
    for name, module in tables.items():
        table = module.TABLE
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
