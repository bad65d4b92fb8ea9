"""Live nodes under attack: nothing dies, everything is counted, good rooms go on (the command
prints the figures).
"""

from __future__ import annotations

import pytest

from tests.hostile.wire import faults, run
from tests.soak import sized


@pytest.mark.parametrize(
    "frames", [600, pytest.param(sized(4_000, 10_000), marks=pytest.mark.slow)]
)
async def test_both_ends_of_the_link(frames: int, seed: int) -> None:
    report = await run(frames=frames, seed=seed, rooms=100, raw=60)
    print(report)
    assert not faults(report), report
