"""Builders of Prometheus metric families from plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvflow.telemetry.histogram import Histogram

REQUEST_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80),
    *(100, 200, 400, 600, 1200, 1800, 2400),
)
"""Upper bounds of histogram buckets, in seconds, for durations up to that of a whole request."""

F = TypeVar("F", GaugeMetricFamily, CounterMetricFamily)
Figure = tuple[str, str] | tuple[str, str, str]
"""(suffix of the family's name, help text, attribute with the value; by default the suffix)"""
V = TypeVar("V", bound=tuple[str, ...])


class FamiliesOf(Collector):
    """A Prometheus collector that calls `make` at each scrape."""

    def __init__(self, make: Callable[[], Iterator[Metric]]) -> None:
        self._make = make

    def collect(self) -> Iterator[Metric]:
        return self._make()


def labelled(family: F, counts: Mapping[str, float]) -> F:
    """Add one sample for each label value in `counts` to `family`, and return `family`."""
    for label, count in counts.items():
        family.add_metric([label], count)
    return family


def each(family: type[F], prefix: str, found: object, *figures: Figure) -> Iterator[F]:
    """Yield one family without labels for each of `figures`, with values from `found`."""
    for name, text, *field in figures:
        yield family(f"{prefix}{name}", text, value=getattr(found, *field or [name]))


def histograms(
    name: str,
    text: str,
    found: Mapping[V, Histogram],
    labels: Sequence[str] = (),
    *,
    bounds: Sequence[float] | None = None,
    unit: float = 1.0,
) -> HistogramMetricFamily:
    """Return a family of histograms. The keys of `found` are tuples of label values.

    `unit` is the size of the family's unit in the unit of the histograms: 0.001 if the histograms
    hold seconds and the family has milliseconds. `bounds` selects some bounds of the histograms, in
    the family's unit. By default, the family has all bounds.
    """
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in found.items():
        counts = histogram.cumulative()
        if bounds is not None:
            known = dict(counts)
            counts = [(bound, known[bound * unit]) for bound in bounds] + [counts[-1]]
        buckets = [
            ("+Inf" if bound == float("inf") else str(float(bound)), count)
            for bound, count in counts
        ]
        family.add_metric(list(values), buckets=buckets, sum_value=histogram.sum / unit)
    return family
