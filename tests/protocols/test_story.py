"""The story of a room: bounded, with its beginning and its end, and events by their names."""

from __future__ import annotations

from enum import IntEnum

from kvflow.protocols.machinery import STORY_LINES, Story


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
