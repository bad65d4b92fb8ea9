"""What users asked to be called with: their mistakes must not leave a room half ended."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvflow.telemetry.counters import Counts

log = logging.getLogger(__name__)


def call_all(callbacks: list[Callable[[], None]], counts: Counts) -> None:
    """Call each once and forget it; what one raises is logged and counted, and the next one is called."""
    called, callbacks[:] = callbacks[:], []
    for callback in called:
        try:
            callback()
        except Exception:
            counts.handler_errors += 1
            log.exception("a room's on_end callback failed")
