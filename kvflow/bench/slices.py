"""`kvflow bench transfer --tp P:D`: the cost of slices, sent as they are and through staging."""

from __future__ import annotations

from contextlib import AsyncExitStack
from math import lcm
from typing import Any

from kvflow.bench.figures import Row, Say, medians, quartiles
from kvflow.bench.pair import WorkerPair, room_figures
from kvflow.protocols.errors import MisuseError

# Bytes of one rank's share of K, or of V, in one token slot.
SLICE_BYTES = (64, 128, 256, 512, 1024, 4096, 16384, 65536)
# Both limit a room: this many tiny slices already keep mooncake busy for 1.3 s.
ROOM_BYTES, ROOM_SLICES = 64 << 20, 1 << 16
WAYS = ("as they are", "through staging")
_LAYERS, _PAGE_SIZE = 4, 16


def widths_of(text: str) -> tuple[int, int]:
    """Return the widths of prefill and decode in `text`, such as 2:1. Raises: MisuseError."""
    try:
        prefill, decode = (int(part) for part in text.split(":"))
    except ValueError:
        raise MisuseError(
            f"--tp {text}: not two numbers, as in 2:1 (shards of prefill, shards of decode)"
        ) from None
    if min(prefill, decode) < 1 or max(prefill, decode) > 8 or prefill == decode:
        raise MisuseError(f"--tp {text}: not two different widths of 1 to 8")
    return prefill, decode


async def bench_slices(
    planes: tuple[str, ...], widths: tuple[int, int], turns: int, say: Say
) -> dict[str, Any]:
    """Measure each plane and size, with both ways interleaved.

    Returns {"turns", "tp", plane: {bytes: {way: GB/s and CPU s/GB of each side, "ratio": GB/s
    through staging / GB/s as they are}}}.
    """
    report: dict[str, Any] = {"turns": turns, "tp": list(widths)}
    for plane in planes:
        report[plane] = {}
        for size in SLICE_BYTES:
            found = report[plane][str(size)] = await _one_size(plane, widths, size, turns)
            say(
                f"{plane}, slices of {size} bytes: "
                + ", ".join(f"{way} {found[way]}" for way in (*WAYS, "ratio"))
            )
    return report


async def _one_size(plane: str, widths: tuple[int, int], size: int, turns: int) -> dict[str, Any]:
    heads = lcm(*widths)
    # Elements have two bytes. A slice is one shard's share, on the side with more shards.
    dim = size * max(widths) // heads // 2
    in_page = size * max(widths) * _PAGE_SIZE * _LAYERS * 2
    pages = max(1, min(ROOM_BYTES, ROOM_SLICES * size) // in_page)
    shape = {"layers": _LAYERS, "heads": heads, "dim": dim, "page_size": _PAGE_SIZE}
    seen: dict[str, list[Row]] = {way: [] for way in WAYS}
    async with AsyncExitStack() as stack:
        pairs = {}
        for way in WAYS:
            sent = {"pages": pages + 1, "widths": widths, "staged": way == WAYS[1]}
            pair = await WorkerPair.open(plane, order="page_first", **shape, **sent)
            pairs[way] = await stack.enter_async_context(pair)
        for turn in range(1 + turns):
            for way in WAYS if turn % 2 else WAYS[::-1]:
                prefill, decode = await pairs[way].rooms(1, 1, pages)
                # Turn 0 warms up and does not count.
                if turn:
                    gb = pages * pairs[way].page_bytes / 1e9
                    seen[way].append(room_figures(prefill, decode, gb))
    found: dict[str, Any] = {way: medians(rows) for way, rows in seen.items()}
    found["ratio"] = quartiles(
        [b["gb_s"] / a["gb_s"] for a, b in zip(*(seen[way] for way in WAYS), strict=True)]
    )
    return found
