"""Requests that leave the device and come back in a simulation: wrong bytes are seen."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from kvflow.memory.pool import PagedPool
from kvflow.proof.sim.faults import ON_COPIES, Faults
from kvflow.proof.sim.pages import Books, watch
from kvflow.proof.sim.run import simulate
from kvflow.proof.sim.state import Squatter, State
from kvflow.proof.sim.stay import (
    ABORT,
    ALL_PAGES,
    ALL_ROWS,
    AS_MANY,
    CANCEL,
    CANCEL_TWICE,
    draw_stay,
)
from kvflow.proof.sim.variety import (
    LAYOUT_WITH_ROWS,
    LAYOUT_WITH_WINDOWS,
    NUM_PAGES,
    NUM_ROWS,
    NUM_WINDOW_PAGES,
)
from kvflow.protocols.errors import CapacityError, OwnershipError

OWNER = "request 1"


class Judge(list[str]):
    def broken(self, invariant: str, text: str) -> None:
        self.append(f"{invariant}: {text}")


@pytest.fixture
def judge() -> Judge:
    return Judge()


@pytest.fixture
def watched(judge: Judge) -> Iterator[tuple[PagedPool, Books]]:
    pool = PagedPool.allocate(LAYOUT_WITH_ROWS, shared=False)
    yield pool, watch(pool, "decode 0", judge, lambda: False)
    pool.close()


def taken(pool: PagedPool, pages: int) -> list[int]:
    counts = (pages, *(1 for _ in pool.layout.spaces[1:]))
    places: list[int] = pool.places.take_room(counts, OWNER).tolist()
    return places


def test_pages_and_rows_have_one_book(watched: tuple[PagedPool, Books], judge: Judge) -> None:
    pool, books = watched
    places = taken(pool, 3)
    assert places[-1] >= NUM_PAGES and books.out == 4 and books.owners[places[-1]] == OWNER
    assert books.name(places[-1]) == f"row {places[-1] - NUM_PAGES}" and books.name(2) == "page 2"
    books.readers[places[-1]] = 1
    pool.places.give_back(np.array(places, dtype=np.int32), OWNER)
    assert judge == [
        f"I13: decode 0: {books.name(places[-1])} is free while it is read or computed"
    ]
    with pytest.raises(OwnershipError):
        pool.rows.give_back(np.array([places[-1] - NUM_PAGES], dtype=np.int32), OWNER)
    assert len(judge) == 2 and judge[1].startswith("I1: decode 0: row ") and not books.out


def test_rows_that_are_not_to_be_had_give_no_pages(judge: Judge) -> None:
    pool = PagedPool.allocate(LAYOUT_WITH_ROWS, shared=False)
    answers = iter([False, True])  # the pages are there, the row is not
    books = watch(pool, "decode 0", judge, lambda: next(answers))
    with pytest.raises(CapacityError, match="on purpose"):
        taken(pool, 3)
    assert not books.out and not judge and pool.places.at_rest()
    pool.close()


def test_places_of_another_space_have_its_name(judge: Judge) -> None:
    pool = PagedPool.allocate(LAYOUT_WITH_WINDOWS, shared=False)
    books = watch(pool, "decode 0", judge, lambda: False)
    places = pool.places.take_room((2, 3, 1), OWNER).tolist()
    assert books.counted(places) == (2, 3, 1) and books.owned() == {OWNER: (2, 3, 1)}
    assert [books.name(place) for place in (places[0], places[2], places[-1])] == [
        f"page {places[0]}",
        f"page {places[2] - NUM_PAGES} of 'window'",
        f"row {places[-1] - NUM_PAGES - NUM_WINDOW_PAGES}",
    ]
    books.readers[places[2]] = 1
    pool.places.give_back(np.array(places, dtype=np.int32), OWNER)
    text = f"{books.name(places[2])} is free while it is read or computed"
    assert judge == [f"I13: decode 0: {text}"]
    pool.close()


@pytest.mark.parametrize("component", [c.name for c in LAYOUT_WITH_WINDOWS.components])
def test_one_byte_of_any_stream_is_seen(judge: Judge, component: str) -> None:
    pool = PagedPool.allocate(LAYOUT_WITH_WINDOWS, shared=False)
    books = watch(pool, "decode 0", judge, lambda: False)
    places = taken(pool, 3)
    for index, place in enumerate(places):
        books.bytes.write(place, bytes([index]) * books.bytes.size(place))
    state = State(books, b"prompt", places, judge.append)
    state.lose()
    state.check(places, "with nothing computed yet")
    state.compute(places)
    state.check(places, "after a step")
    assert not judge
    (part,) = (c for c in pool.layout.components if c.name == component)
    (place,) = [place for place in places[2:] if books.spaces[place] == part.space]
    pool.array(component)[place - pool.layout.bases[part.space]].flat[-1] ^= 1
    state.check(places, "now")
    assert judge == [f"now, {books.name(place)} has other bytes than its own"]
    pool.close()


def test_two_requests_have_no_byte_pattern_in_common(
    watched: tuple[PagedPool, Books], judge: Judge
) -> None:
    pool, books = watched
    places = taken(pool, 2)
    mine, other = (State(books, digest, places, judge.append) for digest in (b"mine", b"other"))
    for state in (mine, other):
        state.lose()
        state.compute(places)
    other.check(places, "")
    assert not judge
    mine.check(places, "")
    assert len(judge) == 3


@pytest.mark.parametrize(
    ("what", "count"), [(AS_MANY, 4), (ALL_PAGES, NUM_PAGES + 1), (ALL_ROWS, 3 + NUM_ROWS)]
)
def test_who_takes_the_places_after_it_notices_a_late_write(
    watched: tuple[PagedPool, Books], judge: Judge, what: str, count: int
) -> None:
    pool, books = watched
    squatter = Squatter(pool, books, (3, 1), what, judge.append)
    assert books.out == count
    books.bytes.write(NUM_PAGES, bytes(books.bytes.size(NUM_PAGES)))
    squatter.leave()
    assert judge == ["row 0, which it has left, was written to"] and not books.out


def test_every_way_of_being_disturbed_is_drawn() -> None:
    rng = random.Random(1)
    acts = [act for _ in range(400) if (stay := draw_stay(rng)) is not None for act in stay.acts]
    found = {
        (act.kind, d.how, d.turns is None)
        for act in acts
        for d in (act.disturbed, act.return_disturbed)
        if d
    }
    for how in (CANCEL, CANCEL_TWICE, ABORT):
        assert {("step", how, True), ("retract", how, True), ("retract", how, False)} <= found
    assert {act.squats for act in acts} == {AS_MANY, ALL_PAGES, ALL_ROWS, ""}


def test_faults_of_copies_are_drawn_where_there_are_copies() -> None:
    drawn = Counter(
        kind for seed in range(200) for kind in Faults(random.Random(seed), copies=True).kinds
    )
    assert all(drawn[kind] > 40 for kind in ON_COPIES)
    assert not any(set(ON_COPIES) & Faults(random.Random(seed)).kinds for seed in range(200))


def test_the_story_tells_who_leaves_and_comes_back() -> None:
    lines: list[str] = []
    assert simulate(0, tell=lambda at_s, who, what: lines.append(what)).violation is None
    story = "\n".join(lines)
    for said in (
        "leaves: <Resident",
        "copies 2 pages out",
        "comes back: <Resident",
        "copies 2 pages in",
    ):
        assert said in story
