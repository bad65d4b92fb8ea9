"""A node that stood still itself does not take its peers for silent."""

from __future__ import annotations

import time

import msgspec

from kvflow.testing.pair import QUICK, pair
from tests.handlers.scenes import success

TIMING = msgspec.structs.replace(QUICK, heartbeat_s=0.05, lost_after_s=0.3)


async def test_a_stalled_loop_ends_no_room() -> None:
    async with pair(timing=TIMING) as p:
        await success(p, 1)
        source, target = await p.open(2, list(range(40)))
        await source.matched()
        time.sleep(2 * TIMING.lost_after_s)  # the stall itself: nobody reads, nobody sweeps
        await success(p, 3)
        assert not source.ended and not target.ended
        target.close()
        await p.rest()
