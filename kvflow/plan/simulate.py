"""A simulation of a fleet that plays a trace: events in order of time, with the engine's own rules.

The rules, in simple form. The router sends a request to the prefill that has most of its prompt,
unless that one is overloaded, and to the least loaded decode. Decode promises it pages for its
prompt and for a share of its new tokens, in order of arrival. Prefill's event loop handles all
requests that have arrived in one turn, so those of a group get into one step. Then prefill gives
each one places for its whole prompt, in order; a step computes a chunk of each placed prompt,
within the tokens of a step. Each chunk is sent when it is computed. With the last one landed,
decode adds the request to its next step, and each step gives every running request one token.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvflow.plan.profile import Sizes, StepTimes
from kvflow.plan.trace import Request, Trace

# The router's thresholds for an overloaded worker (--balance-abs-threshold, ...).
_OVERLOADED_BY, _OVERLOADED_TIMES = 8, 1.5


@dataclass(slots=True)
class Outcome:
    """The times of one request, in seconds from its arrival, and its cached tokens."""

    request: Request
    first_s: float = math.nan
    end_s: float = math.nan
    cached_tokens: int = 0

    @property
    def itl_s(self) -> float:
        """Mean time between two tokens; NaN for a single one."""
        if self.request.new_tokens < 2:
            return math.nan
        return (self.end_s - self.first_s) / (self.request.new_tokens - 1)


class Figures:
    """Throughput, latencies and hit rate of a run, simulated or real."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = outcomes
        ends = [one.request.at_s + one.end_s for one in outcomes]
        self.seconds = max(ends) - min(one.request.at_s for one in outcomes)
        self.tokens_s = sum(one.request.new_tokens for one in outcomes) / self.seconds
        self.requests_s = len(outcomes) / self.seconds
        self._firsts = np.array([one.first_s for one in outcomes])
        gaps = np.array([one.itl_s for one in outcomes])
        self._gaps = gaps[~np.isnan(gaps)]

    def ttft_s(self, quantile: float) -> float:
        return float(np.quantile(self._firsts, quantile))

    def itl_s(self, quantile: float) -> float:
        return float(np.quantile(self._gaps, quantile)) if self._gaps.size else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were cached at prefill."""
        asked = sum(one.request.prompt_tokens for one in self.outcomes)
        return sum(one.cached_tokens for one in self.outcomes) / asked


@dataclass(frozen=True)
class Simulated:
    figures: Figures
    prefill_peak_tokens: int
    """Most tokens of prompts that one prefill computed and sent at once."""
    decode_peak_tokens: int
    """Most tokens that one decode promised at once."""


class _Blocks:
    """Blocks by time of their last use. The longest unused one is evicted first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def common(self, blocks: Sequence[int]) -> int:
        """Return how many of a prompt's first blocks are here."""
        return next(
            (at for at, block in enumerate(blocks) if block not in self._blocks), len(blocks)
        )

    def use(self, blocks: Sequence[int], capacity: int) -> None:
        # The first blocks of a prompt are the most useful, so they count as used last.
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        self.shrink(capacity)

    def shrink(self, capacity: int) -> None:
        while len(self._blocks) > max(0, capacity):
            self._blocks.popitem(last=False)


@dataclass(slots=True, eq=False)
class _Running:
    outcome: Outcome
    decode: _Decode
    computed: int = 0

    @property
    def request(self) -> Request:
        return self.outcome.request


class Sharing(NamedTuple):
    """Factors for the steps of a fleet whose roles share one machine."""

    beside_decode: float = 1.0
    """For a prefill step, as long as a decode steps."""
    beside_prefill: float = 1.0
    """For a decode step, as long as a prefill computes."""
    prefill: float = 1.0
    """For every prefill step, and what a request costs before it."""
    decode: float = 1.0
    """For every decode step, and what an answer takes beside its steps."""


APART = Sharing()


@dataclass(slots=True, eq=False)
class _Step:
    """A running step. `left_s` remained at `since_s`, if nothing runs beside it."""

    left_s: float
    since_s: float
    act: Callable[[], None]
    rate: float = 1.0
    timings: int = 0


