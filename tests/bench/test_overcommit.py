"""The figures of `kvflow bench overcommit`, and the model that it may serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvflow.bench import overcommit
from kvflow.bench.fixed_cost import LAYERS, build_fixed_cost_model
from kvflow.bench.overcommit import (
    COUNTERS,
    OvercommitPlan,
    _ratio,
    _step_cost,
    _Turn,
    bench_overcommit,
)
from kvflow.serve.engine.model.load import load_model
from tests.bench.fleets import serving


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


@pytest.mark.slow
@pytest.mark.xdist_group("fleets")
async def test_three_servers_give_the_same_answers_at_their_own_rates(
    forked_roles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overcommit, "serving", serving)
    said: list[str] = []
    report = await bench_overcommit(OvercommitPlan(requests=6, new_tokens=24, turns=1), said.append)
    assert report["pages"] < report["worst_pages"] and len(said) == 3
    for load in ("early ends", "no early ends"):
        found = report[load]
        assert found["ratio"]["min"] > 0 < found["bound"]["min"]
        assert 0 < found["tokens"] <= 6 * 24 and set(COUNTERS) <= found.keys()
