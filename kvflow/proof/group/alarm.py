"""A timer for one synchronous endpoint in a node's process."""

from __future__ import annotations

from typing import Protocol

from kvflow.proof.bare.node import TICK_GRAIN_S, Node


class Ticking(Protocol):
    def next_tick(self) -> float: ...

    def tick(self, now: float) -> None: ...

    def credit_stall(self, late_s: float, now: float) -> None: ...


class Alarm:
    def __init__(self, node: Node, endpoint: Ticking) -> None:
        self._node, self._endpoint = node, endpoint
        self._fires_at_s = float("inf")

    def set(self) -> None:
        """Set the timer to the endpoint's next tick, unless it already fires earlier."""
        now, at_s = self._node.clock.now, self._endpoint.next_tick()
        fires_at_s = now if at_s == float("-inf") else max(at_s, now + TICK_GRAIN_S)
        if fires_at_s < self._fires_at_s:
            self._fires_at_s = fires_at_s
            self._node.clock.later(fires_at_s - now, self._node, self._fire, fires_at_s)

    def _fire(self, fires_at_s: float) -> None:
        """Tick the endpoint. A late tick shows that the process was halted."""
        if fires_at_s != self._fires_at_s:
            # The timer was set again in the meantime, so this event is obsolete.
            return
        self._fires_at_s = float("inf")
        now = self._node.clock.now
        if (late_s := now - fires_at_s) > self._node.world.timing.heartbeat_s:
            self._endpoint.credit_stall(late_s, now)
        self._endpoint.tick(now)
        self._node.run()
