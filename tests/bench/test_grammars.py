"""Time per token of answers that match a grammar, run small."""

from __future__ import annotations

import pytest

from kvflow.bench import grammars
from kvflow.bench.grammars import bench_grammars
from tests.bench.fleets import serving


@pytest.mark.slow
@pytest.mark.xdist_group("fleets")
async def test_both_sides_of_a_ratio_are_measured(
    forked_roles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "serving", serving)
    said: list[str] = []
    report = await bench_grammars((1, 2), 12, 0.0, 1, 1, said.append)
    assert len(said) == 6
    for found in report["clients"].values():
        assert set(found) == {"free", "json_schema", "regex"}
        assert (
            found["free"]["time_ratio"]["median"] == 1 and found["regex"]["time_ratio"]["min"] > 0
        )
