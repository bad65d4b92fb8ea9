"""The machines together, in random walks past every bound of the exhaustive one (tests/sim/test_explore.py): any
number of faults, three ranks, a link that reorders."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvflow.protocols.machines import decode_room as d
from kvflow.testing.sim.explore_prefill import Price
from kvflow.testing.sim.table_plants import PLANTS
from tests.protocols.joined import World, is_fault, meddle, start, steps

WALKS, STEPS = 40, 40
RARE = {Price.CRASH: 0.02, Price.DECODE_ABORT: 0.05, Price.PREFILL_ABORT: 0.05, Price.SILENCE: 0.05, Price.DOUBT: 0.2}


def walk(rng: random.Random, ranks: int) -> World:
    world = start(ranks)
    for _ in range(rng.randrange(STEPS)):
        if rng.random() < 0.15:
            world = meddle(world, rng)
            continue
        if not (found := steps(world)):
            break
        act, world = rng.choices(found, [RARE.get(act.price, 1.0) for act, _ in found])[0]
        check(world, act.broken)
    return world


def settle(world: World, rng: random.Random) -> World:
    """A fair run without further faults."""
    for _ in range(3_000):
        if world.at_rest:
            return world
        fair = [(act, after) for act, after in steps(world) if not is_fault(act)]
        assert fair, f"no rest: {world}"
        act, world = rng.choices(fair, [0.3 if act.timer else 1.0 for act, _ in fair])[0]
        check(world, act.broken)
    raise AssertionError(f"no rest: {world}")


def check(world: World, broken: str) -> None:
    assert not broken, broken
    assert not world.unsafe, f"I2: {world}"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_walk_is_safe_and_comes_to_rest(seed: int, ranks: int) -> None:
    for n in range(WALKS):
        ending(random.Random(f"{seed} {ranks} {n}"), ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_walks_come_to_every_ending(ranks: int) -> None:
    """The same walks each time: those of one seed may miss the rarer endings."""
    endings = Counter(ending(random.Random(f"{ranks} {n}"), ranks) for n in range(2 * WALKS))
    assert endings["SUCCESS"] and endings["FAILED"] and endings["LOST"], endings


def ending(rng: random.Random, ranks: int) -> str:
    """A walk and what came of its room."""
    room = settle(walk(rng, ranks), rng).decode.room
    return room.phase.name if room else "dead"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_without_faults_every_room_succeeds(seed: int, ranks: int) -> None:
    for n in range(10):
        world = settle(start(ranks), random.Random(f"{seed} fair {n}"))
        assert world.decode.room is not None and world.decode.room.phase is d.DecodePhase.SUCCESS
        assert world.decode.home and all(lane.prefill.tidy for lane in world.lanes)


@pytest.mark.parametrize("plant", [p for p in PLANTS if p.name in ("free on timer", "ack before drain")])
def test_walks_find_a_planted_bug(seed: int, plant: object) -> None:
    with plant.install():  # type: ignore[attr-defined]
        for n in range(2_000):
            try:
                walk(random.Random(f"{seed} planted {n}"), 1)
            except AssertionError as error:
                assert "I2" in str(error)
                return
    raise AssertionError("nobody noticed")
