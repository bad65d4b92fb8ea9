"""Everything that a small prefix index can do: no rule is broken, and planted bugs are found."""

from __future__ import annotations

import pytest

from kvflow.proof.walk import run
from kvflow.proof.walk.breadth_first import walk
from kvflow.proof.walk.cache import CacheWorld
from kvflow.proof.walk.cache_life import Life
from kvflow.proof.walk.cache_plants import PLANTS, CachePlant
from kvflow.proof.walk.cache_worlds import WORLDS
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.machines.cached_run import TABLE, RunKind, RunPhase

NOT_WALKED_HERE = {"writes", "stored", "through", "loaded", "locked", "stale"}
"""`kvflow sim --exhaust --bounds cache` does, in about a minute and a half."""
AT_LEAST = {"evicted": 7_000, "flushed": 3_000}


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_LEAST)
def test_nothing_is_broken(name: str) -> None:
    report = walk(CacheWorld(WORLDS[name][1]))
    print(name, report)
    assert not report["violations"], report
    assert report["states"] >= AT_LEAST[name]
    assert report["rest_states"] > report["states"] // 10


def test_the_other_worlds_are_named() -> None:
    assert set(WORLDS) == {"small", *AT_LEAST} | NOT_WALKED_HERE
    assert (
        {f"cache-{name}" for name in WORLDS}
        == set(run.ALL_SETS["cache"])
        < set(run.ALL_SETS["full"])
    )


def test_two_writes_and_two_splits_break_nothing_in_any_order() -> None:
    report = run.run("cache-small")
    print(report["worlds"])
    assert not report["violations"], report
    assert report["states"] >= 800 and report["worlds"][0]["rest_states"] > 200
    assert not report["cells"]["cached_run"]["impossible"]
    assert report["cells"]["cached_run"]["visited"] >= 5


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_planted_bug_is_found(plant: CachePlant) -> None:
    with plant.install():
        report = walk(CacheWorld(plant.bounds))
    print(plant.name, report.get("broken"), report.get("path"))
    assert report["violations"] == 1, "the walk has not found it"
    assert report["broken"].split(":")[0] == plant.invariant
    assert all(report["path"])


def test_a_plant_can_be_named_and_is_gone_afterwards() -> None:
    before = dict(TABLE.moves)
    report = run.run("cache-small", "failed copy taken for one")
    assert report["violations"] == 1 and report["worlds"][0]["path"]
    assert dict(TABLE.moves) == before
    assert walk(CacheWorld(WORLDS["small"][1]._replace(splits=0)))["violations"] == 0
    with pytest.raises(MisuseError, match="child before parent"):
        run.run("cache-small", "tulip")


def test_a_state_that_was_frozen_goes_on_as_before() -> None:
    world = CacheWorld(WORLDS["locked"][1])
    found = [step() for text, _, step in world.acts(world.start()) if "reads" in text]
    assert len(found) == 2
    life = found[0].life
    assert life is not None
    again = Life.thawed(life.frozen())
    assert again.fingerprint() == life.fingerprint()
    (lock,) = again.locks
    assert any(lock.node is node for node in again.nodes()) and lock.node.locks == 1
    assert TABLE.cell(RunPhase.ARRIVING, RunKind.ACK) is not None
