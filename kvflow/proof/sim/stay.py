"""Life of a request at decode after its room succeeded, drawn from the seed beforehand."""

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
# Turns of the event loop within which every caller of a copy resumes after the copy ends.
TURNS = 6


class Disturbance(NamedTuple):
    """Disturbance in the middle of an act: cancelled work, or an abort from outside."""

    how: str
    after_s: float
    # If not None, the disturbance comes this many turns of the event loop after the next copy ends,
    # and `after_s` has no effect.
    turns: int | None = None


class Act(NamedTuple):
    kind: str
    pause_s: float  # pause before the act
    away_s: float = 0.0
    disturbed: Disturbance | None = None
    return_disturbed: Disturbance | None = None
    squats: str = ""  # places that another request takes meanwhile
    # True if the other request stays until this one is back, or has used up its tries.
    squats_on: bool = False


class Stay(NamedTuple):
    """Acts of a request. A request that is away comes back before its next act.

    With `returns`, it also comes back after its last act.
    """

    acts: tuple[Act, ...]
    returns: bool = True


GOOD = Stay((Act(RETRACT, 0.0, squats=AS_MANY), Act(STEP, 0.0)))
"""The request leaves between landing and its first step, and comes back."""


def draw_stay(rng: random.Random) -> Stay | None:
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
