"""A node that stood still itself does not take its peers for silent."""

from __future__ import annotations

import time

import msgspec

from kvflow.handlers.shell import Shell
from kvflow.telemetry.counters import Counts
from kvflow.testing.pair import QUICK, pair, until
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


async def test_all_of_a_stall_is_seen_though_nothing_was_due() -> None:
    """Else what is left of its patience for a peer may be next to nothing afterwards."""
    endpoint = NothingDue()
    shell = Shell(endpoint, TIMING, Counts(), time.monotonic)
    shell.run()
    time.sleep(2 * TIMING.lost_after_s)
    await until(lambda: endpoint.credited_s)
    assert endpoint.credited_s > 2 * TIMING.lost_after_s - 2 * TIMING.heartbeat_s
    await shell.stop()


class NothingDue:
    def __init__(self) -> None:
        self.outbox: list[object] = []
        self.credited_s = 0.0

    def next_tick(self) -> float:
        return time.monotonic() + 60

    def tick(self, now: float) -> None: ...

    def credit_stall(self, late_s: float, now: float) -> None:
        self.credited_s += late_s
