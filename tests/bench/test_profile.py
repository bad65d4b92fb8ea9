"""What a room calls, counted in the processes of the bench."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvflow.bench import profile

ROOT = str(Path(__file__).parents[2])


def test_calls_are_per_room_and_ours_apart() -> None:
    functions = [
        ["/tree/kvflow/node.py", "room", 20, 0.001],
        ["/tree/kvflow/bench/worker.py", "_lane", 10, 0.004],
        ["~", "len", 70, 0.002],
    ]
    found = profile.per_room(functions, 10)
    assert (found["calls"], found["kvflow_calls"]) == (10.0, 2.0)
    assert (found["us"], found["kvflow_us"]) == (700.0, 100.0)
    names = [row["function"] for row in found["functions"]]
    assert names == ["bench/worker.py _lane", "~ len", "node.py room"]


async def test_each_side_of_a_checkout_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "ROOMS", 50)
    report = await profile.bench_profile([ROOT], "local", 4, print)
    for side in ("prefill", "decode"):
        assert report[ROOT][side]["kvflow_calls"] > 1
        assert report[ROOT][side]["calls"] > report[ROOT][side]["kvflow_calls"]
