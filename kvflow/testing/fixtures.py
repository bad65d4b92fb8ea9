"""Fixtures for tests of code that uses kvflow.

Enable them with `pytest_plugins = ["kvflow.testing.fixtures"]` in a test module. `kvflow_pair` is a
prefill and a decode node in this process (see `testing.pair`). The test fails unless both nodes are
at rest when it ends, no task is left, and the event loop caught no exception.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from kvflow.testing.pair import Pair, pair


@pytest_asyncio.fixture
async def kvflow_clean_loop() -> AsyncIterator[None]:
    """Check that the test leaves no task and no unhandled exception on the event loop."""
    loop = asyncio.get_running_loop()
    raised: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: raised.append(context))
    before = asyncio.all_tasks()
    yield
    for _ in range(3):
        # Closing an object may schedule callbacks. Let them run before looking for leaks.
        await asyncio.sleep(0)
    left = [
        task for task in asyncio.all_tasks() - before - {asyncio.current_task()} if not task.done()
    ]
    assert not left, f"tasks left behind: {left}"
    assert not raised, f"raised into the event loop: {raised}"


@pytest_asyncio.fixture
async def kvflow_pair(kvflow_clean_loop: None) -> AsyncIterator[Pair]:
    """Yield a prefill and a decode on an in-memory network. Both must be at rest at the end."""
    async with pair() as made:
        yield made
        # A test may end while the network is cut or writes are held. Neither is a leak.
        made.network.mend()
        for node in made.nodes:
            made.plane(node).release()
        await made.rest()
