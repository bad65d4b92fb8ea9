"""Deadlines against a plain dictionary: what is due, and when the next is."""

from __future__ import annotations

import random
from enum import IntEnum

from kvflow.protocols.machinery import STORY_LINES, Deadlines, Story

NEVER = float("inf")


def test_as_a_plain_dictionary_would(seed: int) -> None:
    rng = random.Random(seed)
    deadlines: Deadlines[int] = Deadlines()
    plain: dict[int, float] = {}
    now = 0.0
    for _ in range(4_000):
        key, at_s = (
            rng.randrange(60),
            now + rng.choice([0.0, 0.001, 0.02, 0.3, 4.0, NEVER]) * rng.random(),
        )
        if rng.random() < 0.5:
            deadlines.set(key, at_s)
            plain.pop(key, None)
            if at_s != NEVER:
                plain[key] = at_s
        elif rng.random() < 0.3:
            deadlines.advance(key, at_s)
            if key in plain:
                plain[key] = min(plain[key], at_s)
        elif rng.random() < 0.5:
            deadlines.cancel(key)
            plain.pop(key, None)
        else:
            now += rng.random() * 0.1
            due = set()
            while (found := deadlines.pop_due(now)) is not None:
                due.add(found)
            assert due == {k for k, at in plain.items() if at <= now}
            plain = {k: at for k, at in plain.items() if at > now}
        assert len(deadlines) == len(plain) and all(k in deadlines for k in plain)
        assert deadlines.next_at_s() == min(plain.values(), default=NEVER)


def test_the_earliest_comes_first() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for at_s, name in ((1.004, "b"), (1.001, "a"), (2.0, "d"), (1.5, "c")):
        deadlines.set(name, at_s)
    assert [deadlines.pop_due(9.0) for _ in range(5)] == ["a", "b", "c", "d", None]


def test_cancelled_deadlines_leave_nothing_behind() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for n in range(10_000):
        deadlines.set(n, 600.0 + n * 0.001)
        deadlines.cancel(n)
    assert deadlines.next_at_s() == NEVER and not deadlines._buckets and not deadlines._heap


# --- the story of a room


class Phase(IntEnum):
    OPEN = 0


class Event(IntEnum):
    CHUNK_LANDED = 0


def test_events_are_told_by_name() -> None:
    story = Story()
    story.tell(0.5, Event.CHUNK_LANDED, Phase.OPEN, "rank 1")
    story.tell(1.0, "opened", Phase.OPEN)
    assert story.lines() == [(0.5, "chunk_landed", "OPEN", "rank 1"), (1.0, "opened", "OPEN", "")]


def test_the_beginning_stays_and_the_end_follows_it() -> None:
    story, half = Story(), STORY_LINES // 2
    for number in range(100):
        story.tell(number, str(number), Phase.OPEN)
    told = [line.what for line in story.lines()]
    assert told[:half] == [str(number) for number in range(half)]
    assert told[half] == f"{100 - STORY_LINES} lines left out"
    assert told[half + 1 :] == [str(number) for number in range(100 - half, 100)]
