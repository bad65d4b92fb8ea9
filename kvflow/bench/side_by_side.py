"""Rooms and transfers of several checkouts, in short rounds that alternate between running pairs.

A round takes a few tenths of a second, so other load on the machine affects every tree alike. Only
the workers run the tree's code; their commands and the clock are the same for all trees. Processes
start anew every `LIFE_TURNS` turns, in another order, since a process keeps the cores and the
memory that it got. By chance these change CPU per room by some 15 %, and the first process to start
has 7 % more goodput in a local transfer. With two trees, each one starts first equally often in 12
turns.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from kvflow.bench import rooms, transfer
from kvflow.bench.figures import Say
from kvflow.bench.pair import WORKER, WorkerPair

# Rooms of a round by concurrency, chosen so that a round takes a few tenths of a second.
ROOMS = {1: 200, 32: 1500, 256: 3000}
CASES = transfer.PEER_CASES
LIFE_TURNS = 2

Trees = Mapping[str, str]
"""Root of the checkout of each run, by the name of the run; two runs may share a checkout."""
Options = Mapping[str, Mapping[str, Any]]
"""Additional arguments for the setup of a run's workers, by the name of the run."""
Figures = dict[str, float]
Turns = list[dict[str, Figures]]
"""Figures of each run by its name, turn by turn."""
Measure = Callable[[WorkerPair], Awaitable[Figures]]
OpenAll = Callable[[Trees], AbstractAsyncContextManager[dict[str, WorkerPair]]]


async def rooms_by_turns(
    trees: Trees, planes: tuple[str, ...], turns: int, say: Say, options: Options | None = None
) -> Turns:
    """Measure rooms/s, latency and CPU per room in interleaved turns."""
    seen: Turns = [{name: {} for name in trees} for _ in range(turns)]
    for plane in planes:
        cases = {
            f"{plane} {at_once}": partial(_rooms, at_once=at_once, count=n)
            for at_once, n in ROOMS.items()
        }
        await _by_turns(
            partial(_pairs, plane, options or {}, order="page_first", **rooms.SHAPE),
            trees,
            cases,
            seen,
            say,
        )
    return seen


async def transfers_by_turns(
    trees: Trees, planes: tuple[str, ...], turns: int, say: Say, options: Options | None = None
) -> Turns:
    """Measure goodput through rooms. Every run, A/A included, needs 2.3 GiB of memory."""
    seen: Turns = [{name: {} for name in trees} for _ in range(turns)]
    pages = max(case.pages * case.rooms for case in CASES) + transfer.SPARE_PAGES
    for plane in planes:
        cases = {f"{plane} {case}": partial(_goodput, case=case) for case in CASES}
        open_all = partial(
            _pairs, plane, options or {}, order="page_first", pages=pages, **transfer.SHAPE
        )
        await _by_turns(open_all, trees, cases, seen, say)
    return seen


async def _rooms(pair: WorkerPair, *, at_once: int, count: int) -> Figures:
    row = await rooms.ours(pair, at_once, count)
    return {**row, "cpu_ms_per_room": rooms.cpu(row)}


async def _goodput(pair: WorkerPair, *, case: transfer.Case) -> Figures:
    return {"rooms_gb_s": await transfer.through_rooms(pair, case)}


async def _by_turns(
    open_all: OpenAll, trees: Trees, cases: Mapping[str, Measure], seen: Turns, say: Say
) -> None:
    """Fill `seen`, turn by turn, with the figures of every case."""
    for life, first in enumerate(range(0, len(seen), LIFE_TURNS)):
        async with open_all({name: trees[name] for name in _order(list(trees), life)}) as opened:
            for title, measure in cases.items():
                # One measurement of each case that does not count warms its processes up.
                for pair in opened.values():
                    await measure(pair)
                for turn in range(first, min(first + LIFE_TURNS, len(seen))):
                    for name in _order(list(opened), turn):
                        found = await measure(opened[name])
                        seen[turn][name] |= {
                            f"{title} {figure}": value for figure, value in found.items()
                        }
        say(f"{', '.join(cases)}: {min(first + LIFE_TURNS, len(seen))} of {len(seen)} turns")


def _order(names: list[str], turn: int) -> list[str]:
    # The rotation changes the first tree, and the reversal changes what each one follows.
    first = turn % len(names)
    return (names[first:] + names[:first])[:: -1 if turn % 2 else 1]


@asynccontextmanager
async def _pairs(
    plane: str, options: Options, trees: Trees, /, **shape: Any
) -> AsyncIterator[dict[str, WorkerPair]]:
    async with AsyncExitStack() as stack:
        opened: dict[str, WorkerPair] = {}
        for name, tree in trees.items():
            pair = await WorkerPair.open(plane, WORKER, tree, **shape, **options.get(name, {}))
            opened[name] = await stack.enter_async_context(pair)
        yield opened
