"""Report on many seeds: faults that struck, endings of rooms, visited cells, and speed."""

from __future__ import annotations

import multiprocessing
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from kvflow.proof.rules.outcome import Outcome
from kvflow.proof.sim.coverage import Cell, report
from kvflow.proof.simulators import Choice

BATCH = 50  # seeds per task of a worker process
SHOWN = 20  # maximum number of violations in the report


def simulate_many(
    seeds: Sequence[int],
    jobs: int = 1,
    say: Callable[[str], None] = lambda _: None,
    choice: Choice = Choice(),  # noqa: B008
) -> dict[str, Any]:
    """Play `seeds`, and report counts and the first violations, each with its replay command."""
    simulator = choice.load()
    visits: Counter[Cell] = Counter()
    faults: Counter[str] = Counter(dict.fromkeys(simulator.faults, 0))
    endings: Counter[str] = Counter()
    violations: list[dict[str, Any]] = []
    steps: list[int] = []
    cpu_s, few_faults, rooms, rooms_min, nodes_min = 0.0, 0, 0, 1 << 30, 1 << 30
    for outcomes, cells in _batches(seeds, jobs, choice):
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
                violations.append(described(outcome, simulator.how))
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
        "seeds_per_s": round(len(seeds) / cpu_s, 1),  # per second of CPU time
        "rooms": rooms,
        "cells": report(visits, simulator.tables),
        "endings": dict(endings.most_common()),
        "seeds_with_fewer_than_2_fault_kinds": few_faults,
        "min_rooms": rooms_min,
        "min_nodes": nodes_min,
        "first_violations": violations[:SHOWN],
    }


def described(outcome: Outcome, how: str, plant: str = "") -> dict[str, Any]:
    assert outcome.violation is not None
    replay = f"kvflow sim{how} --seed {outcome.seed} --trace"
    if plant:
        replay += f" --plant {plant!r}"
    return {"seed": outcome.seed, **outcome.violation._asdict(), "replay": replay}


def _batches(
    seeds: Sequence[int], jobs: int, choice: Choice
) -> Iterator[tuple[list[Outcome], Counter[Cell]]]:
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    play = partial(_play, choice=choice)
    if jobs == 1:
        yield from map(play, batches)
        return
    # A spawned worker imports everything afresh, so it inherits no plants and no threads.
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(play, batches)


def _play(seeds: Sequence[int], choice: Choice) -> tuple[list[Outcome], Counter[Cell]]:
    visits: Counter[Cell] = Counter()
    simulate = choice.load().simulate
    return [simulate(seed, visits=visits) for seed in seeds], visits
