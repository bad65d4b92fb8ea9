"""Bare endpoints under faults: seeds without a plant break nothing, each plant is found, and one
seed is one run.

A change of what endpoints say to each other moves the seeds: `kvflow sim --bare --plant all` hunts
them anew.
"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvflow.proof.bare.plants import OWN, UNSEEN, all_plants, hunt, planted
from kvflow.proof.bare.run import Cast, played, simulate
from kvflow.proof.bare.scenario import draw_all
from kvflow.proof.sim.commands import app
from kvflow.proof.sim.faults import KINDS
from kvflow.proof.sim.plants import all_plants as plants_of_nodes
from kvflow.proof.sim.report import simulate_many
from kvflow.proof.walk.plants import PLANTS as PLANTS_OF_THE_WALK
from kvflow.protocols.errors import MisuseError
from tests.sim.both import (
    check_that_a_seed_is_one_run,
    check_that_it_is_the_same_run_in_another_process,
    check_that_plants_are_gone_afterwards,
    check_that_the_seed_finds,
    check_what_a_hunt_says,
)
from tests.soak import sized

SEEDS = 300
FOUND_BY = {
    "ack before drain": (1, "I12"),
    "ack popped before send": (15, "I5"),
    "abort never retried": (13, "I5"),
    "no grant check": (50, "I4"),
    "no grant check at prefill": (0, "I4"),
    "resurrect on late metadata": (0, "I6"),
    "chunk without pages lands at once": (2, "I4"),
    "success before all ranks": (1, "I8"),
    "tombstone unbounded": (0, "I5"),
    "restart taken for death": (1, "I2"),
    "silence taken for proof": (20, "I2"),
    "doubt taken for proof": (4, "I2"),
    "heartbeat counts queueing": (86, "I7"),
    "handoff slot shared": (0, "I9"),
    "nothing said again": (15, "I5"),
    "dropped from one table": (0, "I7"),
    "ack for another life": (5, "I6"),
    "prompts not compared": (0, "I8"),
    "goodbye not said": (5156, "I5"),
    "goodbye before the drain": (20, "I2"),
    "goodbye of another incarnation taken as proof": (1, "I2"),
    "goodbye proves what it names": (27, "I2"),
    "free on timer (table)": (1, "I2"),
    "ack before drain (table)": (2, "I12"),
    "abort never retried (table)": (13, "I5"),
    "restart taken for death (table)": (1, "I2"),
    "failed handle taken for landed (table)": (4, "I3"),
    "doubt forgotten": (4, "I2"),
    "unproven taken for drained": (4, "I2"),
    "room failed ends the loan": (1, "I2"),
    "success before all ranks (table)": (1, "I8"),
    "success without the last word": (12, "I8"),
    "free on timer (walk)": (1, "I2"),
    "ack before drain (walk)": (2, "I12"),
    "abort never retried (walk)": (13, "I5"),
    "restart taken for death (walk)": (1, "I2"),
    "failed handle taken for landed (walk)": (4, "I3"),
    "doubt forgotten (walk)": (4, "I2"),
    "unproven taken for drained (walk)": (4, "I2"),
    "room failed ends the loan (walk)": (1, "I2"),
    "success before all ranks (walk)": (1, "I8"),
    "chunk gap ignored": (19, "I4"),
    "resurrect after terminal (walk)": (0, "I5"),
    "double ending": (1, "I4"),
    "last cause kept": (12, "I4"),
    "success without the last word (walk)": (12, "I8"),
    "another life accepted": (5, "I5"),
    "refused link stays usable": (13, "I5"),
    "a displaced peer's doubts forgotten": (20, "I2"),
    "displaced with open grants": (257, "I2"),
    "route closed early": (112, "I2"),
    "abort of an unknown grant not remembered": (314, "I6"),
    "low water not raised": (59, "I6"),
    "evicted doubt forgotten": (4, "I2"),
    "source back not fed": (20, "I5"),
    "lost bootstrap not reported": (23, "I5"),
    "nothing sent again": (25, "I5"),
    "unknown grant not reported": (28, "I5"),
    "fenced without death": (1, "I2"),
    "silence ends the loans": (20, "I2"),
    "settled past open loans": (2, "I4"),
    "announcement not withdrawn": (0, "I4"),
    "checksum ignored": (0, "I8"),
    "lent after the end": (0, "I5"),
    "goodbye names nothing": (20, "I2"),
    "goodbye ends every loan": (27, "I2"),
    "goodbye without its loans": (11, "I5"),
    "settled range begins again": (1194, "I6"),
    "leaving still opens": (34, "I4"),
    "decode's death unseen": (18, "I5"),
    "loss without its rooms": (17, "I5"),
    "begun said once": (28, "I5"),
    "begun before it has": (0, "I4"),
    "one rank has begun": (5, "I4"),
    "begun told twice": (23, "I4"),
    "begun after the end": (148, "I4"),
    "pages taken too soon": (23, "I5"),
    "earlier writer unwatched": (34, "I5"),
    "earlier writer's death unseen": (34, "I5"),
    "earlier loans end with a link": (380, "I2"),
    "earlier loans not inherited": (34, "I2"),
}


def test_seeds_without_a_plant_break_nothing() -> None:
    report = simulate_many(range(SEEDS), bare=True)
    assert not report["first_violations"]
    assert report["seeds"] == SEEDS and report["violations"] == 0
    assert report["min_nodes"] >= 3 and report["min_rooms"] >= 8 and report["median_steps"] > 300
    assert report["seeds_with_fewer_than_2_fault_kinds"] == 0
    more = {"visit", "frozen", "refusal", "lock out", "damage", "no checksum"}
    assert set(report["faults"]) == {*KINDS, *more} and all(report["faults"].values())
    assert not report["cells"]["error"] and report["cells"]["visited"] >= 135


def test_an_abort_that_was_lost_is_repeated_when_it_was_due() -> None:
    """Another room's abort, just before, must not put it off.

    No decode of this run waits until prefill has begun.
    """
    assert played(247161, Cast(draw_all), visits=None, tell=None).violation is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_seeds_in_processes() -> None:
    seeds = range(1000, sized(1500, 4000))
    report = simulate_many(seeds, jobs=2, bare=True)
    assert not report["first_violations"] and report["seeds"] == len(seeds)
    assert len(report["cells"]["missing"]) <= sized(22, 12), "the rest are rare"


def test_a_seed_is_one_run() -> None:
    check_that_a_seed_is_one_run(simulate)


def test_a_seed_is_the_same_run_in_another_process() -> None:
    check_that_it_is_the_same_run_in_another_process(simulate)


def test_every_plant_has_its_seed_here_or_a_reason() -> None:
    names = {plant.name for plant in all_plants()}
    assert names == set(FOUND_BY) and len(names) == len(all_plants())
    theirs = {plant.name for plant in plants_of_nodes()}
    assert UNSEEN.keys() <= theirs
    here = len(theirs) - len(UNSEEN) + len(PLANTS_OF_THE_WALK) + len(OWN)
    assert len(all_plants()) == here


@pytest.mark.parametrize("name", FOUND_BY)
def test_the_pinned_seed_finds_the_plant(name: str) -> None:
    check_that_the_seed_finds(name, FOUND_BY[name], simulate, planted)


def test_a_plant_is_gone_afterwards() -> None:
    check_that_plants_are_gone_afterwards(all_plants(), simulate)


def test_a_hunt_says_what_it_found_or_that_it_did_not() -> None:
    check_what_a_hunt_says(hunt, "ack before drain", "I12")


def test_a_plant_that_cannot_be_seen_is_refused_with_the_reason() -> None:
    with pytest.raises(MisuseError, match="in decode's shell"):
        planted("free on timer")
    with pytest.raises(MisuseError, match="ack before drain"):
        planted("tulip")


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["--bare", *arguments], env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_the_command_reports_seeds_a_story_and_a_violation() -> None:
    status, out = run("--seeds", "0:3", "--json")
    report = json.loads(out)
    assert (
        status == 0
        and report["seeds"] == 3
        and report["violations"] == 0
        and report["seeds_per_s"] > 0
    )
    status, out = run("--seed", "1", "--trace")
    assert status == 0 and ": Bootstrap(room=" in out and "calm" in out and '"violations": 0' in out
    status, out = run("--seed", "1", "--plant", "ack before drain", "--json")
    report = json.loads(out)
    assert (
        status == 1
        and report["replay"] == "kvflow sim --bare --seed 1 --trace --plant 'ack before drain'"
    )
    assert "silence taken for proof" in run("--plants")[1]
