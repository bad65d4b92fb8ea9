"""A report of everything at bare endpoints and in groups that is not at rest (I1, I5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvflow.proof.bare.rest import left as left_of_nodes
from kvflow.proof.bare.world import World
from kvflow.proof.group.stage import Stage
from kvflow.proof.group.world import GroupWorld


def left(world: World, *, doubts: bool) -> Iterator[str]:
    yield from left_of_nodes(world, doubts=doubts)
    assert isinstance(world, GroupWorld)
    for client in world.clients:
        if client.asked and not client.told:
            yield f"the client of room {client.room} has no answer"
    stages = [node for node in world.nodes.values() if isinstance(node, Stage) and node.alive]
    serving = Counter(stage.group for stage in stages if not stage.displaced and not stage.leaving)
    for group, count in serving.items():
        if group not in world.lost and (missing := len(world.agreement.ranks) - count):
            yield f"{missing} ranks of group {group} are about to start again"
    leaders = [stage for stage in stages if stage.leader is not None and not stage.displaced]
    for stage in stages:
        yield from _left_at(stage, [leader for leader in leaders if leader.group == stage.group])


def _left_at(stage: Stage, leaders: list[Stage]) -> Iterator[str]:
    member, leader, session = stage.member, stage.leader, stage.member.session
    # A frozen write never ends, so its room may drain forever.
    frozen = {write.leg.record.serial for write in stage.writes.values() if write.fault == "frozen"}
    drains = {key for key, leg in stage.by_key.items() if leg.record.serial in frozen and leg.told}
    if tickets := [key.ticket for key in member.tickets if key not in drains]:
        yield f"{stage.name}: requests {tickets}"
    if rooms := [key.ticket for key in stage.by_key if key not in drains]:
        yield f"{stage.name}: rooms of requests {rooms}"
    if leader is not None and leader.requests:
        yield f"{stage.name}: requests {sorted(leader.requests)} are not decided"
    if leader is not None and leader.next_tick() == float("-inf"):
        yield f"{stage.name}: its leader has not dealt with a loss"
    # A rank that lost its address cannot join again, so its session may be stale.
    if stage.displaced:
        return
    for leading in leaders:
        assert leading.leader is not None
        held = leading.leader.members.get(member.rank)
        joined = session is not None and session.leader == leading.incarnation
        if session is None or not joined or held is None or held.session != session.number:
            yield f"{stage.name} is not in the group"
        elif session.link.unconfirmed or held.link.unconfirmed:
            votes, decisions = len(session.link.unconfirmed), len(held.link.unconfirmed)
            yield f"{stage.name}: {votes} votes and {decisions} decisions are not confirmed"
