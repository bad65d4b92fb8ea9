"""Finds the fewest workers with which a trace keeps its limits, and what its pools bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvflow.plan.profile import Sizes, StepTimes
from kvflow.plan.simulate import Simulated, simulate
from kvflow.plan.trace import Trace

_MOST_POOLS = 8
# Workers that are added without an effect before the search ends. One more may be without: a
# request that misses the limits does not always get it.
_PATIENCE = 8


class Limits(NamedTuple):
    """Limits that a share of all requests must keep."""

    ttft_s: float
    itl_s: float
    quantile: float

    def kept_by(self, found: Simulated) -> tuple[bool, bool]:
        """Return whether the time to the first token is kept, and that between tokens."""
        return (
            found.figures.ttft_s(self.quantile) <= self.ttft_s,
            found.figures.itl_s(self.quantile) <= self.itl_s,
        )


class Tried(NamedTuple):
    prefills: int
    decodes: int
    found: Simulated
    keeps: bool


class Pool(NamedTuple):
    """A size of each prefill's pool, and the plan's figures with it."""

    tokens: int
    found: Simulated


class Plan(NamedTuple):
    tried: list[Tried]
    """In the order of the search. The last one is the answer if it keeps the limits."""
    pools: list[Pool]
    more_help: bool = True
    """False if further workers were tried and brought the limits no nearer."""

    @property
    def best(self) -> Tried:
        return self.tried[-1]


def search(trace: Trace, times: StepTimes, sizes: Sizes, limits: Limits, most: int) -> Plan:
    """Add workers to a fleet until it keeps the limits, at most `most` of each role.

    A missed time between tokens adds a decode; a missed time to the first token a prefill, or a
    decode where that brings more, because requests also wait for decode's pool. The search ends
    where `_PATIENCE` further workers bring the limits no nearer.
    """
    prefills = decodes = 1
    tried: list[Tried] = []
    nearest = 0  # the index in `tried` of the fleet with the least excess

    def attempt(some: int, others: int) -> Tried:
        found = simulate(trace, times, sizes, some, others)
        return Tried(some, others, found, all(limits.kept_by(found)))

    def excess(one: Tried) -> float:
        return _excess(one.found, limits)

    tried.append(attempt(prefills, decodes))
    while not tried[-1].keeps and len(tried) - nearest <= _PATIENCE:
        first_kept, _ = limits.kept_by(tried[-1].found)
        choices = []
        if not first_kept and prefills < most:
            choices.append(attempt(prefills + 1, decodes))
        if decodes < most:
            choices.append(attempt(prefills, decodes + 1))
        if not choices:
            break
        tried.append(min(choices, key=excess))
        prefills, decodes = tried[-1].prefills, tried[-1].decodes
        if excess(tried[-1]) < excess(tried[nearest]):
            nearest = len(tried) - 1
    more_help = len(tried) - nearest <= _PATIENCE
    if not more_help:
        del tried[nearest + 1 :]
    return Plan(tried, _pools(trace, times, sizes, tried[-1]), more_help)


def _excess(found: Simulated, limits: Limits) -> float:
    """Return how far the limits are missed, both together, as a factor; 2 if they are kept."""
    figures, quantile = found.figures, limits.quantile
    return max(1.0, figures.ttft_s(quantile) / limits.ttft_s) + max(
        1.0, figures.itl_s(quantile) / limits.itl_s
    )


def _pools(trace: Trace, times: StepTimes, sizes: Sizes, best: Tried) -> list[Pool]:
    # From the longest prompt, which a pool must hold, to a pool that never evicts anything.
    different = len({block for one in trace.requests for block in one.blocks})
    least = -(-trace.longest // sizes.page_size) * sizes.page_size
    most = max(least, different * trace.block_tokens + best.found.prefill_peak_tokens)
    factor = max(2.0, (most / least) ** (1 / (_MOST_POOLS - 1)))
    found: list[Pool] = []
    tokens = least
    while not found or found[-1].tokens < most:
        made = simulate(trace, times, sizes, best.prefills, best.decodes, prefill_pool=tokens)
        found.append(Pool(tokens, made))
        tokens = int(tokens * factor)
    return found


def errors(
    predicted: Simulated, real: Simulated, quantiles: Sequence[float] = (0.5, 0.95)
) -> list[tuple[str, float, float]]:
    """Return names, predicted values and real ones, of what a plan is judged by."""
    ours, theirs = predicted.figures, real.figures
    rows = [("output tokens/s", ours.tokens_s, theirs.tokens_s)]
    for quantile in quantiles:
        name = f"p{quantile * 100:g}"
        rows.append((f"TTFT {name} ms", ours.ttft_s(quantile) * 1e3, theirs.ttft_s(quantile) * 1e3))
    for quantile in quantiles:
        name = f"p{quantile * 100:g}"
        rows.append((f"ITL {name} ms", ours.itl_s(quantile) * 1e3, theirs.itl_s(quantile) * 1e3))
    rows.append(("hit rate", ours.hit_rate, theirs.hit_rate))
    return rows
