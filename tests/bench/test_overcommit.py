"""The figures of `kvflow bench overcommit`, and the model that it may serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvflow.bench.fixed_cost import LAYERS, build_fixed_cost_model
from kvflow.bench.overcommit import _ratio, _step_cost, _Turn
from kvflow.serve.engine.model.load import load_model


def test_the_cost_of_a_step_and_of_a_row() -> None:
    turns = [_Turn((steps * 3 + 1000 * 0.5) / 1e3, steps) for steps in (100, 250, 400)]
    assert _step_cost(turns, tokens=1000) == pytest.approx({"fixed": 3.0, "row": 0.5})
    assert _step_cost(turns[:1] * 3, tokens=1000) == {}, "nothing tells one from the other"


def test_ratios_are_of_the_same_turns() -> None:
    fast, slow = (
        [_Turn(seconds, 1) for seconds in turns] for turns in ((1.0, 2.0, 1.0), (2.0, 3.0, 1.0))
    )
    assert _ratio(fast, slow) == {"median": 1.5, "min": 1.0, "max": 2.0}


def test_the_fixed_cost_model_is_the_same_each_time_and_can_be_served(tmp_path: Path) -> None:
    weights = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        build_fixed_cost_model(tmp_path / name)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert len(load_model(str(tmp_path / "one"), "float32").streams) == 2 * LAYERS
