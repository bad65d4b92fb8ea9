"""Each seed of each simulator is one run, and its pinned seeds find the planted bugs.

A change of what nodes say to each other moves the seeds: `make prove` hunts them anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvflow.proof.plant import Plant
from kvflow.proof.simulators import Choice, Simulator
from kvflow.protocols.errors import MisuseError
from tests.sim.story import story_of

CHOICES = {
    "nodes": Choice(),
    "bare": Choice(bare=True),
    "group": Choice(group=4),
    "cache": Choice(cache=True),
}
SIMULATORS = {key: choice.load() for key, choice in CHOICES.items()}
PLANTED = [
    pytest.param(simulator, plant, id=f"{key}: {plant.name}")
    for key, simulator in SIMULATORS.items()
    for plant in simulator.plants
]

everywhere = pytest.mark.parametrize("simulator", SIMULATORS.values(), ids=SIMULATORS)


@everywhere
def test_a_seed_is_one_run(simulator: Simulator) -> None:
    assert (
        story_of(simulator.simulate, 3)
        == story_of(simulator.simulate, 3)
        != story_of(simulator.simulate, 4)
    )


@pytest.mark.parametrize(
    "key", ["nodes", "bare", "group", pytest.param("cache", marks=pytest.mark.slow)]
)
def test_a_seed_is_the_same_run_in_another_process(key: str) -> None:
    code = (
        "from kvflow.proof.simulators import Choice; from tests.sim.story import story_of; "
        f"print(story_of({CHOICES[key]!r}.load().simulate, 3))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONHASHSEED": "77"},
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == story_of(SIMULATORS[key].simulate, 3), done.stderr


# --- planted bugs


@everywhere
def test_there_are_enough_plants_with_names_of_their_own(simulator: Simulator) -> None:
    names = [plant.name for plant in simulator.plants]
    assert len(set(names)) == len(names) >= 10
    assert all(plant.text and simulator.key in plant.found for plant in simulator.plants)


def test_bare_endpoints_show_each_plant_of_whole_nodes_or_there_is_a_reason() -> None:
    for plant in SIMULATORS["nodes"].plants:
        assert ("bare" in plant.found) != bool(plant.unseen), plant.name


@pytest.mark.parametrize(("simulator", "plant"), PLANTED)
def test_the_pinned_seed_finds_the_plant(simulator: Simulator, plant: Plant) -> None:
    seed, invariant = plant.found[simulator.key]
    with simulator.planted(plant.name):
        violation = simulator.simulate(seed).violation
    assert violation is not None and violation.invariant == invariant, violation


@everywhere
def test_a_plant_is_gone_afterwards(simulator: Simulator) -> None:
    for plant in simulator.plants:
        with plant.install():
            pass
    assert simulator.simulate(0).violation is None


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("nodes", "double close"),
        ("bare", "ack before drain"),
        ("group", "local failure skipped"),
        ("cache", "event at enqueue"),
    ],
)
def test_a_hunt_says_what_it_found_or_that_it_did_not(key: str, name: str) -> None:
    said: list[str] = []
    simulator = SIMULATORS[key]
    invariant = simulator.hunt(name, range(50), said.append)["invariant"]
    assert simulator.hunt(name, range(0), said.append) == {"plant": name}
    assert f"breaks {invariant}" in said[0] and "NOT FOUND" in said[1]


@everywhere
def test_an_unknown_plant_is_refused_with_the_known_ones(simulator: Simulator) -> None:
    with pytest.raises(MisuseError, match=simulator.plants[0].name):
        simulator.planted("tulip")


def test_a_plant_that_cannot_be_seen_is_refused_with_the_reason() -> None:
    with pytest.raises(MisuseError, match="in decode's shell"):
        SIMULATORS["bare"].planted("free on timer")
