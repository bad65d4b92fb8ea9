"""Fixtures for tests of whatever stands on kvflow: `pytest_plugins = ["kvflow.testing.fixtures"]`
in a test module.

`kvflow_pair` is a prefill and a decode node in this process (see `testing.pair`). At its end both
must have come to rest, with no task left and nothing raised into the event loop; a test that leaves
something behind fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from kvflow.testing.pair import Pair, pair


@pytest_asyncio.fixture
async def kvflow_clean_loop() -> AsyncIterator[None]:
    """Nothing is left on the event loop: no task, no exception nobody saw."""
    loop = asyncio.get_running_loop()
    raised: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: raised.append(context))
    before = asyncio.all_tasks()
    yield
    for _ in range(3):
        await asyncio.sleep(0)  # callbacks of what was just closed
    left = [
        task for task in asyncio.all_tasks() - before - {asyncio.current_task()} if not task.done()
    ]
    assert not left, f"tasks left behind: {left}"
    assert not raised, f"raised into the event loop: {raised}"


@pytest_asyncio.fixture
async def kvflow_pair(kvflow_clean_loop: None) -> AsyncIterator[Pair]:
    """A prefill and a decode on a network in memory, at rest again at the end of the test."""
    async with pair() as made:
        yield made
        made.network.mend()
        for node in made.nodes:
            made.plane(node).release()
        await made.rest()
