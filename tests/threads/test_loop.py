"""The loop in a thread: order, bursts, errors, and the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kvflow.node.threads.loop import LoopThread
from kvflow.protocols.errors import MisuseError


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("kvflow-test")
    yield thread
    thread.stop()


def test_calls_run_in_order_and_a_burst_wakes_the_loop_once(loop: LoopThread) -> None:
    seen: list[int] = []
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go_on.wait(30)

    loop.post(hold)
    assert held.wait(30)
    wakes = 0
    inner = loop._loop.call_soon_threadsafe

    def counted(*args: object) -> asyncio.Handle:
        nonlocal wakes
        wakes += 1
        return inner(*args)  # type: ignore[arg-type]

    loop._loop.call_soon_threadsafe = counted  # type: ignore[method-assign,assignment]
    for n in range(1000):
        loop.post(lambda n=n: seen.append(n))  # type: ignore[misc]
    go_on.set()

    async def answer() -> int:
        return len(seen)

    assert loop.call(answer) == 1000 and seen == list(range(1000))
    assert wakes == 2  # the burst, and the question


def test_a_call_that_raises_does_not_stop_those_behind_it(loop: LoopThread) -> None:
    def fails() -> None:
        raise ValueError("planted")

    seen: list[str] = []
    loop.post(fails)
    loop.post(lambda: seen.append("behind"))

    async def answer() -> list[str]:
        return seen

    assert loop.call(answer) == ["behind"] and loop.errors == 1


def test_an_exception_is_raised_where_the_call_was_made(loop: LoopThread) -> None:
    async def fails() -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        loop.call(fails)


def test_the_loops_own_thread_cannot_wait_for_itself(loop: LoopThread) -> None:
    async def answer() -> int:
        return 1

    async def asks() -> int:
        return loop.call(answer)

    with pytest.raises(MisuseError, match="this would block kvflow-test"):
        loop.call(asks)


def test_a_loop_that_has_stopped_takes_nothing_more() -> None:
    loop = LoopThread("kvflow-test")
    loop.stop()
    loop.stop()

    async def answer() -> int:
        return 1

    assert not loop.post(lambda: None)
    with pytest.raises(MisuseError, match="kvflow-test is closed"):
        loop.call(answer)


def test_a_loop_that_cannot_be_made_is_an_error_at_once() -> None:
    def broken() -> asyncio.AbstractEventLoop:
        raise OSError("no descriptor left")

    with pytest.raises(OSError, match="no descriptor left"):
        LoopThread("kvflow-test", broken)
