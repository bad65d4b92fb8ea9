"""What both kinds of node have in common: a shipped endpoint, its timer, and what happens to its process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvflow.protocols.ports import Endpoint, Witness
from kvflow.protocols.wire.messages import Incarnation
from kvflow.telemetry.counters import Counts

if TYPE_CHECKING:
    from kvflow.protocols.decode import DecodeEndpoint
    from kvflow.protocols.prefill import PrefillEndpoint
    from kvflow.testing.bare.world import World

TICK_GRAIN_S = 0.005  # as the shells do: what is due within this time is dealt with in one tick
WITNESS = Witness("boot", "pid:[1]", 1, 1)


class Node:
    """One life of one node. Dead ones stay known to the world."""

    RUN: dict[type, Callable[[Any, Any], None]]

    def __init__(self, world: World, name: str, group: int, endpoint: DecodeEndpoint | PrefillEndpoint) -> None:
        self.world, self.name, self.group, self._ticking = world, name, group, endpoint
        self.clock, self.oracle = world.clock, world.oracle
        self.incarnation = endpoint.core.identity.incarnation
        self._outbox = endpoint.core.outbox
        self.alive = True
        self.leaving = False
        self.displaced = False  # alive, but its address belongs to another process now
        self.parked: list[tuple[Callable[..., object], tuple[Any, ...]]] | None = None  # what waits while it is halted
        self.watchers: list[tuple[Node, Any]] = []  # who waits for proof of its death, and what for
        self.malformed = 0  # frames that were handed to it and are no message
        self.troubled_at_s = -1.0  # when it was last cut off or halted
        self.stalled_until_s = -1.0  # its data plane moves nothing till then
        self.proven_at_s = float("inf")  # when its death is known everywhere
        self._due_at_s = float("inf")
        self._fires_at_s = 0.0

    @property
    def up(self) -> bool:
        """Alive, and not standing still."""
        return self.alive and self.parked is None

    @property
    def counts(self) -> Counts:
        observer = self._ticking.core.observer
        assert isinstance(observer, Counts)
        return observer

    def say(self, what: str) -> None:
        if self.world.tell is not None:
            self.world.tell(self.clock.now, self.name, what)

    def wait(self, span: tuple[float, float], do: Callable[..., object], *arguments: Any) -> None:
        """Do something of its own within a span of seconds."""
        low, high = span
        self.clock.later(low + (high - low) * self.world.rng.random(), self, do, *arguments)

    def run(self) -> None:
        """Run what the endpoint asks for until it asks for nothing more; then see to its timer."""
        outbox, endpoint, commands = self._outbox, self._ticking, self.RUN
        while outbox:
            for command in endpoint.commands():
                commands[type(command)](self, command)
        at_s = endpoint.next_tick()
        if at_s >= self._due_at_s:
            return
        now = self.clock.now
        self._due_at_s = at_s
        self._fires_at_s = fires_at_s = now if at_s == float("-inf") else max(at_s, now + TICK_GRAIN_S)
        self.clock.later(fires_at_s - now, self, self._tick, fires_at_s)

    def _tick(self, fires_at_s: float) -> None:
        """How late it comes tells whether the process stood still."""
        if fires_at_s != self._fires_at_s:
            return  # it was set anew
        self._fires_at_s, self._due_at_s = -1.0, float("inf")
        now = self.clock.now
        if (late_s := now - fires_at_s) > self.world.timing.heartbeat_s:
            self._ticking.credit_stall(late_s, now)
        self.tick(now)
        self.run()

    def tick(self, now: float) -> None:
        self._ticking.tick(now)

    def known_dead(self, watched: Any) -> None:
        """The fence, or the end of a process, that it has waited for."""
        raise NotImplementedError


def address_of(name: str, incarnation: Incarnation) -> Endpoint:
    return Endpoint("fake", f"{name} {incarnation:x}", WITNESS)
