"""The benchmark of slices: every size, both ways, and widths that are none."""

from __future__ import annotations

import pytest

from kvflow.bench import slices
from kvflow.bench.slices import WAYS, bench_slices, widths_of
from kvflow.protocols.errors import MisuseError


@pytest.mark.parametrize("text", ["2", "2:", "a:b", "2:2", "0:1", "1:9", "1:2:3"])
def test_widths_that_are_none_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(
        MisuseError, match=f"^--tp {text}: not two (different widths of 1 to 8|numbers, as in 2:1)"
    ):
        widths_of(text)
    assert widths_of("2:1") == (2, 1)


@pytest.mark.slow
async def test_a_size_is_measured_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", (64,))
    monkeypatch.setattr(slices, "ROOM_SLICES", 1 << 12)
    said: list[str] = []
    report = await bench_slices(("local",), (2, 1), 2, said.append)
    found = report["local"]["64"]
    assert len(said) == 1 and found["ratio"]["q1"] > 0
    for way in WAYS:
        assert min(found[way].values()) > 0
