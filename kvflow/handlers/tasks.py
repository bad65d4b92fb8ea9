"""Tasks that nobody awaits: what ends one by surprise is logged and counted, never silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from kvflow.protocols.errors import TransferError
from kvflow.protocols.limits import Timing
from kvflow.protocols.ports import DataPlane, Endpoint
from kvflow.telemetry.counters import Counts

log = logging.getLogger(__name__)


def spawn(work: Coroutine[Any, Any, None], name: str, counts: Counts) -> asyncio.Task[None]:
    """Start `work` as a task."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            counts.handler_errors += 1
            log.error("%s ended", name, exc_info=error)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(ended)
    return task


async def fenced(plane: DataPlane, writer: Endpoint, timing: Timing, counts: Counts) -> bool:
    """True once no write of `writer` can reach our pool any more, False when that can never be proven from here.

    Anything but an answer (no descriptor left to watch with, say) is counted, and asked again.
    """
    while True:
        try:
            await plane.fence(writer)
        except TransferError:
            return False
        except Exception:
            counts.handler_errors += 1
            log.exception("cannot watch the process of %s for now", writer.address)
            await asyncio.sleep(timing.heartbeat_s)
        else:
            return True
