"""Pauses in the loops in which vLLM's processes wait for each other, for hosts with few cores.

For a second after each message vLLM's engine and every worker take a core. Where there are fewer
cores than such loops, whatever else has to run, transfers too, waits for its turn, at times for
seconds (two servers on two cores: the slowest first token came after 1.1 s, and after 0.1 s with
pauses).
"""

from __future__ import annotations

import os
import time
from functools import wraps
from typing import Any

VARIABLE = "KVFLOW_VLLM_FEW_CORES"
_PAUSE_S = 0.0003
_IDLE_AFTER_S = 60.0  # afterwards they wait as vLLM does, which then sleeps until it is woken


def install() -> None:
    """Where the variable is set: pause in these loops. Once in a process."""
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
