"""Fixtures for tests of code that stands on kvflow: `pytest_plugins = ["kvflow.testing.fixtures"]`
in a test module.

`kvflow_pair` is a prefill and a decode node in this process (see `testing.pair`). At its end both
must be at rest, with no task left and no exception raised into the event loop; otherwise the test
fails.
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
        # Callbacks of objects that were just closed run first.
        await asyncio.sleep(0)
    left = [
        task for task in asyncio.all_tasks() - before - {asyncio.current_task()} if not task.done()
    ]
    assert not left, f"tasks left behind: {left}"
    assert not raised, f"raised into the event loop: {raised}"


@pytest_asyncio.fixture
async def kvflow_pair(kvflow_clean_loop: None) -> AsyncIterator[Pair]:
    """Yield a prefill and a decode on a network in memory, at rest again when the test ends."""
    async with pair() as made:
        yield made
        # A test may end with the network cut and with writes held, which is not a leak.
        made.network.mend()
        for node in made.nodes:
            made.plane(node).release()
        await made.rest()
