"""Nodes, each with a shipped endpoint and its timer, and the scene in which they meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from kvflow.proof.bare.clock import Clock
from kvflow.proof.bare.scenario import Twists
from kvflow.proof.bare.wire import Burst, Wire
from kvflow.proof.rules.book import Rules
from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.variety import LATE, LATE_FENCE_S, NEVER, Variety
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.ports import PlaneAddress, ProcessIdentity
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.wire.messages import Incarnation
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.telemetry.counters import Counts

# A tick handles everything that becomes due within this time, as in the shells.
TICK_GRAIN_S = 0.005
PROCESS = ProcessIdentity("boot", "pid:[1]", 1, 1)
CLOSE_LOOK_S, CLOSE_PATIENCE_S = (0.02, 0.1), (0.1, 1.5)

Tell = Callable[[float, str, str], None]
"""A function that receives the story of a run: virtual time, actor, event."""


class Scene:
    """State that all nodes of one run share."""

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        rules: Rules,
        faults: Faults,
        variety: Variety,
        twists: Twists,
        tell: Tell | None,
    ) -> None:
        self.clock, self.rng, self.rules, self.faults, self.tell = clock, rng, rules, faults, tell
        self.variety, self.twists = variety, twists
        self.timing, self.bounds = variety.timing, variety.bounds
        self.wire = Wire(clock, rng, faults, rules.rooms.disturbed, traced=tell is not None)
        self.nodes: dict[int, Node] = {}  # by incarnation; dead nodes stay
        rules.rooms.sides = self.nodes
        self.by_peer_id: dict[bytes, Node] = {}
        self.registry: dict[int, dict[int, RankInfo]] = {}
        self.frozen = 0  # number of writes that never end

    def ranks(self, group: int) -> Sequence[RankInfo]:
        """Return a group's registry entries. A dead rank's entry stays until the rank restarts."""
        found = self.registry[group]
        return [found[rank] for rank in sorted(found)]

    def living(self, kind: type[Any]) -> list[Any]:
        return [
            node
            for node in self.nodes.values()
            if isinstance(node, kind) and node.alive and not node.leaving and not node.displaced
        ]

    def kill(self, node: Node, how: str = "dies") -> None:
        """Kill a node's process. `variety.fences` decides when its watchers get proof of that."""
        node.say(how)
        node.alive, node.parked = False, []
        delay_s = {LATE: LATE_FENCE_S, NEVER: float("inf")}.get(self.variety.fences, 0.0)
        node.proven_at_s = self.clock.now + delay_s
        self.wire.unplug(node)
        node.died()
        for watcher, watched in node.watchers:
            self._prove(watcher, watched)

    def watch(self, watcher: Node, address: PlaneAddress, watched: Any) -> None:
        node = self.nodes[int(address.locator, 16)]
        if node.alive:
            node.watchers.append((watcher, watched))
        else:
            self._prove(watcher, watched)

    def _prove(self, watcher: Node, watched: Any) -> None:
        if self.variety.fences != NEVER:
            longest_s = LATE_FENCE_S if self.variety.fences == LATE else 0.001
            watcher.wait((0.0, longest_s), watcher.known_dead, watched)

    # --- what goes wrong now and then

    def _strikes(self, kind: str, chance: float) -> bool:
        if not chance or not self.faults.on or self.rng.random() >= chance:
            return False
        self.faults.strike(kind)
        return True

    def locks_out(self) -> bool:
        return self._strikes("lock out", self.twists.locks_out)

    def refuses_route(self) -> bool:
        return self._strikes("refusal", self.twists.refuses)

    def damages(self) -> bool:
        if not self._strikes("damage", self.twists.damages):
            return False
        self.rules.rooms.damaged = True
        return True

    def fails_sum(self) -> bool:
        return self._strikes("no checksum", self.twists.fails_sums)

    def freezes(self) -> bool:
        """Return True if this stuck write is never to end. A run has at most one such write."""
        if self.frozen or not self._strikes("frozen", self.twists.freezes):
            return False
        self.frozen += 1
        return True


