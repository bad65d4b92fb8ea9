"""Rates and quantiles over the last seconds, from counters that only grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from kvflow.router.overview.answers import Counts, Info

WINDOW_S = 5.0
"""Figures are about the last seconds, at least as many as this if the window has them."""


class Change(msgspec.Struct, frozen=True):
    """Changes at one worker between the first and the last answer in its window."""

    seconds: float
    tokens: int
    finished: int
    failed: int
    aborted: int
    bytes_moved: int
    asked_tokens: int
    hit_tokens: int
    latencies: dict[str, Counts]

    def per_s(self, count: int) -> float:
        return round(count / self.seconds, 3)


class Window:
    """The latest answers of one worker. A new process at the same address begins a new window."""

    def __init__(self) -> None:
        self._answers: deque[tuple[float, Info]] = deque()

    def add(self, at_s: float, info: Info, longest_gap_s: float) -> None:
        """Add an answer. After a gap, the averages would hide what happened since."""
        if self._answers:
            before_s, before = self._answers[-1]
            if at_s - before_s > longest_gap_s or before.incarnation != info.incarnation:
                self._answers.clear()
        self._answers.append((at_s, info))
        # The answer before the window stays, so that the window is never shorter than `WINDOW_S`.
        while len(self._answers) > 2 and self._answers[1][0] <= at_s - WINDOW_S:
            self._answers.popleft()

    def change(self) -> Change | None:
        """Return what changed, or None after fewer than two answers."""
        if len(self._answers) < 2:
            return None
        (began_s, first), (ended_s, last) = self._answers[0], self._answers[-1]
        if ended_s <= began_s:
            return None
        then, now = first.completions, last.completions
        asked, hits = (
            0
            if first.prefix_cache is None or last.prefix_cache is None
            else getattr(last.prefix_cache, name) - getattr(first.prefix_cache, name)
            for name in ("asked_tokens", "hit_tokens")
        )
        return Change(
            seconds=ended_s - began_s,
            tokens=now.generated_tokens - then.generated_tokens,
            finished=now.finished - then.finished,
            failed=now.failed - then.failed,
            aborted=now.aborted - then.aborted,
            bytes_moved=last.bytes_moved - first.bytes_moved,
            asked_tokens=asked,
            hit_tokens=hits,
            latencies=_subtracted(now.latencies, then.latencies),
        )


def _subtracted(now: Mapping[str, Counts], then: Mapping[str, Counts]) -> dict[str, Counts]:
    return {
        name: Counts(
            counts.bounds,
            tuple(a - b for a, b in zip(counts.counts, then[name].counts, strict=True)),
        )
        for name, counts in now.items()
        if name in then and len(then[name].counts) == len(counts.counts)
    }


def added(parts: Iterable[Counts]) -> Counts:
    """Return the sum of histograms. One with other buckets than the first is left out."""
    total = Counts()
    for part in parts:
        if not total.bounds:
            total = part
        elif part.bounds == total.bounds and len(part.counts) == len(total.counts):
            counts = (a + b for a, b in zip(total.counts, part.counts, strict=True))
            total = Counts(total.bounds, tuple(counts))
    return total


def quantile(found: Counts, share: float) -> float | None:
    """Return the value below which `share` of the values lie, or None without values.

    Within a bucket, the values are taken to lie evenly, as Prometheus' `histogram_quantile` does.
    """
    bounds, counts = found.bounds, found.counts
    if len(counts) != len(bounds) + 1 or not (total := sum(counts)) or not bounds:
        return None
    wanted, below = share * total, 0
    for (low, high), count in zip(pairwise((0.0, *bounds)), counts, strict=False):
        if count and below + count >= wanted:
            return _rounded(low + (high - low) * max(0.0, wanted - below) / count)
        below += count
    return bounds[-1]


def summed(values: Sequence[float | None]) -> float | None:
    """Return the sum of the known values, or None if none is known."""
    known = [value for value in values if value is not None]
    return round(sum(known), 3) if known else None


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
