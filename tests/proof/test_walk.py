"""The exhaustive walk: nothing is broken in small bounds, it sees what a plain walk sees, its short
cuts hold.
"""

from __future__ import annotations

import functools
from collections import deque
from contextlib import nullcontext

import msgspec
import numpy as np
import pytest

from kvflow.proof.walk import run
from kvflow.proof.walk.decode_side import DecodeSide
from kvflow.proof.walk.mirror import mirrored
from kvflow.proof.walk.search import Faults, Walk
from kvflow.proof.walk.shelf import freeze
from kvflow.proof.walk.tables import deaf
from kvflow.proof.walk.world import Bounds, Price, World
from kvflow.proof.walk.worlds import SETS, WORLDS
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.spaces import Counts
from kvflow.protocols.wire import messages as wire
from tests.protocols.joined import Joined, State

TINY = Bounds(
    chunks=1, in_flight=2, drops=0, duplicates=0, crashes=0, aborts=0, doubts=0, silences=0
)
ABORTED = TINY._replace(aborts=1, restarts=False)
UNPAID = {Price.NOTHING, Price.DOUBT}
# Half of the time that all small worlds take.
LONG = ("small-ranks", "shutdown")


def test_the_key_of_an_endpoint_has_the_contents_of_its_sets() -> None:
    """`unproven` of a peer is a frozenset. It was left out, and numbered as an object."""
    assert freeze(frozenset({3}), {}) == freeze({3}, {}) != freeze(frozenset({4}), {})
    seen: dict[int, int] = {}
    assert freeze(frozenset(), seen) == freeze(frozenset(), seen) and not seen


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in SETS["small"]]
)
def test_nothing_is_broken_in_a_small_world(name: str) -> None:
    report = run.run(name)
    (world,) = report["worlds"]
    print(world["states"], world["seconds"])
    assert report["violations"] == 0, world
    assert world["world"] == name
    assert world["states"] > 1_000 and world["rest_states"] > 5
    assert not any(cells["impossible"] for cells in report["cells"].values())
    assert report["endpoints"] == [
        "kvflow.protocols.decode.endpoint.DecodeEndpoint",
        "kvflow.protocols.prefill.endpoint.PrefillEndpoint",
    ]


def test_as_many_states_as_a_plain_walk_sees() -> None:
    """With doubts as often as they like, and no other fault."""
    bounds = TINY._replace(chunks=2, doubts=-1, announce=True, registered=False)
    joined = Joined(bounds)
    seen = {joined.start}
    waiting: deque[State] = deque(seen)
    while waiting:
        for act, after in joined.steps(waiting.popleft()):
            if act.price in UNPAID and after not in seen:
                seen.add(after)
                waiting.append(after)
    walk = Walk(bounds)
    assert walk.run() is None
    assert len(walk.states) == len(seen) > 1_000


@functools.cache
def walked(bounds: Bounds) -> Walk:
    walk = Walk(bounds)
    assert walk.run() is None
    return walk


@pytest.mark.xdist_group("aborted")  # they share walks
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_deaf_decode_is_changed_by_no_word(ranks: int) -> None:
    """What the tables leave out: words of a rank whose loan has ended, in a room that has."""
    walk = walked(ABORTED._replace(ranks=ranks, crashes=ranks == 1))
    asked = 0
    told = [(w.source, type(w)) for w in walk.tables._words.values]
    assert len(told) > 5
    words = [
        w
        for w in walk.tables._words.values
        if isinstance(w, wire.ChunkDone | wire.RoomFailed | wire.AbortAck)
    ]
    for decode in walk.tables.decodes.values:
        for rank in range(ranks):
            if not decode.alive or not deaf(decode, rank, 1):
                continue
            for word in words:
                side = DecodeSide(decode, walk.tables.world)
                after = side.run(
                    lambda s, rank=rank, word=word: s.hear(rank, word),  # type: ignore[misc]
                )
                assert (after, side.words) == (decode, [[]] * ranks), word
                asked += 1
    assert asked > 10


def test_no_decode_is_changed_by_a_heartbeat() -> None:
    walk = Walk(TINY._replace(silences=1, crashes=1, registered=False))
    assert walk.run() is None
    world = walk.tables.world
    for decode in walk.tables.decodes.values:
        if decode.alive:
            side = DecodeSide(decode, world)
            word = world.register(wire.Incarnation(77))
            beat = wire.Heartbeat(source=word.source, target=word.target)
            assert side.run(lambda s, beat=beat: s.hear(0, beat)) == decode  # type: ignore[misc]
            assert side.words == [[]]


def test_every_state_is_its_parts() -> None:
    walk = Walk(TINY._replace(ranks=2))
    assert walk.run() is None
    assert (walk.tables.pack(walk.tables.parts(walk.states)) == walk.states).all()
    assert (np.diff(walk.states.astype(object)) > 0).all(), "each state is there once"


def test_a_world_of_two_spaces_fills_them_chunk_by_chunk() -> None:
    world = World(WORLDS["small-spaces"].bounds)
    assert world.fills == ((1, 0), (1, 1))
    assert world.counts == (2, 1) == world.layout.wanted(world.tokens, world.prefix_tokens)
    assert world.chunk_bits == [0b001, 0b110] and world.all_bits == 0b111
    assert world.places_of(1).tolist() == [8, 9, 72]
    assert [world.sources(chunk).tolist() for chunk in (0, 1)] == [[0], [1, 64]]
    assert [world.position(place) for place in (24, 25, 88)] == [0, 1, 2]
    assert [world.reached(1, bits) for bits in (0b011, 0b100, 0b110)] == [1 << 2, 1 << 3, 3 << 2]


