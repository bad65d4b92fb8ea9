"""`kvflow sim --exhaust`: walk through every state of two or three machines and their link, of a
small group of ranks, or of a small prefix cache.

A step restores a shipped endpoint (`DecodeEndpoint` or `PrefillEndpoint`), feeds it one event and
reads its new state: see `shelf`, `decode_side` and `prefill_side`. `group` walks over a group of
ranks, `cache` over the prefix index. There are many small worlds, because a single large one would
have far too many states: see `worlds`, `group_worlds` and `cache_worlds`.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import monotonic
from typing import Any
from unittest.mock import patch

from kvflow.proof.sim.coverage import AnyTable, Cell, covered, report
from kvflow.proof.walk import breadth_first
from kvflow.proof.walk.breadth_first import World
from kvflow.proof.walk.cache import CacheWorld
from kvflow.proof.walk.cache_plants import PLANTS as PLANTS_OF_A_CACHE
from kvflow.proof.walk.cache_worlds import WORLDS as OF_A_CACHE
from kvflow.proof.walk.cache_worlds import CacheBounds
from kvflow.proof.walk.group import GroupWorld
from kvflow.proof.walk.group_worlds import WORLDS as OF_A_GROUP
from kvflow.proof.walk.group_worlds import GroupBounds
from kvflow.proof.walk.plants import PLANTS
from kvflow.proof.walk.search import Walk
from kvflow.proof.walk.world import Bounds
from kvflow.proof.walk.worlds import SETS, WORLDS
from kvflow.protocols.decode import endpoint as decode
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.machines import (
    cached_run,
    decode_room,
    grants,
    group,
    link,
    ownership,
    peer,
    prefill_room,
)
from kvflow.protocols.machines import loan as loans
from kvflow.protocols.prefill import endpoint as prefill

TABLES: dict[str, AnyTable] = {
    "decode_room": decode_room.TABLE,
    "prefill_room": prefill_room.TABLE,
    "loan": loans.TABLE,
    "link": link.TABLE,
    "peer": peer.TABLE,
    "grants": grants.TABLE,
    "group_member": group.MEMBER,
    "group_leader": group.LEADER,
    "cached_run": cached_run.TABLE,
    **{f"pages_{source.name.lower()}": table for source, table in ownership.TABLES.items()},
}
# The names of group worlds and of cache worlds begin with these prefixes.
_GROUP = "group-"
_CACHE = "cache-"
_OTHERS: dict[str, tuple[str, GroupBounds | CacheBounds]] = {
    **{_GROUP + name: world for name, world in OF_A_GROUP.items()},
    **{_CACHE + name: world for name, world in OF_A_CACHE.items()},
}
_GROUPS = tuple(name for name in _OTHERS if name.startswith(_GROUP))
_CACHES = tuple(name for name in _OTHERS if name.startswith(_CACHE))
ALL_SETS = SETS | {"group": _GROUPS, "cache": _CACHES, "full": SETS["full"] + _GROUPS + _CACHES}
TEXTS = {name: world.text for name, world in WORLDS.items()} | {
    name: text for name, (text, _) in _OTHERS.items()
}


def run(
    bounds: str = "", plant: str = "", say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Walk every world of `bounds`, and stop at the first violation.

    `bounds` names a set of worlds ("full" if empty) or one world. `plant` names a bug to plant,
    unless it is empty.

    Raises: MisuseError for unknown bounds or an unknown plant.
    """
    bounds = bounds or "full"
    names = ALL_SETS.get(bounds) or ((bounds,) if bounds in TEXTS else ())
    if not names:
        raise MisuseError(f"no bounds {bounds!r}; there are: {', '.join((*ALL_SETS, *TEXTS))}")
    found: list[dict[str, Any]] = []
    visits: Counter[Cell] = Counter()
    with _planted(plant):
        with covered(visits, TABLES):
            for name in names:
                say(f"{name}: {TEXTS[name]}")
                found.append({"world": name} | _walk_named(name, say))
                if found[-1]["violations"]:
                    break
        visited = {name for name, _, _ in visits}
        cells = {name: _cells(name, visits) for name in TABLES if name in visited}
    total = {
        key: sum(one[key] for one in found)
        for key in ("states", "transitions", "violations", "seconds")
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    modules = sorted(name for name in sys.modules if name.startswith("kvflow.protocols."))
    return {
        "bounds": bounds,
        "plant": plant,
        **total,
        "peak_mib": peak,
        "endpoints": [
            f"{kind.__module__}.{kind.__name__}"
            for kind in (decode.DecodeEndpoint, prefill.PrefillEndpoint)
        ],
        "modules": modules,
        "worlds": found,
        "cells": cells,
    }


def _cells(name: str, visits: Counter[Cell]) -> dict[str, Any]:
    """Count a table's legal cells, and those of them that the walk visited.

    Lists the unvisited ones, and any impossible cells that the walk visited.
    """
    found = report(visits, {name: TABLES[name]})
    missing, wrong = (
        [cell.removeprefix(f"{name} ") for cell in found[key]] for key in ("missing", "error")
    )
    return {
        "legal": found["visited"] + len(missing),
        "visited": found["visited"],
        "unvisited": missing,
        "impossible": wrong,
    }


def _walk_named(name: str, say: Callable[[str], None]) -> dict[str, Any]:
    if name in WORLDS:
        return walk(WORLDS[name].bounds, say)
    _, bounds = _OTHERS[name]
    world: World[Any] = (
        GroupWorld(bounds) if isinstance(bounds, GroupBounds) else CacheWorld(bounds)
    )
    return {"bounds": bounds._asdict(), **breadth_first.walk(world, say)}


def walk(bounds: Bounds, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Walk one world, and return the report.

    `states` counts each state once. `looked_at` counts every visit: the walk visits a state again
    if more faults, or others, remain.
    """
    began = monotonic()
    with one_task_at_a_time() if bounds.step_by_step else nullcontext():
        here = Walk(bounds)
        violation = here.run(say)
    found: dict[str, Any] = {
        "bounds": bounds._asdict(),
        "states": len(here.states),
        "looked_at": sum(len(level.states) for level in here.levels),
        "transitions": here.steps,
        "depth": len(here.levels) - 1,
        "rest_states": here.rest_states,
        "decodes": len(here.tables.decodes.values),
        "prefills": len(here.tables.prefills.values),
        "violations": int(violation is not None),
        "seconds": round(monotonic() - began, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }
    if violation is not None:
        found |= {"broken": violation.broken, "path": violation.path}
        steps = (f"  {n}. {line}" for n, line in enumerate(violation.path, 1))
        say("\n".join([violation.broken, *steps]))
    return found


@contextmanager
def one_task_at_a_time() -> Iterator[None]:
    """Let each tick handle only one room or loan, so that messages can arrive in between."""
    with patch.object(decode, "TICK_WORK", 1), patch.object(prefill, "TICK_WORK", 1):
        yield


def _planted(name: str) -> Any:
    if not name:
        return nullcontext()
    known = {plant.name: plant.install for plant in PLANTS}
    known |= {plant.name: plant.install for plant in PLANTS_OF_A_CACHE}
    if name not in known:
        raise MisuseError(f"no plant {name!r} of the walk; there are: {', '.join(known)}")
    return known[name]()
