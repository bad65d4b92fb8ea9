"""The course of one seed, for whole nodes and for bare endpoints.

Faults strike for a while, and then every node must come to rest. Probe rooms must succeed between
every living prefill and decode. At the end the nodes receive false messages (see `sim.lies`), and
every prefill dies.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvflow.proof.rules.book import Rules
from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.scenario import Accident, Scenario
from kvflow.proof.sim.times import FAULTS_END_S, FENCED_S, RECOVER_S, REST_S, SETTLE_S
from kvflow.proof.sim.variety import LATE, LATE_FENCE_S, NEVER

# Number of probe rooms for each pair, and number of pages in each chunk. The rooms fit into a pool
# whose quarantine is full.
PROBES, PROBE_CHUNKS = 6, (1, 1)


class Course:
    """One scenario, played in one world. Subclasses schedule its requests and advance the clock.

    The world owns the nodes and carries out what happens to them. It is a `sim.cluster.Cluster` or
    a `bare.world.World`, which have the same methods.
    """

    def __init__(self, world: Any, scenario: Scenario, faults: Faults, rules: Rules) -> None:
        self._world, self.scenario, self.faults, self.rules = world, scenario, faults, rules
        rules.rooms.forgetful = scenario.forgetful
        self.places: list[Any] = []  # current node at each place
        self.probe_room = 1_000_000

    # --- what subclasses do

    async def wait(self, for_s: float) -> None:
        """Let `for_s` seconds of virtual time pass."""
        raise NotImplementedError

    def schedule(self) -> None:
        raise NotImplementedError

    def schedule_more(self) -> None:
        """Schedule events other than requests and accidents."""

    async def probe(self) -> None:
        """Verify that rooms succeed between every living prefill and decode (I7)."""
        raise NotImplementedError

    def still_left(self, *, doubts: bool) -> list[str]:
        """Return a line for each thing not at rest. With `doubts`, loans may lack proof."""
        raise NotImplementedError

    def at_the_end(self) -> None:
        """Run further checks, once everything is at rest and the probe rooms succeed."""

    def struck(self, node: Any, accident: Accident) -> None:
        """React to an accident that has just struck `node`."""

    def stays(self, node: Any) -> bool:
        """Return True unless the node is about to change its role."""
        return True

    def counted(self) -> dict[str, int]:
        return {}

    # --- the course

    async def play(self) -> None:
        world, fences = self._world, self.scenario.variety.fences
        for group, world_size in enumerate(self.scenario.groups):
            for rank in range(world_size):
                self.places.append(world.start_prefill(group, rank, world_size))
        self.places += [world.start_decode(n) for n in range(self.scenario.decodes)]
        self.schedule()
        for accident in self.scenario.accidents:
            self.rules.later(accident.at_s, self.happen, accident)
        self.schedule_more()
        await self.wait(FAULTS_END_S)
        await self._two_kinds_at_least()
        self.calm()
        await self._until_rest(SETTLE_S, "with the faults over", doubts=True)
        # Heartbeats restore the links that nodes considered lost.
        await self.wait(RECOVER_S)
        if fences == LATE:
            # After this time, fences have answered for every dead process.
            await self.wait(LATE_FENCE_S)
        await self.probe()
        await self._until_rest(REST_S, "after good rooms", doubts=True)
        self._check_counts()
        self.at_the_end()
        world.tell_lies()
        await self.wait(RECOVER_S)
        for node in world.everyone():
            if node.is_prefill and node.alive:
                world.kill(node)
        if fences == NEVER:
            world.declare_dead()
        await self._until_rest(FENCED_S + LATE_FENCE_S, "with every writer dead", doubts=False)

    def happen(self, accident: Accident) -> None:
        node, world = self.places[accident.node], self._world
        kind, for_s = accident.kind, accident.for_s
        # Only a prefill has an address and writes pages. After a switch, this may be a decode.
        of_prefills = kind in ("takeover", "stall")
        if not node.up or node.leaving or (of_prefills and not node.is_prefill):
            return
        if kind == "crash" and not self.enough_without(node):
            kind = "restart"
        self.faults.strike(kind)
        later = self.rules.later
        if kind in ("crash", "restart"):
            world.kill(node)
            if kind == "restart":
                later(for_s, self._start_again, accident.node)
        elif kind == "leave":
            world.leave(node)
            later(for_s, self._start_again, accident.node)
        elif kind == "stall":
            world.stall(node, for_s)
        elif kind == "jam":
            world.jam(node)
            later(for_s, world.unjam, node)
        elif kind == "takeover":
            self.places[accident.node] = world.take_over(node)
        elif kind == "freeze":
            world.halt(node)
            later(for_s, world.resume, node)
        else:
            world.cut(node)
            later(for_s, world.mend, node)
        self.struck(node, accident._replace(kind=kind))

    def enough_without(self, gone: Any) -> bool:
        left = Counter(
            node.group if node.is_prefill else "decode"
            for node in self.places
            if node.alive and node is not gone and self.stays(node)
        )
        whole = any(left[group] == ranks for group, ranks in enumerate(self.scenario.groups))
        return whole and left["decode"] > 0

    def _start_again(self, place: int) -> None:
        node = self.places[place]
        if not node.alive:
            self.places[place] = self._world.start_again(node)
        # The node is still closing, so check again later.
        elif node.leaving:
            self.rules.later(0.1, self._start_again, place)

    async def _two_kinds_at_least(self) -> None:
        """Briefly halt a node or cut it off, until at least two kinds of fault have struck."""
        for kind in ("freeze", "partition"):
            if len(self.faults.struck) >= 2:
                return
            while not (up := [n for n, node in enumerate(self.places) if node.up]):
                # No node is up, but one will start or resume soon.
                await self.wait(0.1)
            self.happen(Accident(0.0, kind, up[-1], 0.2))
            await self.wait(0.25)

    def calm(self) -> None:
        """End all faults. Dropped frames stay dropped, and delayed frames still arrive late."""
        self.rules.trace(lambda: "calm")
        self.faults.calm()
        world = self._world
        for node in world.everyone():
            if node.alive:
                world.resume(node)
                world.mend(node)
                world.unjam(node)
                world.stall(node, 0.0)

    async def _until_rest(self, patience_s: float, when: str, *, doubts: bool) -> None:
        deadline_s = self.rules.now_s() + patience_s
        while still := self.still_left(doubts=doubts):
            if self.rules.now_s() >= deadline_s:
                text = f"{when}, after {patience_s:g} s: {'; '.join(still)}"
                return self.rules.broken("I5", text)
            await self.wait(0.1)
        return None

    def _check_counts(self) -> None:
        for node in self._world.everyone():
            if node.alive and node.counts.malformed != node.malformed:
                said, there = node.counts.malformed, node.malformed
                self.rules.broken("I7", f"{node.name} counts {said} malformed frames of {there}")
