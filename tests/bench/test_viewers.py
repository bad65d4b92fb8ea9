"""Requests per second beside viewers of the live page, run small."""

from __future__ import annotations

import pytest

from kvflow.bench import viewers
from kvflow.bench.viewers import bench_viewers
from tests.bench.fleets import serving


@pytest.mark.slow
@pytest.mark.xdist_group("fleets")
async def test_both_sides_of_a_ratio_are_measured(
    forked_roles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewers, "serving", serving)
    said: list[str] = []
    report = await bench_viewers(2, 2, 6, 2, 1, said.append)
    assert 0 < report["ratio"]["min"] <= report["ratio"]["max"] and len(said) == 2
    assert report["requests_per_s"]["alone"]["min"] > 0 < report["ratio_of_means"]
