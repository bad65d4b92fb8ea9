"""One seed of whole nodes, played to its end. See `proof.course` for the stages of a run."""

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
from kvflow.proof.course import PROBE_CHUNKS, PROBES, Course
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
    with_windows,
)
from kvflow.proof.sim.staging import waits_observed
from kvflow.proof.sim.stay import GOOD
from kvflow.proof.sim.swap import swapped
from kvflow.proof.sim.thread_engine import loans_observed
from kvflow.proof.sim.times import A_MOMENT_S, REST_S
from kvflow.proof.sim.variety import NEVER, PAGE_SIZE
from kvflow.proof.sim.watch import nodes_observed
from kvflow.protocols.arguments import prompt_digest
from kvflow.protocols.errors import Code, KvflowError
from kvflow.protocols.pages.spaces import counts_fit

STEPS_MIN = 200
# Maximum number of probe rooms at one node at a time. They fit even when the quarantine is full.
PROBES_OF_NODE = 12


class Run(Course):
    def __init__(
        self,
        loop: VirtualLoop,
        faults: Faults,
        scenario: Scenario,
        scheduler: Scheduler,
        oracle: Oracle,
        cluster: Cluster | None = None,
    ) -> None:
        self.cluster = cluster or Cluster(loop, oracle, faults, scenario.variety)
        super().__init__(self.cluster, scenario, faults, oracle)
        self.loop, self.scheduler, self.oracle = loop, scheduler, oracle
        self.cluster.threaded = scenario.threaded
        self.cluster.threaded_groups = scenario.threaded_groups
        oracle.dp_groups.groups = self.cluster.data_parallel = dp_groups_of(scenario.data_parallel)
        # A room that finds no staging is announced when decode first asks about it.
        if scenario.variety.staging_bytes:
            oracle.rooms.announced_within_s = scenario.variety.timing.repeat_after_s + A_MOMENT_S
        # Jobs report to the rules every cause that they issue.
        self._job = partial(Job, issue=oracle.rooms.issue)
        self._switching: Member | None = None  # node that is changing its role
        self._prefills: list[range] = []  # places of each group
        for ranks in scenario.groups:
            first = self._prefills[-1].stop if self._prefills else 0
            self._prefills.append(range(first, first + ranks))
        groups = [group for group, places in enumerate(self._prefills) for _ in places]
        # Number of the group or decode that belongs at each place.
        self._numbers = [*groups, *range(scenario.decodes)]
        self._begun: dict[Process | None, list[Job]] = defaultdict(list)

    async def wait(self, for_s: float) -> None:
        await asyncio.sleep(for_s)

    # --- requests

    def schedule(self) -> None:
        for request in self.scenario.requests:
            decode = sum(self.scenario.groups) + request.decode_at
            self._schedule(request, self._prefills[request.group], request.group, decode)

    def _schedule(self, request: Request, prefills: Iterable[int], group: int, decode: int) -> None:
        """Schedule a request at these places. Decode looks up `group` in the registry."""
        if request.prefill is not None:
            for place in prefills:
                job = self._job(
                    request.room,
                    request.prompt,
                    request.chunks,
                    deadline_s=request.prefill.deadline_s,
                    fails_at=request.fails_at,
                    refused=request.refused,
                )
                leg = request.prefill
                self.loop.later(leg.at_s, self._begin, place, PrefillNode, job, leg)
        if request.decode is not None:
            job = self._job(
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
            leg = request.decode
            self.loop.later(leg.at_s, self._begin, decode, DecodeNode, job, leg)

    def _begin(self, place: int, role: type, job: Job, leg: Leg) -> None:
        """Begin one leg of a request, unless its place has no living node of that role."""
        member = self.places[place]
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
        """Close all other rooms of the node, as the `on_end` callback of the job's room."""
        for other in self._begun[current_process()]:
            if other is not job and other.close is not None:
                other.close(other.cause(Code.CLIENT_GONE, "toppled"))

    def _end(self, member: Member, task: asyncio.Task[None], job: Job, how: str) -> None:
        """Disturb a leg: its client goes away, or the engine wants the room's pages back."""
        if not member.up or task.done():
            return
        self.oracle.trace(lambda: f"{member.name}: room {job.room}: {how}")
        if how == "close" and job.close is not None:
            member.process.run(job.close, job.cause(Code.CLIENT_GONE, "retracted"))
        else:
            member.process.run(task.cancel)
            if how == "cancel twice":
                self.loop.later(0.0005, task.cancel)

    # --- accidents

    def struck(self, node: Member, accident: Accident) -> None:
        variety, kind = self.scenario.variety, accident.kind
        # No fence proves this death, so an operator who saw it declares it.
        if kind in ("crash", "restart") and variety.fences == NEVER:
            self.loop.later(2 * accident.for_s, self.cluster.declare_dead)
        elif kind == "stall":
            self.loop.later(variety.timing.lost_after_s + 0.1, self._check_stalled, node)

    def _check_stalled(self, member: Member) -> None:
        """Verify that a node is unavailable if its data plane has stalled for too long."""
        long = member.plane.stalled_s > self.scenario.variety.timing.lost_after_s
        if member.up and not member.leaving and long and not member.node.unavailable_reason:
            text = f"{member.name}: its data plane stands still, and it calls itself available"
            self.oracle.broken("I7", text)

    def stays(self, node: Member) -> bool:
        return node is not self._switching

    def schedule_more(self) -> None:
        if (switch := self.scenario.switch) is not None:
            self.loop.later(switch.at_s, self._switch, switch)

    # --- roles

    def _switch(self, switch: Switch) -> None:
        member = self.places[switch.node]
        if not self.faults.on or not member.up or member.leaving or not self.enough_without(member):
            return
        self.faults.strike(SWITCH)
        self._switching = member
        self.cluster.leave(member)
        self._go_on(switch)

    def _go_on(self, switch: Switch) -> None:
        place, member = switch.node, self.places[switch.node]
        if member.alive:
            self.loop.later(0.02, self._go_on, switch)
            return
        at_home = isinstance(member.node, PrefillNode) != (place < sum(self.scenario.groups))
        group = self._numbers[place] if at_home else len(self.places) + place
        self.places[place] = self.cluster.switch_role(member, group)
        self._switching = None
        if not at_home:
            for request in switch.requests:
                self._schedule_elsewhere(request, place, group)
            if switch.back_after_s is not None:
                self.loop.later(switch.back_after_s, self._switch, switch)

    def _schedule_elsewhere(self, request: Request, place: int, group: int) -> None:
        if isinstance(self.places[place].node, PrefillNode):
            decodes = [n for n, m in enumerate(self.places) if isinstance(m.node, DecodeNode)]
            self._schedule(request, (place,), group, decodes[request.room % len(decodes)])
        else:
            others = [n for n, places in enumerate(self._prefills) if place not in places]
            other = others[request.room % len(others)]
            self._schedule(request, self._prefills[other], other, place)

    # --- rest

    def still_left(self, *, doubts: bool) -> list[str]:
        return left(self.cluster.members, self.oracle, doubts=doubts)

    def counted(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        if staged := self.cluster.staged.values():
            counts["waits for staging"] = sum(one.waits for one in staged)
            counts["copies from staging"] = sum(one.copies.ended for one in staged)
        if self.cluster.data_parallel:
            counts["ends told to every group"] = self.oracle.dp_groups.told_to_every_group
        engines = [member.engine for member in self.cluster.members if member.engine is not None]
        if engines:
            counts["rooms of engines without a loop"] = sum(engine.handled for engine in engines)
        return counts

    async def probe(self) -> None:
        await self._probe()
        while self.loop.steps < STEPS_MIN:
            await self._probe()

    async def _probe(self) -> None:
        legs: list[tuple[Member, Job]] = []
        groups = {m.group for m in self.cluster.living(PrefillNode)}
        decodes = self.cluster.living(DecodeNode)
        count = min(PROBES, PROBES_OF_NODE // max(1, len(groups), len(decodes)))
        for group in sorted(groups):
            ranks = [m for m in self.cluster.living(PrefillNode) if m.group == group]
            if group < len(self._prefills) and len(ranks) < len(self._prefills[group]):
                continue
            # A node above its quarantine limit may lack free pages or refuse rooms.
            if any(_above_its_limit(m) for m in ranks):
                continue
            for decode in decodes:
                if _above_its_limit(decode):
                    continue
                for number in range(count):
                    self.probe_room = room = self.probe_room + 1
                    prompt = [room] * (sum(PROBE_CHUNKS) * PAGE_SIZE)
                    legs += [(member, self._job(room, prompt, PROBE_CHUNKS)) for member in ranks]
                    named = partial(self.cluster.named, group, *self._names_for_probe(group, room))
                    stay = None if number else GOOD
                    legs.append((decode, self._job(room, prompt, names=named, stay=stay)))
        await asyncio.sleep(self.scenario.variety.timing.repeat_after_s)
        if legs:
            tasks = [member.spawn(self._leg(member, job)) for member, job in legs]
            await asyncio.wait(tasks, timeout=REST_S)
        for member, job in legs:
            if not job.succeeded:
                text = f"{member.name}: a good room after the faults has not succeeded"
                self.oracle.broken("I7", text)

    def _names_for_probe(self, group: int, room: int) -> tuple[str, int | None]:
        if (found := self.cluster.data_parallel.get(group)) is None:
            return OWN_GROUP, None
        named = room % found.dp_size != found.dp_rank
        return WORD if room & 1 else EVERY_GROUP, found.dp_rank if named else None


def simulate(
    seed: int,
    scheduler: Scheduler | None = None,
    *,
    visits: Counter[Cell] | None = None,
    tell: Callable[[float, str, str], None] | None = None,
) -> Outcome:
    """Play one seed. Each line of its story goes to `tell(virtual time, process name, line)`."""
    rng = random.Random(seed)
    loop = VirtualLoop(rng)
    faults = Faults(rng, copies=True)
    # Each extension has its own generator, so that it leaves the draws of the others unchanged.
    scenario = with_windows(random.Random(f"windows {seed}"), draw(rng, faults))
    scenario = with_dp_groups(random.Random(f"dp groups {seed}"), scenario)
    scenario = with_switch(random.Random(f"switch {seed}"), scenario)
    scenario = with_staging(random.Random(f"staging {seed}"), scenario)
    # Threaded engines drive their own nodes, but a scheduler passed in must drive all nodes.
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
        # The clean-up cancels tasks midway. That must not count as a violation.
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


def _above_its_limit(member: Member) -> bool:
    """Return True if the node has more places of some space in quarantine than its limit."""
    ledger = member.node.shell.endpoint.core.ledger
    return not counts_fit(ledger.quarantined, ledger.quarantine_limit)


def _plenty() -> AbstractContextManager[object]:
    """Skip the check for available memory, because the pools are tiny and many."""
    return swapped(shared, "available_memory", lambda: None)


@contextmanager
def _logged(oracle: Oracle) -> Iterator[None]:
    """Report every error that handlers log: they must survive whatever the wire delivers.

    The log of `kvflow.memory` is disabled, because copies from staging fail on purpose.
    """
    logger, memory = logging.getLogger("kvflow.handlers"), logging.getLogger("kvflow.memory")
    with (
        swapped(logger, "propagate", False),
        swapped(logger, "handlers", [_Errors(oracle)]),
        swapped(memory, "disabled", True),
    ):
        yield


class _Errors(logging.Handler):
    def __init__(self, oracle: Oracle) -> None:
        super().__init__(logging.ERROR)
        self._oracle = oracle

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._oracle.broken("I7", f"{record.getMessage()}: {error!r}")
