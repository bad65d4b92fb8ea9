"""Whole nodes with prefix caches: seeds without a plant break nothing."""

from __future__ import annotations

import pytest

from kvflow.proof.cached.disk import ON_DISKS
from kvflow.proof.sim.report import simulate_many
from kvflow.proof.simulators import Choice
from tests.soak import sized


def test_a_few_seeds_without_a_plant_break_nothing() -> None:
    report = simulate_many(range(4), choice=Choice(cache=True))
    assert not report["first_violations"]
    assert report["endings"]["cache: cached pages used"] > 20


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_more_seeds_in_processes() -> None:
    seeds = range(100, sized(140, 180))
    report = simulate_many(seeds, jobs=2, choice=Choice(cache=True))
    assert not report["first_violations"]
    counts, faults = report["endings"], report["faults"]
    for what in ("saved", "loaded", "stored", "fetched", "evicted"):
        assert counts[f"cache: {what} pages"] > 20, counts
    assert counts["cache: flushes"] > 20 and counts["cache: rooms that failed"] > 200
    assert all(faults[kind] for kind in (*ON_DISKS, "failed copy", "slow copy", "restart"))
    assert not report["cells"]["error"]
    missing = {cell for cell in report["cells"]["missing"] if cell.startswith("cached run")}
    # Prompts wait for what is loaded of them, so they hardly ever give a page that arrives just
    # then: the walk does.
    assert missing <= {"cached run ARRIVING x GIVEN"}
