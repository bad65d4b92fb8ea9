"""What a request does at decode after its room has succeeded: drawn from the seed beforehand,
played by `residence`.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from kvflow.proof.sim.times import Span

STEP, GROW, RETRACT, DROP = "step", "grow", "retract", "drop"
CANCEL, CANCEL_TWICE, ABORT = "cancel", "cancel twice", "abort"
AS_MANY, ALL_PAGES, ALL_ROWS = "as many", "all pages", "all rows"
PAUSE_S: Span = (0.0, 0.04)
AWAY_S: Span = (0.0, 0.08)
DISTURBED_S: Span = (0.0, 0.012)
TURNS = 6  # of the event loop between the end of a copy and the moment in which all know of it


class Disturbance(NamedTuple):
    """In the middle of an act: what is awaited is cancelled, or the request is aborted from beside
    it.
    """

    how: str
    after_s: float
    turns: int | None = None  # after the end of its next copy, rather than at a time


class Act(NamedTuple):
    kind: str
    pause_s: float  # before it
    away_s: float = 0.0
    disturbed: Disturbance | None = None
    return_disturbed: Disturbance | None = None
    squats: str = ""  # what others take meanwhile
    squats_on: bool = False  # until it is back, or has tried for long


class Stay(NamedTuple):
    """A request that is away before an act comes back for it; `returns`: also after the last."""

    acts: tuple[Act, ...]
    returns: bool = True


GOOD = Stay((Act(RETRACT, 0.0, squats=AS_MANY), Act(STEP, 0.0)))
"""It leaves between landing and its first step, and comes back."""


def draw_stay(rng: random.Random) -> Stay | None:
    """None for a request that keeps its places, and no more."""
    if rng.random() < 0.4:
        return None
    kinds = rng.choices((STEP, GROW, RETRACT, DROP), (4, 2, 4, 1), k=rng.randint(1, 5))
    return Stay(tuple(_act(rng, kind) for kind in kinds), rng.random() < 0.8)


def _act(rng: random.Random, kind: str) -> Act:
    pause_s = rng.uniform(*PAUSE_S)
    if kind not in (RETRACT, DROP):
        return Act(kind, pause_s, disturbed=_disturbance(rng, turns=False))
    return Act(
        kind,
        pause_s,
        rng.uniform(*AWAY_S),
        _disturbance(rng, turns=True) if kind == RETRACT else None,
        _disturbance(rng, turns=True),
        squats=rng.choices((AS_MANY, ALL_PAGES, ALL_ROWS, ""), (5, 1, 1, 3))[0],
        squats_on=rng.random() < 0.4,
    )


def _disturbance(rng: random.Random, *, turns: bool) -> Disturbance | None:
    if rng.random() > 0.2:
        return None
    after_turns = rng.randint(0, TURNS) if turns and rng.random() < 0.4 else None
    return Disturbance(
        rng.choice((CANCEL, CANCEL_TWICE, ABORT, ABORT)), rng.uniform(*DISTURBED_S), after_turns
    )
