"""Several checkouts side by side: ratios turn by turn, and the first tree's to itself."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from kvflow.bench import side_by_side, transfer
from kvflow.bench.compare import bench_compare, flatten, table
from kvflow.bench.guards import bench_guards
from kvflow.bench.transfer import Case, bench_transfer
from kvflow.protocols.errors import MisuseError

ROOT = str(Path(__file__).parents[2])
SPEEDS = (100.0, 110.0, 90.0, 105.0)


def turns(figure: str, factor: float) -> list[dict[str, dict[str, float]]]:
    """Turns in which B is `factor` times A, and A/A up to a twentieth more or less than A."""
    off = (1.05, 0.95, 1.02, 0.98)
    return [
        {"A": {figure: a}, "B": {figure: a * factor}, "A/A": {figure: a * o}}
        for a, o in zip(SPEEDS, off, strict=True)
    ]


@pytest.mark.parametrize("names", [["A", "B"], ["A", "B", "A/A"]])
def test_each_tree_comes_first_and_follows_each_other_one_equally_often(names: list[str]) -> None:
    orders = [side_by_side._order(names, turn) for turn in range(2 * len(names))]
    assert Counter(order[0] for order in orders) == dict.fromkeys(names, 2)
    followed = Counter(pair for order in orders for pair in pairwise(order))
    assert len(followed) == len(names) * (len(names) - 1) and len(set(followed.values())) == 1


@pytest.mark.parametrize(
    ("figure", "factor", "worse"),
    [
        ("local 32 rooms_per_s", 0.8, True),
        ("local 32 rooms_per_s", 1.3, False),
        ("local 32 cpu_ms_per_room", 1.3, True),
        ("local 32 cpu_ms_per_room", 0.8, False),
        ("local 32 cpu_ms_per_room", 1.0, False),
    ],
)
def test_a_difference_beyond_a_trees_own_spread_is_marked(
    figure: str, factor: float, worse: bool
) -> None:
    (row,) = table(turns(figure, factor))
    assert row["ratio"]["median"] == pytest.approx(factor, rel=0.01)
    assert row["ratio"]["min"] < row["ratio"]["median"] < row["ratio"]["max"]
    assert row["a_a"]["min"] == 0.95 and row["a_a"]["max"] == 1.05 and 1.02 < row["spread"] < 1.05
    assert row["best"]["ratio"] == pytest.approx(factor)
    assert (row["tree"], row["worse"]) == ("B", worse)


def test_a_figure_that_is_zero_once_has_no_ratio() -> None:
    seen = turns("local 32 stall_max_ms", 1.0)
    seen[2]["B"]["local 32 stall_max_ms"] = 0.0
    assert table(seen) == []


def test_figures_of_a_report_are_found_by_their_path() -> None:
    cpu = {"cpu_ms_per_room_prefill": 1.0, "cpu_ms_per_room_decode": 2.0}
    report = {
        "rounds": 1,
        "plan": {"rest_s": 5.0},
        "local": {"32": {"rooms_per_s": 9.0, **cpu}},
        "mooncake": {"aborts": 3, "abort_to_reusable_ms": {"median": 4.0, "max": 7.0}},
    }
    found = flatten(report)
    assert found["local 32 cpu_ms_per_room"] == 3.0 and found["local 32 rooms_per_s"] == 9.0
    assert found["mooncake abort_to_reusable_ms"] == 4.0
    assert not any(name.startswith(("plan", "rounds")) for name in found)


@pytest.mark.slow
async def test_rooms_of_two_checkouts_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "ROOMS", {1: 10, 4: 40})
    report = await bench_compare([ROOT, ROOT], ("local",), ["rooms"], 1, print)
    speeds = [row for row in report["table"] if row["figure"].endswith("rooms_per_s")]
    assert [row["figure"] for row in speeds] == ["local 1 rooms_per_s", "local 4 rooms_per_s"]
    assert all(row["a"] > 0 and row["ratio"]["median"] > 0 for row in speeds)


async def test_what_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="name the root of a checkout"):
        await bench_compare([str(tmp_path)], ("local",), ["rooms"], 1, print)


async def test_options_that_would_be_ignored_are_refused() -> None:
    with pytest.raises(MisuseError, match="takes no option --rounds"):
        await bench_compare([ROOT], ("local",), ["rooms", "--rounds", "1"], 1, print)


SMALL_SHAPE = {"layers": 2, "heads": 1, "dim": 8, "page_size": 16}


@pytest.mark.slow
async def test_goodput_is_measured_beside_that_of_the_bare_plane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "CASES", (Case(128, 2),))
    monkeypatch.setattr(transfer, "SHAPE", SMALL_SHAPE)
    said: list[str] = []
    report = await bench_transfer(("local",), ("page_first",), 2, None, False, said.append)
    found = report["local page_first"]["128 pages x 2"]
    assert found["pairs"] == 2 and len(said) == 1
    assert min(found[figure]["q1"] for figure in ("ratio", "rooms_gb_s", "raw_gb_s")) > 0


@pytest.mark.slow
async def test_what_guards_cost_is_measured_beside_plain_rooms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(side_by_side, "ROOMS", {4: 40})
    monkeypatch.setattr(side_by_side, "CASES", (Case(2, 1),))
    monkeypatch.setattr(transfer, "SHAPE", SMALL_SHAPE)
    report = await bench_guards(("local",), 1, print)
    rows = {(row["figure"], row["tree"]) for row in report["table"]}
    assert {"key", "verify"} == {tree for _, tree in rows}
    assert {"local 4 rooms_per_s", "local 2 pages x 1 rooms_gb_s"} <= {figure for figure, _ in rows}
