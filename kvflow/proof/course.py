"""Course of one seed, whoever plays it: faults, calm, rest, good rooms for every pair, lies, and
every writer's death.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvflow.proof.rules.book import Rules
from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.scenario import Accident, Scenario
from kvflow.proof.sim.times import FAULTS_END_S, FENCED_S, RECOVER_S, REST_S, SETTLE_S
from kvflow.proof.sim.variety import LATE, LATE_FENCE_S, NEVER

# Good rooms for every pair, and the pages of their chunks. They fit beside any quarantine.
PROBES, PROBE_CHUNKS = 6, (1, 1)


class Course:
    """One scenario in one world. Subclasses play its requests, and let time pass.

    Nodes and their fates are the world's: a `sim.cluster.Cluster`, or a `bare.world.World`, which
    has the same acts.
    """

    def __init__(self, world: Any, scenario: Scenario, faults: Faults, rules: Rules) -> None:
        self._world, self.scenario, self.faults, self.rules = world, scenario, faults, rules
        rules.rooms.forgetful = scenario.forgetful
        self.places: list[Any] = []  # present node of each place
        self.probe_room = 1_000_000

    # --- what subclasses do

    async def wait(self, for_s: float) -> None:
        """Let so much time pass."""
        raise NotImplementedError

    def schedule(self) -> None:
        """Schedule the requests of the scenario."""
        raise NotImplementedError

    def schedule_more(self) -> None:
        """Schedule what comes beside requests and accidents."""

    async def probe(self) -> None:
        """Verify that good rooms succeed for every pair that lives (I7)."""
        raise NotImplementedError

    def still_left(self, *, doubts: bool) -> list[str]:
        """Return a line for everything that is not at rest."""
        raise NotImplementedError

    def at_the_end(self) -> None:
        """Check more: all is at rest, and every living node has shown that it works."""

    def struck(self, node: Any, accident: Accident) -> None:
        """Do more about an accident that struck this node."""

    def stays(self, node: Any) -> bool:
        """Return True for a node that is not about to change its role."""
        return True

    def counted(self) -> dict[str, int]:
        """Return further counts for the report."""
        return {}

    # --- the course

    async def play(self) -> None:
        """Play the scenario to its end."""
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
        # Links that were given up come back with a heartbeat.
        await self.wait(RECOVER_S)
        if fences == LATE:
            # By then the fence has answered for all that died.
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
        """Let an accident strike its node, and schedule its end."""
        node, kind, world, for_s = (
            self.places[accident.node],
            accident.kind,
            self._world,
            accident.for_s,
        )
        # Only a prefill has an address and writes. A switch of roles may have put a decode there.
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
        """Return True if a whole prefill group and a decode would be left."""
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
        # The node still closes in order: look again later.
        elif node.leaving:
            self.rules.later(0.1, self._start_again, place)

    async def _two_kinds_at_least(self) -> None:
        """Halt a node or cut it off for a moment, until at least two kinds of fault struck."""
        for kind in ("freeze", "partition"):
            if len(self.faults.struck) >= 2:
                return
            while not (up := [n for n, node in enumerate(self.places) if node.up]):
                # Every node is about to start again.
                await self.wait(0.1)
            self.happen(Accident(0.0, kind, up[-1], 0.2))
            await self.wait(0.25)

    def calm(self) -> None:
        """End all faults. Dropped frames stay lost and late ones stay late, but no new fault
        strikes.
        """
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
