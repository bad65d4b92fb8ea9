"""One seed, played to its end: faults, calm, rest, good rooms for every pair, and every writer's
death.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from time import process_time
from typing import Any, NamedTuple

from kvflow.proof.bare.clock import Clock
from kvflow.proof.bare.decode import Decode
from kvflow.proof.bare.job import DecodeJob, PrefillJob
from kvflow.proof.bare.node import Node, Tell
from kvflow.proof.bare.prefill import Prefill
from kvflow.proof.bare.rest import left
from kvflow.proof.bare.scenario import Twist, Twists, Visit, draw_waiting
from kvflow.proof.bare.world import World
from kvflow.proof.rules.book import Rules
from kvflow.proof.rules.outcome import Outcome
from kvflow.proof.rules.rooms import Rooms
from kvflow.proof.rules.watch import observed, swaps
from kvflow.proof.sim.coverage import Cell, covered
from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.scenario import Accident, Leg, Request, Scenario
from kvflow.proof.sim.times import FAULTS_END_S, FENCED_S, RECOVER_S, REST_S, SETTLE_S
from kvflow.proof.sim.variety import LATE, LATE_FENCE_S, NEVER, PAGE_SIZE
from kvflow.protocols.decode.core import MAX_REPEAT_AFTER_S
from kvflow.protocols.wire.codec import prompt_digest

# Good rooms for every pair, and the pages of their chunks. They fit beside any quarantine.
PROBES, PROBE_CHUNKS = 6, (1, 1)
PROBE_TOKENS = sum(PROBE_CHUNKS) * PAGE_SIZE


class Run:
    """One scenario in one world."""

    left = staticmethod(left)  # a group run replaces it

    def __init__(self, world: World, scenario: Scenario, twists: Twists) -> None:
        self.world, self.scenario, self.twists = world, scenario, twists
        self.clock, self.faults = world.clock, world.faults
        self.places: list[Any] = []  # present node of each place
        self._probe_room = 1_000_000
        self.rows = int(bool(scenario.variety.layout.num_rows))

    def play(self) -> None:
        """Play the scenario: faults, calm, good rooms, lies, and at last the death of every
        writer.
        """
        world, scenario = self.world, self.scenario
        for group, world_size in enumerate(scenario.groups):
            self.places += [
                world.start_prefill(group, rank, world_size) for rank in range(world_size)
            ]
        self.places += [world.start_decode(n) for n in range(scenario.decodes)]
        for request, twist in zip(scenario.requests, self.twists.requests, strict=True):
            self._schedule(request, twist)
        for accident in scenario.accidents:
            self.clock.later(accident.at_s, None, self.happen, accident)
        if (visit := self.twists.visit) is not None:
            self.clock.later(visit.at_s, None, self._visit, visit)
        self.clock.play(FAULTS_END_S)
        self._two_kinds_at_least()
        self._calm()
        self._until_rest(SETTLE_S, "with the faults over", doubts=True)
        # Links that were given up come back with a heartbeat.
        self.clock.play(RECOVER_S)
        if scenario.variety.fences == LATE:
            # By then the fence has answered for all that died.
            self.clock.play(LATE_FENCE_S)
        self._probe()
        self._until_rest(REST_S, "after good rooms", doubts=True)
        self._check_counts()
        world.tell_lies()
        self.clock.play(RECOVER_S)
        dead = [node for node in world.nodes.values() if isinstance(node, Prefill)]
        for node in dead:
            if node.alive:
                world.kill(node)
        if scenario.variety.fences == NEVER:
            world.declare_dead(*dead)
        self._until_rest(FENCED_S + LATE_FENCE_S, "with every writer dead", doubts=False)

    # --- requests

    def _schedule(self, request: Request, twist: Twist) -> None:
        """Schedule both legs of a request; a twist may send the same room to a second decode."""
        issue, digest = self.world.rules.rooms.issue, prompt_digest(request.prompt)
        if request.prefill is not None:
            self.schedule_prefill(request, twist, request.prefill, digest)
        if (leg := request.decode) is not None:
            places = (
                [request.decode_at]
                if twist.second_decode is None
                else [request.decode_at, twist.second_decode]
            )
            for place in places:
                theirs = DecodeJob(
                    request.room,
                    len(request.decode_prompt),
                    digest
                    if request.decode_prompt is request.prompt
                    else prompt_digest(request.decode_prompt),
                    request.group,
                    issue,
                    rows=self.rows,
                    deadline_s=leg.deadline_s,
                    refused=request.decode_refused,
                    prefix_pages=twist.prefix_pages,
                    announces=twist.announces,
                    offers_after_s=request.offers_after_s,
                    waits=twist.waits,
                    kept_s=request.kept_s,
                )
                self.clock.later(
                    leg.at_s, None, self.begin, sum(self.scenario.groups) + place, theirs, leg
                )

    def schedule_prefill(self, request: Request, twist: Twist, leg: Leg, digest: bytes) -> None:
        """Schedule the request at every rank of its group, at the same moment."""
        first = sum(self.scenario.groups[: request.group])
        for rank in range(self.scenario.groups[request.group]):
            job = PrefillJob(
                request.room,
                len(request.prompt),
                digest,
                tuple(request.chunks),
                self.world.rules.rooms.issue,
                rows=self.rows,
                deadline_s=leg.deadline_s,
                refused=request.refused,
                fails_at=request.fails_at,
                rendezvous_s=twist.rendezvous_s,
                begins_after_s=twist.begins_after_s,
            )
            self.clock.later(leg.at_s, None, self.begin, first + rank, job, leg)

    def begin(self, place: int, job: Any, leg: Leg) -> None:
        node = self.places[place]
        if not node.alive:
            return
        self.world.tell_node(node, node.begin, job)
        if leg.ends is not None:
            after_s, how = leg.ends
            self.clock.later(after_s, node, node.end, job, how)

    # --- accidents

    def happen(self, accident: Accident) -> None:
        """Let an accident strike its node, and schedule its end."""
        node, kind, world = self.places[accident.node], accident.kind, self.world
        if not node.up or node.leaving:
            return
        if kind == "crash" and not self._enough_without(node):
            kind = "restart"
        self.faults.strike(kind)
        later, for_s = self.clock.later, accident.for_s
        if kind in ("crash", "restart"):
            world.kill(node)
            if self.twists.declares_after_s is not None and isinstance(node, Prefill):
                later(self.twists.declares_after_s, None, world.declare_dead, node)
            if kind == "restart":
                later(for_s, None, self._start_again, accident.node)
        elif kind == "leave":
            node.say("leaves")
            node.leave()
            later(for_s, None, self._start_again, accident.node)
        elif kind == "stall":
            node.say(f"its data plane stalls for {for_s:.2f} s")
            node.stall(for_s)
        elif kind == "jam":
            world.jam(node)
            later(for_s, None, world.unjam, node)
        elif kind == "takeover":
            self.places[accident.node] = world.take_over(node)
        elif kind == "freeze":
            world.halt(node)
            later(for_s, None, world.resume, node)
        else:
            world.cut(node)
            later(for_s, None, world.mend, node)

    def _visit(self, visit: Visit) -> None:
        """Halt a decode for long, while another one comes and wants its place."""
        world, node = self.world, self.places[sum(self.scenario.groups) + visit.decode]
        if not node.up or node.leaving:
            return
        self.faults.strike("visit")
        world.halt(node)
        self.clock.later(visit.silent_s, None, world.resume, node)
        guest = world.start_decode(self.scenario.decodes)
        self.clock.later(visit.stays_s, None, self._depart, guest)
        for group in range(len(self.scenario.groups)):
            self._probe_room += 1
            digest = self._probe_room.to_bytes(32, "little")
            job = DecodeJob(
                self._probe_room, PAGE_SIZE, digest, group, world.rules.rooms.issue, rows=self.rows
            )
            self.clock.later(visit.comes_after_s, guest, guest.begin, job)

    def _depart(self, guest: Decode) -> None:
        if guest.alive:
            self.world.kill(guest)

    def _enough_without(self, gone: Node) -> bool:
        """Return True if a whole prefill group and a decode would be left."""
        alive = [node for node in self.places if node.alive and node is not gone]
        left_of = Counter(node.group if isinstance(node, Prefill) else "decode" for node in alive)
        whole = any(left_of[group] == ranks for group, ranks in enumerate(self.scenario.groups))
        return left_of["decode"] > 0 and whole

    def _start_again(self, place: int) -> None:
        node = self.places[place]
        if not node.alive:
            self.places[place] = self.world.start_again(node)
        # The node still closes in order: look again later.
        elif node.leaving:
            self.clock.later(0.1, None, self._start_again, place)

    def _two_kinds_at_least(self) -> None:
        """Halt a node or cut it off for a moment, until at least two kinds of fault struck."""
        for kind in ("freeze", "partition"):
            if len(self.faults.struck) >= 2:
                return
            while not (up := [n for n, node in enumerate(self.places) if node.up]):
                # Every node is about to start again.
                self.clock.play(0.1)
            self.happen(Accident(0.0, kind, up[-1], 0.2))
            self.clock.play(0.25)

    def _calm(self) -> None:
        """End all faults. Dropped frames stay lost and late ones stay late, but no new fault
        strikes.
        """
        world = self.world
        if world.tell is not None:
            world.tell(self.clock.now, "", "calm")
        self.faults.calm()
        for node in world.nodes.values():
            if node.alive:
                world.resume(node)
                world.mend(node)
                world.unjam(node)
                if isinstance(node, Prefill):
                    node.stall(0.0)
        for node in [
            node for node in world.nodes.values() if isinstance(node, Prefill) and node.alive
        ]:
            for write in [write for write in node.writes.values() if write.fault == "frozen"]:
                if not world.nodes[write.key[1]].alive or world.nodes[write.key[1]].leaving:
                    # Prefill keeps the place of a dead decode while a write to it runs.
                    write.thaw()
                # Both halves would wait for this write, as they should.
                node.end(write.leg.job, "given up")
        self.clock.later(MAX_REPEAT_AFTER_S + RECOVER_S, None, self._give_up_waiting)

    def _give_up_waiting(self) -> None:
        """Make decodes offer pages for rooms that prefill has not begun.

        By now every lost question was asked again: such a room never begins.
        """
        for node in self.world.nodes.values():
            if node.alive and isinstance(node, Decode):
                node.give_up_waiting()

    # --- rest

    def _until_rest(self, patience_s: float, when: str, *, doubts: bool) -> None:
        deadline_s = self.clock.now + patience_s
        while next(self.left(self.world, doubts=doubts), None) is not None:
            if self.clock.now >= deadline_s:
                still = self.left(self.world, doubts=doubts)
                self.world.rules.broken("I5", f"{when}, after {patience_s:g} s: {'; '.join(still)}")
            self.clock.play(0.1)

    def _probe(self) -> None:
        """Verify that good rooms succeed for every pair that lives (I7)."""
        world, jobs = self.world, []
        self.clock.play(world.timing.repeat_after_s)
        for group, world_size in enumerate(self.scenario.groups):
            prefills = [node for node in world.living(Prefill) if node.group == group]
            if len(prefills) < world_size:
                continue
            for decode in world.living(Decode):
                ledger = decode.endpoint.core.ledger
                if ledger.quarantined_pages > ledger.quarantine_limit:
                    # A decode with so much quarantine may refuse rooms.
                    continue
                for _ in range(PROBES - world.frozen):
                    jobs += self._good_room(group, prefills, decode)
        waits_until_s = self.clock.now + REST_S
        while any(not job.succeeded for _, job in jobs):
            if self.clock.now >= waits_until_s:
                names = {node.name for node, job in jobs if not job.succeeded}
                world.rules.broken(
                    "I7", f"{sorted(names)}: a good room after the faults has not succeeded"
                )
            self.clock.play(0.1)

    def _good_room(
        self, group: int, prefills: list[Prefill], decode: Decode
    ) -> list[tuple[Node, Any]]:
        """Begin a room that must succeed, and return each node with its job."""
        self._probe_room = room = self._probe_room + 1
        digest = room.to_bytes(32, "little")
        jobs = self.good_room_at_prefill(room, PROBE_TOKENS, digest, prefills)
        jobs.append(
            (
                decode,
                DecodeJob(
                    room, PROBE_TOKENS, digest, group, self.world.rules.rooms.issue, rows=self.rows
                ),
            )
        )
        decode.begin(jobs[-1][1])
        return jobs

    def good_room_at_prefill(
        self, room: int, tokens: int, digest: bytes, prefills: list[Prefill]
    ) -> list[tuple[Node, Any]]:
        """Begin a room at every rank, and return each node with the job that must succeed there."""
        jobs: list[tuple[Node, Any]] = []
        for node in prefills:
            job = PrefillJob(
                room, tokens, digest, PROBE_CHUNKS, self.world.rules.rooms.issue, rows=self.rows
            )
            jobs.append((node, job))
            node.begin(job)
        return jobs

    def counted(self) -> dict[str, int]:
        """Return further counts for the report."""
        return {}

    def _check_counts(self) -> None:
        for node in self.world.nodes.values():
            if node.alive and node.counts.malformed != node.malformed:
                counted = node.counts.malformed
                self.world.rules.broken(
                    "I7", f"{node.name} counts {counted} malformed frames of {node.malformed}"
                )


class BrokenError(AssertionError):
    """An invariant does not hold; the run ends here."""


def _stop() -> None:
    raise BrokenError


class Cast(NamedTuple):
    """Classes and scenario of one kind of run."""

    draw: Callable[[random.Random, Faults], tuple[Scenario, Twists]] = draw_waiting
    world: type[World] = World
    run: type[Run] = Run
    rooms: type[Rooms] = Rooms


def rules_for(clock: Clock, tell: Tell | None, rooms: type[Rooms] = Rooms) -> Rules:
    """Return the rule book of a run, which a violation ends with BrokenError."""
    return Rules(
        lambda: clock.now,
        lambda delay_s, do, *arguments: clock.later(delay_s, None, do, *arguments),
        _stop,
        None if tell is None else lambda line: tell(clock.now, "", line),
        rooms,
    )


def simulate(
    seed: int, *, visits: Counter[Cell] | None = None, tell: Tell | None = None
) -> Outcome:
    """Play one seed, and report its story to `tell(virtual time, who, what)`."""
    return played(seed, Cast(), visits=visits, tell=tell)


def played(seed: int, cast: Cast, *, visits: Counter[Cell] | None, tell: Tell | None) -> Outcome:
    """Play one seed with this cast, and return its outcome."""
    begun = process_time()
    rng, clock = random.Random(seed), Clock()
    faults = Faults(rng)
    scenario, twists = cast.draw(rng, faults)
    rules = rules_for(clock, tell, cast.rooms)
    rules.rooms.forgetful = scenario.forgetful
    world = cast.world(clock, rng, rules, faults, scenario.variety, twists, tell)
    run = cast.run(world, scenario, twists)
    with swaps(observed(rules.rooms)), covered(Counter() if visits is None else visits):
        try:
            run.play()
        except BrokenError:
            pass
        # An endpoint that raises is a finding, whatever it raises.
        except Exception as error:
            if tell is not None:
                raise
            with suppress(BrokenError):
                rules.broken("I7", f"raised: {error!r}")
    return Outcome(
        seed,
        rules.violation,
        clock.steps,
        clock.now,
        process_time() - begun,
        faults.struck,
        dict(rules.rooms.endings) | run.counted(),
        len(scenario.requests),
        sum(scenario.groups) + scenario.decodes,
    )
