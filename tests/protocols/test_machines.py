"""The shipped endpoints in random walks past the bounds of tests/proof/test_walk.py."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from kvflow.proof.walk import run
from kvflow.proof.walk.acts import Acts
from kvflow.proof.walk.decode_side import Decode, DecodeSide
from kvflow.proof.walk.plants import PLANTS
from kvflow.proof.walk.prefill_side import PrefillSide
from kvflow.proof.walk.world import Act, Bounds, Price
from kvflow.protocols.machines.ownership import PagePhase
from tests.protocols.joined import Joined, State, is_fault, meddle

WALKS, STEPS = 15, 40
ANY = Bounds(in_flight=99)
RARE = {
    Price.CRASH: 0.02,
    Price.DECODE_ABORT: 0.05,
    Price.PREFILL_ABORT: 0.05,
    Price.SILENCE: 0.05,
    Price.DOUBT: 0.2,
}
JOINED = {ranks: Joined(ANY._replace(ranks=ranks)) for ranks in (1, 2, 3)}


def walk(joined: Joined, rng: random.Random) -> State:
    state = joined.start
    for _ in range(rng.randrange(STEPS)):
        if rng.random() < 0.15:
            state = meddle(state, rng)
            continue
        if not (found := joined.steps(state)):
            break
        act, state = rng.choices(found, [RARE.get(act.price, 1.0) for act, _ in found])[0]
        joined.check(act, state)
    return state


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_walk_is_safe_and_comes_to_rest(seed: int, ranks: int) -> None:
    for n in range(WALKS):
        ending(random.Random(f"{seed} {ranks} {n}"), ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_walks_come_to_every_ending(ranks: int) -> None:
    """The same walks each time: those of one seed may miss the rarer endings."""
    endings = Counter(ending(random.Random(f"{ranks} {n}"), ranks) for n in range(3 * WALKS))
    assert endings[PagePhase.LANDED] and endings[PagePhase.FREED] and endings["dead"], endings


def ending(rng: random.Random, ranks: int) -> Any:
    """A walk and what became of its room's pages."""
    joined = JOINED[ranks]
    decode = joined.settle(walk(joined, rng), rng).decode
    return decode.grants[-1].pages.target if decode.grants else "dead"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_without_faults_every_room_succeeds(seed: int, ranks: int) -> None:
    joined = JOINED[ranks]
    for n in range(5):
        rng, state = random.Random(f"{seed} fair {n}"), joined.start
        while not joined.at_rest(state):
            fair = [step for step in joined.steps(state) if not is_fault(step[0])]
            act, state = rng.choice([step for step in fair if not step[0].timer] or fair)
            joined.check(act, state)
        assert state.decode.grants[0].pages.target is PagePhase.LANDED


@pytest.mark.parametrize(
    "plant", [p for p in PLANTS if p.name in ("doubt forgotten", "failed handle taken for landed")]
)
def test_walks_find_a_planted_bug(seed: int, plant: Any) -> None:
    with plant.install():
        joined = Joined(ANY)
        for n in range(2_000):
            try:
                walk(joined, random.Random(f"{seed} planted {n}"))
            except AssertionError as error:
                # Another invariant than the one it is named for may break first.
                assert str(error).startswith(("I", "table"))
                return
    raise AssertionError("no walk has found it")


class Recording(Acts):
    """Remembers how each act is done.

    What an act led to is part of its name: the same text may stand for two messages, as the
    ranks' `Register` do, which differ in the first grant of the room.
    """

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.how: dict[Any, Callable[[Any], None]] = {}

    def _decode(self, value: Any, text: str, do: Any, *rest: Any, **more: Any) -> Any:
        act = super()._decode(value, text, do, *rest, **more)
        self.how[value, act.text, act.side, act.words] = do
        return act

    def _prefill(self, value: Any, text: str, do: Any, *rest: Any, **more: Any) -> Any:
        act = super()._prefill(value, text, do, *rest, **more)
        self.how[value, act.text, act.side, act.words] = do
        return act


WORLDS = {
    "one room": Bounds(chunks=2, in_flight=9),
    "two rooms": Bounds(
        chunks=1, in_flight=9, rooms=(1, 1), announce=True, quarantine_share=0.0, leaves=1
    ),
    "registration": Bounds(
        chunks=1, in_flight=9, registered=False, refusals=1, others=1, targets=1, closed_grants=0
    ),
    "checksums": Bounds(
        chunks=2, in_flight=9, verify=True, checksums=1, out_of_order=True, declares=1
    ),
    "two ranks": Bounds(ranks=2, chunks=2, in_flight=9, step_by_step=True),
}


@pytest.mark.parametrize("name", WORLDS)
def test_an_endpoint_of_the_same_key_behaves_the_same(seed: int, name: str) -> None:
    """The key is complete: the history of an endpoint changes nothing."""
    joined, compared = Joined(WORLDS[name], Recording), 0
    with run.one_task_at_a_time() if joined.bounds.step_by_step else nullcontext():
        for n in range(12):
            compared += live_walk(joined, random.Random(f"{seed} key {n}"))
    assert compared > 60, "too few events met an endpoint of another history"


def live_walk(joined: Joined, rng: random.Random) -> int:
    """A walk in which two sides live on, beside those that are restored for every event."""
    world, state, acts = joined.world, joined.start, joined.acts
    assert isinstance(acts, Recording)
    decode: Any = world.decodes.take(state.decode.endpoint)
    prefills: list[Any] = [world.prefills.take(lane.prefill.endpoint) for lane in state.lanes]
    compared = 0
    for _ in range(STEPS):
        if rng.random() < 0.15:
            state = meddle(state, rng)
            continue
        if not (found := joined.steps(state)):
            break
        act, after = rng.choices(found, [RARE.get(act.price, 1.0) for act, _ in found])[0]
        joined.check(act, after)
        changed = [
            r for r, lane in enumerate(state.lanes) if lane.prefill != after.lanes[r].prefill
        ]
        if not isinstance(act.side, Decode) and not changed:
            state = after  # whichever rank it was: it is as before
            continue
        rank = changed[0] if changed else 0
        before: Any = state.decode if isinstance(act.side, Decode) else state.lanes[rank].prefill
        do = acts.how.get((before, act.text, act.side, act.words))
        if do is not None and act.side.alive and before.alive:
            live = decode if isinstance(act.side, Decode) else prefills[rank]
            compared += compare(world, act, before, do, live)
        elif isinstance(act.side, Decode):
            return compared  # it is dead
        elif act.side.alive and act.side.endpoint != before.endpoint:
            prefills[rank] = world.prefills.take(act.side.endpoint)
        state = after
    return compared


def compare(world: Any, act: Act[Any], before: Any, do: Callable[[Any], None], live: Any) -> int:
    side: Any
    if isinstance(before, Decode):
        side = DecodeSide(before, world, live)
        assert (side.run(do), tuple(map(tuple, side.words))) == (act.side, act.words), act.text
    else:
        side = PrefillSide(before, world, live)
        assert side.run(do) == act.side, act.text
        assert act.side.target_gone or (tuple(side.words),) == act.words, act.text
    return 1
