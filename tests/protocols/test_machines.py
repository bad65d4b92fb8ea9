"""The machines together, on a link that loses, repeats and reorders: nothing corrupts a page, and all comes to rest."""

from __future__ import annotations

import random

import pytest

from kvflow.protocols import decode_room as d
from kvflow.protocols import prefill_room as p
from kvflow.protocols.ports import Landing
from tests.protocols.joined import CHUNKS, GONE, World

WALKS, STEPS = 1_500, 60


def act(world: World, rng: random.Random, *, faults: bool) -> None:
    """One thing that can happen, of all that can happen now."""
    choices: list[tuple[float, str, int]] = [(1, "sweep", 0)]
    if world.link:
        choices += [(6, "deliver", 0)]
        if faults:
            choices += [(1, "drop", 0), (1, "repeat", 0)]
    for rank, r in enumerate(world.ranks):
        if not r.engine and not r.dead:
            choices.append((2, "engine", rank))
        if world.can_send(rank):
            choices.append((4, "send", rank))
        if None in r.flights:
            choices.append((3, "land", rank))
        if faults and not r.dead:
            choices += [(0.2, "crash", rank), (0.2, "silence", rank), (0.4, "prefill ends", rank)]
            if None in r.flights:
                choices.append((0.5, "doubt", rank))
            if r.late:
                choices.append((0.5, "late", rank))
        if r.dead:
            choices.append((0.5, "fence", rank))
    if faults:
        choices.append((0.3, "decode ends", 0))
    weights = [weight for weight, _, _ in choices]
    _, what, rank = rng.choices(choices, weights)[0]
    perform(world, rng, what, rank, faults=faults)


def perform(world: World, rng: random.Random, what: str, rank: int, *, faults: bool) -> None:
    r = world.ranks[rank]
    running = [i for i, landing in enumerate(r.flights) if landing is None]
    match what:
        case "sweep":
            world.sweep()
        case "deliver":
            world.deliver(rng.randrange(len(world.link)) if faults else 0)
        case "drop":
            world.link.pop(rng.randrange(len(world.link)))
        case "repeat":
            world.link.append(rng.choice(world.link))
        case "engine":
            world.engine_opens(rank)
        case "send":
            world.send(rank)
        case "land":
            draining = r.room is not None and r.room.phase is p.PrefillPhase.DRAINING
            landing = Landing.DRAINED if draining and rng.random() < 0.5 else Landing.LANDED
            world.end_write(rank, landing, rng.choice(running))
        case "doubt":
            world.end_write(rank, Landing.UNPROVEN, rng.choice(running))
        case "late":
            assert not world.home, "I2: a doubtful write landed on pages that were free"
            r.late -= 1
        case "crash":
            world.crash(rank)
        case "fence":
            world.fence(rank)
        case "silence":
            world.lose(rank)
        case "prefill ends":
            if r.room is not None and r.room.phase not in p.TERMINAL:
                world.prefill(rank, p.PrefillEvent(p.PrefillKind.ENDED_LOCALLY, cause=GONE))
        case "decode ends":
            world.decode(d.DecodeEvent(d.DecodeKind.ENDED_LOCALLY, cause=GONE))


def walk(seed: str, ranks: int, broken: str = "") -> World:
    rng = random.Random(seed)
    world = World(rng, ranks, broken)
    for _ in range(rng.randrange(STEPS)):
        act(world, rng, faults=True)
        world.check()
    return world


def settle(world: World) -> None:
    """A fair run without further faults: every message arrives, every write lands, every death is observed."""
    rng = world.rng
    for rank in range(len(world.ranks)):
        if not world.connected[rank] and not world.ranks[rank].dead:
            world.come_back(rank)
    for _ in range(2_000):
        if world.at_rest() and not world.link:
            return
        act(world, rng, faults=False)
        world.check()
    phases = [r.room.phase.name if r.room else "-" for r in world.ranks]
    raise AssertionError(f"no rest: decode {world.room.phase.name}, prefill {phases}, loans {world.loans}")


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_walk_is_safe_and_comes_to_rest(seed: int, ranks: int) -> None:
    endings: set[str] = set()
    for n in range(WALKS):
        name = f"{seed} {ranks} {n}"
        try:
            world = walk(name, ranks)
            settle(world)
        except AssertionError as error:
            raise AssertionError(f"walk {name!r}: {error}") from error
        endings.add(world.room.phase.name)
        if not any(r.doubted for r in world.ranks):
            assert world.home, "no doubt, so every page is home"
    assert endings == {phase.name for phase in d.TERMINAL}, "the walks must see every ending"


@pytest.mark.parametrize("ranks", [1, 2])
def test_doubtful_pages_come_home_when_the_writer_is_fenced(seed: int, ranks: int) -> None:
    doubtful = 0
    for n in range(WALKS):
        world = walk(f"{seed} fence {ranks} {n}", ranks)
        settle(world)
        if world.home:
            continue
        doubtful += 1
        for rank in range(ranks):
            world.crash(rank)
            world.fence(rank)
            world.check()
        assert world.home
    assert doubtful, "no walk left a loan in doubt: the test has seen nothing"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_without_faults_every_room_succeeds(seed: int, ranks: int) -> None:
    for n in range(60):
        world = World(random.Random(f"{seed} fair {n}"), ranks)
        settle(world)
        assert world.room.phase is d.DecodePhase.SUCCESS and world.home
        assert all(r.reported == CHUNKS for r in world.ranks)


@pytest.mark.parametrize(
    "broken", ["free on the end of the room", "doubt taken for proof", "ack before drain", "doubt forgotten"]
)
def test_bugs_that_somebody_has_had_are_found(seed: int, broken: str) -> None:
    for n in range(4_000):
        try:
            settle(walk(f"{seed} broken {n}", 1 + n % 2, broken))
        except AssertionError as error:
            assert "I2" in str(error)
            return
    raise AssertionError(f"nobody noticed: {broken}")
