"""One store over the places of three spaces: every operation is for all of them, or for none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvflow.memory.allocator import PageAllocator
from kvflow.memory.external import ExternalPages
from kvflow.memory.places import PlaceAllocator, batches
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import CapacityError, OwnershipError
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.protocols.pages.layout import PageIndices, Space, build_layout, unit_named
from tests.memory.kinds import layout_of

COUNTS = (8, 10, 3)
ROOM = (3, 2, 1)
BASES = (0, 8, 18)


def indices(*numbers: int) -> PageIndices:
    return np.array(numbers, dtype=np.int32)


def store_of() -> tuple[PagedPool, PlaceAllocator]:
    pool = PagedPool.allocate(layout_of("windows", 4, 8, 3, "page_first"), shared=False)
    store = pool.places
    assert isinstance(store, PlaceAllocator) and pool.layout.counts == store.free == COUNTS
    return pool, store


def test_a_room_has_places_of_every_space_in_order() -> None:
    pool, store = store_of()
    first, second = store.take_room(ROOM, "a"), store.take_room(ROOM, "b")
    assert first.tolist() == [0, 1, 2, 8, 9, 18] and second.tolist() == [3, 4, 5, 10, 11, 19]
    assert first.dtype == np.int32 and store.free == (2, 6, 1) and store.free_pages == 2
    assert store.owned() == {"a": 6, "b": 6} and store.count_by("a") == 6
    assert [allocator.owned() for allocator in pool.allocators] == [
        {"a": count, "b": count} for count in ROOM
    ]
    assert pool.pages is pool.allocators[0] and pool.rows is pool.allocators[2]
    store.give_back(second, "b")
    assert not store.at_rest()
    store.give_back(first, "a")
    assert store.at_rest() and store.free == COUNTS


@pytest.mark.parametrize("space", range(3))
def test_one_place_that_is_out_of_any_space_is_not_at_rest(space: int) -> None:
    pool, store = store_of()
    taken = pool.allocators[space].take(1, "a")
    assert not store.at_rest()
    pool.allocators[space].give_back(taken, "a")
    assert store.at_rest()


@pytest.mark.parametrize("lacking", range(3))
def test_a_room_that_lacks_one_place_takes_none(lacking: int) -> None:
    pool, store = store_of()
    allocator = pool.allocators[lacking]
    allocator.take(COUNTS[lacking] - ROOM[lacking] + 1, "another")
    before = store.free
    what = ("pages", "'window' pages", "rows")[lacking]
    with pytest.raises(CapacityError, match=f"^{what}: asked for {ROOM[lacking]}, limit ") as full:
        store.take_room(ROOM, "a")
    assert full.value.limit == ROOM[lacking] - 1
    assert store.free == before and "a" not in store.owned()
    assert store.take(1, "a").tolist() == [0 if lacking else 6], "a page of the first space"


@pytest.mark.parametrize("wrong", range(3))
@pytest.mark.parametrize("operation", ["move", "give_back", "hold", "unhold"])
def test_an_operation_that_one_space_refuses_changes_none(operation: str, wrong: int) -> None:
    pool, store = store_of()
    mine = store.take_room(ROOM, "a")
    if operation == "unhold":
        store.hold(mine)
    # One of the places has no owner, and is not held.
    bad = mine.copy()
    bad[(0, 3, 5)[wrong]] = BASES[wrong] + COUNTS[wrong] - 1
    run: dict[str, Callable[[], Any]] = {
        "move": lambda: store.move(bad, "a", "b"),
        "give_back": lambda: store.give_back(bad, "a"),
        "hold": lambda: store.hold(bad),
        "unhold": lambda: store.unhold(bad),
    }

    def state() -> list[Any]:
        allocators = pool.allocators
        return [store.owned(), store.free, [(a.held_pages, a._held_calls) for a in allocators]]

    before, unit = state(), ("page", "'window' page", "row")[wrong]
    with pytest.raises(OwnershipError, match=f"{unit} {COUNTS[wrong] - 1} "):
        run[operation]()
    assert state() == before
    if operation == "unhold":
        store.unhold(mine)
    store.give_back(mine, "a")
    assert store.at_rest()


def test_held_places_of_every_space_come_back_with_the_last_hold() -> None:
    pool, store = store_of()
    mine = store.take_room(ROOM, "a")
    store.hold(mine)
    store.move(mine, "a", "b")
    store.give_back(mine, "b")
    assert [a.returning_pages for a in pool.allocators] == list(ROOM)
    assert store.free == (5, 8, 2) and not store.at_rest()
    # The row is not held twice, so none of these holds ends, and no place becomes free.
    with pytest.raises(OwnershipError, match="row 0 is not held that often"):
        store.unhold(indices(0, 8, 18, 18))
    assert [a.returning_pages for a in pool.allocators] == list(ROOM)
    store.unhold(mine)
    assert store.at_rest() and store.free == COUNTS


def test_free_and_owned_places_of_every_space_are_withheld() -> None:
    pool, store = store_of()
    mine = store.take_room(ROOM, "a")
    withheld = indices(7, 0, 8, 17, 20, 18)  # a free and an owned one of each space
    store.withhold(withheld)
    assert store.free == (4, 7, 1) and [a.returning_pages for a in pool.allocators] == [1, 1, 1]
    store.give_back(mine, "a")
    taken = store.take_room(store.free, "b")
    assert not set(taken.tolist()) & set(withheld.tolist()) and taken.size == 21 - 6
    store.give_back(taken, "b")
    store.unhold(withheld)
    assert store.at_rest()


@pytest.mark.parametrize("outside", [-1, 21])
def test_places_outside_the_pool_are_refused(outside: int) -> None:
    _, store = store_of()
    for operation in (store.hold, store.unhold, store.withhold):
        with pytest.raises(OwnershipError, match=f"place {outside} is outside 0..20"):
            operation(indices(0, outside))
    store.hold(indices())
    assert store.at_rest()


def test_another_allocator_of_pages_shares_the_other_spaces() -> None:
    pool, store = store_of()
    pages = PageAllocator(8, reserved=2)
    over = pool.places_over(pages)
    mine = over.take_room(ROOM, "a")
    assert mine.tolist() == [2, 3, 4, 8, 9, 18] and pages.owned() == {"a": 3}
    assert store.free == (8, 8, 2) and over.allocators == (pages, *pool.allocators[1:])
    over.give_back(mine, "a")
    assert store.at_rest()


def test_one_space_needs_no_store_over_its_allocator() -> None:
    pool = PagedPool.allocate(layout_of("mha", 4, 8, 0, "page_first"), shared=False)
    assert pool.places is pool.pages and pool.places.allocators == pool.allocators == (pool.pages,)
    assert pool.pages.free == (8,) and pool.places.take_room((2,), "a").tolist() == [0, 1]
    other = PageAllocator(8)
    assert pool.places_over(other) is other
    with pytest.raises(ValueError, match="too many values"):
        pool.places.take_room((2, 1), "a")


def test_an_engines_own_store_counts_places_of_all_spaces() -> None:
    store = ExternalPages(21)
    assert store.free == () and store.take_room((0, 0, 0), "a").size == 0
    with pytest.raises(CapacityError, match="needs 6 pages and the node has none to give"):
        store.take_room(ROOM, "a")
    store.hold(indices(0, 8, 18))
    assert store.busy(range(21)).tolist() == [0, 8, 18]


def test_places_are_named_after_their_space() -> None:
    spaces = (Space("tokens", 4, 4), Space("a", 4, 2), Space("state", 2, 0), Space("more", 2, 0))
    kinds = [
        StateKind(space.name, "uint8", (4,), ROW if space.in_rows else "slot", space=space.name)
        for space in spaces
    ]
    layout = build_layout(kinds, spaces=spaces)
    names = [unit_named(layout, space) for space in range(4)]
    assert names == ["page", "'a' page", "row", "'more' row"]


def test_a_batch_has_places_of_one_space() -> None:
    places = (indices(4, 0, 2), indices(7, 5), indices(1))
    found = [[own.tolist() for own in batch] for batch in batches(places, (2, 5, 1))]
    assert found == [[[4, 0], [], []], [[2], [], []], [[], [7, 5], []], [[], [], [1]]]
    assert [[own.tolist() for own in batch] for batch in batches(places, (0, 0, 9))] == [
        [[], [], [1]]
    ]
