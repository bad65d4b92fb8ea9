"""`kvflow bench compare`: one measurement of several checkouts, in interleaved turns.

Each turn measures every tree once and the first once more (A/A), in an order that rotates. A ratio
compares a tree with the first tree in the same turn, so other load on the machine affects both.
A/A shows the spread that a difference must exceed. For rooms and transfers, the trees alternate in
short rounds (`side_by_side.py`). For anything else, a turn is a whole run of `kvflow bench ...` in
each tree.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from kvflow.bench.figures import Say, places
from kvflow.bench.side_by_side import rooms_by_turns, transfers_by_turns
from kvflow.protocols.errors import KvflowError, MisuseError

AGAIN = "A/A"
SIDE_BY_SIDE = {"rooms": rooms_by_turns, "transfer": transfers_by_turns}
HERE = Path(__file__).parents[2]

Figures = dict[str, float]

HIGHER_IS_BETTER = ("rooms_per_s", "rooms_per_s_first", "rooms_per_s_last", "rooms_gb_s", "ratio")
# Parts of a report that hold no figure to compare.
LEFT_OUT = {"plan", "shape", "left", "raw", "must", "idle"}
# These figures describe the machine or the load, not the tree.
NO_FIGURES = {"raw_gb_s", "bare_window_ms", "bare_stop_ms", "moved", "received_per_s"}
PRINTED = {
    *HIGHER_IS_BETTER,
    *("abort_to_reusable_ms", "abort_to_reusable_windows", "abort_to_reusable_stops"),
    *("cpu_ms_per_room", "cpu_percent", "memory_kib_per_room", "sent_bytes_per_s"),
    *("stall_max_ms", "full_ms", "ended_ms"),
}


async def bench_compare(
    trees: Sequence[str], planes: tuple[str, ...], what: Sequence[str], turns: int, say: Say
) -> dict[str, Any]:
    """Run the bench `what` over all `trees`, which are absolute paths, in interleaved turns.

    Returns {"trees", "what", "turns": the figures of each turn, "table": rows}.

    Raises: MisuseError if a tree is not a checkout, or if `what` has options for a bench that takes
    none; KvflowError if a run fails.
    """
    # Without the check, a mistyped path would measure any other kvflow that Python finds.
    await asyncio.gather(*(_check(tree) for tree in trees))
    runs = {chr(ord("A") + at): tree for at, tree in enumerate(trees)} | {AGAIN: trees[0]}
    if what[0] in SIDE_BY_SIDE and "--open" not in what:
        if len(what) > 1:
            raise MisuseError(
                f"compare {what[0]} takes no option {what[1]}: give the data planes before the "
                "dashes"
            )
        seen = await SIDE_BY_SIDE[what[0]](runs, planes, turns, say)
    else:
        seen = await _whole_runs(runs, (*what, "--transfer-backend", ",".join(planes)), turns, say)
    return {"trees": list(trees), "what": list(what), "turns": seen, "table": table(seen)}


async def _whole_runs(
    runs: dict[str, str], what: Sequence[str], turns: int, say: Say
) -> list[dict[str, Figures]]:
    seen: list[dict[str, Figures]] = []
    names = list(runs)
    for turn in range(turns):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        seen.append({name: flatten(await measure(runs[name], what)) for name in order})
        say(f"turn {turn + 1} of {turns}")
    return seen


async def measure(tree: str, what: Sequence[str]) -> dict[str, Any]:
    """Run `kvflow bench` once over the library in `tree`, and return its report."""
    # Use this tree's bench over the other library: older trees lack `--open`, and only figures from
    # the same bench are comparable.
    if "--open" in what:
        what, tree = (*what, "--tree", tree), str(HERE)
    text = await _run(tree, "-m", "kvflow.cli", "bench", *what, "--json")
    report: dict[str, Any] = json.loads(text)
    return report


def flatten(report: dict[str, Any], path: tuple[str, ...] = ()) -> Figures:
    """Return figures by path, with the median in place of a spread.

    The result also has the sum of both sides' CPU times per room.
    """
    found: Figures = {}
    for name, value in report.items():
        here = (*path, name)
        if name in LEFT_OUT or name in NO_FIGURES:
            continue
        if isinstance(value, dict):
            found |= (
                {" ".join(here): value["median"]} if "median" in value else flatten(value, here)
            )
        elif path and isinstance(value, float) and value > 0:
            found[" ".join(here)] = value
    if {"cpu_ms_per_room_prefill", "cpu_ms_per_room_decode"} <= report.keys():
        both: float = report["cpu_ms_per_room_prefill"] + report["cpu_ms_per_room_decode"]
        found[" ".join((*path, "cpu_ms_per_room"))] = both
    return found


def table(seen: list[dict[str, Figures]]) -> list[dict[str, Any]]:
    """Return a row for each figure and tree.

    In each turn, a tree's ratio is its figure divided by the geometric mean of the first tree's two
    figures. `ratio` is the spread of these ratios. `a_a` is the spread of the ratios of the first
    tree's second figure to its first figure, and `spread` is the factor by which the two typically
    differ. A tree is worse if its median ratio is worse by more than that factor. Other load can
    only make a figure worse. So `best` compares the better quartiles of the tree and of A/A with
    the first tree's better quartile. A figure that is 0 in any turn has no row.
    """
    rows: list[dict[str, Any]] = []
    names = [name for name in sorted(seen[0]) if name not in ("A", AGAIN)] or [AGAIN]
    all_figures = [figures for turn in seen for figures in turn.values()]
    common = [
        key for key in seen[0]["A"] if all(figures.get(key, 0) > 0 for figures in all_figures)
    ]
    for key in common:
        higher = key.endswith(HIGHER_IS_BETTER)
        same = [turn[AGAIN][key] / turn["A"][key] for turn in seen]
        spread = statistics.median(max(ratio, 1 / ratio) for ratio in same)
        for name in names:
            ratio = _places(
                [turn[name][key] / math.sqrt(turn["A"][key] * turn[AGAIN][key]) for turn in seen]
            )
            worse = ratio["median"] * spread < 1 if higher else ratio["median"] > spread
            good = {
                run: np.percentile([turn[run][key] for turn in seen], 75 if higher else 25)
                for run in ("A", name, AGAIN)
            }
            best, best_again = (round(good[run] / good["A"], 3) for run in (name, AGAIN))
            row = {
                "figure": key,
                "tree": name,
                "a": statistics.median(turn["A"][key] for turn in seen),
                "ratio": ratio,
                "a_a": _places(same),
                "spread": round(spread, 3),
                "worse": worse,
                "best": {"ratio": best, "a_a": best_again},
                "better": "higher" if higher else "lower",
            }
            rows.append(row)
    return rows


def printed(rows: list[dict[str, Any]]) -> Table:
    """Return a table of the rows in `PRINTED`, with a star for a tree that is worse."""
    ratios = ("ratio [min median max]", "A/A [min median max]")
    shown = Table("figure", "better", "A", "tree", *ratios, "spread", "best, A/A", "")
    for row in rows:
        if row["figure"].rsplit(" ", 1)[-1] in PRINTED:
            cells = [row["figure"], row["better"], f"{row['a']:.4g}", row["tree"]]
            for ratio in (row["ratio"], row["a_a"]):
                text = f"[{ratio['min']:.2f} {ratio['median']:.3f} {ratio['max']:.2f}]"
                cells.append(escape(text))
            best = f"{row['best']['ratio']:.3f}, {row['best']['a_a']:.3f}"
            shown.add_row(*cells, f"{row['spread']:.3f}", best, "*" if row["worse"] else "")
    return shown


def _places(ratios: list[float]) -> dict[str, float]:
    return places(ratios, min=0, q1=25, median=50, q3=75, max=100)


async def _check(tree: str) -> None:
    """Raise MisuseError unless Python, run in `tree`, imports kvflow from `tree`."""
    find = (
        "import importlib.util as u; found = u.find_spec('kvflow'); print(found.origin if found "
        "else 'no kvflow')"
    )
    origin = (await _run(tree, "-c", find)).strip()
    if not origin.startswith(tree + os.sep):
        raise MisuseError(
            f"--tree {tree}: Python imports {origin} from there; name the root of a checkout"
        )


async def _run(tree: str, *argv: str) -> str:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", *argv),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": tree, "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tree,
    )
    try:
        out, err = await child.communicate()
    finally:
        # If the wait is cancelled, the running child would disturb the next measurement.
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        raise KvflowError(
            f"python {' '.join(argv)} in {tree} ended with {child.returncode}: "
            f"{err.decode()[-2000:]}"
        )
    return out.decode()
