"""Virtual time: a heap of what happens when."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Event = tuple[float, int, Any, Callable[..., object], tuple[Any, ...]]
"""When, a number that breaks ties, the node whose doing it is (None: the world's), what, with which
arguments.
"""


class Clock:
    """Moves from one event to the next.

    What a node was about to do is kept while it is halted, and lost when it is dead."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        self._count = 0
        self._events: list[Event] = []

    def later(self, delay_s: float, node: Any, do: Callable[..., object], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay_s, self._count, node, do, arguments))

    def play(self, for_s: float) -> None:
        """Let so much time pass."""
        events, pop, until_s = self._events, heapq.heappop, self.now + for_s
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
