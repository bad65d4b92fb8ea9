"""Arrivals of several sources: order, batches, silence, errors, and nothing left open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from kvflow.http.sse import Arrivals


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


async def test_silence_is_an_empty_batch_and_nothing_is_lost() -> None:
    source = Source(1, 2, waits=True)
    seen: list[int] = []
    silences = 0
    async with Arrivals([source.items()], 0.01) as arrivals:
        async for batch in arrivals:
            seen += [number for _, number in batch]
            silences += not batch
            if silences == 3:
                source.go.set()
    assert seen == [1, 2]
    assert silences >= 3  # a busy machine has more of them before the source has ended
    assert source.closed


async def test_a_reader_that_was_busy_has_not_waited_in_silence() -> None:
    source = Source(waits=True)
    loop = asyncio.get_running_loop()
    async with Arrivals([source.items()], 0.05) as arrivals:
        await asyncio.sleep(0.12)  # the timer has come twice meanwhile: what is waited for here
        began = loop.time()
        assert await anext(arrivals) == []
    assert loop.time() - began >= 0.02


async def test_a_slow_reader_gets_what_has_come_in_one_batch() -> None:
    source = Source(1, 2, 3, waits=True)
    async with Arrivals([source.items()]) as arrivals:
        assert await anext(arrivals) == [(0, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize("batches", [0, 1])
async def test_leaving_closes_the_sources_first(batches: int) -> None:
    sources = [Source(1, 2, waits=True) for _ in range(2)]
    async with Arrivals([source.items() for source in sources], 0.01) as arrivals:
        for _ in range(batches):
            await anext(arrivals)
    # One that never ran has nothing to close.
    assert all(source.closed or batches == 0 for source in sources)


async def test_cancelling_a_reader_closes_its_sources() -> None:
    source = Source(1, waits=True)
    waiting = asyncio.Event()

    async def read() -> None:
        async with Arrivals([source.items()], 60) as arrivals:
            await anext(arrivals)
            waiting.set()
            await anext(arrivals)

    task = asyncio.create_task(read())
    await waiting.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.closed


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_each_source_keeps_its_order(count: int) -> None:
    sources = [Source(1, 2, 3) for _ in range(count)]
    seen: dict[int, list[int]] = {}
    async with Arrivals([source.items() for source in sources]) as arrivals:
        async for batch in arrivals:
            for index, number in batch:
                seen.setdefault(index, []).append(number)
    assert seen == {i: [1, 2, 3] for i in range(count)}
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("others", [0, 3])
async def test_the_first_error_ends_all_sources_after_what_came_before_it(others: int) -> None:
    failing = Source(1, error=ValueError("first"))
    waiting = [Source(1, waits=True) for _ in range(others)]
    seen = []
    with pytest.raises(ValueError, match="first"):
        async with Arrivals([failing.items(), *(source.items() for source in waiting)]) as arrivals:
            async for batch in arrivals:
                seen += batch
    assert (0, 1) in seen
    assert failing.closed
    assert all(source.closed for source in waiting)


async def test_an_error_does_not_wait_for_a_source_that_never_pauses() -> None:
    async def endless() -> AsyncGenerator[int, None]:
        while True:
            await asyncio.sleep(0)
            yield 1

    with pytest.raises(ValueError, match="at once"):
        async with (
            asyncio.timeout(20),
            Arrivals([endless(), Source(error=ValueError("at once")).items()]) as arrivals,
        ):
            async for _ in arrivals:
                pass


async def test_one_source_is_stopped_and_the_others_go_on() -> None:
    stopped, other = Source(1, waits=True), Source(2, 3, waits=True)
    seen: list[tuple[int, int]] = []
    async with Arrivals([stopped.items(), other.items()]) as arrivals:
        async for batch in arrivals:
            seen += batch
            if len(seen) == 3:
                arrivals.stop(0, 99)
                arrivals.stop(0, 100)  # nothing more
            if (0, 99) in seen:
                other.go.set()
    assert sorted(seen) == [(0, 1), (0, 99), (1, 2), (1, 3)]
    assert stopped.closed and other.closed


async def test_what_a_stopped_source_still_gives_or_raises_is_dropped() -> None:
    closed = asyncio.Event()

    async def stubborn(last: bool) -> AsyncGenerator[int, None]:
        """Ends only after its drain, with an item or an error."""
        try:
            yield 1
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            if last:
                yield 2
            raise RuntimeError("the room has failed") from None
        finally:
            closed.set()

    for last in (True, False):
        closed.clear()
        seen: list[int] = []
        async with asyncio.timeout(20), Arrivals([stubborn(last)]) as arrivals:
            async for batch in arrivals:
                seen += [number for _, number in batch]
                if seen == [1]:
                    arrivals.stop(0, 99)
        assert seen == [1, 99]
        assert closed.is_set()


async def test_a_source_that_has_ended_cannot_be_stopped() -> None:
    async with Arrivals([Source(1).items()]) as arrivals:
        seen = [batch async for batch in arrivals]
        arrivals.stop(0, 99)
        seen += [batch async for batch in arrivals]
    assert seen == [[(0, 1)]]


async def test_a_source_that_is_stopped_before_it_has_begun_is_waited_for_no_longer() -> None:
    """An abort may come in the turn of the loop in which the request begins."""
    first, second = Source(1), Source(2, waits=True)
    seen: list[tuple[int, int]] = []
    async with asyncio.timeout(20), Arrivals([first.items(), second.items()]) as arrivals:
        arrivals.stop(1, last=-1)
        async for batch in arrivals:
            seen += batch
    assert sorted(seen) == [(0, 1), (1, -1)]
