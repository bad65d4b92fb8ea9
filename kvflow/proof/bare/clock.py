"""Virtual time: a heap of events, ordered by the time at which they happen."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Event = tuple[float, int, Any, Callable[..., object], tuple[Any, ...]]
"""An event: its time, a number that breaks ties, the node that acts (None for the world), the
function to call and its arguments.
"""


class Clock:
    """A clock that jumps from one event to the next.

    Events of a halted node wait until it resumes. Events of a dead node are dropped.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        self._count = 0
        self._events: list[Event] = []

    def later(self, delay_s: float, node: Any, do: Callable[..., object], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay_s, self._count, node, do, arguments))

    def play(self, for_s: float) -> None:
        events, pop, until_s = self._events, heapq.heappop, self.now + for_s
        # This loop takes most of a seed's time, so it uses local variables.
        steps = self.steps
        while events and events[0][0] <= until_s:
            self.now, _, node, do, arguments = pop(events)
            if node is not None and node.parked is not None:
                if node.alive:
                    node.parked.append((do, arguments))
                continue
            steps += 1
            self.steps = steps
            do(*arguments)
        self.now = until_s
