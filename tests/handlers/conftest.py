"""A test that hangs is cancelled, so that the next one runs: a signal does not get through to
uvloop's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio

PATIENCE_S = 20


@pytest_asyncio.fixture(autouse=True)
async def _no_hang() -> AsyncIterator[None]:
    def cancel() -> None:
        for task in asyncio.all_tasks():
            if not task.get_name().startswith("kvflow"):
                task.cancel(f"nothing happened for {PATIENCE_S} s")

    watchdog = asyncio.get_running_loop().call_later(PATIENCE_S, cancel)
    yield
    watchdog.cancel()
