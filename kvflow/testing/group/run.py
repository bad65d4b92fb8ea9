"""One seed of a group under a storm: decodes abort, clients go, ranks and their leader fail, freeze and crash."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvflow.testing.bare.node import Node, Tell
from kvflow.testing.bare.prefill import Prefill
from kvflow.testing.bare.run import PROBE_CHUNKS, Cast, Run, played
from kvflow.testing.bare.scenario import Twist, Twists, draw_all
from kvflow.testing.group.client import NO_FATE, Client, Fate
from kvflow.testing.group.rest import left
from kvflow.testing.group.stage import GONE, Stage
from kvflow.testing.group.world import GroupHalves, GroupWorld
from kvflow.testing.sim.coverage import Cell
from kvflow.testing.sim.faults import Faults
from kvflow.testing.sim.outcome import Outcome
from kvflow.testing.sim.scenario import Accident, Leg, Request, Scenario, Shape

RANKS = 4
ABORTS = 0.35  # the share of requests that decode, or the leader's client, ends at some moment, beside the others'


def storm(rng: random.Random, faults: Faults, shapes: Sequence[Shape]) -> tuple[Scenario, Twists]:
    """The scenario of bare endpoints, with more that end early."""
    scenario, twists = draw_all(rng, faults, shapes)
    requests = [_stormy(rng, request) for request in scenario.requests]
    return scenario._replace(requests=requests), twists


def _stormy(rng: random.Random, request: Request) -> Request:
    if rng.random() >= ABORTS:
        return request
    ends = (rng.choice((rng.uniform(0, 0.02), rng.uniform(0, 0.3))), "storm")
    if rng.random() < 0.7:
        return request if request.decode is None else request._replace(decode=request.decode._replace(ends=ends))
    return request if request.prefill is None else request._replace(prefill=request.prefill._replace(ends=ends))


class GroupRun(Run):
    """Requests come to the leader alone."""

    world: GroupWorld
    left = staticmethod(left)

    def __init__(self, world: GroupWorld, scenario: Scenario, twists: Twists) -> None:
        super().__init__(world, scenario, twists)
        halves = world.oracle.halves
        assert isinstance(halves, GroupHalves)
        halves.causes = world.rules.group_causes

    def schedule_prefill(self, request: Request, twist: Twist, leg: Leg, digest: bytes) -> None:
        rank = self.world.rng.randrange(self.scenario.groups[0])  # what befalls an engine befalls one
        fate = Fate(
            leg.deadline_s,
            twist.rendezvous_s,
            rank if request.refused else None,
            rank if request.fails_at is not None else None,
            request.fails_at,
        )
        client = self._client(request.room, len(request.prompt), digest, tuple(request.chunks), fate)
        self.clock.later(leg.at_s, None, self._ask, client, leg)

    def _client(self, room: int, tokens: int, digest: bytes, chunks: tuple[int, ...], fate: Fate = NO_FATE) -> Client:
        world = self.world
        number, issue, broken = len(world.clients), world.oracle.issue, world.oracle.broken
        client = Client(number, room, tokens, digest, chunks, issue, broken, rows=self.rows, fate=fate)
        world.clients.append(client)
        return client

    def _ask(self, client: Client, leg: Leg) -> None:
        """There is no other way in: while the leader is dead its clients are turned away."""
        node = self.places[0]
        assert isinstance(node, Stage)
        client.asked = True
        if not node.alive:
            client.tell(GONE)
            return
        node.callers[client] = None
        self.world.tell_node(node, node.ask, client)
        if leg.ends is not None:
            after_s, how = leg.ends
            self.clock.later(after_s, node, node.client_goes, client, how)

    def good_room_at_prefill(
        self, room: int, tokens: int, digest: bytes, prefills: list[Prefill]
    ) -> list[tuple[Node, Any]]:
        client = self._client(room, tokens, digest, PROBE_CHUNKS)
        self._ask(client, Leg(0.0))
        return [(self.places[0], client)]

    def happen(self, accident: Accident) -> None:
        if accident.kind == "takeover" and accident.node:
            accident = accident._replace(kind="restart")  # else the rank is taken for as long as it lives
        super().happen(accident)

    def counted(self) -> dict[str, int]:
        return {f"group {what}": count for what, count in self.world.rules.counts.items()}


def simulate(
    seed: int, *, visits: Counter[Cell] | None = None, tell: Tell | None = None, ranks: int = RANKS
) -> Outcome:
    """Play one seed of a group of so many ranks."""
    shapes = (((ranks,), 1), ((ranks,), 2))
    cast = Cast(lambda rng, faults: storm(rng, faults, shapes), GroupWorld, GroupRun, GroupHalves)
    return played(seed, cast, visits=visits, tell=tell)
