"""One seed of one or two groups under a storm of faults."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvflow.proof.bare.node import Node, Tell
from kvflow.proof.bare.prefill import Prefill
from kvflow.proof.bare.run import Cast, Run, played
from kvflow.proof.bare.scenario import Twist, Twists, draw_all
from kvflow.proof.course import PROBE_CHUNKS
from kvflow.proof.group.client import NO_FATE, Client, Fate
from kvflow.proof.group.rest import left
from kvflow.proof.group.stage import GONE, Stage
from kvflow.proof.group.world import GroupRooms, GroupWorld
from kvflow.proof.rules.outcome import Outcome
from kvflow.proof.sim.coverage import Cell
from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.scenario import Accident, Leg, Request, Scenario, Shape

RANKS = 4
# Share of room ids that are used again, often while the first room drains.
REUSES = 0.1
# Share of requests that a client ends early, in addition to those that `draw_all` ends.
ABORTS = 0.35


def storm(rng: random.Random, faults: Faults, shapes: Sequence[Shape]) -> tuple[Scenario, Twists]:
    scenario, twists = draw_all(rng, faults, shapes)
    requests = [_stormy(rng, request) for request in scenario.requests]
    again = [
        _used_again(rng, request, scenario.decodes) for request in requests if rng.random() < REUSES
    ]
    return scenario._replace(requests=requests + again), twists._replace(
        requests=[*twists.requests, *(Twist() for _ in again)]
    )


def _stormy(rng: random.Random, request: Request) -> Request:
    if rng.random() >= ABORTS:
        return request
    ends = (rng.choice((rng.uniform(0, 0.02), rng.uniform(0, 0.3))), "storm")
    side = "decode" if rng.random() < 0.7 else "prefill"
    leg = getattr(request, side)
    return request if leg is None else request._replace(**{side: leg._replace(ends=ends)})


def _used_again(rng: random.Random, request: Request, decodes: int) -> Request:
    """Return a request that uses the room id again, as can happen after the loss of a decode.

    The first room may be over, draining or running. The new one is at a random decode.
    """
    at_s = max(leg.at_s for leg in (request.prefill, request.decode) if leg is not None)
    at_s += rng.uniform(0.0, 0.4)
    # Another prompt makes a mix-up of the two rooms visible.
    prompt = [*request.prompt[:-1], request.prompt[-1] ^ 4]
    legs = [Leg(at_s + rng.choice((0.0, rng.uniform(0, 0.1)))) for _ in range(2)]
    return request._replace(
        prompt=prompt,
        decode_prompt=prompt,
        decode_at=rng.randrange(decodes),
        prefill=legs[0],
        decode=legs[1],
        refused=False,
        decode_refused=False,
        fails_at=None,
    )


class GroupRun(Run):
    """A run in which prefill's requests go to the leaders, not to every rank."""

    world: GroupWorld
    left = staticmethod(left)

    def schedule_prefill(self, request: Request, twist: Twist, leg: Leg, digest: bytes) -> None:
        # Each misfortune of an engine strikes one rank of the group.
        rank = self.world.rng.randrange(self.scenario.groups[request.group])
        fate = Fate(
            leg.deadline_s,
            twist.rendezvous_s,
            rank if request.refused else None,
            rank if request.fails_at is not None else None,
            request.fails_at,
        )
        tokens, chunks = len(request.prompt), tuple(request.chunks)
        client = self._client(request.group, request.room, tokens, digest, chunks, fate)
        self.clock.later(leg.at_s, None, self._ask, client, leg)

    def _client(
        self,
        group: int,
        room: int,
        tokens: int,
        digest: bytes,
        chunks: tuple[int, ...],
        fate: Fate = NO_FATE,
    ) -> Client:
        world = self.world
        number, issue, broken = len(world.clients), world.rules.rooms.issue, world.rules.broken
        client = Client(
            number,
            room,
            tokens,
            digest,
            chunks,
            issue,
            broken,
            group=group,
            layout=self.layout,
            fate=fate,
        )
        world.clients.append(client)
        return client

    def _ask(self, client: Client, leg: Leg) -> None:
        node = self._leader(client)
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
        client = self._client(prefills[0].group, room, tokens, digest, PROBE_CHUNKS)
        self._ask(client, Leg(0.0))
        return [(self._leader(client), client)]

    def _leader(self, client: Client) -> Stage:
        node = self.places[sum(self.scenario.groups[: client.group])]
        assert isinstance(node, Stage)
        return node

    def happen(self, accident: Accident) -> None:
        node, kind = self.places[accident.node], accident.kind
        if isinstance(node, Stage) and node.up and not node.leaving:
            # The rank stays taken in the group until the process that lost its address dies.
            if kind == "takeover" and node.rank:
                self.clock.later(accident.for_s, node, self.world.kill, node)
            elif kind == "crash" and self.enough_without(node):
                self.world.lost.add(node.group)
        super().happen(accident)

    def counted(self) -> dict[str, int]:
        return {f"group {what}": count for what, count in self.world.agreement.counts.items()}


def simulate(
    seed: int, *, visits: Counter[Cell] | None = None, tell: Tell | None = None, ranks: int = RANKS
) -> Outcome:
    shapes = (*(((ranks,), decodes) for decodes in (1, 1, 2, 2)), ((ranks, ranks), 1))
    cast = Cast(lambda rng, faults: storm(rng, faults, shapes), GroupWorld, GroupRun, GroupRooms)
    return played(seed, cast, visits=visits, tell=tell)
