"""The pair that most of these tests use, and an end for a test that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvflow.testing.fixtures import kvflow_clean_loop, kvflow_pair
from kvflow.testing.pair import Pair

__all__ = ["kvflow_clean_loop", "kvflow_pair"]
PATIENCE_S = 20


@pytest_asyncio.fixture(autouse=True)
async def _no_hang() -> AsyncIterator[None]:
    # A signal does not get through to uvloop's loop, so a test that hangs is cancelled.
    def cancel() -> None:
        for task in asyncio.all_tasks():
            if not task.get_name().startswith("kvflow"):
                task.cancel(f"nothing happened for {PATIENCE_S} s")

    watchdog = asyncio.get_running_loop().call_later(PATIENCE_S, cancel)
    yield
    watchdog.cancel()


@pytest.fixture
def p(kvflow_pair: Pair) -> Pair:
    return kvflow_pair
