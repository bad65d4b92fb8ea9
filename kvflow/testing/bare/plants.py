"""Planted bugs of the simulator and of the walk, as far as they are in endpoints and tables: seeds must find each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kvflow.protocols.errors import MisuseError
from kvflow.protocols.machines.ranges import GrantRanges
from kvflow.testing.bare.run import simulate
from kvflow.testing.sim import plants_residency
from kvflow.testing.sim.plants import Plant, hunted
from kvflow.testing.sim.plants import all_plants as of_nodes
from kvflow.testing.sim.swap import swapped
from kvflow.testing.walk.plants import PLANTS as OF_THE_WALK

UNSEEN = {
    "free on timer": "it is in decode's shell",
    "double close": "it is in the room that users hold",
    "resurrect after terminal": "decode's shell closes a room that has ended",
    "second cancel skips the drain": "there is no task to cancel",
    "source let go": "the allocator's holds are a shell's",
    "failed slice retried": "it is in the data plane",
    "failed handle taken for landed": "it is in the data plane",
    "garbage ends the loop": "there is no task that reads",
    "earlier loans forgotten": "stores are a shell's",
    "earlier writer unwatched": "no decode has the pool of one before it; the walk finds its likeness",
    "close taken for proof": "it is in the shell's watches",
} | {plant.name: "no request leaves a device" for plant in plants_residency.PLANTS}
"""Of the whole-node simulator, in what is not here; each of those before "source let go" has a likeness in a table."""

OWN = (
    Plant(
        "settled range begins again",
        "a grant that decode has settled above an open one is not known to have ended",
        lambda: swapped(GrantRanges, "add", lambda *_: None),
        "I6",
    ),
)
"""Too rare for whole nodes, and too large for a walk."""


NOT_HERE = dict.fromkeys(
    ("earlier writer's death unseen", "earlier loans end with a link"), "no decode has the pool of one before it"
)
"""Of the walk."""


def all_plants() -> tuple[Plant, ...]:
    """Those of the walk are called so where another one has their name."""
    found = {plant.name: plant for plant in of_nodes() if plant.name not in UNSEEN}
    for plant in OF_THE_WALK:
        if plant.name in NOT_HERE:
            continue
        name = f"{plant.name} (walk)" if plant.name in found or plant.name in UNSEEN else plant.name
        found[name] = Plant(name, plant.text, plant.install, plant.invariant)
    return (*found.values(), *OWN)


def planted(name: str) -> AbstractContextManager[object]:
    """The plant of that name, installed; nothing for an empty one. Raises: MisuseError."""
    if not name:
        return nullcontext()
    known = {plant.name: plant for plant in all_plants()}
    if name not in known:
        unseen = UNSEEN | NOT_HERE
        why = f", where it cannot be seen: {unseen[name]}" if name in unseen else f"; there are: {', '.join(known)}"
        raise MisuseError(f"no plant {name!r}{why}")
    return known[name].install()


def hunt(name: str, seeds: Sequence[int], say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The first seed that finds a plant, and what it broke; no seed when none does."""
    with planted(name):
        return hunted(name, seeds, simulate, say)
