"""The nodes of one run, and the accidents that can happen to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvflow.proof.bare.decode import Decode
from kvflow.proof.bare.node import Node, Scene
from kvflow.proof.bare.prefill import Prefill
from kvflow.proof.sim.lies import another_life, from_long_ago
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.wire.codec import routing_id
from kvflow.protocols.wire.messages import Incarnation


class World(Scene):
    def start_prefill(self, group: int, rank: int, world_size: int) -> Prefill:
        node = Prefill(self, group, rank, world_size, self._incarnation())
        self.nodes[node.incarnation] = self.wire.routers[node.control] = node
        self.registry.setdefault(group, {})[rank] = node.info
        return node

    def start_decode(self, number: int) -> Decode:
        node = Decode(self, number, self._incarnation())
        self.nodes[node.incarnation] = self.by_peer_id[routing_id(node.incarnation)] = node
        return node

    def start_again(self, node: Node) -> Node:
        node.say("starts again")
        if isinstance(node, Prefill):
            return self.start_prefill(node.group, node.rank, node.info.world_size)
        heir = self.start_decode(node.group)
        if isinstance(node, Decode) and node.left_behind is not None:
            heir.inherit(node)
        return heir

    def _incarnation(self) -> Incarnation:
        return Incarnation(self.rng.getrandbits(63) | 1)

    def everyone(self) -> list[Node]:
        return list(self.nodes.values())

    def declare_dead(self, *nodes: Node) -> None:
        """Let an operator declare `nodes`, or by default all dead prefills, dead at all decodes."""
        for node in self.living(Decode):
            for dead in nodes or [n for n in self.everyone() if n.is_prefill and not n.alive]:
                self.tell_node(node, node.declare_dead, dead.incarnation)

    def tell_lies(self) -> None:
        sources = {node.incarnation: node for node in self.living(Prefill)}
        for node in self.living(Decode):
            for peer in list(node.endpoint.peers):
                source = sources.get(peer.key.incarnation)
                if source is None or peer.phase is not LinkPhase.UP:
                    continue
                said = another_life(node.incarnation, peer)
                self.wire.deliver([(peer.key.control, node, False, frame) for frame in said])
                if (known := source.endpoint.core.peers.get(node.incarnation)) is not None:
                    said = from_long_ago(source.incarnation, known)
                    self.wire.deliver([(peer.key.control, node, True, frame) for frame in said])

    @staticmethod
    def tell_node(node: Node, do: Callable[..., object], *arguments: Any) -> None:
        if node.parked is None:
            do(*arguments)
        else:
            node.parked.append((do, arguments))

    def take_over(self, node: Prefill) -> Node:
        """Give a node's address to another process, while the node lives and its writes go on."""
        node.say("loses its address to another process")
        node.displaced = True
        return self.start_again(node)

    def leave(self, node: Node) -> None:
        node.say("leaves")
        node.leave()

    def stall(self, node: Node, for_s: float) -> None:
        if isinstance(node, Prefill):
            node.say(f"its data plane stalls for {for_s:.2f} s")
            node.stall(for_s)

    def halt(self, node: Node) -> None:
        node.say("stands still")
        node.parked, node.unread = [], []

    def resume(self, node: Node) -> None:
        if node.alive and node.parked is not None:
            node.say("goes on")
            node.troubled_at_s = self.clock.now
            parked, node.parked = node.parked, None
            for do, arguments in parked:
                # An action may end the node. Its remaining actions are then dropped.
                if node.alive:
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


def _end_of(node: Node) -> str | int:
    return node.control if isinstance(node, Prefill) else node.incarnation
