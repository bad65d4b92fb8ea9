"""One seed of whole nodes with prefix caches, whose tiers fail and whose stores reopen."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvflow.proof.cached.disk import DiskFaults, empty_folder, spoil
from kvflow.proof.cached.node_cache import CachePlan, NodeCache, draw_plan
from kvflow.proof.cached.scheduler import CachingScheduler
from kvflow.proof.cached.texts import Library, Texts, page_bytes
from kvflow.proof.rules.outcome import Outcome
from kvflow.proof.sim import run as plain
from kvflow.proof.sim.cluster import Cluster, Member
from kvflow.proof.sim.coverage import Cell
from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.loop import VirtualLoop
from kvflow.proof.sim.oracle import Oracle
from kvflow.proof.sim.scenario import (
    PROMPT_PAGES_MAX,
    Accident,
    Request,
    Scenario,
    draw,
    draw_chunks,
)
from kvflow.proof.sim.swap import swapped
from kvflow.proof.sim.times import FAULTS_END_S
from kvflow.proof.sim.variety import NUM_PAGES, PAGE_SIZE, Variety
from kvflow.proof.sim.virtual_thread import LockStep
from kvflow.protocols.errors import TransferError
from kvflow.protocols.pages.layout import build_layout
from kvflow.serve.cache.storage import call

SHAPES = (((1,), 1), ((1,), 1), ((1,), 2), ((1, 1), 1), ((1, 1), 2))
"""Shapes whose groups have one rank each. Several ranks would have to agree on what is cached."""
_STREAMS = (("0.k", "uint8", (8,)), ("0.v", "uint8", (8,)))
_LAYOUT = build_layout(_STREAMS, page_size=PAGE_SIZE, num_pages=NUM_PAGES, fingerprint="simulated")


class CachedOracle(Oracle):
    """Oracle that derives the content of a page from the tokens of its prompt.

    A room transfers only the pages at the end of a prompt that decode lacks.
    """

    texts: Texts

    def expected(self, digest: bytes, index: int, count: int, size_bytes: int) -> bytes:
        digests = self.texts.of(digest)
        return page_bytes(digests[len(digests) - count + index], size_bytes)


class CachingCluster(Cluster):
    """Cluster whose nodes have caches. Each place keeps its plan and its folder across restarts."""

    def __init__(
        self,
        loop: VirtualLoop,
        oracle: Oracle,
        faults: Faults,
        variety: Variety,
        rng: random.Random,
    ) -> None:
        super().__init__(loop, oracle, faults, variety)
        self.texts, self.counts, self.workers = Texts(), Counter[str](), list[LockStep[Any]]()
        self.caches: dict[int, NodeCache] = {}
        self._folder = empty_folder()
        self.rng, self.disk_faults = rng, DiskFaults(rng, faults.struck)
        self._plans: dict[str, CachePlan] = {}

    def _join(self, name: str, *parts: Any) -> Member:
        member = super()._join(name, *parts)
        plan = self._plans.setdefault(name, draw_plan(self.rng))
        folder = Path(self._folder, name.replace(" ", "-"))
        if any(cache.folder == folder and not cache.lost for cache in self.caches.values()):
            # Another process of that name still uses the folder.
            folder = Path(f"{folder}-{len(self.caches)}")
        spoil(folder, self.disk_faults, most=True)
        member.cache = self.caches[id(member.node)] = NodeCache(
            name,
            member.node.pool,
            member.seen.books,
            plan,
            folder,
            self.texts,
            self.oracle,
            self.faults,
            self.disk_faults,
            self.workers,
        )
        return member

    def kill(self, member: Member) -> None:
        super().kill(member)
        if member.cache is not None:
            member.cache.die()

    def _left(self, member: Member) -> None:
        super()._left(member)
        if member.cache is not None:
            member.cache.die()

    def close(self) -> None:
        for cache in self.caches.values():
            cache.die()
        for step in self.workers:
            step.abandon()
        for cache in self.caches.values():
            cache.unmap()
        super().close()


class CachedRun(plain.Run):
    cluster: CachingCluster

    def __init__(
        self,
        loop: VirtualLoop,
        faults: Faults,
        scenario: Scenario,
        oracle: CachedOracle,
        rng: random.Random,
    ):
        cluster = CachingCluster(loop, oracle, faults, scenario.variety, rng)
        scheduler = CachingScheduler(cluster.texts, cluster.caches, cluster.counts, rng)
        super().__init__(loop, faults, scenario, scheduler, oracle, cluster)
        oracle.texts, self._rng = cluster.texts, rng
        for _ in range(rng.randint(3, 12)):
            act = rng.choice((self._evict, self._evict, self._evict, self._flush, self._spoil))
            loop.later(rng.uniform(0.1, FAULTS_END_S), act)
        # Restart some processes, which then open their stores again.
        for _ in range(rng.randint(0, 2)):
            node = rng.randrange(sum(scenario.groups) + scenario.decodes)
            restart = Accident(rng.uniform(0.5, 1.8), "restart", node, rng.uniform(0.05, 0.3))
            loop.later(restart.at_s, self.happen, restart)

    def _pick(self) -> Member | None:
        up = [member for member in self.cluster.members if member.up and not member.leaving]
        return self._rng.choice(up) if up else None

    def _evict(self) -> None:
        if (member := self._pick()) is not None:
            self.oracle.trace(lambda: f"{member.name}: pages are wanted")
            member.process.run(member.node.pool.pages.reclaim, self._rng.randint(1, NUM_PAGES))

    def _flush(self) -> None:
        if (member := self._pick()) is not None:
            self.oracle.trace(lambda: f"{member.name}: its cache is flushed")
            self.cluster.counts["flushes"] += 1
            member.process.run(member.cache.cache.flush)

    def _spoil(self) -> None:
        if (member := self._pick()) is not None and self.cluster.disk_faults.on:
            spoil(member.cache.folder, self.cluster.disk_faults)

    def calm(self) -> None:
        super().calm()
        self.cluster.disk_faults.on = False

    def still_left(self, *, doubts: bool) -> list[str]:
        caches = [member.cache for member in self.cluster.members if member.alive]
        found = super().still_left(doubts=doubts)
        found += [what for cache in caches for what in cache.left()]
        if not found:
            for cache in caches:
                cache.check_told()
        return found

    def counted(self) -> dict[str, int]:
        counts = Counter(self.cluster.counts)
        for cache in self.cluster.caches.values():
            counts.update(cache.counted())
        return {f"cache: {what}": count for what, count in counts.items()}

    def at_the_end(self) -> None:
        for member in self.cluster.members:
            if member.alive and (left := member.cache.empty()):
                self.oracle.broken("I5", "; ".join(left))


def with_caches(rng: random.Random, scenario: Scenario) -> Scenario:
    """Let prompts share prefixes, repeat some requests, and let no request leave the device."""
    library = Library(rng, PROMPT_PAGES_MAX)
    requests = [_with_prompt(rng, request, library.draw()) for request in scenario.requests]
    # Repeat some requests, with the same prompt or with the next turn of the dialogue.
    for request in rng.sample(requests, min(len(requests), rng.randint(6, 12))):
        at_s = rng.uniform(0.3, 2.0)
        legs = [
            None if leg is None else leg._replace(at_s=leg.at_s + at_s)
            for leg in (request.prefill, request.decode)
        ]
        again = request._replace(room=request.room + 1_000, prefill=legs[0], decode=legs[1])
        same = rng.random() < 0.6
        prompt = request.prompt if same else library.after(request.prompt)
        requests.append(_with_prompt(rng, again, prompt))
    return scenario._replace(requests=requests, variety=scenario.variety._replace(layout=_LAYOUT))


def _with_prompt(rng: random.Random, request: Request, prompt: list[int]) -> Request:
    same = request.decode_prompt == request.prompt
    return request._replace(
        prompt=prompt,
        decode_prompt=prompt if same else [*prompt[:-1], prompt[-1] ^ 1],
        chunks=draw_chunks(rng, -(-len(prompt) // PAGE_SIZE)),
        stay=None,
    )


def simulate(
    seed: int,
    *,
    visits: Counter[Cell] | None = None,
    tell: Callable[[float, str, str], None] | None = None,
) -> Outcome:
    """Play one seed. Each line of its story goes to `tell(virtual time, process name, line)`."""
    rng = random.Random(seed)
    loop, faults = VirtualLoop(rng), Faults(rng, copies=True)
    # A separate generator leaves the draws of the plain simulator unchanged.
    mine = random.Random(f"cache {seed}")
    scenario = with_caches(mine, draw(rng, faults, SHAPES))

    def make_run(oracle: Oracle) -> plain.Run:
        assert isinstance(oracle, CachedOracle)
        return CachedRun(loop, faults, scenario, oracle, mine)

    with swapped(call, "time", _Clock(loop)), _logged():
        return plain.played(
            seed, loop, faults, scenario, CachedOracle, make_run, visits=visits, tell=tell
        )


@contextmanager
def _logged() -> Iterator[None]:
    """Raise logged errors, except those that the simulator injected. Print nothing."""
    with ExitStack() as swaps:
        for name in ("kvflow.serve.cache", "kvflow.storage"):
            logger = logging.getLogger(name)
            swaps.enter_context(swapped(logger, "propagate", False))
            swaps.enter_context(swapped(logger, "handlers", [_OnPurpose(logging.WARNING)]))
        yield


class _OnPurpose(logging.Handler):
    """Log handler that raises every logged error except `TransferError`, which is injected."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, TransferError):
            raise error


class _Clock:
    """Replacement for the `time` module in a store. It advances a little at every step."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.time() + self._loop.steps * 1e-9
