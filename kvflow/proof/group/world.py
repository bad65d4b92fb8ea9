"""The nodes of a run in which prefills form groups, and the accidents that can happen to them."""

from __future__ import annotations

from typing import Any

from kvflow.proof.bare.node import Node
from kvflow.proof.bare.prefill import Prefill
from kvflow.proof.bare.world import World
from kvflow.proof.group.client import Client
from kvflow.proof.group.lines import Lines
from kvflow.proof.group.rules import Agreement
from kvflow.proof.group.stage import Group, Stage
from kvflow.proof.rules.rooms import Rooms
from kvflow.protocols.errors import Cause

# Share of runs in which ranks send votes in each other's name.
FORGES = 0.1
# Share of deaths that break a connection. The others are noticed only as silence.
NOTICED = 0.5
_NOTICE_S = (0.0, 0.005)
WHERE = ("decodes", "group", "everything")


class GroupWorld(World):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lines = Lines(self.clock, self.rng, self.faults, traced=self.tell is not None)
        self.agreement = Agreement(self.rules, self.clock, self.lines)
        assert isinstance(self.rules.rooms, GroupRooms)
        self.rules.rooms.causes = self.agreement.group_causes
        self.clients: list[Client] = []
        self.lost: set[int] = set()  # groups that lost a rank permanently
        self.group = Group(self.lines, self.agreement, self.clients, self.rng.random() < FORGES)

    def start_prefill(self, group: int, rank: int, world_size: int) -> Prefill:
        self.agreement.ranks = range(world_size)
        stage = Stage(self, self.group, group, rank, world_size, self._incarnation())
        self.nodes[stage.incarnation] = self.wire.routers[stage.control] = stage
        self.registry.setdefault(group, {})[rank] = stage.info
        stage.run()
        return stage

    def kill(self, node: Node, how: str = "dies") -> None:
        super().kill(node, how)
        if not isinstance(node, Stage) or self.rng.random() >= NOTICED:
            return
        if node.leader is None:
            leader = self.lines.leaders.get(node.group)
            if leader is not None:
                leader.wait(_NOTICE_S, leader.member_died, node.incarnation)
            return
        for stage in list(self.lines.members.values()):
            session = stage.member.session
            if session is not None and session.leader == node.incarnation:
                stage.wait(_NOTICE_S, stage.leader_gone, node.incarnation)

    def cut(self, node: Node) -> None:
        where = self.rng.choice(WHERE) if isinstance(node, Stage) else "decodes"
        if where != "group":
            super().cut(node)
        if where != "decodes":
            node.say("is cut off from its group")
            self.lines.cut.add(node.incarnation)

    def mend(self, node: Node) -> None:
        super().mend(node)
        if node.incarnation in self.lines.cut:
            self.lines.cut.discard(node.incarnation)
            node.troubled_at_s = self.clock.now

    def jam(self, node: Node) -> None:
        super().jam(node)
        if isinstance(node, Stage) and self.rng.random() < 0.7:
            self.lines.jammed.setdefault(node.incarnation, [])

    def unjam(self, node: Node) -> None:
        super().unjam(node)
        if isinstance(node, Stage):
            self.lines.unjam(node)


class GroupRooms(Rooms):
    """Rooms of a group. A room may end at a rank because another rank, or the leader, was lost."""

    causes: set[Cause]

    def _not_for_nothing(self, record: Any, *arguments: Any) -> None:
        cause = record.state.cause
        if cause not in self.causes:
            super()._not_for_nothing(record, *arguments)
