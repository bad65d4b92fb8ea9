"""The nodes of one run, what they reach each other by, and what can happen to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvflow.protocols.ports import Endpoint
from kvflow.protocols.wire.messages import Incarnation
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.testing.bare.clock import Clock
from kvflow.testing.bare.decode import Decode
from kvflow.testing.bare.oracle import Oracle
from kvflow.testing.bare.prefill import Prefill
from kvflow.testing.bare.wire import Wire
from kvflow.testing.sim.faults import Faults
from kvflow.testing.sim.variety import LATE, LATE_FENCE_S, NEVER, Variety

if TYPE_CHECKING:
    from kvflow.testing.bare.node import Node
    from kvflow.testing.bare.scenario import Twists

Tell = Callable[[float, str, str], None]
"""Virtual time, who, what."""


class World:
    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        oracle: Oracle,
        faults: Faults,
        variety: Variety,
        twists: Twists,
        tell: Tell | None,
    ) -> None:
        self.clock, self.rng, self.oracle, self.faults, self.tell = clock, rng, oracle, faults, tell
        self.variety, self.timing, self.bounds, self.twists = variety, variety.timing, variety.bounds, twists
        self.wire = Wire(self)
        self.nodes: list[Node] = []
        self.by_incarnation: dict[int, Node] = {}
        self.decodes: dict[int, Decode] = {}
        self.prefills: dict[int, Prefill] = {}
        self.by_peer_id: dict[bytes, Decode] = {}
        self._by_address: dict[str, Node] = {}
        self._registry: dict[int, dict[int, RankInfo]] = {}
        self.frozen = 0  # writes that never end by themselves

    def ranks(self, group: int) -> Sequence[RankInfo]:
        """What a registry says about a prefill group now; a dead rank's last entry stands until it is back."""
        found = self._registry[group]
        return [found[rank] for rank in sorted(found)]

    # --- beginnings

    def start_prefill(self, group: int, rank: int, world_size: int) -> Prefill:
        node = Prefill(self, group, rank, world_size, self._incarnation())
        self.prefills[node.incarnation] = node
        self.wire.routers[node.control] = node
        self._registry.setdefault(group, {})[rank] = node.info
        self._join(node, node.endpoint.core.identity.address)
        return node

    def start_decode(self, number: int) -> Decode:
        node = Decode(self, number, self._incarnation())
        self.decodes[node.incarnation] = self.by_peer_id[node.peer_id] = node
        self._join(node, node.endpoint.core.identity.address)
        return node

    def start_again(self, node: Node) -> Node:
        """The next life of a node, at the same address."""
        node.say("starts again")
        if isinstance(node, Prefill):
            return self.start_prefill(node.group, node.rank, node.info.world_size)
        return self.start_decode(node.group)

    def _incarnation(self) -> Incarnation:
        return Incarnation(self.rng.getrandbits(63) | 1)

    def _join(self, node: Node, address: Endpoint) -> None:
        self.nodes.append(node)
        self.by_incarnation[node.incarnation] = self._by_address[address.address] = node

    # --- ends

    def kill(self, node: Node, how: str = "dies") -> None:
        """Nothing of it runs, arrives or lands any more, and that can be observed."""
        node.say(how)
        node.alive, node.parked = False, []
        delay_s = {LATE: LATE_FENCE_S, NEVER: float("inf")}.get(self.variety.fences, 0.0)
        node.proven_at_s = self.clock.now + delay_s
        if isinstance(node, Prefill):
            if self.wire.routers.get(node.control) is node:
                del self.wire.routers[node.control]
            for write in list(node.reaching):
                write.out_of_reach()
        else:
            assert isinstance(node, Decode)
            node.lines.clear()
            node.pages.lost = True
        for watcher, watched in node.watchers:
            self._prove(watcher, watched)

    def watch(self, watcher: Node, address: Endpoint, watched: Any) -> None:
        """`watcher` waits for proof of the death of the process at `address`."""
        node = self._by_address[address.address]
        if node.alive:
            node.watchers.append((watcher, watched))
        else:
            self._prove(watcher, watched)

    def _prove(self, watcher: Node, watched: Any) -> None:
        if self.variety.fences != NEVER:
            longest_s = LATE_FENCE_S if self.variety.fences == LATE else 0.001
            watcher.wait((0.0, longest_s), watcher.known_dead, watched)

    def declare_dead(self, *nodes: Node) -> None:
        """An operator gives his word for processes that have died, at every decode."""
        for node in self.living(Decode):
            for dead in nodes:
                node.declare_dead(dead.incarnation)

    def living(self, kind: type[Decode | Prefill]) -> list[Any]:
        return [
            node
            for node in self.nodes
            if isinstance(node, kind) and node.alive and not node.leaving and not node.displaced
        ]

    # --- what can happen to a node

    def take_over(self, node: Prefill) -> Node:
        """Another process answers at its address, though it lives, and its writes go on."""
        node.say("loses its address to another process")
        node.displaced = True
        return self.start_again(node)

    def halt(self, node: Node) -> None:
        node.say("stands still")
        node.parked = []

    def resume(self, node: Node) -> None:
        if node.alive and node.parked is not None:
            node.say("goes on")
            node.troubled_at_s = self.clock.now
            parked, node.parked = node.parked, None
            for do, arguments in parked:
                do(*arguments)

    def jam(self, node: Node) -> None:
        node.say("is jammed")
        self.wire.jammed.setdefault(_end_of(node), [])

    def unjam(self, node: Node) -> None:
        if _end_of(node) in self.wire.jammed:
            node.troubled_at_s = self.clock.now
            self.wire.unjam(_end_of(node))

    def cut(self, node: Node) -> None:
        node.say("is cut off")
        self.wire.cut.add(_end_of(node))

    def mend(self, node: Node) -> None:
        if _end_of(node) in self.wire.cut:
            node.say("can be reached again")
            node.troubled_at_s = self.clock.now
            self.wire.cut.discard(_end_of(node))

    # --- what else goes wrong, now and then

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
        """Bytes of a write that is verified."""
        if not self._strikes("damage", self.twists.damages):
            return False
        self.oracle.damaged = True
        return True

    def fails_sum(self) -> bool:
        return self._strikes("no checksum", self.twists.fails_sums)

    def freezes(self) -> bool:
        """A stuck write never ends; one a run."""
        if self.frozen or not self._strikes("frozen", self.twists.freezes):
            return False
        self.frozen += 1
        return True


def _end_of(node: Node) -> str | int:
    """What its links have in common."""
    return node.control if isinstance(node, Prefill) else node.incarnation
