"""Who is next for shared pages: neither a large room nor the small ones behind it starve."""

from __future__ import annotations

import random

import pytest

from kvflow.protocols.waiting import PASSED_FOR_S, Waiting, Waits


def test_first_come_first_served_among_those_that_fit() -> None:
    waiting: Waiting[str] = Waiting()
    for n, (key, wanted) in enumerate((("large", 8), ("small", 2), ("other", 2))):
        waiting.add(key, (wanted,), 0.01 * n)
    waiting.add("small", (9,), 0.5)  # it waits already
    assert (len(waiting), waiting.pages) == (3, 12)
    assert waiting.next((1,), (10,), 0.1) is None
    assert waiting.next((2,), (10,), 0.1) == "small"
    assert waiting.next((8,), (10,), 0.1) == "large"
    assert waiting.discard("small") and not waiting.discard("small") and "small" not in waiting
    assert waiting.next((7,), (10,), 0.1) == "other"


def test_the_oldest_that_was_passed_for_long_has_what_comes_back_to_itself() -> None:
    waiting: Waiting[str] = Waiting()
    waiting.add("large", (8,), 0.0)
    waiting.add("small", (2,), 0.1)
    assert waiting.next((7,), (10,), PASSED_FOR_S) is None
    assert waiting.next((8,), (10,), PASSED_FOR_S) == "large"
    # Quarantine keeps more than it could do without.
    assert waiting.next((7,), (7,), PASSED_FOR_S + 1) == "small"
    assert waiting.report((7,), PASSED_FOR_S) == Waits(2, 10, 1, PASSED_FOR_S)
    assert waiting.report((8,), PASSED_FOR_S) == Waits(2, 10, 0, PASSED_FOR_S)
    waiting.clear()
    assert not waiting and waiting.pages == 0 and waiting.report((8,), 9.0) == Waits(0, 0, 0, 0.0)


@pytest.mark.parametrize("turn", range(20))
def test_nobody_waits_longer_than_the_rooms_before_it_last(turn: int) -> None:
    """Rooms of any size keep coming, and each lasts at most a second."""
    rng, most = random.Random(turn), 10
    waiting: Waiting[int] = Waiting()
    ends: list[tuple[float, int]] = []
    sizes: dict[int, int] = {}
    came: dict[int, float] = {}
    longest, now = 0.0, 0.0
    for number in range(2_000):
        now = number * 0.05
        if len(waiting) < 20:
            sizes[number] = 10 if number % 37 == 0 else rng.randint(1, 3)
            came[number] = now
            waiting.add(number, (sizes[number],), now)
        ends = [end for end in ends if end[0] > now]
        while True:
            free = most - sum(pages for _, pages in ends)
            if (key := waiting.next((free,), (most,), now)) is None:
                break
            waiting.discard(key)
            longest = max(longest, now - came[key])
            ends.append((now + rng.random(), sizes[key]))
    assert longest < PASSED_FOR_S + 20 * 1.1


def test_a_room_waits_for_the_space_that_lacks() -> None:
    waiting: Waiting[str] = Waiting()
    waiting.add("window", (1, 3, 1), 0.0)
    waiting.add("pages", (4, 1, 1), 0.1)
    waiting.add("row", (0, 0, 1), 0.2)
    assert waiting.pages == 12
    most = (5, 4, 2)
    assert waiting.next((5, 4, 0), most, 0.3) is None, "each wants a row"
    assert waiting.next((3, 2, 2), most, 0.3) == "row"
    assert waiting.next((5, 2, 2), most, 0.3) == "pages"
    assert waiting.next((1, 3, 1), most, 0.3) == "window"
    assert waiting.next((5, 2, 2), most, PASSED_FOR_S) is None, "the oldest may not be passed now"
    # It may be where quarantine keeps the pages of its space.
    assert waiting.next((5, 2, 2), (5, 2, 2), PASSED_FOR_S) == "pages"
    assert waiting.report((5, 2, 2), PASSED_FOR_S) == Waits(3, 12, 1, PASSED_FOR_S)
    assert waiting.report((3, 2, 0), PASSED_FOR_S).stuck_rooms == 3
