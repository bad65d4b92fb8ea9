"""Input of one seed: a scenario of whole nodes, with twists that only bare endpoints have."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.scenario import SHAPES, Request, Scenario, Shape, draw
from kvflow.proof.sim.variety import NEVER, PROMPT, Variety


class Twist(NamedTuple):
    prefix_pages: int = 0  # number of pages that decode already has
    # If False, the offer itself announces the room, provided that every rank is linked.
    announces: bool = True
    rendezvous_s: float | None = None
    second_decode: int | None = None  # another decode that opens the same room
    # Seconds until prefill asks for places for the whole prompt, or None if it never does.
    begins_after_s: float | None = None
    waits: bool = False  # True if decode holds its pages back until prefill begins


class Visit(NamedTuple):
    """A visit by a guest decode. Prefill has a place for it only if a silent decode makes way."""

    at_s: float
    decode: int  # the decode that is halted at `at_s`, for `silent_s`
    silent_s: float
    comes_after_s: float
    stays_s: float


class Twists(NamedTuple):
    """Twists of one run, and the chances of faults that the whole-node simulator lacks."""

    requests: list[Twist]
    locks_out: float  # chance that a connection is locked out
    refuses: float  # chance that a registration is refused
    damages: float  # chance that a verified write is damaged
    fails_sums: float  # chance that decode cannot compute a checksum
    freezes: float  # chance that a stuck write never ends
    declares_after_s: float | None  # seconds until an operator declares a crashed prefill dead
    visit: Visit | None


def draw_all(
    rng: random.Random, faults: Faults, shapes: Sequence[Shape] = SHAPES
) -> tuple[Scenario, Twists]:
    scenario = draw(rng, faults, shapes)
    twists = _twists(rng, scenario)
    if twists.visit is not None:
        variety = scenario.variety
        # A guest is turned away only if the regular decodes take all places.
        bounds = msgspec.structs.replace(variety.bounds, targets=scenario.decodes)
        scenario = scenario._replace(variety=variety._replace(bounds=bounds))
    return scenario, twists


def draw_waiting(rng: random.Random, faults: Faults) -> tuple[Scenario, Twists]:
    """Call `draw_all`, and in some runs let decodes wait until prefill begins a room."""
    scenario, twists = draw_all(rng, faults)
    if rng.random() < _WAIT:
        twists = twists._replace(requests=[_waiting(rng, twist) for twist in twists.requests])
    return scenario, twists


def _waiting(rng: random.Random, twist: Twist) -> Twist:
    after_s = rng.choice((0.0, rng.uniform(0.0, 0.4)))
    return twist._replace(
        begins_after_s=after_s if rng.random() < 0.9 else None, waits=rng.random() < 0.7
    )


def _twists(rng: random.Random, scenario: Scenario) -> Twists:
    variety: Variety = scenario.variety
    return Twists(
        [_twist(rng, request, scenario.decodes) for request in scenario.requests],
        locks_out=0.2 if rng.random() < 0.06 else 0.0,
        refuses=0.5 if rng.random() < 0.08 else 0.0,
        damages=0.3 if variety.verify and rng.random() < 0.4 else 0.0,
        fails_sums=0.1 if variety.verify and rng.random() < 0.3 else 0.0,
        freezes=0.5 if rng.random() < 0.3 else 0.0,
        visit=_visit(rng, scenario.decodes)
        if rng.random() < 0.12 and variety.fences != NEVER
        else None,
        declares_after_s=rng.uniform(0.0, 1.5)
        if rng.random() < _DECLARED[variety.fences]
        else None,
    )


def _visit(rng: random.Random, decodes: int) -> Visit:
    at_s, comes_after_s = rng.uniform(0.05, 0.6), rng.uniform(1.5, 2.1)
    silent_s = comes_after_s + rng.uniform(0.0, 0.6)
    stays_s = comes_after_s + rng.uniform(0.02, 0.3)
    return Visit(at_s, rng.randrange(decodes), silent_s, comes_after_s, stays_s)


_WAIT = 0.3
_DECLARED = {PROMPT: 0.0, NEVER: 0.6, "late": 0.3}


def _twist(rng: random.Random, request: Request, decodes: int) -> Twist:
    if rng.random() < 0.6:
        return Twist()
    pages = len(request.prompt) // 4 + 1
    return Twist(
        prefix_pages=rng.randint(1, pages) if rng.random() < 0.4 else 0,
        announces=rng.random() < 0.5,
        rendezvous_s=rng.uniform(0.05, 3.0) if rng.random() < 0.3 else None,
        second_decode=rng.randrange(decodes) if decodes > 1 and rng.random() < 0.15 else None,
    )
