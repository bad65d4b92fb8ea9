"""Pauses in the loops of vLLM's processes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.connectors.vllm import few_cores


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_changed_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it would fail
    if value is None:
        monkeypatch.delenv(few_cores.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(few_cores.VARIABLE, value)
    few_cores.install()


@pytest.mark.parametrize(("idle_s", "done"), [(0.0, "pause"), (59.0, "pause"), (61.0, "wait")])
def test_a_loop_pauses_until_nothing_has_come_for_long(
    monkeypatch: pytest.MonkeyPatch, idle_s: float, done: str
) -> None:
    found: list[str] = []
    clock = SimpleNamespace(monotonic=lambda: 1000.0, sleep=lambda _: found.append("pause"))
    monkeypatch.setattr(few_cores, "time", clock)

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        assert timeout_ms == 7
        found.append("wait")

    few_cores._pausing(wait)(SimpleNamespace(last_read=1000.0 - idle_s), 7)
    assert found == [done]
