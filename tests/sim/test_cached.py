"""Whole nodes with prefix caches: seeds without a plant break nothing, each plant is found, and one
seed is one run.

A change of what is said, or of what can happen, moves the seeds: `kvflow sim --cache --plant all`
hunts them anew.
"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvflow.proof.cached.disk import ON_DISKS
from kvflow.proof.cached.plants import PLANTS, all_plants, hunt, planted
from kvflow.proof.cached.run import simulate
from kvflow.proof.sim.commands import app
from kvflow.proof.sim.report import simulate_many
from kvflow.protocols.errors import MisuseError
from tests.sim.both import (
    check_that_a_seed_is_one_run,
    check_that_it_is_the_same_run_in_another_process,
    check_that_plants_are_gone_afterwards,
    check_that_the_seed_finds,
    check_what_a_hunt_says,
)

FOUND_BY = {
    "ack publishes the node of the time": (12, "I5"),
    "child before parent": (4, "I10"),
    "event at enqueue": (0, "I10"),
    "lock not copied at split": (6, "I5"),
    "readers not copied at split": (12, "I5"),
    "failed copy taken for one": (1, "I10"),
    "source of a copy let go": (1, "I13"),
    "failed write keeps its pages": (2, "I5"),
    "eviction not told": (0, "I10"),
    "torn file accepted": (1, "I10"),
    "doubtful page cached": (0, "I2"),
    "loaded pages not held": (1, "I14"),
    "failed prompt cached": (4, "I10"),
    "chunk without pages lands at once": (1, "I4"),
}


def test_a_few_seeds_without_a_plant_break_nothing() -> None:
    report = simulate_many(range(4), cache=True)
    assert not report["first_violations"]
    assert report["endings"]["cache: cached pages used"] > 20


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_more_seeds_in_processes() -> None:
    report = simulate_many(range(100, 180), jobs=2, cache=True)
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


def test_a_seed_is_one_run() -> None:
    check_that_a_seed_is_one_run(simulate)


@pytest.mark.slow
def test_a_seed_is_the_same_run_in_another_process() -> None:
    check_that_it_is_the_same_run_in_another_process(simulate)


def test_every_plant_has_its_seed_here() -> None:
    assert {plant.name: plant.invariant for plant in all_plants()} == {
        name: rule for name, (_, rule) in FOUND_BY.items()
    }


@pytest.mark.parametrize("name", FOUND_BY)
def test_the_pinned_seed_finds_the_plant(name: str) -> None:
    check_that_the_seed_finds(name, FOUND_BY[name], simulate, planted)


def test_a_plant_is_gone_afterwards() -> None:
    check_that_plants_are_gone_afterwards(PLANTS, simulate)


def test_a_hunt_says_what_it_found_or_that_it_did_not() -> None:
    check_what_a_hunt_says(hunt, "event at enqueue", "I10")


def test_a_plant_that_is_none_is_refused() -> None:
    with pytest.raises(MisuseError, match="torn file accepted"):
        planted("tulip")


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["--cache", *arguments], env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_the_command_reports_seeds_a_story_and_a_violation() -> None:
    status, out = run("--seeds", "0:2", "--json")
    report = json.loads(out)
    assert (status, report["seeds"], report["violations"]) == (0, 2, 0)
    status, out = run("--seed", "1", "--trace")
    assert status == 0 and (": its cache is flushed" in out or ": pages are wanted" in out)
    status, out = run("--seed", "0", "--plant", "event at enqueue", "--json")
    report = json.loads(out)
    assert status == 1
    assert report["replay"] == "kvflow sim --cache --seed 0 --trace --plant 'event at enqueue'"
    assert "doubtful page cached" in run("--plants")[1]
    with pytest.raises(MisuseError, match="choose one"):
        run("--bare", "--seeds", "0:1")