class Node:
    """One life of a node."""

    RUN: ClassVar[dict[type, Callable[[Any, Any], None]]]
    is_prefill = False

    def __init__(
        self, world: Scene, name: str, group: int, endpoint: DecodeEndpoint | PrefillEndpoint
    ) -> None:
        self.world, self.name, self.group, self._ticking = world, name, group, endpoint
        self.clock, self.rules, self._traced = world.clock, world.rules, world.tell is not None
        self.incarnation = endpoint.core.identity.incarnation
        self._outbox = endpoint.core.outbox
        self.alive = True
        self.leaving = False
        self.displaced = False
        # Actions that wait while this node is halted. None while it runs.
        self.parked: list[tuple[Callable[..., object], tuple[Any, ...]]] | None = None
        self.unread: Burst = []  # frames received since it was halted
        # (node to notify of the death, argument of its `known_dead`)
        self.watchers: list[tuple[Node, Any]] = []
        self.malformed = 0  # number of spoilt frames that this node received
        self.troubled_at_s = -1.0
        self.stalled_until_s = -1.0
        self.routes: set[int] = set()
        self.proven_at_s = float("inf")  # approximate time of the last proof of its death
        self._due_at_s = float("inf")
        self._fires_at_s = 0.0

    @property
    def up(self) -> bool:
        return self.alive and self.parked is None

    def reaches(self, target: int) -> bool:
        return target in self.routes

    @property
    def counts(self) -> Counts:
        observer = self._ticking.core.observer
        assert isinstance(observer, Counts)
        return observer

    def say(self, what: str) -> None:
        if self.world.tell is not None:
            self.world.tell(self.clock.now, self.name, what)

    def wait(self, span: tuple[float, float], do: Callable[..., object], *arguments: Any) -> None:
        """Schedule an action of this node after a random delay within `span`, in seconds."""
        low, high = span
        self.clock.later(low + (high - low) * self.world.rng.random(), self, do, *arguments)

    def run(self) -> None:
        outbox, endpoint, commands = self._outbox, self._ticking, self.RUN
        while outbox:
            for command in endpoint.commands():
                commands[type(command)](self, command)
        at_s = endpoint.next_tick()
        if at_s >= self._due_at_s:
            return
        now = self.clock.now
        self._due_at_s = at_s
        fires_at_s = now if at_s == float("-inf") else max(at_s, now + TICK_GRAIN_S)
        self._fires_at_s = fires_at_s
        self.clock.later(fires_at_s - now, self, self._tick, fires_at_s)

    def _tick(self, fires_at_s: float) -> None:
        """Tick the endpoint. A late tick shows that the process was halted."""
        if fires_at_s != self._fires_at_s:
            # The timer was set again in the meantime, so this event is obsolete.
            return
        self._fires_at_s, self._due_at_s = -1.0, float("inf")
        now = self.clock.now
        if (late_s := now - fires_at_s) > self.world.timing.heartbeat_s:
            self._ticking.credit_stall(late_s, now)
        self.tick(now)
        self.run()

    def tick(self, now: float) -> None:
        self._ticking.tick(now)

    def read(self, burst: Burst) -> None:
        """Handle the frames that wait at the node's sockets, and run the resulting commands."""
        raise NotImplementedError

    def known_dead(self, watched: Any) -> None:
        raise NotImplementedError

    def leave(self) -> None:
        """Shut down cleanly: end every room, wait a while for proof, and say goodbye."""
        self.leaving = True
        self._ticking.leave(self.clock.now)
        self.run()
        low, high = CLOSE_PATIENCE_S
        self.look_again(self.clock.now + low + (high - low) * self.world.rng.random())

    def look_again(self, until_s: float) -> None:
        """Wait for outstanding rooms and loans, until `until_s` at the latest, and then part."""
        raise NotImplementedError

    def part(self) -> None:
        self._ticking.part(self.clock.now)
        self.run()
        self._await_answers(self.clock.now + 2 * self.world.timing.heartbeat_s)

    def _await_answers(self, until_s: float) -> None:
        if self._ticking.parting(self.clock.now) and self.clock.now < until_s:
            return self.wait(CLOSE_LOOK_S, self._await_answers, until_s)
        return self.has_parted()

    def has_parted(self) -> None:
        """End the node. Every peer has acknowledged the goodbye, or the time for that is over."""
        raise NotImplementedError

    def died(self) -> None:
        raise NotImplementedError


def address_of(incarnation: Incarnation) -> PlaneAddress:
    return PlaneAddress("fake", f"{incarnation:x}", PROCESS)
