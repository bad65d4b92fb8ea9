"""Everything that two or three machines and their link can do: `kvflow sim --exhaust`.

What runs are the shipped tables and step functions (`protocols.decode_room`, `prefill_room`, `loans`), joined by as
little as the handlers do with a message (`explore_decode`, `explore_prefill`). Of two ranks, doubts and silences are
bounded as well; of one, they may come at any time and as often as they like.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from time import monotonic
from typing import Any
from unittest.mock import patch

from kvflow.protocols.errors import MisuseError
from kvflow.protocols.machines import decode_room, prefill_room
from kvflow.protocols.machines import loan as loans
from kvflow.protocols.machines.tables import ERROR, Table
from kvflow.testing.sim.explore_tables import Bounds
from kvflow.testing.sim.explore_walk import Walk
from kvflow.testing.sim.table_plants import PLANTS

BOUNDS: dict[str, tuple[Bounds, ...]] = {
    "full": (Bounds(), Bounds(ranks=2, chunks=2, in_flight=3, drops=1, duplicates=1, doubts=0, silences=0)),
    "wide": (Bounds(ranks=2, in_flight=3, drops=1, duplicates=1, doubts=0, silences=0),),
    "small": (
        Bounds(chunks=2, in_flight=2, drops=1, duplicates=1),
        Bounds(ranks=2, chunks=1, in_flight=2, drops=0, duplicates=0, doubts=0, silences=0),
    ),
}
"""Two machines, then three; "wide" has three machines and three chunks, "small" is what the test suite walks."""

MACHINES = {"decode_room": decode_room, "prefill_room": prefill_room, "loans": loans}


class Watched:
    """A table that remembers which of its cells were asked for."""

    def __init__(self, table: Table[Any, Any, Any]) -> None:
        self.table = table
        self.seen: set[tuple[IntEnum, IntEnum]] = set()

    def move(self, phase: IntEnum, kind: IntEnum) -> Any:
        self.seen.add((phase, kind))
        return self.table.move(phase, kind)

    def unvisited(self) -> list[str]:
        """Cells the table does not call impossible, and the walk has not seen."""
        cells = [(phase, kind) for phase in self.table.phases for kind in self.table.kinds]
        legal = [cell for cell in cells if self.table.cell(*cell) is not ERROR]
        return [f"{phase.name} x {kind.name}" for phase, kind in legal if (phase, kind) not in self.seen]


def run(bounds: str = "", plant: str = "", say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Walk every world of `bounds` ("full" when empty), with that planted bug if one is named; stops at a violation.

    Raises: MisuseError for bounds or a plant there are not.
    """
    worlds = BOUNDS.get(bounds or "full")
    if worlds is None:
        raise MisuseError(f"no bounds {bounds!r}; there are: {', '.join(BOUNDS)}")
    found: list[dict[str, Any]] = []
    with _planted(plant), watched() as tables:
        for world in worlds:
            found.append(walk(world, say))
            if found[-1]["violations"]:
                break
        cells = {name: {"visited": len(t.seen), "unvisited": t.unvisited()} for name, t in tables.items()}
    total = {key: sum(one[key] for one in found) for key in ("states", "transitions", "violations", "seconds")}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {"bounds": bounds or "full", "plant": plant, **total, "peak_mib": peak, "worlds": found, "cells": cells}


def walk(bounds: Bounds, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Walk one world. `states` are counted without the faults that are left, `looked_at` with them."""
    began, here = monotonic(), Walk(bounds)
    violation = here.run(say)
    report: dict[str, Any] = {
        "bounds": bounds._asdict(),
        "states": len(here.states),
        "looked_at": sum(len(level.states) for level in here.levels),
        "transitions": here.steps,
        "depth": len(here.levels) - 1,
        "rest_states": here.rest_states,
        "violations": int(violation is not None),
        "seconds": round(monotonic() - began, 1),
    }
    if violation is not None:
        report |= {"broken": violation.broken, "path": violation.path}
        say("\n".join([violation.broken, *(f"  {n}. {line}" for n, line in enumerate(violation.path, 1))]))
    return report


@contextmanager
def watched() -> Iterator[dict[str, Watched]]:
    """The machines' tables, with a note of every cell that is asked for."""
    tables = {name: Watched(module.TABLE) for name, module in MACHINES.items()}
    with (
        patch.object(decode_room, "TABLE", tables["decode_room"]),
        patch.object(prefill_room, "TABLE", tables["prefill_room"]),
        patch.object(loans, "TABLE", tables["loans"]),
    ):
        yield tables


def _planted(name: str) -> Any:
    if not name:
        return nullcontext()
    for plant in PLANTS:
        if plant.name == name:
            return plant.install()
    raise MisuseError(f"no plant {name!r} in the tables; there are: {', '.join(plant.name for plant in PLANTS)}")
