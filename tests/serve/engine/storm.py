"""Requests in lanes, one after the other in each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable


async def in_lanes(lanes: int, requests: int, one: Callable[[int], Awaitable[object]]) -> None:
    """Call `one` with the number of each request."""
    numbers = iter(range(requests))

    async def lane() -> None:
        for number in numbers:
            await one(number)

    async with asyncio.TaskGroup() as running:
        for _ in range(lanes):
            running.create_task(lane())


async def turns(chance: random.Random, *counts: int) -> None:
    for _ in range(chance.choice(counts)):
        await asyncio.sleep(0)
