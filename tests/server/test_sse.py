"""Paced and merged sources: order, silence, errors, and nothing left open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from kvflow.server.http.sse import Paced, merged


class Source:
    """Numbers, then a wait until `go`; notes that it was closed."""

    def __init__(self, *numbers: int, error: Exception | None = None, waits: bool = False) -> None:
        self._numbers, self._error, self._waits = numbers, error, waits
        self.go = asyncio.Event()
        self.closed = False

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for number in self._numbers:
                yield number
            if self._waits:
                await self.go.wait()
            if self._error is not None:
                raise self._error
        finally:
            await asyncio.sleep(0)  # a drain that takes a turn of the loop
            self.closed = True


async def test_paced_says_none_in_silence_and_loses_nothing() -> None:
    source = Source(1, 2, waits=True)
    seen: list[int | None] = []
    async with Paced(source.items(), 0.01) as items:
        async for item in items:
            seen.append(item)
            if item is None:
                source.go.set()
    assert [item for item in seen if item is not None] == [1, 2]
    assert None in seen
    assert source.closed


@pytest.mark.parametrize("items_read", [0, 1, 2])
async def test_leaving_paced_closes_its_source_first(items_read: int) -> None:
    source = Source(1, 2, waits=True)
    async with Paced(source.items(), 0.01) as items:
        for _ in range(items_read):
            await anext(items)
    assert source.closed or items_read == 0  # a generator that never ran has nothing to close


async def test_cancelling_a_paced_reader_closes_its_source() -> None:
    source = Source(1, waits=True)
    waiting = asyncio.Event()

    async def read() -> None:
        async with Paced(source.items(), 60) as items:
            await anext(items)
            waiting.set()
            await anext(items)

    task = asyncio.create_task(read())
    await waiting.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.closed


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_merged_keeps_the_order_of_each_source(count: int) -> None:
    sources = [Source(1, 2, 3) for _ in range(count)]
    seen: dict[int, list[int]] = {}
    async for index, number in merged([source.items() for source in sources]):
        seen.setdefault(index, []).append(number)
    assert seen == {i: [1, 2, 3] for i in range(count)}
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("others", [0, 3])
async def test_the_first_error_ends_all_sources(others: int) -> None:
    failing = Source(1, error=ValueError("first"))
    waiting = [Source(1, waits=True) for _ in range(others)]
    with pytest.raises(ValueError, match="first"):
        async for _ in merged([failing.items(), *(source.items() for source in waiting)]):
            pass
    assert failing.closed
    assert all(source.closed for source in waiting)


async def test_closing_merged_closes_all_sources() -> None:
    sources = [Source(1, waits=True) for _ in range(3)]
    items = merged([source.items() for source in sources])
    for _ in sources:
        await anext(items)
    await items.aclose()
    assert all(source.closed for source in sources)
