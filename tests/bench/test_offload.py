"""`bench offload` in small: what is copied out comes back, beside a memcpy."""

from __future__ import annotations

import threading

import pytest

from kvflow.bench.offload import OffloadPlan, bench_offload
from kvflow.bench.offload_steps import NEW_TOKENS, DecodeBatch
from kvflow.serve.demo_model import DEMO_MODEL_DIR
from kvflow.serve.engine.model.load import load_model


@pytest.mark.parametrize("order", ["page_first", "layer_first"])
async def test_copies_are_divided_by_a_memcpy_of_as_many_bytes(order: str) -> None:
    said: list[str] = []
    report = (
        await bench_offload(OffloadPlan(pages=9, rounds=3, orders=(order,), batch=0), said.append)
    )[order]
    assert report["bytes"] == 9 << 21 and len(said) == 4
    for way in ("copy_out", "restore"):
        assert 0 < report[f"{way}_worst"] <= report[f"{way}_over_memcpy"]
        assert report[f"{way}_gb_s"] > 0
    assert report["holds"] == (
        min(report["copy_out_over_memcpy"], report["restore_over_memcpy"]) >= 0.8
    )
    assert "beside_steps" not in report


async def test_steps_and_copies_are_timed_beside_each_other() -> None:
    plan = OffloadPlan(pages=2, rounds=2, batch=2, steps_s=0.05)
    beside = (await bench_offload(plan, lambda _: None))["page_first"]["beside_steps"]
    assert beside.pop("step_ms") > 0
    work = ("busy_core", "memcpy", "copy_out", "restore")
    assert set(beside) == {
        f"{what}{name}" for name in work for what in ("step_beside_", "step_p99_beside_")
    } | {f"{name}_beside_steps" for name in work}
    assert all(0 < ratio < 1000 for ratio in beside.values())


def test_a_batch_decodes_for_ever() -> None:
    batch = DecodeBatch(load_model(str(DEMO_MODEL_DIR)), 2)
    stop = Stopped(2 * NEW_TOKENS)
    assert len(batch.steps_until(stop)) == 1 + 2 * NEW_TOKENS
    # Work may end before the thread has begun.
    assert len(batch.steps_until(stop)) == 1
    batch.pool.close()


class Stopped(threading.Event):
    """Set after so many looks at it."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._left = looks

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0
