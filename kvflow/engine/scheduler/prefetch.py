"""What the cache brings to the device for one request before it begins, and how long the request waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, Literal, TypeVar

from kvflow.aio import run_to_end

T = TypeVar("T")
PrefetchPolicy = Literal["best_effort", "timeout", "wait_complete"]
TIMEOUT_S, TIMEOUT_PER_TOKEN_S = 1.0, 0.00025  # of SGLang's hierarchical cache


def patience_s(policy: PrefetchPolicy, tokens: int) -> float | None:
    """How long a request with a prompt of `tokens` waits for nothing else; None: as long as it takes."""
    if policy == "wait_complete":
        return None
    return 0.0 if policy == "best_effort" else TIMEOUT_S + tokens * TIMEOUT_PER_TOKEN_S


async def beside(loading: Coroutine[Any, Any, None], other: Awaitable[T], limit_s: float | None) -> T:
    """Wait for `other`, and at most `limit_s` longer for `loading`. It has ended when this returns or raises: what did
    not come in time is stopped, and drained. Raises: what `other` raises."""
    task = asyncio.ensure_future(loading)
    try:
        found = await other
        if not task.done():
            await asyncio.wait([task], timeout=limit_s)
    finally:
        task.cancel()
        await run_to_end(asyncio.gather(task, return_exceptions=True))
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
    return found
