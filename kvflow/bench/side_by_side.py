"""Rooms and transfers of several checkouts, measured in turn in short rounds.

A round takes a few tenths of a second, so other load on the machine affects every tree alike. Only
the workers run the tree's code. Their commands and the clock are the same for all trees.

Every `LIFE_TURNS` turns, all processes are restarted in another order. A process keeps the cores
and the memory that it got when it started. Both depend on chance, and change the CPU time per room
by some 15 %. The first process to start also has 7 % more goodput in a local transfer. With two
trees and A/A, each of the three runs starts first equally often in 12 turns.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from kvflow.bench import rooms, transfer
from kvflow.bench.figures import Say
from kvflow.bench.pair import WORKER, WorkerPair

# Number of rooms per round, by concurrency: a round takes a few tenths of a second.
ROOMS = {1: 200, 32: 1500, 256: 3000}
CASES = transfer.PEER_CASES
LIFE_TURNS = 2

Trees = Mapping[str, str]
"""The root of each run's checkout, by the name of the run. Two runs may share a checkout."""
Options = Mapping[str, Mapping[str, Any]]
"""Additional arguments for the setup of a run's workers, by the name of the run."""
Figures = dict[str, float]
Turns = list[dict[str, Figures]]
"""A list with one entry per turn: the figures of each run, by the name of the run."""
Measure = Callable[[WorkerPair], Awaitable[Figures]]


async def rooms_by_turns(
    trees: Trees, planes: tuple[str, ...], turns: int, say: Say, options: Options | None = None
) -> Turns:
    """Measure rooms/s, latency and CPU per room in interleaved turns."""
    cases = {str(n): partial(_rooms, at_once=n, count=count) for n, count in ROOMS.items()}
    return await _by_turns(trees, planes, turns, say, options or {}, cases, rooms.SHAPE)


async def transfers_by_turns(
    trees: Trees, planes: tuple[str, ...], turns: int, say: Say, options: Options | None = None
) -> Turns:
    """Measure goodput through rooms. Every run, A/A included, needs 2.3 GiB of memory."""
    cases = {str(case): partial(_goodput, case=case) for case in CASES}
    pages = max(case.pages * case.rooms for case in CASES) + transfer.SPARE_PAGES
    shape = {**transfer.SHAPE, "pages": pages}
    return await _by_turns(trees, planes, turns, say, options or {}, cases, shape)


async def _rooms(pair: WorkerPair, *, at_once: int, count: int) -> Figures:
    row = await rooms.ours(pair, at_once, count)
    return {**row, "cpu_ms_per_room": rooms.cpu(row)}


async def _goodput(pair: WorkerPair, *, case: transfer.Case) -> Figures:
    return {"rooms_gb_s": await transfer.through_rooms(pair, case)}


async def _by_turns(
    trees: Trees,
    planes: tuple[str, ...],
    turns: int,
    say: Say,
    options: Options,
    cases: Mapping[str, Measure],
    shape: Mapping[str, int],
) -> Turns:
    seen: Turns = [{name: {} for name in trees} for _ in range(turns)]
    for plane, first in itertools.product(planes, range(0, turns, LIFE_TURNS)):
        last = min(first + LIFE_TURNS, turns)
        order = {name: trees[name] for name in _order(list(trees), first // LIFE_TURNS)}
        async with _pairs(plane, options, order, **shape) as opened:
            for case, measure in cases.items():
                # Measure each case once without counting it, to warm up the processes.
                for pair in opened.values():
                    await measure(pair)
                for turn in range(first, last):
                    for name in _order(list(opened), turn):
                        for figure, value in (await measure(opened[name])).items():
                            seen[turn][name][f"{plane} {case} {figure}"] = value
        say(f"{plane}, {', '.join(cases)}: {last} of {turns} turns")
    return seen


def _order(names: list[str], turn: int) -> list[str]:
    # The rotation changes which tree comes first. The reversal changes which tree follows which,
    # and lasts for a whole rotation. If the order were reversed every second turn, the reversal
    # would undo the rotation of two trees, and the same tree would always come first.
    rotations, first = divmod(turn, len(names))
    return (names[first:] + names[:first])[:: -1 if rotations % 2 else 1]


@asynccontextmanager
async def _pairs(
    plane: str, options: Options, trees: Trees, /, **shape: Any
) -> AsyncIterator[dict[str, WorkerPair]]:
    async with AsyncExitStack() as stack:
        opened: dict[str, WorkerPair] = {}
        for name, tree in trees.items():
            more = {"order": "page_first", **shape, **options.get(name, {})}
            pair = await WorkerPair.open(plane, WORKER, tree, **more)
            opened[name] = await stack.enter_async_context(pair)
        yield opened
