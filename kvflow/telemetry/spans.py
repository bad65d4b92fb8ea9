"""Spans of a traced request, without the library that exports them, and the times that they show.

Nothing here is made for a request that is not traced.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

Attributes = Mapping[str, str | int | float | Sequence[str]]


# Seconds from the arrival of a request to the first token of its stream.
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"


class Span(Protocol):
    """A running span. Times are `time.perf_counter`, which is the clock of nodes too."""

    @property
    def recording(self) -> bool:
        """False if the sampler left this trace out. Its context is passed on all the same."""

    def annotate(self, attributes: Attributes) -> None: ...

    def event(self, name: str) -> None:
        """Record that something happens now."""

    def child(self, name: str, began_s: float, ended_s: float, attributes: Attributes) -> None:
        """Add a span that has ended. It is cut to the time in which this span runs."""

    def call(self, name: str, attributes: Attributes) -> tuple[Span, dict[str, str]]:
        """Begin a span for a call to another process. Return the headers that continue the trace
        there, too.
        """

    def end(self, error: str = "") -> None:
        """End the span, with the type of its error, if any."""


class Marks:
    """The times of one completion at one worker. An unset time is 0.0."""

    __slots__ = (
        "cached_tokens",
        "finish_reason",
        "first_at_s",
        "last_at_s",
        "placed_at_s",
        "queued_at_s",
        "room",
        "room_ended_at_s",
        "step_s",
        "stepped_at_s",
        "steps",
        "steps_began_at_s",
        "tokens",
    )

    def __init__(self) -> None:
        # A room of the library, whose record has the times at which it reached its stages.
        self.room: Any = None
        self.room_ended_at_s = 0.0
        # The wait for a place in the batch, and for pages.
        self.queued_at_s = self.placed_at_s = 0.0
        # The model's steps at prefill: the first one's begin, the last one's end, their sum.
        self.steps_began_at_s = self.stepped_at_s = self.step_s = 0.0
        self.steps = 0
        self.first_at_s = self.last_at_s = 0.0
        self.tokens = self.cached_tokens = 0
        self.finish_reason = ""

    def opened(self, room: Any) -> None:
        """Follow `room`, which calls back when it ends."""
        self.room = room
        room.on_end(self._room_ended)

    def _room_ended(self) -> None:
        self.room_ended_at_s = time.perf_counter()

    def queued(self, began_s: float) -> None:
        """Record that the wait that began at `began_s` is over."""
        self.queued_at_s, self.placed_at_s = began_s, time.perf_counter()

    def stepped(self, began_s: float, ended_s: float) -> None:
        self.steps_began_at_s = self.steps_began_at_s or began_s
        self.stepped_at_s = ended_s
        self.step_s += ended_s - began_s
        self.steps += 1

    def token(self, cached_tokens: int, finish_reason: str | None) -> None:
        """Record a token that leaves the engine."""
        now = time.perf_counter()
        self.first_at_s = self.first_at_s or now
        self.last_at_s = now
        self.tokens += 1
        self.cached_tokens = self.cached_tokens or cached_tokens
        self.finish_reason = finish_reason or self.finish_reason


MARKS: ContextVar[Marks | None] = ContextVar("kvflow_marks", default=None)
"""The marks of the completion that the current task serves, or None if it is not traced."""
