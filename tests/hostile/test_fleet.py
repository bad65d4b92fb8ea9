"""Real roles under fire, over real HTTP (the commands print the figures, at full size)."""

from __future__ import annotations

import pytest

from tests.hostile import errors, http, storm
from tests.soak import sized

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("printed")]


async def test_broken_http(seed: int) -> None:
    report = await http.run(each=sized(100, 300), seed=seed, good=24, loris=10)
    print(report)
    assert not http.faults(report), report


async def test_failures_at_prefill(seed: int) -> None:
    report = await errors.run(failures=40, seed=seed)
    print(report)
    assert not [fault for fault in errors.faults(report) if not fault.startswith("p99")], report


@pytest.mark.parametrize("router", ["kvflow", pytest.param("sglang", marks=pytest.mark.soak)])
async def test_clients_that_leave(router: str, seed: int) -> None:
    report = await storm.run(requests=sized(60, 100), router=router, seed=seed)
    print(report)
    assert not storm.faults(report), report
