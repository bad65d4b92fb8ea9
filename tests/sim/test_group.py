"""A group of ranks under a storm: seeds without a plant break nothing."""

from __future__ import annotations

import pytest

from kvflow.proof.group.run import simulate
from kvflow.proof.sim.faults import KINDS
from kvflow.proof.sim.report import simulate_many
from kvflow.proof.simulators import Choice
from tests.soak import sized

SEEDS = 30


def test_seeds_without_a_plant_break_nothing() -> None:
    report = simulate_many(range(SEEDS), choice=Choice(group=4))
    assert not report["first_violations"]
    assert report["seeds"] == SEEDS
    assert report["min_nodes"] >= 5
    assert report["min_rooms"] >= 8
    assert set(KINDS) <= report["faults"].keys()
    assert all(report["faults"].values())
    assert not report["cells"]["error"]
    endings = report["endings"]
    assert endings["group opened"] > 500
    assert endings["group started"] > endings["group succeeded"] > 250
    assert endings["group ranks lost"] > 25
    assert sum(what.startswith("group failed") for what in endings) >= 10


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_smaller_groups(ranks: int) -> None:
    report = simulate_many(range(15), choice=Choice(group=ranks))
    assert not report["first_violations"]


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(11070, id="a rank that leaves is not back yet"),
        pytest.param(11323, id="an earlier process of rank 0 asks the new leader first"),
        pytest.param(19105, id="a refusal without a leg is met by a decode of another request"),
        pytest.param(33507, id="the end of a leg is met by the first of two decodes"),
    ],
)
def test_seeds_that_once_broke_something_break_nothing(seed: int) -> None:
    assert simulate(seed).violation is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_seeds_in_processes() -> None:
    report = simulate_many(range(1_000, sized(1_200, 3_000)), jobs=2, choice=Choice(group=4))
    assert not report["first_violations"]
    missing = {cell for cell in report["cells"]["missing"] if cell.startswith("group")}
    assert len(missing) <= sized(13, 8), "the rest are walked"
