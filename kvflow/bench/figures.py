"""Figures of a benchmark: percentiles of measurements, and medians of rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np

Say = Callable[[str], None]
"""A function that receives a line of progress."""
Row = dict[str, float]
"""Figures of one measurement, by name."""


def places(values: Sequence[float], **percent: float) -> Row:
    """Return percentiles of `values`, by name, rounded to 3 decimals."""
    found = np.percentile(values, list(percent.values()))
    return {name: round(float(at), 3) for name, at in zip(percent, found, strict=True)}


def quartiles(values: Sequence[float]) -> Row:
    return places(values, median=50, q1=25, q3=75)


def extremes(values: Sequence[float]) -> Row:
    return places(values, median=50, min=0, max=100)


def medians(rows: Sequence[Row]) -> Row:
    """Return the median of every figure over `rows`, rounded to 4 decimals."""
    return {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}
