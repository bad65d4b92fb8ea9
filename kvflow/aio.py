"""Awaiting what runs in a thread: cancelling a coroutine does not stop it, so it is waited for all the same (I12)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_to_end(running: asyncio.Future[T]) -> T:
    """Await a thread's work until it has ended. A cancellation is raised only then; a second one changes nothing."""
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not running.cancelled():
            running.exception()  # retrieved, or asyncio logs it
        raise cancelled
    return running.result()


async def in_thread(work: Callable[[], T], undo: Callable[[T], object] = lambda _: None) -> T:
    """Run `work` in a thread, to its end; where this coroutine was cancelled meanwhile, its result is undone."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await run_to_end(running)
    except asyncio.CancelledError:
        if not running.cancelled() and running.exception() is None:
            undo(running.result())
        raise
