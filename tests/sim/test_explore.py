"""The exhaustive walk: nothing is broken in small bounds, it sees what a plain walk sees, its short cuts hold."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from kvflow.protocols.errors import MisuseError
from kvflow.testing.sim import explore
from kvflow.testing.sim.explore_decode import DecodeSide
from kvflow.testing.sim.explore_prefill import Price, Word
from kvflow.testing.sim.explore_tables import Bounds
from kvflow.testing.sim.explore_walk import Faults, Walk
from tests.protocols.joined import World, start, steps

WORDS = [Word("chunk", n) for n in range(3)] + [Word(name) for name in ("failed", "drained", "unproven", "unknown")]


def test_nothing_is_broken_within_small_bounds() -> None:
    report = explore.run("small")
    assert report["violations"] == 0
    one, three = report["worlds"]
    print(report)
    assert one["states"] > 10_000 and three["states"] > 10_000, "the walk must have gone somewhere"
    assert one["rest_states"] > 20 and three["rest_states"] > 20


def test_a_small_walk_sees_every_cell_but_those_its_bounds_exclude() -> None:
    with explore.watched() as tables:
        Walk(Bounds(chunks=2, in_flight=2, drops=1, duplicates=1)).run()
    assert {name: tables[name].unvisited() for name in tables} == {
        "decode_room": ["WAITING_FOR_INPUT x ALL_LANDED", "TRANSFERRING x CHUNK_LANDED"],  # one chunk, three chunks
        "prefill_room": [],
        "loans": [],
    }


def test_as_many_states_as_a_plain_walk_sees() -> None:
    """With doubts and silences as often as they like, and no other fault."""
    free = (Price.NOTHING, Price.DOUBT, Price.SILENCE)
    seen = {start(1)}
    waiting: deque[World] = deque(seen)
    while waiting:
        for act, after in steps(waiting.popleft(), chunks=2, in_flight=2):
            if act.price in free and after not in seen:
                seen.add(after)
                waiting.append(after)
    walk = Walk(Bounds(chunks=2, in_flight=2, drops=0, duplicates=0, crashes=0, aborts=0))
    assert walk.run() is None
    assert len(walk.states) == len(seen) > 1_000


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_deaf_decode_is_changed_by_no_word(ranks: int) -> None:
    """What the tables leave out: words of a rank whose loan has ended, in a room that has."""
    walk = Walk(Bounds(ranks=ranks, chunks=1, in_flight=2, drops=0, duplicates=0, silences=0, doubts=0))
    assert walk.run() is None
    asked = 0
    for decode in walk.tables.decodes.values:
        for rank in range(ranks):
            for word in WORDS if decode.deaf(rank) else ():
                side = DecodeSide(decode, 1)
                side.hear(rank, word)
                assert (side.state, side.words) == (decode, [[]] * ranks), word
                asked += 1
    assert asked > 10


def test_every_state_is_its_parts() -> None:
    walk = Walk(Bounds(ranks=2, chunks=1, in_flight=2, drops=0, duplicates=0, aborts=0, silences=0, doubts=0))
    assert walk.run() is None
    assert (walk.tables.pack(walk.tables.parts(walk.states)) == walk.states).all()
    assert (np.diff(walk.states.astype(object)) > 0).all(), "each state is there once"


def test_fewer_faults_are_within_more() -> None:
    faults = Faults(Bounds(drops=1, duplicates=0, aborts=0))
    assert faults.within.tolist() == [0b01, 0b11]
    both = np.array([0b11], np.uint64)
    assert faults.only_richest(both).tolist() == [0b10] and faults.closed(np.array([0b10], np.uint64)).tolist() == [
        0b11
    ]


def test_bounds_and_plants_have_names() -> None:
    with pytest.raises(MisuseError, match="full, wide, small"):
        explore.run("huge")
    with pytest.raises(MisuseError, match="free on timer"):
        explore.run("small", "no such plant")


@pytest.mark.slow
def test_nothing_is_broken_between_two_machines() -> None:
    report = explore.walk(explore.BOUNDS["full"][0], print)
    print(report)
    assert report["violations"] == 0
