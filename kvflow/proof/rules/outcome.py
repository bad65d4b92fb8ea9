"""Outcome of one seed."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Violation(NamedTuple):
    invariant: str
    text: str
    at_s: float


class Outcome(NamedTuple):
    seed: int
    violation: Violation | None
    steps: int
    virtual_s: float
    cpu_s: float
    faults: Counter[str]
    endings: dict[str, int]
    rooms: int
    nodes: int
