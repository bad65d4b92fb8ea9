"""The bench of optimistic prefill, run small."""

from __future__ import annotations

import pytest

from kvflow.bench import early
from tests.bench.fleets import serving

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleets")]


async def test_it_measures_prompts_that_were_begun_early(
    forked_roles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "serving", serving)
    report = await early.bench_early(turns=1, gap_s=0.5)
    assert report["optimistic"]["starts"] == report["optimistic"]["hits"] == 2
    assert len(report["off"]["ms"]) == len(report["on"]["ms"]) == 1
