"""Rooms and transfers of several checkouts at once: every tree's processes stay up, and short rounds alternate.

A round takes a few tenths of a second, so what else the machine does meets every tree alike. Only the workers are a
tree's own code; what they are asked, and how the clock is read, is the same for all.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from kvflow.bench import rooms, transfer
from kvflow.bench.pair import WORKER, Pair

ROOMS = {1: 200, 32: 1500, 256: 3000}  # of a round, by how many run at once: a few tenths of a second
WARM_ROOMS, WARM_AT_ONCE = 400, 8
CASES = transfer.PEER_CASES

Trees = Mapping[str, str]
"""Name of a run -> root of its checkout; two names may have the same."""
Figures = dict[str, float]
Say = Callable[[str], None]


@asynccontextmanager
async def pairs(trees: Trees, plane: str, **shape: Any) -> AsyncIterator[dict[str, Pair]]:
    """A prefill and a decode of every tree."""
    async with AsyncExitStack() as stack:
        opened = {name: await Pair.open(plane, WORKER, tree, **shape) for name, tree in trees.items()}
        for pair in opened.values():
            await stack.enter_async_context(pair)
        yield opened


async def rooms_by_turns(trees: Trees, planes: tuple[str, ...], turns: int, say: Say) -> list[dict[str, Figures]]:
    """`turns` times the figures of every tree by its name."""
    seen: list[dict[str, Figures]] = [{name: {} for name in trees} for _ in range(turns)]
    for plane in planes:
        async with pairs(trees, plane, order="page_first", **rooms.SHAPE) as opened:
            for pair in opened.values():
                await pair.rooms(WARM_ROOMS, WARM_AT_ONCE, 1)
            for concurrency, count in ROOMS.items():

                async def measure(pair: Pair, at_once: int = concurrency, of_a_round: int = count) -> Figures:
                    row = await rooms.ours(pair, at_once, of_a_round)
                    return {**row, "cpu_ms_per_room": rooms.cpu(row)}

                await _turns(opened, seen, f"{plane} {concurrency}", measure)
                say(f"{plane}, {concurrency} at once: {turns} turns")
    return seen


async def transfers_by_turns(trees: Trees, planes: tuple[str, ...], turns: int, say: Say) -> list[dict[str, Figures]]:
    """As `rooms_by_turns`; goodput through rooms, 2.3 GiB of memory a tree."""
    seen: list[dict[str, Figures]] = [{name: {} for name in trees} for _ in range(turns)]
    pages = max(case.pages * case.rooms for case in CASES) + transfer.SPARE_PAGES
    for plane in planes:
        async with pairs(trees, plane, order="page_first", pages=pages, **transfer.SHAPE) as opened:
            for case in CASES:
                for pair in opened.values():
                    await transfer.through_rooms(pair, case)

                async def measure(pair: Pair, moved: transfer.Case = case) -> Figures:
                    return {"rooms_gb_s": await transfer.through_rooms(pair, moved)}

                await _turns(opened, seen, f"{plane} {case}", measure)
                say(f"{plane}, {case}: {turns} turns")
    return seen


async def _turns(
    opened: Mapping[str, Pair],
    seen: list[dict[str, Figures]],
    title: str,
    measure: Callable[[Pair], Awaitable[Figures]],
) -> None:
    names = list(opened)
    for turn, figures in enumerate(seen):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found = await measure(opened[name])
            figures[name] |= {f"{title} {figure}": value for figure, value in found.items()}
