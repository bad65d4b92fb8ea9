"""Live nodes, lied to in every field of every message: nothing dies, nothing grows (the command
prints the figures).
"""

from __future__ import annotations

import pytest

from tests.hostile.falsehoods import name_of, paths
from tests.hostile.lies import faults, run
from tests.protocols.wire import GOOD, to_decode, to_prefill


@pytest.mark.parametrize(
    "messages",
    [100, pytest.param(2_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
async def test_both_ends_of_the_link(messages: int, seed: int) -> None:
    report = await run(messages=messages, seed=seed, rooms=100)
    print(report)
    assert not faults(report), report
    if messages < 2_000:
        return  # too few to meet every field
    for kind in (*to_prefill, *to_decode):
        for path in paths(GOOD[kind]):
            assert report["fields"].get(name_of(GOOD[kind], path)), (
                f"{name_of(GOOD[kind], path)}: never a lie"
            )
