"""`kvflow bench guards`: the cost of a control key and of `--verify-transfers`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

from kvflow.bench.compare import AGAIN, table
from kvflow.bench.side_by_side import Options, rooms_by_turns, transfers_by_turns
from kvflow.transports.control.curve import write_key


async def bench_guards(
    planes: tuple[str, ...], turns: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure four runs in interleaved turns.

    "A" and "A/A" are plain, "key" has CURVE on the control link, and "verify" has a checksum of
    every page. Returns {"turns": the figures of each turn, "table": the rows of `compare.table`}.
    """
    # An empty path stands for this tree: the runs differ only in their options.
    with TemporaryDirectory() as folder:
        key = os.path.join(folder, "control.key")
        await asyncio.to_thread(write_key, key)
        runs = dict.fromkeys(("A", "key", "verify", AGAIN), "")
        options: Options = {"key": {"control_key_file": key}, "verify": {"verify_transfers": True}}
        rooms = await rooms_by_turns(runs, planes, turns, say, options)
        goodput = await transfers_by_turns(runs, planes, turns, say, options)
    seen = [
        {name: {**figures, **moved[name]} for name, figures in turn.items()}
        for turn, moved in zip(rooms, goodput, strict=True)
    ]
    return {"turns": seen, "table": table(seen)}
