"""`kvflow bench transfer --page-sizes P:D`: the cost of pages that differ in size."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from kvflow.bench.figures import Row, Say, medians, quartiles
from kvflow.bench.pair import WorkerPair, room_figures
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.layout import MAX_PAGE_SIZE

# A token of 32 KiB, so that a page of 16 tokens has 512 KiB.
_SHAPE = {"layers": 8, "heads": 8, "dim": 128}
TOKENS = (64, 512, 4096)
_LEAST_ROUNDS = 512  # tokens of a turn: several rooms, one after the other, if a room is shorter


def sizes_of(text: str) -> tuple[int, int]:
    """Return the page sizes of prefill and decode in `text`, such as 16:64. Raises: MisuseError."""
    try:
        prefill, decode = (int(part) for part in text.split(":"))
    except ValueError:
        raise MisuseError(
            f"--page-sizes {text}: not two numbers, as in 16:64 (tokens in a page of prefill, "
            "tokens in a page of decode)"
        ) from None
    small, large = sorted((prefill, decode))
    if small < 1 or large > MAX_PAGE_SIZE or small == large or large % small:
        raise MisuseError(
            f"--page-sizes {text}: not two different sizes of 1 to {MAX_PAGE_SIZE}, one a multiple "
            "of the other"
        )
    return prefill, decode


async def bench_page_sizes(
    planes: tuple[str, ...], orders: tuple[str, ...], sizes: tuple[int, int], turns: int, say: Say
) -> dict[str, Any]:
    """Measure rooms between pages of these two sizes, and between pages of either size on both
    sides, interleaved.

    Returns {"turns", "page_sizes", "plane order": {tokens: {"P:D": GB/s, and CPU s/GB of each side,
    "ratio to P:P": quartiles of the goodput divided by that of equal sizes}}}.
    """
    small, large = sorted(sizes)
    report: dict[str, Any] = {"turns": turns, "page_sizes": list(sizes)}
    ways = (sizes, (small, small), (large, large))
    for plane in planes:
        for order in orders:
            found = report[f"{plane} {order}"] = {}
            async with AsyncExitStack() as stack:
                pairs = {}
                for way in ways:
                    more = {"pages": 2 * max(*TOKENS, large) // small, "order": order}
                    pair = await WorkerPair.open(
                        plane, page_size=small, page_sizes=way, **_SHAPE, **more
                    )
                    pairs[_named(way)] = await stack.enter_async_context(pair)
                for tokens in TOKENS:
                    pages = -(-tokens // large) * large // small
                    found[str(tokens)] = await _one_length(pairs, pages, pages * small, turns)
                    say(f"{plane} {order}, {tokens} tokens: {found[str(tokens)]}")
    return report


def _named(sizes: tuple[int, int]) -> str:
    return f"{sizes[0]}:{sizes[1]}"


async def _one_length(
    pairs: dict[str, WorkerPair], pages: int, tokens: int, turns: int
) -> dict[str, Any]:
    """`pages` are those of a room, of the smaller size."""
    rounds = max(1, _LEAST_ROUNDS // tokens)
    seen: dict[str, list[Row]] = {name: [] for name in pairs}
    names = list(pairs)
    for turn in range(1 + turns):
        # The order rotates, so that none always comes after the same one.
        for name in names[turn % 3 :] + names[: turn % 3]:
            pair = pairs[name]
            prefill, decode = await pair.rooms(rounds, 1, pages)
            # Turn 0 warms up and does not count.
            if turn:
                gb = rounds * tokens * _token_bytes() / 1e9
                seen[name].append(room_figures(prefill, decode, gb))
    found: dict[str, Any] = {name: medians(rows) for name, rows in seen.items()}
    mixed, *equal = names
    for name in equal:
        both = zip(seen[mixed], seen[name], strict=True)
        found[f"ratio to {name}"] = quartiles([a["gb_s"] / b["gb_s"] for a, b in both])
    return found


def _token_bytes() -> int:
    return _SHAPE["layers"] * _SHAPE["heads"] * _SHAPE["dim"] * 2 * 2
