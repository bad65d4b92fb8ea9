"""Each planted bug is found, by the seed that stands here and by the invariant it breaks.

A change of what nodes say to each other moves the seeds: `make prove` hunts them anew, and prints
what belongs here.
"""

from __future__ import annotations

import pytest

from kvflow.proof.sim.plants import all_plants, hunt, planted
from kvflow.proof.sim.run import simulate
from kvflow.protocols.errors import MisuseError
from tests.sim.both import (
    check_that_plants_are_gone_afterwards,
    check_that_the_seed_finds,
    check_what_a_hunt_says,
)

SEEDS = {
    "free on timer": (4, "I2"),
    "ack before drain": (0, "I12"),
    "ack popped before send": (0, "I5"),
    "abort never retried": (13, "I4"),
    "no grant check": (94, "I4"),
    "no grant check at prefill": (42, "I4"),
    "resurrect on late metadata": (5, "I6"),
    "failed slice retried": (4, "I3"),
    "success before all ranks": (5, "I8"),
    "double close": (0, "I1"),
    "tombstone unbounded": (0, "I5"),
    "restart taken for death": (13, "I2"),
    "silence taken for proof": (26, "I2"),
    "doubt taken for proof": (4, "I2"),
    "failed handle taken for landed": (4, "I3"),
    "heartbeat counts queueing": (1, "I4"),
    "handoff slot shared": (0, "I9"),
    "second cancel skips the drain": (8, "I13"),
    "source let go": (0, "I13"),
    "nothing said again": (25, "I5"),
    "dropped from one table": (0, "I7"),
    "ack for another life": (8, "I6"),
    "prompts not compared": (1, "I8"),
    "goodbye not said": (12, "I5"),
    "goodbye before the drain": (18, "I2"),
    "goodbye of another incarnation taken as proof": (13, "I2"),
    "goodbye proves what it names": (18, "I2"),
    "earlier loans forgotten": (63, "I1"),
    "earlier writer unwatched": (63, "I5"),
    "close taken for proof": (63, "I2"),
    "earlier loans of a decode forgotten by prefill": (190, "I5"),
    "garbage ends the loop": (3, "I5"),
    "free on timer (table)": (0, "I2"),
    "ack before drain (table)": (0, "I12"),
    "abort never retried (table)": (13, "I5"),
    "restart taken for death (table)": (13, "I2"),
    "failed handle taken for landed (table)": (4, "I3"),
    "doubt forgotten": (4, "I2"),
    "unproven taken for drained": (4, "I2"),
    "room failed ends the loan": (0, "I2"),
    "success before all ranks (table)": (5, "I8"),
    "resurrect after terminal": (4, "I4"),
    "success without the last word": (8, "I8"),
    "view instead of copy": (0, "I14"),
    "hand-over is a view": (0, "I9"),
    "index keys left out": (0, "I14"),
    "scales left out": (0, "I14"),
    "row left out": (0, "I14"),
    "host memory freed twice": (0, "I1"),
    "resumed before the copy has ended": (0, "I13"),
    "row given away in a step": (18, "I13"),
    "places let go in a copy": (3, "I13"),
    "copy cancelled, not drained": (3, "I12"),
    "abort forgets host memory": (3, "I5"),
    "failed return taken for one": (20, "I14"),
    "failed retract taken for one": (3, "I14"),
    "staging given back before the copy ended": (32, "I13"),
    "rooms that wait for staging are not woken": (5, "I7"),
    "a large room is passed for ever": (141, "I7"),
    "end told by another rule": (12, "I4"),
    "only the first group told": (12, "I4"),
    "linked groups mixed up": (12, "I4"),
    "closed while its group is asked for": (170, "I4"),
    "pages idle before the drain": (33, "I2"),
    "released as it fails": (7, "I2"),
    "closed before it was opened": (9, "I4"),
    "last posted first": (9, "I7"),
    "opened after the close": (973, "I4"),
    "offered too late and kept": (54, "I5"),
    "earlier loans not busy": (111, "I1"),
    "events lost between polls": (7, "I4"),
}


def test_there_are_enough_plants_with_names_of_their_own() -> None:
    names = [plant.name for plant in all_plants()]
    assert len(set(names)) == len(names) >= 12
    assert set(names) == set(SEEDS), "each plant has its seed here"


@pytest.mark.parametrize("name", SEEDS)
def test_the_pinned_seed_finds_the_plant(name: str) -> None:
    check_that_the_seed_finds(name, SEEDS[name], simulate, planted)


def test_a_plant_is_gone_afterwards() -> None:
    check_that_plants_are_gone_afterwards(all_plants(), simulate)


def test_a_hunt_says_what_it_found_or_that_it_did_not() -> None:
    check_what_a_hunt_says(hunt, "double close", "I1")


def test_an_unknown_plant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(MisuseError, match="free on timer"):
        planted("tulip")
