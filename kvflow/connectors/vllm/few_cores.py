"""Pauses in the loops in which vLLM's processes wait for each other, for hosts with few cores.

vLLM's engine and every worker occupy a core for a second after each message. Where there are fewer
cores than such loops, all other work, transfers included, waits for its turn, at times for seconds:
with two servers on two cores the slowest first token came after 1.1 s, and with pauses after 0.1 s.
"""

from __future__ import annotations

import os
import time
from functools import wraps
from typing import Any

VARIABLE = "KVFLOW_VLLM_FEW_CORES"
_PAUSE_S = 0.0003
_IDLE_AFTER_S = 60.0  # after this vLLM's own wait is used, which sleeps until a message


def install() -> None:
    """Pause in these loops where the variable is set. Takes effect once in a process."""
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
