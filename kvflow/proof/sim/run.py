"""One seed, played to its end: faults, calm, rest, good rooms for every pair, and every writer's
death.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import process_time

from kvflow.memory import shared
from kvflow.node import DecodeNode, PrefillNode
from kvflow.proof.rules.outcome import Outcome
from kvflow.proof.sim.cluster import Cluster, Member
from kvflow.proof.sim.coverage import Cell, covered
from kvflow.proof.sim.dp_groups import asked_observed, dp_groups_of
from kvflow.proof.sim.engine import Job, PlainScheduler, Scheduler
from kvflow.proof.sim.faults import SWITCH, Faults
from kvflow.proof.sim.loop import Process, VirtualLoop, current_process
from kvflow.proof.sim.oracle import Oracle
from kvflow.proof.sim.residence import Residence
from kvflow.proof.sim.rest import left
from kvflow.proof.sim.scenario import (
    EVERY_GROUP,
    OWN_GROUP,
    WORD,
    Accident,
    Leg,
    Request,
    Scenario,
    Switch,
    draw,
    with_dp_groups,
    with_staging,
    with_switch,
    with_threads,
)
from kvflow.proof.sim.staging import waits_observed
from kvflow.proof.sim.stay import GOOD
from kvflow.proof.sim.swap import swapped
from kvflow.proof.sim.thread_engine import loans_observed
from kvflow.proof.sim.times import A_MOMENT_S, FAULTS_END_S, FENCED_S, RECOVER_S, REST_S, SETTLE_S
from kvflow.proof.sim.variety import LATE, LATE_FENCE_S, NEVER, PAGE_SIZE
from kvflow.proof.sim.watch import nodes_observed
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.wire.codec import prompt_digest

STEPS_MIN = 200
# Good rooms for every pair, and the pages of their chunks.
PROBES, PROBE_CHUNKS = 6, (1, 1)
# At most so many run at once at a node, so that they fit beside any quarantine.
PROBES_OF_NODE = 12


class Run:
    """One scenario on one cluster."""

    def __init__(
        self,
        loop: VirtualLoop,
        faults: Faults,
        scenario: Scenario,
        scheduler: Scheduler,
        oracle: Oracle,
        cluster: Cluster | None = None,
    ) -> None:
        """Prepare the run on `cluster`, or on a plain one."""
        self.loop, self.faults, self.scenario, self.scheduler, self.oracle = (
            loop,
            faults,
            scenario,
            scheduler,
            oracle,
        )
        self.cluster = cluster or Cluster(loop, oracle, faults, scenario.variety)
        self.cluster.threaded, self.cluster.threaded_groups = (
            scenario.threaded,
            scenario.threaded_groups,
        )
        oracle.dp_groups.groups = self.cluster.data_parallel = dp_groups_of(scenario.data_parallel)
        oracle.rooms.forgetful = scenario.forgetful
        # A room that finds no staging is announced with the first repetition.
        if scenario.variety.staging_bytes:
            oracle.rooms.announced_within_s = scenario.variety.timing.repeat_after_s + A_MOMENT_S
        self._places: list[Member] = []  # present member of each place
        self._switching: Member | None = None  # leaves to take the other role
        self._probe_room = 1_000_000
        self._prefills: list[range] = []  # places of each group
        for ranks in scenario.groups:
            first = self._prefills[-1].stop if self._prefills else 0
            self._prefills.append(range(first, first + ranks))
        groups = [group for group, places in enumerate(self._prefills) for _ in places]
        # By place: number of the group, or of the decode, that belongs there.
        self._numbers = [*groups, *range(scenario.decodes)]
        self._begun: dict[Process | None, list[Job]] = defaultdict(list)

    async def play(self) -> None:
        """Play the scenario: faults, calm, good rooms, lies, and at last the death of every
        writer.
        """
        for group, world_size in enumerate(self.scenario.groups):
            self._places += [
                self.cluster.start_prefill(group, rank, world_size) for rank in range(world_size)
            ]
        self._places += [self.cluster.start_decode(n) for n in range(self.scenario.decodes)]
        for request in self.scenario.requests:
            decode = sum(self.scenario.groups) + request.decode_at
            self._schedule(request, self._prefills[request.group], request.group, decode)
        for accident in self.scenario.accidents:
            self.loop.later(accident.at_s, self._happen, accident)
        if (switch := self.scenario.switch) is not None:
            self.loop.later(switch.at_s, self._switch, switch)
        await asyncio.sleep(FAULTS_END_S)
        await self._two_kinds_at_least()
        self.calm()
        await self._until_rest(SETTLE_S, "with the faults over", doubts=True)
        # Links that were given up come back with a heartbeat.
        await asyncio.sleep(RECOVER_S)
        if self.scenario.variety.fences == LATE:
            # By then the fence has answered for all that died.
            await asyncio.sleep(LATE_FENCE_S)
        await self._probe()
        while self.loop.steps < STEPS_MIN:
            await self._probe()
        await self._until_rest(REST_S, "after one more room", doubts=True)
        self._check_counts()
        self.at_the_end()
        self.cluster.tell_lies()
        await asyncio.sleep(RECOVER_S)
        for member in self.cluster.members:
            if isinstance(member.node, PrefillNode) and member.alive:
                self.cluster.crash(member)
        if self.scenario.variety.fences == NEVER:
            self.cluster.declare_dead()
        await self._until_rest(FENCED_S + LATE_FENCE_S, "with every writer dead", doubts=False)

    # --- requests

    def _schedule(self, request: Request, prefills: Iterable[int], group: int, decode: int) -> None:
        """Schedule a request at these places. `group` is the one that decode looks up in the
        registry.
        """
        if request.prefill is not None:
            for place in prefills:
                job = Job(
                    request.room,
                    request.prompt,
                    request.chunks,
                    deadline_s=request.prefill.deadline_s,
                    fails_at=request.fails_at,
                    refused=request.refused,
                )
                self.loop.later(
                    request.prefill.at_s, self._begin, place, PrefillNode, job, request.prefill
                )
        if request.decode is not None:
            job = Job(
                request.room,
                request.decode_prompt,
                deadline_s=request.decode.deadline_s,
                ranks=partial(self.cluster.ranks, group),
                names=partial(self.cluster.named, group, request.named, request.dp_rank),
                kept_s=request.kept_s,
                refused=request.decode_refused,
                offers_after_s=request.offers_after_s,
                stay=request.stay,
            )
            if request.topples:
                job.topples = partial(self._topple, job)
            self.loop.later(
                request.decode.at_s, self._begin, decode, DecodeNode, job, request.decode
            )

    def _begin(self, place: int, role: type, job: Job, leg: Leg) -> None:
        """Begin one leg, unless the place has no node of that role: then its client is refused, and
        the other leg learns of that.
        """
        member = self._places[place]
        if not member.alive or member.leaving or not isinstance(member.node, role):
            return
        task = member.spawn(self._leg(member, job))
        self._begun[member.process].append(job)
        if leg.ends is not None:
            after_s, how = leg.ends
            self.loop.later(after_s, self._end, member, task, job, how)

    async def _leg(self, member: Member, job: Job) -> None:
        try:
            if member.engine is not None:
                await member.engine.play(job)
            elif isinstance(member.node, PrefillNode):
                await self.scheduler.prefill(member.node, job)
            else:
                if job.stay is not None and member.snapshots is not None:
                    digest = prompt_digest(job.prompt)
                    job.residence = Residence(
                        member.node, member.snapshots, self.oracle, digest, job.stay
                    )
                await self.scheduler.decode(member.node, job)
        except KvflowError as error:
            said = f"{member.name}: room {job.room}: {type(error).__name__}: {error}"
            self.oracle.trace(lambda: said)

    def _topple(self, job: Job) -> None:
        """End all other rooms of the node, from within the `on_end` of this one."""
        for other in self._begun[current_process()]:
            if other is not job and other.close is not None:
                other.close(Cause(Code.CLIENT_GONE, "toppled"))

    def _end(self, member: Member, task: asyncio.Task[None], job: Job, how: str) -> None:
        """Disturb a leg: its client goes away, or the engine wants the room's pages back."""
        if not member.up or task.done():
            return
        self.oracle.trace(lambda: f"{member.name}: room {job.room}: {how}")
        if how == "close" and job.close is not None:
            member.process.run(job.close, Cause(Code.CLIENT_GONE, "retracted"))
        else:
            member.process.run(task.cancel)
            if how == "cancel twice":
                self.loop.later(0.0005, task.cancel)

    # --- accidents

    def _happen(self, accident: Accident) -> None:
        """Let an accident strike its node, and schedule its end."""
        member = self._places[accident.node]
        kind, cluster = accident.kind, self.cluster
        if not member.up or member.leaving:
            return
        if kind in ("takeover", "stall") and not isinstance(member.node, PrefillNode):
            return
        if kind == "crash" and not self._enough_without(member):
            kind = "restart"
        self.faults.strike(kind)
        if kind in ("crash", "restart"):
            cluster.crash(member)
            # No fence proves this death, so an operator who saw it declares it.
            if self.scenario.variety.fences == NEVER:
                self.loop.later(2 * accident.for_s, cluster.declare_dead)
            if kind == "restart":
                self.loop.later(accident.for_s, self._start_again, accident.node)
        elif kind == "leave":
            cluster.leave(member)
            self.loop.later(accident.for_s, self._start_again, accident.node)
        elif kind == "stall":
            cluster.stall(member, accident.for_s)
            self.loop.later(
                self.scenario.variety.timing.lost_after_s + 0.1, self._check_stalled, member
            )
        elif kind == "jam":
            cluster.jam(member)
            self.loop.later(accident.for_s, cluster.unjam, member)
        elif kind == "takeover":
            self._places[accident.node] = cluster.take_over(member)
        elif kind == "freeze":
            cluster.halt(member)
            self.loop.later(accident.for_s, cluster.resume, member)
        else:
            cluster.cut(member)
            self.loop.later(accident.for_s, cluster.mend, member)

    def _check_stalled(self, member: Member) -> None:
        """Verify that a node whose data plane stood still for too long reports it: health and
        heartbeats depend on that.
        """
        long = member.plane.stalled_s > self.scenario.variety.timing.lost_after_s
        if member.up and not member.leaving and long and not member.node.unavailable_reason:
            self.oracle.broken(
                "I7", f"{member.name}: its data plane stands still, and it calls itself available"
            )

    def _enough_without(self, gone: Member) -> bool:
        """Return True if a whole prefill group and a decode would be left."""
        left = Counter(
            m.group if isinstance(m.node, PrefillNode) else "decode"
            for m in self._places
            if m.alive and m is not gone and m is not self._switching
        )
        return left["decode"] > 0 and any(
            left[g] == ranks for g, ranks in enumerate(self.scenario.groups)
        )

    def _start_again(self, place: int) -> None:
        member = self._places[place]
        if not member.alive:
            self._places[place] = self.cluster.start_again(member)
        # The node still closes in order: look again later.
        elif member.leaving:
            self.loop.later(0.1, self._start_again, place)

    # --- roles

    def _switch(self, switch: Switch) -> None:
        member = self._places[switch.node]
        if (
            not self.faults.on
            or not member.up
            or member.leaving
            or not self._enough_without(member)
        ):
            return
        self.faults.strike(SWITCH)
        self._switching = member
        self.cluster.leave(member)
        self._go_on(switch)

    def _go_on(self, switch: Switch) -> None:
        """Start the node of the other role, once the old one has ended."""
        place, member = switch.node, self._places[switch.node]
        if member.alive:
            self.loop.later(0.02, self._go_on, switch)
            return
        at_home = isinstance(member.node, PrefillNode) != (place < sum(self.scenario.groups))
        group = self._numbers[place] if at_home else len(self._places) + place
        self._places[place] = self.cluster.switch_role(member, group)
        self._switching = None
        if not at_home:
            for request in switch.requests:
                self._schedule_elsewhere(request, place, group)
            if switch.back_after_s is not None:
                self.loop.later(switch.back_after_s, self._switch, switch)

    def _schedule_elsewhere(self, request: Request, place: int, group: int) -> None:
        """Schedule a request for the node at `place`, whose role is not the usual one there, and
        for another node.
        """
        if isinstance(self._places[place].node, PrefillNode):
            decodes = [
                n for n, member in enumerate(self._places) if isinstance(member.node, DecodeNode)
            ]
            self._schedule(request, (place,), group, decodes[request.room % len(decodes)])
        else:
            others = [n for n, places in enumerate(self._prefills) if place not in places]
            other = others[request.room % len(others)]
            self._schedule(request, self._prefills[other], other, place)

    async def _two_kinds_at_least(self) -> None:
        """Halt a node or cut it off for a moment, until at least two kinds of fault struck."""
        for kind in ("freeze", "partition"):
            if len(self.faults.struck) >= 2:
                return
            while not (  # noqa: ASYNC110
                up := [
                    n
                    for n, member in enumerate(
                        self._places,
                    )
                    if member.up
                ]
            ):
                # Every node is about to start again.
                await asyncio.sleep(0.1)
            self._happen(Accident(0.0, kind, up[-1], 0.2))
            await asyncio.sleep(0.25)

    def calm(self) -> None:
        """End all faults. Dropped frames stay lost and late ones stay late, but no new fault
        strikes.
        """
        self.oracle.trace(lambda: "calm")
        self.faults.calm()
        for member in self.cluster.members:
            if member.alive:
                self.cluster.resume(member)
                self.cluster.mend(member)
                self.cluster.unjam(member)
                self.cluster.stall(member, 0.0)

    # --- rest

    async def _until_rest(self, patience_s: float, when: str, *, doubts: bool) -> None:
        deadline_s = self.loop.time() + patience_s
        while still := self.still_left(doubts=doubts):
            if self.loop.time() >= deadline_s:
                return self.oracle.broken(
                    "I5", f"{when}, after {patience_s:g} s: {'; '.join(still)}"
                )
            await asyncio.sleep(0.1)
        return None

    def still_left(self, *, doubts: bool) -> list[str]:
        """Return a line for everything that is not at rest."""
        return left(self.cluster.members, self.oracle, doubts=doubts)

    def counted(self) -> dict[str, int]:
        """Return further counts for the report."""
        counts: dict[str, int] = {}
        if staged := self.cluster.staged.values():
            counts["waits for staging"] = sum(one.waits for one in staged)
            counts["copies from staging"] = sum(one.copies.ended for one in staged)
        if self.cluster.data_parallel:
            counts["ends told to every group"] = self.oracle.dp_groups.told_to_every_group
        if engines := [
            member.engine for member in self.cluster.members if member.engine is not None
        ]:
            counts["rooms of engines without a loop"] = sum(engine.handled for engine in engines)
        return counts

    def at_the_end(self) -> None:
        """Hook for further checks: all is at rest, and every living node has shown that it
        works.
        """

    async def _probe(self) -> None:
        """Verify that good rooms succeed for every pair that lives (I7)."""
        legs: list[tuple[Member, Job]] = []
        groups, decodes = (
            {m.group for m in self.cluster.living(PrefillNode)},
            self.cluster.living(DecodeNode),
        )
        count = min(PROBES, PROBES_OF_NODE // max(1, len(groups), len(decodes)))
        for group in sorted(groups):
            ranks = [m for m in self.cluster.living(PrefillNode) if m.group == group]
            if group < len(self._prefills) and len(ranks) < len(self._prefills[group]):
                continue
            if any(
                member.node.quarantined_pages > member.node.quarantine_limit for member in ranks
            ):
                # With so many pages of earlier nodes in quarantine it may have too few.
                continue
            for decode in decodes:
                assert isinstance(decode.node, DecodeNode)
                if decode.node.quarantined_pages > decode.node.quarantine_limit:
                    # A decode with so much quarantine may refuse rooms.
                    continue
                for number in range(count):
                    self._probe_room = room = self._probe_room + 1
                    prompt = [room] * (sum(PROBE_CHUNKS) * PAGE_SIZE)
                    legs += [(member, Job(room, prompt, PROBE_CHUNKS)) for member in ranks]
                    named = partial(self.cluster.named, group, *self._names_for_probe(group, room))
                    legs.append(
                        (decode, Job(room, prompt, names=named, stay=None if number else GOOD))
                    )
        await asyncio.sleep(self.scenario.variety.timing.repeat_after_s)
        if legs:
            await asyncio.wait(
                [member.spawn(self._leg(member, job)) for member, job in legs], timeout=REST_S
            )
        for member, job in legs:
            if not job.succeeded:
                self.oracle.broken(
                    "I7", f"{member.name}: a good room after the faults has not succeeded"
                )

    def _names_for_probe(self, group: int, room: int) -> tuple[str, int | None]:
        if (found := self.cluster.data_parallel.get(group)) is None:
            return OWN_GROUP, None
        named = room % found.dp_size != found.dp_rank
        return WORD if room & 1 else EVERY_GROUP, found.dp_rank if named else None

    def _check_counts(self) -> None:
        for member in self.cluster.members:
            if member.alive and member.node.counts.malformed != member.seen.malformed:
                said, there = member.node.counts.malformed, member.seen.malformed
                self.oracle.broken("I7", f"{member.name} counts {said} malformed frames of {there}")


def simulate(
    seed: int,
    scheduler: Scheduler | None = None,
    *,
    visits: Counter[Cell] | None = None,
    tell: Callable[[float, str, str], None] | None = None,
) -> Outcome:
    """Play one seed, and report its story to `tell(virtual time, who, what)`."""
    rng = random.Random(seed)
    loop = VirtualLoop(rng)
    faults = Faults(rng, copies=True)
    # Each extension has a generator apart, so that it leaves the draws of the others as they are.
    scenario = with_dp_groups(random.Random(f"dp groups {seed}"), draw(rng, faults))
    scenario = with_switch(random.Random(f"switch {seed}"), scenario)
    scenario = with_staging(random.Random(f"staging {seed}"), scenario)
    # A scheduler that is passed in must drive every node, and threaded engines drive theirs.
    if scheduler is None:
        scenario = with_threads(random.Random(f"threads {seed}"), scenario)

    def make_run(oracle: Oracle) -> Run:
        return Run(loop, faults, scenario, scheduler or PlainScheduler(), oracle)

    return played(seed, loop, faults, scenario, Oracle, make_run, visits=visits, tell=tell)


def played(
    seed: int,
    loop: VirtualLoop,
    faults: Faults,
    scenario: Scenario,
    make_oracle: Callable[[VirtualLoop, Callable[[str], None] | None], Oracle],
    make_run: Callable[[Oracle], Run],
    *,
    visits: Counter[Cell] | None = None,
    tell: Callable[[float, str, str], None] | None = None,
) -> Outcome:
    """Play a scenario that was drawn, to its end."""
    begun = process_time()

    def line(what: str) -> None:
        assert tell is not None
        process = current_process()
        tell(loop.time(), process.name if process else "", what)

    oracle = make_oracle(loop, None if tell is None else line)
    run = make_run(oracle)
    try:
        with (
            covered(Counter() if visits is None else visits),
            nodes_observed(oracle),
            waits_observed(oracle, run.cluster.staged),
            asked_observed(oracle.dp_groups),
            loans_observed(oracle),
            _logged(oracle),
            _plenty(),
        ):
            loop.play(run.play())
            if loop.raised and oracle.violation is None:
                oracle.broken("I7", f"raised into the event loop: {loop.raised[0]}")
        steps, virtual_s = loop.steps, loop.time()
        # The clean-up cancels tasks in the middle of their work, which would look like violations.
        oracle.over = True
        with _logged(oracle):
            loop.wind_up()
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        loop.close()
        run.cluster.close()
    return Outcome(
        seed,
        oracle.violation,
        steps,
        virtual_s,
        process_time() - begun,
        faults.struck,
        {**oracle.rooms.endings, **run.counted()},
        len(scenario.requests),
        sum(scenario.groups) + scenario.decodes,
    )


def _plenty() -> AbstractContextManager[object]:
    """Skip the question how much memory the system has left: the pools are tiny, and there are
    many.
    """
    return swapped(shared, "available_memory", lambda: None)


@contextmanager
def _logged(oracle: Oracle) -> Iterator[None]:
    """Take every error in the handlers' log for a violation: they must survive all that comes over
    the wire.

    Copies from staging that fail on purpose are logged as well, and ignored.
    """
    logger, memory = logging.getLogger("kvflow.handlers"), logging.getLogger("kvflow.memory")
    with (
        swapped(logger, "propagate", False),
        swapped(logger, "handlers", [_Errors(oracle)]),
        swapped(memory, "disabled", True),
    ):
        yield


class _Errors(logging.Handler):
    """Log handler that takes every error for a violation."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(logging.ERROR)
        self._oracle = oracle

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._oracle.broken("I7", f"{record.getMessage()}: {error!r}")