class _Steps:
    """The running steps of one role.

    They slow down for as long as a step of the other role runs, not only if it ran when they began:
    a prefill step takes as long as many decode steps.
    """

    def __init__(self, clock: _Clock, factor: float, beside: float) -> None:
        self._clock, self._factor, self._beside = clock, factor, beside
        self._running: list[_Step] = []
        self._other: _Steps = self

    def pair_with(self, other: _Steps) -> None:
        self._other, other._other = other, self

    def begin(self, step_s: float, act: Callable[[], None]) -> None:
        """Call `act` when a step ends that takes `step_s` alone."""
        step = _Step(step_s * self._factor, self._clock.now_s, act)
        self._running.append(step)
        self._time(step)
        if len(self._running) == 1:
            self._other._changed()

    def _changed(self) -> None:
        if self._beside != 1:
            for step in self._running:
                self._time(step)

    def _time(self, step: _Step) -> None:
        now_s = self._clock.now_s
        step.left_s -= (now_s - step.since_s) * step.rate
        step.since_s = now_s
        step.rate = 1 / self._beside if self._other._running else 1.0
        step.timings += 1
        self._clock.at(
            now_s + step.left_s / step.rate, functools.partial(self._end, step, step.timings)
        )

    def _end(self, step: _Step, timing: int) -> None:
        if timing != step.timings:  # its end was set anew
            return
        self._running.remove(step)
        if not self._running:
            self._other._changed()
        step.act()


class _Clock:
    """Events in order of time, and of their number among equals."""

    def __init__(self, sharing: Sharing) -> None:
        self.now_s = 0.0
        self.sharing = sharing
        self.prefill = _Steps(self, sharing.prefill, sharing.beside_decode)
        self.decode = _Steps(self, sharing.decode, sharing.beside_prefill)
        self.prefill.pair_with(self.decode)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), act))

    def run(self) -> None:
        while self._events:
            self.now_s, _, act = heapq.heappop(self._events)
            act()


@dataclass(eq=False)
class _Prefill:
    clock: _Clock
    times: StepTimes
    sizes: Sizes
    pool_tokens: int
    block_tokens: int
    cache: _Blocks = field(default_factory=_Blocks)
    sent: _Blocks = field(default_factory=_Blocks)
    """Prompts that the router has sent here, by which it chooses."""
    load: int = 0
    peak: int = 0
    _arrived: list[_Running] = field(default_factory=list)
    _handles: bool = False
    _waiting: deque[_Running] = field(default_factory=deque)
    _placed: list[_Running] = field(default_factory=list)
    _taken: int = 0
    _busy: bool = False
    _line_free_s: float = 0.0

    def add(self, running: _Running) -> None:
        self._arrived.append(running)
        # This event comes after all arrivals of the same time.
        self.clock.at(self.clock.now_s, self._handle)

    def _handle(self) -> None:
        """Handle what has arrived, in one turn of the event loop, which runs beside the steps."""
        if self._handles or not self._arrived:
            return
        self._handles, some = True, self._arrived
        self._arrived = []
        turn_s = len(some) * self.times.busy_s * self.clock.sharing.prefill
        self.clock.at(self.clock.now_s + turn_s, functools.partial(self._handled, some))

    def _handled(self, some: list[_Running]) -> None:
        self._handles = False
        self._waiting.extend(some)
        self._step()
        self._handle()

    def _step(self) -> None:
        if self._busy:
            return
        self._place()
        rows: list[tuple[_Running, int]] = []
        left = self.sizes.batch_tokens
        for running in self._placed:
            remaining = running.request.prompt_tokens - running.computed
            if not remaining or not left:
                continue
            count = min(self.sizes.chunk_tokens, left, remaining)
            rows.append((running, count))
            left -= count
        if not rows:
            return
        self._busy = True
        step_s = self.times.prefill_step_s((count, one.computed) for one, count in rows)
        self.clock.prefill.begin(step_s, lambda: self._stepped(rows))

    def _place(self) -> None:
        """Give waiting prompts places, in order, as long as the pool has them."""
        while self._waiting:
            running = self._waiting[0]
            tokens = running.request.prompt_tokens
            if self._taken + tokens > self.pool_tokens and self._placed:
                return
            self._waiting.popleft()
            # At least one token is computed, because the first token follows from it.
            most = (tokens - 1) // self.block_tokens
            found = self.cache.common(running.request.blocks[:most])
            running.outcome.cached_tokens = running.computed = found * self.block_tokens
            self.cache.use(running.request.blocks[:found], len(self.cache))
            self._taken += tokens
            self.peak = max(self.peak, self._taken)
            self.cache.shrink(self._room_for_cached())
            self._placed.append(running)

    def _room_for_cached(self) -> int:
        return (self.pool_tokens - self._taken) // self.block_tokens

    def _stepped(self, rows: list[tuple[_Running, int]]) -> None:
        self._busy = False
        for running, count in rows:
            running.computed += count
            start_s = max(self.clock.now_s, self._line_free_s)
            self._line_free_s = start_s + self.times.transfer_s(count)
            if running.computed == running.request.prompt_tokens:
                self.clock.at(self._line_free_s, functools.partial(self._landed, running))
        self._step()

    def _landed(self, running: _Running) -> None:
        self._placed.remove(running)
        self.load -= 1
        request = running.request
        self._taken -= request.prompt_tokens
        whole = request.prompt_tokens // self.block_tokens
        self.cache.use(request.blocks[:whole], self._room_for_cached())
        running.decode.join(running)
        self._step()


