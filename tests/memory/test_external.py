"""Pages of the engine's own allocator: uses are counted, nothing is handed out."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvflow.memory.external import ExternalPages
from kvflow.protocols.errors import CapacityError, MisuseError, OwnershipError
from kvflow.protocols.pages.layout import PageIndices


def pages(*numbers: int) -> PageIndices:
    return np.array(numbers, dtype=np.int32)


def test_a_page_is_busy_until_its_last_use_ends() -> None:
    store = ExternalPages(8)
    store.hold(pages(1, 2, 2))
    store.hold(pages(2))
    assert list(store.busy([0, 2, 1])) == [2, 1] and store.busy_pages == 2
    store.unhold(pages(1, 2, 2))
    assert list(store.busy([0, 1, 2])) == [2] and not store.at_rest()
    store.unhold(pages(2))
    assert store.at_rest() and repr(store) == "<ExternalPages of 8 pages: 0 busy>"


def test_nothing_is_handed_out() -> None:
    store = ExternalPages(8)
    assert store.free_pages == 0 and len(store.take(0, "room")) == 0
    with pytest.raises(
        CapacityError, match=r"'room 7' needs 3 pages .* open the room with pages=, 3 of them"
    ):
        store.take(3, "room 7")
    with pytest.raises(
        OwnershipError, match="cannot give back 1 pages: they belong to the engine's own allocator"
    ):
        store.give_back(pages(1), "x")
    with pytest.raises(
        OwnershipError, match="cannot move 1 pages: they belong to the engine's own allocator"
    ):
        store.move(pages(1), "x", "y")
    store.give_back(pages(), "x")
    store.move(pages(), "x", "y")


@pytest.mark.parametrize(
    ("wrong", "text"), [([8], "page 8 is outside 0..7"), ([2, -1], "page -1"), ([[1]], "shape")]
)
def test_pages_outside_the_pool(wrong: list[int], text: str) -> None:
    store = ExternalPages(8)
    for call in (store.hold, store.unhold, store.busy, store.wait_idle):
        with pytest.raises(OwnershipError, match=text):
            call(np.array(wrong))
    assert store.at_rest()


def test_a_use_that_never_began_does_not_end() -> None:
    store = ExternalPages(8)
    store.hold(pages(1))
    with pytest.raises(OwnershipError, match="page 2 is not in use"):
        store.unhold(pages(1, 2))
    assert list(store.busy(range(8))) == [1]


def test_a_pool_of_no_pages_is_misuse() -> None:
    with pytest.raises(MisuseError, match="num_pages 0 is below 1"):
        ExternalPages(0)


def test_a_wait_ends_with_the_last_use_or_in_time() -> None:
    store = ExternalPages(8)
    store.hold(pages(1, 2))
    assert not store.wait_idle([1], timeout_s=0.0)
    assert store.wait_idle([3, 4], timeout_s=0.0)
    seen = []
    waiting = threading.Thread(target=lambda: seen.append(store.wait_idle([1, 2], timeout_s=30)))
    waiting.start()
    store.unhold(pages(1))
    assert not store.wait_idle([2], timeout_s=0.0)
    store.unhold(pages(2))
    waiting.join(30)
    assert seen == [True]


def test_many_threads_count_right() -> None:
    store = ExternalPages(8)

    def use() -> None:
        for _ in range(200):
            store.hold(pages(0, 3, 3))
            store.unhold(pages(3, 0, 3))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.at_rest()


def test_many_pages_are_not_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`np.add.at` took 150 ms of the event loop for the pages of the largest room."""
    store = ExternalPages(4096)
    scattered = np.random.default_rng(1).permutation(np.arange(4096, dtype=np.int32))[:2048]
    with monkeypatch.context() as without:
        without.setattr(np, "add", None)
        store.hold(scattered)
        store.hold(scattered[:1024])
        assert store.busy_pages == 2048
        store.unhold(scattered)
        assert sorted(store.busy(scattered)) == sorted(scattered[:1024])
        store.unhold(scattered[:1024])
    assert store.at_rest()
    twice = np.repeat(scattered[:512], 2)
    store.hold(twice)
    store.unhold(scattered[:512])
    assert store.busy_pages == 512
    with pytest.raises(OwnershipError, match="not in use"):
        store.unhold(scattered)
    store.unhold(scattered[:512])
    assert store.at_rest()
