"""Bare endpoints under faults: seeds without a plant break nothing."""

from __future__ import annotations

import pytest

from kvflow.proof.bare.run import Cast, played
from kvflow.proof.bare.scenario import draw_all
from kvflow.proof.sim.faults import KINDS
from kvflow.proof.sim.report import simulate_many
from kvflow.proof.simulators import Choice
from tests.soak import sized

SEEDS = 150


def test_seeds_without_a_plant_break_nothing() -> None:
    report = simulate_many(range(SEEDS), choice=Choice(bare=True))
    assert not report["first_violations"]
    assert report["seeds"] == SEEDS and report["violations"] == 0
    assert report["min_nodes"] >= 3 and report["min_rooms"] >= 8 and report["median_steps"] > 300
    assert report["seeds_with_fewer_than_2_fault_kinds"] == 0
    more = {"visit", "frozen", "refusal", "lock out", "damage", "no checksum"}
    assert set(report["faults"]) == {*KINDS, *more} and all(report["faults"].values())
    assert not report["cells"]["error"] and report["cells"]["visited"] >= 135


def test_an_abort_that_was_lost_is_repeated_when_it_was_due() -> None:
    """Another room's abort, just before, must not put it off."""
    assert played(247161, Cast(draw_all), visits=None, tell=None).violation is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_seeds_in_processes() -> None:
    seeds = range(1000, sized(1500, 4000))
    report = simulate_many(seeds, jobs=2, choice=Choice(bare=True))
    assert not report["first_violations"] and report["seeds"] == len(seeds)
    assert len(report["cells"]["missing"]) <= sized(22, 12), "the rest are rare"
