"""A call returns only when its work in a thread has ended, cancelled or not (I12)."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvflow.aio import in_thread, run_to_end


async def test_a_cancelled_wait_drains_first_and_twice_too() -> None:
    gate, ended = threading.Event(), threading.Event()

    def work() -> None:
        gate.wait(10)
        ended.set()

    with ThreadPoolExecutor(1) as executor:
        running = asyncio.get_running_loop().run_in_executor(executor, work)
        waiter = asyncio.ensure_future(run_to_end(running))
        for _ in range(2):
            await asyncio.sleep(0)
            waiter.cancel()
        await asyncio.sleep(0)
        assert not waiter.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert ended.is_set()


async def test_a_cancelled_call_is_undone_once_it_has_ended() -> None:
    gate = threading.Event()
    undone: list[int] = []

    def work() -> int:
        gate.wait(10)
        return 7

    waiter = asyncio.ensure_future(in_thread(work, undone.append))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.sleep(0)
    assert not waiter.done() and not undone
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert undone == [7] and await in_thread(work, undone.append) == 7 and undone == [7]
