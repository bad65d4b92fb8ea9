"""`kvflow sim` as one types it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvflow.proof.sim.commands import app
from kvflow.protocols.errors import MisuseError


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_seeds_give_one_json_object() -> None:
    status, out = run("--seeds", "0:3", "--json")
    report = json.loads(out)
    assert (
        status == 0 and report["seeds"] == 3 and report["violations"] == 0 and report["steps"] > 600
    )
    assert {"faults", "median_steps", "steps_per_s", "cells"} <= set(report)


def test_one_seed_tells_its_story() -> None:
    status, out = run("--seed", "1", "--trace")
    assert status == 0 and ": Bootstrap(room=" in out and "calm" in out and '"violations": 0' in out


def test_a_violation_says_how_to_see_it_again() -> None:
    status, out = run("--seed", "0", "--plant", "double close", "--json")
    report = json.loads(out)
    assert status == 1 and report["violations"] == 1 and report["invariant"] == "I1"
    assert report["replay"] == "kvflow sim --seed 0 --trace --plant 'double close'"


def test_a_hunt_prints_the_first_seed() -> None:
    status, out = run("--plant", "double close", "--json")
    assert status == 0 and json.loads(out)["found"][0]["seed"] == 0
    status, out = run("--plant", "restart taken for death", "--seeds", "0:1")
    assert status == 1 and "NOT FOUND" in out


def test_plants_are_listed() -> None:
    assert "free on timer" in run("--plants")[1]
    assert len(json.loads(run("--plants", "--json")[1])) >= 12


def test_worlds_are_listed_and_a_group_is_walked() -> None:
    assert "group-loss" in run("--exhaust", "--bounds", "list")[1]
    listed = json.loads(run("--exhaust", "--bounds", "list", "--json")[1])
    assert set(listed["sets"]["group"]) < set(listed["sets"]["full"]) <= set(listed["worlds"])
    status, out = run("--exhaust", "--bounds", "group-refused", "--json")
    report = json.loads(out)
    assert status == 0 and report["states"] > 2_000 and report["violations"] == 0
    assert set(report["cells"]) == {"group_member", "group_leader"}
    assert not any(cells["impossible"] for cells in report["cells"].values())


@pytest.mark.parametrize("seeds", ["x", "5:5", "1:y"])
def test_a_range_that_is_none_is_refused(seeds: str) -> None:
    with pytest.raises(MisuseError, match="--seeds"):
        run("--seeds", seeds)


def test_what_would_have_no_effect_is_refused() -> None:
    with pytest.raises(MisuseError, match="--bounds cache is of --exhaust"):
        run("--bounds", "cache")
    with pytest.raises(MisuseError, match="--cache is of seeds, and --exhaust plays none"):
        run("--exhaust", "--cache")
