"""A group of stages and one decode that meet no fault but those that a test makes."""

from __future__ import annotations

import random
from types import TracebackType
from typing import Self

from kvflow.proof.bare.clock import Clock
from kvflow.proof.bare.decode import Decode
from kvflow.proof.bare.job import DecodeJob
from kvflow.proof.bare.run import rules_for
from kvflow.proof.bare.scenario import Twists
from kvflow.proof.group.client import Client
from kvflow.proof.group.rest import left
from kvflow.proof.group.stage import Stage
from kvflow.proof.group.world import GroupRooms, GroupWorld
from kvflow.proof.rules.watch import observed
from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.swap import swaps
from kvflow.proof.sim.variety import LAYOUT, PAGE_SIZE, PROMPT, TIMING, Variety
from kvflow.protocols.group.leader import GroupLeader
from kvflow.protocols.limits import Bounds

TOKENS, DIGEST = 4 * PAGE_SIZE, bytes(32)


class OneFault(Faults):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.calm()
        self.next_write = ""

    def of_write(self) -> str:
        fault, self.next_write = self.next_write, ""
        return fault


class Stages:
    """Use it as a context: the rule book watches every endpoint meanwhile."""

    def __init__(self, ranks: int = 4, seed: int = 1) -> None:
        rng = random.Random(seed)
        self.clock, self.faults, self._ranks = Clock(), OneFault(rng), ranks
        self.rules = rules_for(self.clock, None, GroupRooms)
        variety = Variety(Bounds(), TIMING, PROMPT, False, LAYOUT, (8, 3))
        twists = Twists([], 0.0, 0.0, 0.0, 0.0, 0.0, None, None)
        self.world = GroupWorld(self.clock, rng, self.rules, self.faults, variety, twists, None)
        self._watch = swaps(observed(self.rules.rooms))

    def __enter__(self) -> Self:
        self._watch.__enter__()
        self.stages = [self._stage(rank, self._ranks) for rank in range(self._ranks)]
        self.decode: Decode = self.world.start_decode(0)
        self.clock.play(2 * TIMING.heartbeat_s)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.__exit__(kind, error, trace)

    def _stage(self, rank: int, ranks: int) -> Stage:
        stage = self.world.start_prefill(0, rank, ranks)
        assert isinstance(stage, Stage)
        return stage

    def start_again(self, rank: int) -> None:
        stage = self.world.start_again(self.stages[rank])
        assert isinstance(stage, Stage)
        self.stages[rank] = stage

    @property
    def leader(self) -> GroupLeader:
        assert self.stages[0].leader is not None
        return self.stages[0].leader

    def ask(self, room: int = 7) -> Client:
        number, issue = len(self.world.clients), self.rules.rooms.issue
        client = Client(number, room, TOKENS, DIGEST, (2, 2), issue, self.rules.broken)
        self.world.clients.append(client)
        client.asked = True
        self.stages[0].callers[client] = None
        self.stages[0].ask(client)
        return client

    def offer(self, room: int = 7, decode: Decode | None = None) -> DecodeJob:
        job = DecodeJob(room, TOKENS, DIGEST, self.rules.rooms.issue, 0)
        (decode or self.decode).begin(job)
        return job

    def assert_served(self, room: int = 7, decode: Decode | None = None) -> None:
        client, job = self.ask(room), self.offer(room, decode)
        self.clock.play(1.0)
        assert client.succeeded
        assert job.succeeded

    def at_rest(self) -> None:
        assert not list(left(self.world, doubts=False))
        for stage in self.stages:
            counts = stage.counts
            assert counts.rooms_opened == sum(counts.endings.values())
            assert not stage.endpoint.rooms
            assert not stage.member.tickets
