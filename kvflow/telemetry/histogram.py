"""A histogram for use in a single thread. An observation costs a bisection, and takes no lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

# The buckets of SGLang's queue time, so that dashboards for SGLang work.
QUEUE_SECONDS = (
    *(0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 70),
    *(80, 90, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000, 1200, 1400, 1600, 1800, 2000),
    *(2500, 3000),
)
_SHORT_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
BOOTSTRAP_SECONDS = (*_SHORT_SECONDS, 0.5, 1, 2.5, 5, 10, 30)
TRANSFER_SECONDS = (*BOOTSTRAP_SECONDS, 60, 300)
_MIB, _GIB = 1 << 20, 1 << 30
TRANSFER_BYTES = tuple(n * _MIB for n in (0.0625, 0.25, 1, 5, 10, 50, 100, 500, 1000, 5000, 10000))
TRANSFER_BYTES_PER_SECOND = tuple(
    n * _GIB for n in (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 200, 400)
)


class Histogram:
    """A histogram and the sum of its values. `bounds` are its buckets' upper bounds, ascending."""

    __slots__ = ("bounds", "buckets", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.buckets = [0] * (len(self.bounds) + 1)  # the last one is for values above all bounds
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.buckets)

    def observe(self, value: float, times: int = 1) -> None:
        # `bisect_left` puts a value that equals a bound into the bucket below that bound.
        self.buckets[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def observe_all(self, values: Sequence[float]) -> None:
        """Observe each value once. This is cheaper than one call per value."""
        bounds, buckets = self.bounds, self.buckets
        for value in values:
            buckets[bisect_left(bounds, value)] += 1
        self.sum += sum(values)

    def cumulative(self) -> list[tuple[float, int]]:
        """Return (bound, number of values up to it) for each bound; the last bound is infinity."""
        return list(zip((*self.bounds, float("inf")), accumulate(self.buckets), strict=True))
