"""Threads of virtual time, and engines behind the thread front in whole runs."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from kvflow.proof.sim import thread_engine
from kvflow.proof.sim.loop import Process, VirtualLoop, current_process
from kvflow.proof.sim.run import simulate
from kvflow.proof.sim.swap import swapped
from kvflow.proof.sim.times import LONG_PREEMPTED_S, POST_S
from kvflow.proof.sim.virtual_thread import LockStep, VirtualLoopThread
from kvflow.protocols.errors import MisuseError
from tests.sim.story import story_of

CLOSES = 122
"""A seed in which a decode behind the front is closed, with loans that it cannot prove, and another
one goes on.
"""


def play(main: Callable[[VirtualLoop, VirtualLoopThread], Coroutine[Any, Any, None]]) -> None:
    loop = VirtualLoop(random.Random(7))
    try:
        loop.run_until_complete(main(loop, VirtualLoopThread("front", Process("node"), loop)))
    finally:
        loop.close()


def test_posted_calls_run_later_in_their_order_as_the_process() -> None:
    async def main(loop: VirtualLoop, front: VirtualLoopThread) -> None:
        seen: list[tuple[int, str]] = []

        def call(number: int) -> None:
            process = current_process()
            seen.append((number, process.name if process else ""))

        for number in range(5):
            assert front.post(partial(call, number))
        assert not seen
        await asyncio.sleep(POST_S[1])
        assert seen == [(number, "node") for number in range(5)] and not front.errors

    play(main)


def test_a_question_has_its_answer_at_once_after_what_was_posted() -> None:
    async def main(loop: VirtualLoop, front: VirtualLoopThread) -> None:
        seen: list[int] = []

        async def answer() -> list[int]:
            return list(seen)

        async def waits() -> None:
            await asyncio.sleep(0)

        front.post(lambda: seen.append(1))
        assert front.call(answer) == [1]
        with pytest.raises(AssertionError, match="must be called in a LockStep"):
            front.call(waits)

    play(main)


def test_a_thread_that_blocks_lets_the_loop_go_on_and_never_runs_beside_it() -> None:
    async def main(loop: VirtualLoop, front: VirtualLoopThread) -> None:
        seen: list[str] = []

        async def work() -> str:
            await asyncio.sleep(1.0)
            seen.append("work")
            return "done"

        def blocks() -> str:
            assert threading.current_thread() is not threading.main_thread()
            seen.append("begins")
            found = front.call(work)
            seen.append("goes on")
            return found

        loop.later(0.5, lambda: seen.append("another"))
        step = LockStep(loop, Process("node"), blocks)
        assert seen == ["begins"]
        assert await step.answer == "done" and loop.time() >= 1.0
        assert seen == ["begins", "another", "work", "goes on"]

    play(main)


def test_a_thread_may_stand_before_it_has_posted_and_finds_the_loop_stopped() -> None:
    async def main(loop: VirtualLoop, front: VirtualLoopThread) -> None:
        seen: list[int] = []
        front.post(lambda: seen.append(1))
        step = LockStep(loop, Process("node"), lambda: front.post(lambda: seen.append(2)))
        front.stop()
        assert seen == [1], "what was posted before still runs"
        assert not await step.answer and loop.time() <= 2 * LONG_PREEMPTED_S[1]
        await asyncio.sleep(POST_S[1])
        assert seen == [1]

        async def answer() -> None: ...

        with pytest.raises(MisuseError, match="front is closed"):
            await LockStep(loop, Process("node"), lambda: front.call(answer)).answer

    play(main)


def test_a_thread_that_waits_in_vain_is_ended() -> None:
    async def main(loop: VirtualLoop, front: VirtualLoopThread) -> None:
        step = LockStep(loop, Process("node"), lambda: front.call(lambda: asyncio.sleep(1.0)))
        assert step.is_alive()
        step.abandon()
        assert not step.is_alive()
        await asyncio.sleep(2.0)  # what it has waited for changes nothing
        assert not step.answer.done()

    play(main)


def test_a_seed_with_such_threads_is_one_run() -> None:
    closed: list[object] = []
    close = thread_engine.ThreadEngine.close

    async def counted(self: thread_engine.ThreadEngine[Any, Any, Any]) -> None:
        await close(self)
        closed.append(self)

    with swapped(thread_engine.ThreadEngine, "close", counted):
        assert story_of(simulate, CLOSES) == story_of(simulate, CLOSES)
    assert len(closed) >= 4
    assert not [thread for thread in threading.enumerate() if isinstance(thread, LockStep)], (
        "no thread is left"
    )