@pytest.mark.parametrize("fills", [(), ((1, 1),)], ids=["one space", "two spaces"])
def test_the_mirror_image_of_a_mirror_image_is_the_same(fills: tuple[Counts, ...]) -> None:
    walk = Walk(TINY._replace(ranks=2, crashes=1, restarts=False, fills=fills))
    assert walk.run() is None
    turned = 0
    for decode in list(walk.tables.decodes.values):
        other = mirrored(decode, walk.tables.world)
        assert mirrored(other, walk.tables.world) == decode
        turned += other != decode
    assert turned > 5


def test_fewer_faults_are_within_more() -> None:
    faults = Faults(Bounds(drops=1, duplicates=0, aborts=0))
    assert faults.within.tolist() == [0b01, 0b11]
    both = np.array([0b11], np.uint64)
    assert faults.only_richest(both).tolist() == [0b10] and faults.closed(
        np.array([0b10], np.uint64)
    ).tolist() == [0b11]


def test_bounds_and_plants_have_names() -> None:
    with pytest.raises(MisuseError, match="full, wide, small, group"):
        run.run("huge")
    with pytest.raises(MisuseError, match="doubt forgotten"):
        run.run("small", "no such plant")


@pytest.mark.slow
@pytest.mark.xdist_group("aborted")
def test_a_word_has_one_cause_and_the_first_rank_as_its_source() -> None:
    walk = walked(ABORTED._replace(ranks=2))
    for word in walk.tables._words.values[1:]:
        assert word.source in (101, 201)
        assert msgspec.structs.asdict(word).get("rank", 0) == 0


# The worlds that broke what was first built: each path ended in a state that was never at rest, or
# unsafe.
PATHS: dict[str, tuple[Bounds, list[str]]] = {
    "announced, and the Bootstrap lost": (
        TINY._replace(drops=1),
        [
            "decode opens a room",
            "decode asks about grant 1",
            "decode lends the pages of grant 1",
            "the link loses Bootstrap (grant 1) on its way to prefill",
            "prefill is asked by its engine",
        ],
    ),
    "acknowledged, RoomFailed lost, and then the link": (
        TINY._replace(drops=1, crashes=1, aborts=1, restarts=False),
        [
            "decode opens a room",
            "decode lends the pages of grant 1",
            "prefill hears Bootstrap (grant 1)",
            "prefill is asked with another prompt",
            "the link loses RoomFailed (grant 1) on its way to decode",
            "decode hears AbortAck (grant 1, drained)",
            "prefill crashes",
        ],
    ),
    "withdrawn on a link that was dialled again": (
        TINY._replace(drops=1, silences=1, registered=False, rooms=(1, 2)),
        [
            "decode opens a room",
            "decode has heard nothing of prefill for too long",
            "decode opens a room",
            "prefill hears Register",
            "prefill has its route to 77 opened",
        ],
    ),
    "withdrawn while the link was down": (
        TINY._replace(drops=1, silences=1, step_by_step=True),
        [
            "decode opens a room",
            "decode asks about grant 1",
            "decode has heard nothing of prefill for too long",
            "prefill hears Announce (grant 1)",
            "prefill hears Register",
            "decode hears Registered",
            "the link loses Abort (grant 1) on its way to prefill",
        ],
    ),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_led_nowhere_comes_to_rest(name: str) -> None:
    bounds, path = PATHS[name]
    with run.one_task_at_a_time() if bounds.step_by_step else nullcontext():
        comes_to_rest(Joined(bounds), path)


def comes_to_rest(joined: Joined, path: list[str]) -> None:
    state = joined.follow(path)
    seen, waiting = {state}, deque([state])
    while waiting:
        state = waiting.popleft()
        if joined.at_rest(state):
            return
        for act, after in joined.steps(state):
            if act.fair and act.price is Price.NOTHING and after not in seen:
                seen.add(after)
                waiting.append(after)
    raise AssertionError(f"none of {len(seen)} states is at rest")


def test_a_grant_of_a_decode_that_was_displaced_does_not_begin_again() -> None:
    """Prefill once wrote into pages that it had called drained."""
    joined = Joined(TINY._replace(doubts=1, silences=2, others=1, targets=1))
    state = joined.follow(
        [
            "decode has heard nothing of prefill for too long",
            "prefill hears Register",
            "prefill hears Heartbeat (settled below 1)",
            "decode opens a room",
            "prefill hears Register",
            "decode registers again",
            "decode hears Registered",
            "prefill hears Announce (grant 1)",
            "decode lends the pages of grant 1",
            "prefill has heard nothing of decode 77 for too long",
            "decode hears RoomFailed (grant 1)",
            "decode hears AbortAck (grant 1, drained)",
            "prefill is registered with by another decode",
            "prefill has its route to 88 opened",
            "prefill has heard nothing of decode 88 for too long",
            "prefill hears Register",
            "prefill has its route to 77 opened",
            "prefill hears Bootstrap (grant 1)",
            "prefill is asked by its engine",
        ]
    )
    assert state.decode.grants[0].home
    assert not any("sends a chunk" in act.text for act, _ in joined.steps(state))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["displaced", "eviction", "prefix", "no-fence", "steps", "spaces"])
def test_nothing_is_broken_in_a_world_of_its_own(name: str) -> None:
    report = run.walk(WORLDS[name].bounds, print)
    print(report)
    assert report["violations"] == 0
