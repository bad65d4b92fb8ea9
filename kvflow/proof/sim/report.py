"""Report about many seeds: faults that struck, endings of rooms, visited cells, and speed."""

from __future__ import annotations

import multiprocessing
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from kvflow.proof.rules.outcome import Outcome
from kvflow.proof.sim.coverage import (
    TABLES,
    TABLES_OF_CACHES,
    TABLES_OF_GROUPS,
    TABLES_OF_NODES,
    Cell,
    report,
)
from kvflow.proof.sim.faults import KINDS, ON_COPIES, SWITCH
from kvflow.proof.sim.plants import planted
from kvflow.proof.sim.run import simulate

BATCH = 50  # seeds that a worker process plays at a time
SHOWN = 20  # violations that are printed in full


def simulate_many(
    seeds: Sequence[int],
    jobs: int = 1,
    plant: str = "",
    say: Callable[[str], None] = lambda _: None,
    *,
    bare: bool = False,
    group: int = 0,
    cache: bool = False,
) -> dict[str, Any]:
    """Play `seeds` and return a report, which counts and states how to replay each violation.

    The seeds are of whole nodes, with prefix caches or without, of bare endpoints, or of one group
    of `group` ranks.
    """
    bare = bare or bool(group)
    visits: Counter[Cell] = Counter()
    faults: Counter[str] = Counter(dict.fromkeys(_fault_kinds(bare, cache), 0))
    endings: Counter[str] = Counter()
    violations: list[dict[str, Any]] = []
    steps: list[int] = []
    cpu_s, few_faults, rooms, rooms_min, nodes_min = 0.0, 0, 0, 1 << 30, 1 << 30
    for outcomes, cells in _batches(seeds, jobs, plant, bare, group, cache):
        visits.update(cells)
        for outcome in outcomes:
            faults.update(outcome.faults)
            endings.update(outcome.endings)
            steps.append(outcome.steps)
            cpu_s += outcome.cpu_s
            few_faults += len(outcome.faults) < 2
            rooms += outcome.rooms
            rooms_min, nodes_min = min(rooms_min, outcome.rooms), min(nodes_min, outcome.nodes)
            if outcome.violation is not None:
                violations.append(described(outcome, plant, bare=bare, group=group, cache=cache))
                say(f"seed {outcome.seed}: {outcome.violation.invariant}: {outcome.violation.text}")
        if len(steps) % 1000 == 0:
            say(f"{len(steps)} of {len(seeds)} seeds, {len(violations)} violations")
    return {
        "seeds": len(seeds),
        "violations": len(violations),
        "faults": dict(faults),
        "steps": sum(steps),
        "median_steps": int(statistics.median(steps)),
        "min_steps": min(steps),
        "steps_per_s": round(sum(steps) / cpu_s),
        "seeds_per_s": round(len(seeds) / cpu_s, 1),  # of CPU time, on one core
        "rooms": rooms,
        "cells": report(visits, _tables(bare, group, cache)),
        "endings": dict(endings.most_common()),
        "seeds_with_fewer_than_2_fault_kinds": few_faults,
        "min_rooms": rooms_min,
        "min_nodes": nodes_min,
        "first_violations": violations[:SHOWN],
    }


def _tables(bare: bool, group: int, cache: bool) -> Mapping[str, Any]:
    """Return the tables whose cells the seeds can visit."""
    if cache:
        return TABLES_OF_CACHES
    if group:
        return TABLES_OF_GROUPS
    return TABLES if bare else TABLES_OF_NODES


def _fault_kinds(bare: bool, cache: bool) -> tuple[str, ...]:
    if bare:
        return KINDS
    return (*KINDS, *ON_COPIES) if cache else (*KINDS, *ON_COPIES, SWITCH)


def described(
    outcome: Outcome, plant: str = "", *, bare: bool = False, group: int = 0, cache: bool = False
) -> dict[str, Any]:
    assert outcome.violation is not None
    how = f" --group {group}" if group else " --bare" * bare + " --cache" * cache
    replay = f"kvflow sim{how} --seed {outcome.seed} --trace" + (
        f" --plant {plant!r}" if plant else ""
    )
    return {"seed": outcome.seed, **outcome.violation._asdict(), "replay": replay}


def _batches(
    seeds: Sequence[int], jobs: int, plant: str, bare: bool, group: int, cache: bool
) -> Iterator[tuple[list[Outcome], Counter[Cell]]]:
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    play = partial(_play_cached if cache else _play_bare if bare else _play, plant=plant)
    if group:
        play = partial(_play_group, plant=plant, ranks=group)
    if jobs == 1:
        yield from map(play, batches)
        return
    # A spawned worker imports everything afresh, so it inherits no plants and no threads.
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(play, batches)


def _play(seeds: Sequence[int], plant: str) -> tuple[list[Outcome], Counter[Cell]]:
    visits: Counter[Cell] = Counter()
    with planted(plant):
        return [simulate(seed, visits=visits) for seed in seeds], visits


def _play_bare(seeds: Sequence[int], plant: str) -> tuple[list[Outcome], Counter[Cell]]:
    from kvflow.proof.bare.plants import planted as planted_bare
    from kvflow.proof.bare.run import simulate as simulate_bare

    visits: Counter[Cell] = Counter()
    with planted_bare(plant):
        return [simulate_bare(seed, visits=visits) for seed in seeds], visits


def _play_cached(seeds: Sequence[int], plant: str) -> tuple[list[Outcome], Counter[Cell]]:
    from kvflow.proof.cached.plants import planted as planted_cached
    from kvflow.proof.cached.run import simulate as simulate_cached

    visits: Counter[Cell] = Counter()
    with planted_cached(plant):
        return [simulate_cached(seed, visits=visits) for seed in seeds], visits


def _play_group(
    seeds: Sequence[int], plant: str, ranks: int
) -> tuple[list[Outcome], Counter[Cell]]:
    from kvflow.proof.group.plants import planted as planted_group
    from kvflow.proof.group.run import simulate as simulate_group

    visits: Counter[Cell] = Counter()
    with planted_group(plant):
        return [simulate_group(seed, visits=visits, ranks=ranks) for seed in seeds], visits
