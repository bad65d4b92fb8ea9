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


@pytest.mark.parametrize(
    ("how", "told", "plant"),
    [
        ([], (": Bootstrap(room=", "calm"), "double close"),
        (["--bare"], (": Bootstrap(room=", "calm"), "dropped from one table"),
        (["--group", "3"], (": Decision(session=", ": RankVote(session="), "starts alone"),
        (["--cache"], ("its cache is flushed",), "event at enqueue"),
    ],
    ids=["nodes", "bare", "group", "cache"],
)
def test_seeds_a_story_a_violation_and_plants(
    how: list[str], told: tuple[str, ...], plant: str
) -> None:
    status, out = run(*how, "--seeds", "0:2", "--json")
    report = json.loads(out)
    assert (status, report["seeds"], report["violations"]) == (0, 2, 0)
    assert report["steps"] > 400 and report["seeds_per_s"] > 0
    assert {"faults", "median_steps", "steps_per_s", "cells"} <= set(report)
    status, out = run(*how, "--seed", "1", "--trace")
    assert status == 0 and '"violations": 0' in out and all(line in out for line in told)
    status, out = run(*how, "--seed", "0", "--plant", plant, "--json")
    report = json.loads(out)
    assert status == 1 and report["violations"] == 1
    options = " ".join(["kvflow sim", *how])
    assert report["replay"] == f"{options} --seed 0 --trace --plant {plant!r}"
    assert plant in run(*how, "--plants")[1]
    listed = {
        one["name"]: one["invariant"] for one in json.loads(run(*how, "--plants", "--json")[1])
    }
    assert len(listed) >= 10 and listed[plant] == report["invariant"]


def test_a_hunt_prints_the_first_seed() -> None:
    status, out = run("--plant", "double close", "--json")
    assert status == 0 and json.loads(out)["found"][0]["seed"] == 0
    status, out = run("--plant", "no grant check", "--seeds", "0:1")
    assert status == 1 and "NOT FOUND" in out


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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--bounds", "cache"], "--bounds cache is of --exhaust"),
        (["--exhaust", "--cache"], "--cache is of seeds, and --exhaust plays none"),
        (["--cache", "--bare", "--seeds", "0:1"], "choose one"),
        (["--fleet", "3", "--bare"], "2 of --bare, --group, --cache, --fleet are given: choose"),
        (["--fleet", "3", "--seeds", "0:1"], "--fleet plays one run, of --seed: leave --seeds out"),
        (["--rooms", "3"], "--rooms is of --fleet, which is not given"),
    ],
)
def test_what_would_have_no_effect_is_refused(options: list[str], text: str) -> None:
    with pytest.raises(MisuseError, match=text):
        run(*options)
