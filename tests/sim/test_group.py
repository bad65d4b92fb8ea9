"""A group of ranks under a storm: seeds without a plant break nothing, each plant is found, and one
seed is one run.

A change of what is said, or of what can happen, moves the seeds: `kvflow sim --group 4 --plant all`
hunts them anew.
"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvflow.proof.group.plants import PLANTS, all_plants, hunt, planted
from kvflow.proof.group.run import simulate
from kvflow.proof.sim.commands import app
from kvflow.proof.sim.faults import KINDS
from kvflow.proof.sim.report import simulate_many
from kvflow.protocols.errors import MisuseError
from tests.sim.both import (
    check_that_a_seed_is_one_run,
    check_that_it_is_the_same_run_in_another_process,
    check_that_plants_are_gone_afterwards,
    check_that_the_seed_finds,
    check_what_a_hunt_says,
)
from tests.soak import sized

SEEDS = 60
FOUND_BY = {
    "local failure skipped": (0, "spread"),
    "decision not carried out": (1, "spread"),
    "decisions out of order": (1, "order"),
    "failure reported twice": (0, "once"),
    "cause lost": (0, "first cause"),
    "leader lost unseen": (5, "I5"),
    "rank lost unseen": (5, "I5"),
    "any name believed": (20, "start"),
    "one vote for two": (0, "success"),
    "starts alone": (0, "start"),
}


def test_seeds_without_a_plant_break_nothing() -> None:
    report = simulate_many(range(SEEDS), group=4)
    assert not report["first_violations"]
    assert report["seeds"] == SEEDS
    assert report["min_nodes"] >= 5
    assert report["min_rooms"] >= 8
    assert set(KINDS) <= report["faults"].keys()
    assert all(report["faults"].values())
    assert not report["cells"]["error"]
    endings = report["endings"]
    assert endings["group opened"] > 1_000
    assert endings["group started"] > endings["group succeeded"] > 500
    assert endings["group ranks lost"] > 50
    assert sum(what.startswith("group failed") for what in endings) >= 10


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_smaller_groups(ranks: int) -> None:
    report = simulate_many(range(15), group=ranks)
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
    report = simulate_many(range(1_000, sized(1_200, 3_000)), jobs=2, group=4)
    assert not report["first_violations"]
    missing = {cell for cell in report["cells"]["missing"] if cell.startswith("group")}
    assert len(missing) <= sized(13, 8), "the rest are walked"


def test_a_seed_is_one_run() -> None:
    check_that_a_seed_is_one_run(simulate)


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
    check_what_a_hunt_says(hunt, "local failure skipped", "spread")


def test_a_plant_that_is_none_is_refused() -> None:
    with pytest.raises(MisuseError, match="local failure skipped"):
        planted("tulip")


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["--group", "3", *arguments], env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_the_command_reports_seeds_a_story_and_a_violation() -> None:
    status, out = run("--seeds", "0:3", "--json")
    report = json.loads(out)
    assert (status, report["seeds"], report["violations"]) == (0, 3, 0)
    status, out = run("--seed", "1", "--trace")
    assert status == 0
    assert ": Decision(session=" in out
    assert ": RankVote(session=" in out
    status, out = run("--seed", "0", "--plant", "starts alone", "--json")
    report = json.loads(out)
    assert status == 1
    assert report["replay"] == "kvflow sim --group 3 --seed 0 --trace --plant 'starts alone'"
    assert "any name believed" in run("--plants")[1]
    assert (
        json.loads(run("--plant", "starts alone", "--json")[1])["found"][0]["invariant"] == "start"
    )
