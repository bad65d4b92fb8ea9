"""Time as an event: one loop that looks at what has stood still, for both roles."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvflow.protocols.limits import Timing
from kvflow.telemetry.counters import Counts

log = logging.getLogger(__name__)


async def keep_sweeping(
    timing: Timing, counts: Counts, sweep: Callable[[], None], forgive: Callable[[float], None]
) -> None:
    """Call `sweep` every `timing.sweep_s` until cancelled; its errors are counted, and the loop goes on.

    `forgive(late_s)` comes first when the loop itself stood still: what peers said meanwhile lies unread, so their
    silence does not count.
    """
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + timing.sweep_s
        await asyncio.sleep(timing.sweep_s)
        try:
            if (late_s := loop.time() - due) > timing.heartbeat_s:
                forgive(late_s)
            sweep()
        except Exception:
            counts.handler_errors += 1
            log.exception("sweep failed")
