"""`bench offload` in small: what is copied out comes back, and is divided by a memcpy of the same run."""

from __future__ import annotations

import pytest

from kvflow.bench.offload import OffloadPlan, bench_offload


@pytest.mark.parametrize("order", ["page_first", "layer_first"])
async def test_copies_are_divided_by_a_memcpy_of_as_many_bytes(order: str) -> None:
    said: list[str] = []
    report = (await bench_offload(OffloadPlan(pages=9, rounds=3, orders=(order,)), said.append))[order]
    assert report["bytes"] == 9 << 21 and len(said) == 4
    for way in ("copy_out", "restore"):
        assert 0 < report[f"{way}_worst"] <= report[f"{way}_over_memcpy"]
        assert report[f"{way}_gb_s"] > 0
    assert report["holds"] == (min(report["copy_out_over_memcpy"], report["restore_over_memcpy"]) >= 0.8)
