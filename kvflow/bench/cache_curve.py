"""`kvflow bench cache --capacity-curve`: hit rates by capacity, compared with Mooncake's paper.

`index` is the hit rate of kvflow's index with pages of 512 tokens: cached tokens / tokens of all
prompts. `lru` is the hit rate of a plain LRU of whole blocks. The LRU evicts one block at a time in
the order of last use, so it evicts the first block of a prompt before the last. The index evicts
the end of a prompt before its beginning, so it does a little better where capacity is short.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table

from kvflow.bench.cache import replay
from kvflow.bench.cache_trace import Prompt
from kvflow.bench.figures import Say
from kvflow.protocols.errors import MisuseError
from kvflow.traces import BLOCK_TOKENS

MILLIONS = (0.1, 0.2, 0.5, 1, 2, 4, 5, 8, 10, 20, 50)
# Millions of tokens -> hit rate: Mooncake, FAST'25, Fig. 9.
PAPER = {0.1: 0.012, 1: 0.146, 2: 0.235, 4: 0.380, 5: 0.435, 8: 0.545, 10: 0.589, 50: 0.658}
PAPER_TRACE = "synthetic"
WITHIN = 0.01

Row = dict[str, Any]


async def capacity_curve(
    name: str, prompts: Sequence[Prompt], plot: Path | None, say: Say
) -> dict[str, Any]:
    """Measure the hit rate at every capacity in `MILLIONS`. Write an SVG plot to `plot`, if given.

    Returns {"table": rows, "holds": True if all rows are within 0.01 of the paper's, None for a
    trace without figures in the paper}.

    Raises: MisuseError if the folder of `plot` does not exist.
    """
    # The curve takes minutes, so the check comes before it.
    if plot is not None and not plot.parent.is_dir():
        raise MisuseError(f"--plot {plot}: there is no folder {plot.parent}")
    rows: list[Row] = []
    for millions in MILLIONS:
        blocks = int(millions * 1e6) // BLOCK_TOKENS
        index = (await asyncio.to_thread(replay, prompts, BLOCK_TOKENS, blocks))["hit_rate"]
        row: Row = {
            "capacity_tokens": int(millions * 1e6),
            "index": index,
            "lru": block_lru(prompts, blocks),
        }
        if name == PAPER_TRACE and (paper := PAPER.get(millions)) is not None:
            off = max(abs(row["index"] - paper), abs(row["lru"] - paper))
            row |= {"paper": paper, "off": off, "holds": off <= WITHIN}
        rows.append({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()})
        say(f"{millions:g}M tokens: {rows[-1]['index']:.3f}")
    held = [row["holds"] for row in rows if "holds" in row]
    if plot is not None:
        try:
            await asyncio.to_thread(
                plot.write_text, svg(f"{name}: hit rate by capacity", rows), encoding="utf-8"
            )
        except OSError as error:
            raise MisuseError(f"--plot {plot}: {error.strerror}") from None
    return {"table": rows, "holds": all(held) if held else None}


def block_lru(prompts: Sequence[Prompt], capacity: int) -> float:
    """Return the hit rate of a plain LRU of `capacity` blocks.

    It is the share of all whole blocks that come before the first missing block of their prompt.
    """
    cached: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for prompt in prompts:
        blocks = prompt.blocks[: prompt.num_tokens // BLOCK_TOKENS]
        total += len(blocks)
        hits += next((at for at, block in enumerate(blocks) if block not in cached), len(blocks))
        for block in blocks:
            cached[block] = None
            cached.move_to_end(block)
            if len(cached) > capacity:
                cached.popitem(last=False)
    return hits / total if total else 0.0


def printed(rows: Sequence[Row]) -> Table:
    shown = Table(
        "capacity, tokens", "index", "lru", "paper", "off", "", title="hit rate by capacity"
    )
    for row in rows:
        figures = [
            f"{row[key]:.3f}" if key in row else "" for key in ("index", "lru", "paper", "off")
        ]
        shown.add_row(
            f"{row['capacity_tokens']:,}",
            *figures,
            "" if row.get("holds", True) else f"more than {WITHIN}",
        )
    return shown


WIDTH, HEIGHT, MARGIN = 720, 420, 56
TOP = 0.8  # end of the axis of hit rates; a higher rate in the data extends it
INDEX_COLOUR, PAPER_COLOUR = "#1f77b4", "#d62728"


def svg(title: str, rows: Sequence[Row]) -> str:
    """Return an SVG plot over a logarithmic axis: the index as a line, the paper as dots."""
    low, high = (math.log10(rows[at]["capacity_tokens"]) for at in (0, -1))
    top = max(TOP, *(row["index"] for row in rows))

    def place(tokens: int, rate: float) -> tuple[float, float]:
        x = MARGIN + (math.log10(tokens) - low) / (high - low) * (WIDTH - 2 * MARGIN)
        return round(x, 1), round(HEIGHT - MARGIN - rate / top * (HEIGHT - 2 * MARGIN), 1)

    left, right, bottom = MARGIN, WIDTH - MARGIN, HEIGHT - MARGIN
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        (
            f'<text x="{WIDTH / 2}" y="{MARGIN / 2}" text-anchor="middle" '
            f'font-size="15">{escape(title)}</text>'
        ),
    ]
    for tenth in range(0, int(top * 10) + 1, 2):
        y = place(rows[0]["capacity_tokens"], tenth / 10)[1]
        parts += [
            f'<path d="M{left} {y}H{right}" stroke="#ddd"/>',
            f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{tenth / 10:.1f}</text>',
        ]
    for row in rows:
        x = place(row["capacity_tokens"], 0)[0]
        label = f"{row['capacity_tokens'] / 1e6:g}M"
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    line = " ".join("{},{}".format(*place(row["capacity_tokens"], row["index"])) for row in rows)
    parts.append(
        f'<polyline points="{line}" fill="none" stroke="{INDEX_COLOUR}" stroke-width="2"/>'
    )
    for row in rows:
        if "paper" in row:
            x, y = place(row["capacity_tokens"], row["paper"])
            parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{PAPER_COLOUR}"/>')
    parts += [
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">capacity, tokens</text>',
        f'<text x="{left + 12}" y="{MARGIN + 14}" fill="{INDEX_COLOUR}">kvflow</text>',
        f'<text x="{left + 12}" y="{MARGIN + 30}" fill="{PAPER_COLOUR}">paper</text>'
        if "paper" in rows[0]
        else "",
        "</svg>",
    ]
    return "\n".join(filter(None, parts)) + "\n"
