"""Outcome of one seed."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Violation(NamedTuple):
    """Broken invariant, and the virtual time at which it broke."""

    invariant: str
    text: str
    at_s: float


class Outcome(NamedTuple):
    """Result of one seed, with the counts for the report."""

    seed: int
    violation: Violation | None
    steps: int
    virtual_s: float
    cpu_s: float
    faults: Counter[str]
    endings: dict[str, int]
    rooms: int
    nodes: int
