"""Every bug planted in the machines is found by the exhaustive walk, by the invariant it breaks."""

from __future__ import annotations

import pytest

from kvflow.protocols.machines import decode_room, prefill_room
from kvflow.protocols.machines import loan as loans
from kvflow.testing.sim import explore
from kvflow.testing.sim.explore_tables import Bounds
from kvflow.testing.sim.table_plants import PLANTS, Plant

ONE = Bounds(chunks=2, in_flight=2, drops=1, duplicates=1)
THREE = Bounds(ranks=2, chunks=1, in_flight=2, drops=0, duplicates=0, crashes=0, aborts=0, doubts=0, silences=0)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_is_found(plant: Plant) -> None:
    with plant.install():
        report = explore.walk(THREE if plant.name == "success before all ranks" else ONE)
    assert report["violations"] == 1, "nobody noticed"
    print(f"{plant.name}: {report['broken']}, {len(report['path'])} steps, {report['states']} states")
    assert report["broken"].split(":")[0] == plant.invariant
    assert report["path"] and all(report["path"])


def test_a_plant_leaves_nothing_behind() -> None:
    before = [module.__dict__.copy() for module in (decode_room, loans, prefill_room)]
    for plant in PLANTS:
        with plant.install():
            pass
    assert [module.__dict__ for module in (decode_room, loans, prefill_room)] == before
