"""Pauses in the loops in which vLLM's processes wait for each other, for hosts with few cores.

After each message, vLLM's engine and each of its workers spin on a core for a second. If there are
more such loops than cores, all other work, transfers included, waits for its turn, at times for
seconds. With two servers on two cores the slowest first token came after 1.1 s without pauses, and
after 0.1 s with them.
"""

from __future__ import annotations

import os
import time
from functools import wraps
from typing import Any

VARIABLE = "KVFLOW_VLLM_FEW_CORES"
_PAUSE_S = 0.0003
# After this, vLLM's own wait takes over; it sleeps until a message arrives.
_IDLE_AFTER_S = 60.0


def install() -> None:
    """Add the pauses if the environment variable `VARIABLE` is set. Idempotent."""
    if os.environ.get(VARIABLE, "") in ("", "0"):
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    if not hasattr(SpinCondition.wait, "__wrapped__"):
        SpinCondition.wait = _pausing(SpinCondition.wait)


def _pausing(wait: Any) -> Any:
    @wraps(wait)
    def paused(self: Any, timeout_ms: int | None = None) -> None:
        if time.monotonic() <= self.last_read + _IDLE_AFTER_S:
            time.sleep(_PAUSE_S)
        else:
            wait(self, timeout_ms)

    return paused