@dataclass(eq=False)
class _Decode:
    clock: _Clock
    times: StepTimes
    sizes: Sizes
    pool_tokens: int
    load: int = 0
    peak: int = 0
    _waiting: deque[tuple[_Running, Callable[[], None]]] = field(default_factory=deque)
    _promised: int = 0
    _admitted: int = 0
    _joining: list[_Running] = field(default_factory=list)
    _ending: list[tuple[int, int, _Running]] = field(default_factory=list)  # by number of a step
    _batch: int = 0
    _context: int = 0
    _steps: int = 0
    _busy: bool = False
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def promise(self, running: _Running, then: Callable[[], None]) -> None:
        """Call `then` when the request has its promise of pages."""
        self._waiting.append((running, then))
        self._admit()

    def _tokens(self, request: Request) -> int:
        new = math.ceil(request.new_tokens * self.sizes.new_token_ratio)
        return request.prompt_tokens + new

    def _admit(self) -> None:
        while self._waiting and self._admitted < self.sizes.max_running:
            running, then = self._waiting[0]
            tokens = self._tokens(running.request)
            if self._promised + tokens > self.pool_tokens and self._admitted:
                return
            self._waiting.popleft()
            self._promised += tokens
            self._admitted += 1
            self.peak = max(self.peak, self._promised)
            then()

    def join(self, running: _Running) -> None:
        """Take a request whose prompt has landed, with its first token."""
        running.outcome.first_s = self.clock.now_s - running.request.at_s
        if running.request.new_tokens == 1:
            self._end(running)
        else:
            self._joining.append(running)
            self._step()

    def _step(self) -> None:
        if self._busy:
            return
        for running in self._joining:
            request = running.request
            last = self._steps + request.new_tokens - 1
            heapq.heappush(self._ending, (last, next(self._numbers), running))
            self._batch += 1
            self._context += request.prompt_tokens + 1
        self._joining.clear()
        if not self._batch:
            return
        self._busy = True
        step_s = self.times.decode_step_s(self._batch, self._context)
        self.clock.decode.begin(step_s, self._stepped)

    def _stepped(self) -> None:
        self._busy = False
        self._steps += 1
        self._context += self._batch
        while self._ending and self._ending[0][0] <= self._steps:
            running = heapq.heappop(self._ending)[2]
            self._batch -= 1
            self._context -= running.request.prompt_tokens + running.request.new_tokens
            self._end(running)
        self._step()

    def _end(self, running: _Running) -> None:
        outcome = running.outcome
        outcome.end_s = self.clock.now_s - running.request.at_s
        if running.request.new_tokens > 1:
            outcome.end_s += self.times.answer_s * self.clock.sharing.decode
        self._promised -= self._tokens(running.request)
        self._admitted -= 1
        self.load -= 1
        self._admit()


def simulate(
    trace: Trace,
    times: StepTimes,
    sizes: Sizes,
    prefills: int,
    decodes: int,
    *,
    prefill_pool: int = 0,
    decode_pool: int = 0,
    sharing: Sharing = APART,
) -> Simulated:
    """Play a trace on a fleet. Pools are in tokens; 0 takes those of `sizes`.

    Without `sharing`, each worker has a machine of its own. A request that no pool holds runs
    alone.
    """
    clock, block = _Clock(sharing), trace.block_tokens
    sources = [
        _Prefill(clock, times, sizes, prefill_pool or sizes.prefill_pool, block)
        for _ in range(prefills)
    ]
    targets = [
        _Decode(clock, times, sizes, decode_pool or sizes.decode_pool) for _ in range(decodes)
    ]
    outcomes = [Outcome(request) for request in trace.requests]

    def arrive(outcome: Outcome) -> None:
        request = outcome.request
        source = _chosen(sources, request)
        target = min(targets, key=lambda one: one.load)
        source.load, target.load = source.load + 1, target.load + 1
        source.sent.use(request.blocks, source.pool_tokens // block)
        running = _Running(outcome, target)
        target.promise(running, lambda: source.add(running))

    for outcome in outcomes:
        clock.at(
            outcome.request.at_s + times.request_s * sharing.prefill,
            functools.partial(arrive, outcome),
        )
    clock.run()
    return Simulated(
        Figures(outcomes),
        max(one.peak for one in sources),
        max(one.peak for one in targets),
    )


def _chosen(sources: Sequence[_Prefill], request: Request) -> _Prefill:
    least = min(one.load for one in sources)
    most = max(least + _OVERLOADED_BY, least * _OVERLOADED_TIMES)

    def place(one: _Prefill) -> tuple[bool, int, int]:
        return one.load > most, -one.sent.common(request.blocks), one.load

    return min(sources, key=place)
