"""The bench of stalls serves its largest cases whole; how long they take depends on the machine."""

from __future__ import annotations

import msgspec
import pytest

from kvflow.bench import crowds, stalls
from kvflow.http.app import MAX_BODY_BYTES
from kvflow.protocols.wire.messages import MAX_PAGES_PER_ROOM


def test_the_cases_are_the_largest_legal_ones() -> None:
    bodies = {name: msgspec.json.encode(body) for name, _, body in stalls.cases()}
    assert stalls.BOOTSTRAP_PAGES == MAX_PAGES_PER_ROOM
    assert MAX_BODY_BYTES - 8192 < max(map(len, bodies.values())) < MAX_BODY_BYTES - 256


@pytest.mark.slow
async def test_every_case_is_answered_and_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "WATCH_S", 0.0)
    monkeypatch.setattr(stalls, "STREAM_TOKENS", 50)
    monkeypatch.setattr(crowds, "IDLE_CONNECTIONS", 40)
    monkeypatch.setattr(crowds, "ANNOUNCED_ROOMS", 200)
    report = await stalls.bench_stalls(1, print)
    assert list(report["cases"]) == [*(name for name, _, _ in stalls.cases()), *crowds.crowds()]
    for figures in report["cases"].values():
        assert set(figures) == {"prefill", "decode", "idle"}
        assert all(seen["late_p99_ms"] >= seen["late_p50_ms"] for seen in figures.values())
