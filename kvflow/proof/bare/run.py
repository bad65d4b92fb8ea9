"""One seed of bare endpoints, played to its end."""

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
from kvflow.proof.course import PROBE_CHUNKS, PROBES, Course
from kvflow.proof.rules.book import Rules
from kvflow.proof.rules.outcome import Outcome
from kvflow.proof.rules.rooms import Rooms
from kvflow.proof.rules.watch import observed
from kvflow.proof.sim.coverage import Cell, covered
from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.scenario import (
    Accident,
    Leg,
    Request,
    Scenario,
    with_page_sizes,
    with_windows,
)
from kvflow.proof.sim.swap import swaps
from kvflow.proof.sim.times import RECOVER_S, REST_S
from kvflow.proof.sim.variety import PAGE_SIZE
from kvflow.protocols.arguments import prompt_digest
from kvflow.protocols.decode.core import MAX_REPEAT_AFTER_S
from kvflow.protocols.pages.spaces import counts_fit

PROBE_TOKENS = sum(PROBE_CHUNKS) * PAGE_SIZE


class Run(Course):
    left = staticmethod(left)  # `GroupRun` replaces it

    def __init__(self, world: World, scenario: Scenario, twists: Twists) -> None:
        super().__init__(world, scenario, world.faults, world.rules)
        self.world, self.twists, self.clock = world, twists, world.clock
        self.layout, self.decode_layout = scenario.variety.layout, scenario.variety.decode_layout

    async def wait(self, for_s: float) -> None:
        self.clock.play(for_s)

    # --- requests

    def schedule(self) -> None:
        for request, twist in zip(self.scenario.requests, self.twists.requests, strict=True):
            self._schedule(request, twist)

    def _schedule(self, request: Request, twist: Twist) -> None:
        """Schedule both legs of a request. A twist may send the same room to a second decode."""
        issue, digest = self.world.rules.rooms.issue, prompt_digest(request.prompt)
        if request.prefill is not None:
            self.schedule_prefill(request, twist, request.prefill, digest)
        if (leg := request.decode) is not None:
            if request.decode_prompt is not request.prompt:
                digest = prompt_digest(request.decode_prompt)
            for place in (request.decode_at, twist.second_decode):
                if place is None:
                    continue
                theirs = DecodeJob(
                    request.room,
                    len(request.decode_prompt),
                    digest,
                    issue,
                    request.group,
                    layout=self.decode_layout,
                    deadline_s=leg.deadline_s,
                    refused=request.decode_refused,
                    prefix_pages=twist.prefix_pages,
                    announces=twist.announces,
                    offers_after_s=request.offers_after_s,
                    waits=twist.waits,
                    kept_s=request.kept_s,
                )
                number = sum(self.scenario.groups) + place
                self.clock.later(leg.at_s, None, self.begin, number, theirs, leg)

    def schedule_prefill(self, request: Request, twist: Twist, leg: Leg, digest: bytes) -> None:
        first = sum(self.scenario.groups[: request.group])
        for rank in range(self.scenario.groups[request.group]):
            job = PrefillJob(
                request.room,
                len(request.prompt),
                digest,
                self.world.rules.rooms.issue,
                tuple(request.chunks),
                layout=self.layout,
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

    def struck(self, node: Node, accident: Accident) -> None:
        declares_after_s = self.twists.declares_after_s
        if accident.kind in ("crash", "restart") and declares_after_s is not None:
            self.clock.later(declares_after_s, None, self.world.declare_dead, node)

    def schedule_more(self) -> None:
        if (visit := self.twists.visit) is not None:
            self.clock.later(visit.at_s, None, self._visit, visit)

    def _visit(self, visit: Visit) -> None:
        """Halt a decode for a long time, while a guest decode comes and needs its place."""
        world, node = self.world, self.places[sum(self.scenario.groups) + visit.decode]
        if not node.up or node.leaving:
            return
        self.faults.strike("visit")
        world.halt(node)
        self.clock.later(visit.silent_s, None, world.resume, node)
        guest = world.start_decode(self.scenario.decodes)
        self.clock.later(visit.stays_s, None, self._depart, guest)
        for group in range(len(self.scenario.groups)):
            self.probe_room += 1
            digest = self.probe_room.to_bytes(32, "little")
            job = DecodeJob(
                self.probe_room,
                PAGE_SIZE,
                digest,
                world.rules.rooms.issue,
                group,
                layout=self.decode_layout,
            )
            self.clock.later(visit.comes_after_s, guest, guest.begin, job)

    def _depart(self, guest: Decode) -> None:
        if guest.alive:
            self.world.kill(guest)

    def calm(self) -> None:
        super().calm()
        world = self.world
        for node in [n for n in world.nodes.values() if isinstance(n, Prefill) and n.alive]:
            for write in [write for write in node.writes.values() if write.fault == "frozen"]:
                if not world.nodes[write.key[1]].alive or world.nodes[write.key[1]].leaving:
                    # Prefill keeps a departed decode's place while a write to it runs.
                    write.thaw()
                # Both halves wait for this write, so only their user can end the room.
                node.end(write.leg.job, "given up")
        self.clock.later(MAX_REPEAT_AFTER_S + RECOVER_S, None, self._give_up_waiting)

    def _give_up_waiting(self) -> None:
        """Make decodes offer pages for rooms that prefill has not begun.

        Every lost message has been sent again by now, so such a room will never begin.
        """
        for node in self.world.nodes.values():
            if node.alive and isinstance(node, Decode):
                node.give_up_waiting()

    # --- rest

    def still_left(self, *, doubts: bool) -> list[str]:
        return list(self.left(self.world, doubts=doubts))

    async def probe(self) -> None:
        world, jobs = self.world, []
        self.clock.play(world.timing.repeat_after_s)
        for group, world_size in enumerate(self.scenario.groups):
            prefills = [node for node in world.living(Prefill) if node.group == group]
            if len(prefills) < world_size:
                continue
            for decode in world.living(Decode):
                ledger = decode.endpoint.core.ledger
                if not counts_fit(ledger.quarantined, ledger.quarantine_limit):
                    # A decode above its quarantine limit may refuse rooms, so it gets no probe.
                    continue
                for _ in range(PROBES - world.frozen):
                    jobs += self._good_room(group, prefills, decode)
        waits_until_s = self.clock.now + REST_S
        while any(not job.succeeded for _, job in jobs):
            if self.clock.now >= waits_until_s:
                names = {node.name for node, job in jobs if not job.succeeded}
                text = f"{sorted(names)}: a good room after the faults has not succeeded"
                world.rules.broken("I7", text)
            self.clock.play(0.1)

    def _good_room(
        self, group: int, prefills: list[Prefill], decode: Decode
    ) -> list[tuple[Node, Any]]:
        self.probe_room = room = self.probe_room + 1
        digest = room.to_bytes(32, "little")
        jobs = self.good_room_at_prefill(room, PROBE_TOKENS, digest, prefills)
        issue = self.world.rules.rooms.issue
        job = DecodeJob(room, PROBE_TOKENS, digest, issue, group, layout=self.decode_layout)
        decode.begin(job)
        return [*jobs, (decode, job)]

    def good_room_at_prefill(
        self, room: int, tokens: int, digest: bytes, prefills: list[Prefill]
    ) -> list[tuple[Node, Any]]:
        jobs: list[tuple[Node, Any]] = []
        issue = self.world.rules.rooms.issue
        for node in prefills:
            job = PrefillJob(room, tokens, digest, issue, PROBE_CHUNKS, layout=self.layout)
            jobs.append((node, job))
            node.begin(job)
        return jobs


class BrokenError(AssertionError):
    """An invariant is broken. This error ends the run."""


def _stop() -> None:
    raise BrokenError


class Cast(NamedTuple):
    """The classes of one kind of run, and the function that draws its scenario."""

    draw: Callable[[random.Random, Faults], tuple[Scenario, Twists]] = draw_waiting
    world: type[World] = World
    run: type[Run] = Run
    rooms: type[Rooms] = Rooms


def rules_for(clock: Clock, tell: Tell | None, rooms: type[Rooms] = Rooms) -> Rules:
    """Return the rules of a run. A violation ends the run with BrokenError."""
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

    def draw_spaces(rng: random.Random, faults: Faults) -> tuple[Scenario, Twists]:
        scenario, twists = draw_waiting(rng, faults)
        # Own generators leave the other draws unchanged.
        scenario = with_windows(random.Random(f"windows {seed}"), scenario)
        return with_page_sizes(random.Random(f"page sizes {seed}"), scenario), twists

    return played(seed, Cast(draw_spaces), visits=visits, tell=tell)


def played(seed: int, cast: Cast, *, visits: Counter[Cell] | None, tell: Tell | None) -> Outcome:
    begun = process_time()
    rng, clock = random.Random(seed), Clock()
    faults = Faults(rng)
    scenario, twists = cast.draw(rng, faults)
    rules = rules_for(clock, tell, cast.rooms)
    world = cast.world(clock, rng, rules, faults, scenario.variety, twists, tell)
    run = cast.run(world, scenario, twists)
    with swaps(observed(rules.rooms)), covered(Counter() if visits is None else visits):
        try:
            # In virtual time no `await` suspends the coroutine, so this one step is the whole run.
            run.play().send(None)
        except (BrokenError, StopIteration):
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
