"""Every bug planted in what ships is found by the exhaustive walk, by the invariant it breaks."""

from __future__ import annotations

import pytest

from kvflow.proof.walk import run
from kvflow.proof.walk.plants import PLANTS
from kvflow.proof.walk.plants_tables import Plant
from kvflow.protocols.decode import core as decode_core
from kvflow.protocols.decode import endpoint as decode_endpoint
from kvflow.protocols.machines import decode_room, grants, link, peer, prefill_room
from kvflow.protocols.machines import loan as loans
from kvflow.protocols.prefill import core as prefill_core
from kvflow.protocols.prefill import endpoint as prefill_endpoint

MODULES = (decode_room, grants, link, loans, peer, prefill_room)
PATCHED = (decode_core, decode_endpoint, prefill_core, prefill_endpoint)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_is_found(plant: Plant) -> None:
    with plant.install():
        report = run.walk(plant.bounds)
    assert report["violations"] == 1, "the walk has not found it"
    print(
        f"{plant.name}: {report['broken']}, {len(report['path'])} steps, {report['states']} states"
    )
    assert report["broken"].split(":")[0] == plant.invariant
    assert report["path"] and all(report["path"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "bounds", sorted({plant.bounds for plant in PLANTS}, key=repr), ids=lambda bounds: ""
)
def test_nothing_is_found_without_the_plant(bounds: object) -> None:
    report = run.walk(bounds)  # type: ignore[arg-type]
    assert report["violations"] == 0, report


def test_a_plant_leaves_nothing_behind() -> None:
    before = [module.__dict__.copy() for module in (*MODULES, *PATCHED)]
    cells = [dict(module.TABLE.moves) for module in MODULES]
    for plant in PLANTS:
        with plant.install():
            pass
    assert [module.__dict__ for module in (*MODULES, *PATCHED)] == before
    assert [dict(module.TABLE.moves) for module in MODULES] == cells
