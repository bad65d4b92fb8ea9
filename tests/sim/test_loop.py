"""Virtual time jumps and never waits, and all randomness comes from the seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from kvflow.aio import Job, Threads
from kvflow.proof.sim.loop import Process, VirtualLoop, VirtualThread, current_process


def play(main: Coroutine[Any, Any, None], loop: VirtualLoop | None = None) -> VirtualLoop:
    loop = loop or VirtualLoop(random.Random(1))
    try:
        loop.play(main)
    finally:
        loop.wind_up()
        loop.close()
    assert not loop.raised
    return loop


def test_an_hour_takes_no_time_and_one_step() -> None:
    loop = play(asyncio.sleep(3600))
    assert loop.time() == 3600 and loop.steps == 1


def test_nothing_left_to_happen_is_a_deadlock() -> None:
    async def wait_for_nobody() -> None:
        await asyncio.sleep(5)
        await asyncio.Event().wait()

    loop = VirtualLoop(random.Random(1))
    with pytest.raises(RuntimeError, match=r"deadlock at 5\.0"):
        loop.run_until_complete(wait_for_nobody())
    loop.wind_up()
    loop.close()


def test_stop_ends_a_run_and_what_is_left_is_swept_up() -> None:
    ended: list[str] = []

    async def for_ever() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append("swept up")

    loop = VirtualLoop(random.Random(1))
    loop.later(7, loop.stop)
    play(for_ever(), loop)
    assert loop.time() == 7 and ended == ["swept up"]


def test_what_begins_while_the_rest_is_swept_up_is_swept_up_too() -> None:
    ended: list[str] = []

    async def for_ever(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)
            if name == "first":
                loop.later(0.001, lambda: asyncio.ensure_future(for_ever("late")))
                await asyncio.sleep(0.01)

    loop = VirtualLoop(random.Random(1))
    loop.later(1, loop.stop)
    play(for_ever("first"), loop)
    assert ended == ["first", "late"]


def test_a_thread_of_its_own_kind_says_when_its_work_happens() -> None:
    class Late(VirtualThread):
        def begin(self, done: asyncio.Future[Any], job: Job[Any]) -> None:
            asyncio.get_running_loop().call_later(5, lambda: done.set_result(job.run()))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        threads = Threads("late")
        threads.executor = Late()
        assert await threads.run(lambda: 3) == 3 and loop.time() == 5

    play(main())


def test_threads_are_virtual_and_go_on_when_nobody_waits_any_more() -> None:
    done: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert await asyncio.to_thread(lambda: 5) == 5
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        working = asyncio.ensure_future(asyncio.to_thread(lambda: done.append(loop.time())))
        await asyncio.sleep(0)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert not done
        await asyncio.sleep(1)
        assert done and done[0] < loop.time()

    play(main())


def test_a_halted_process_stands_still_and_a_dead_one_does_not_even_clean_up() -> None:
    said: list[str] = []

    async def talk(name: str) -> None:
        try:
            for n in range(4):
                await asyncio.sleep(1)
                process = current_process()
                assert process is not None and process.name == name
                said.append(f"{name} {n}")
        finally:
            said.append(f"{name} ends")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        frozen, dead = Process("frozen"), Process("dead")
        tasks = [
            process.run(asyncio.ensure_future, talk(process.name)) for process in (frozen, dead)
        ]
        await asyncio.sleep(1.5)
        loop.halt(frozen)
        loop.kill(dead)
        await asyncio.sleep(10)
        assert said == ["frozen 0", "dead 0"]
        loop.resume(frozen)
        loop.resume(dead)
        await asyncio.sleep(2.5)
        assert said == ["frozen 0", "dead 0", "frozen 1", "frozen 2", "frozen 3", "frozen ends"]
        assert tasks[0].done() and not tasks[1].done()

    play(main())


def test_the_same_seed_gives_the_same_times() -> None:
    async def main() -> None:
        for _ in range(20):
            await asyncio.to_thread(int)

    first, again, other = (
        play(main(), VirtualLoop(random.Random(seed))).time() for seed in (4, 4, 5)
    )
    assert first == again != other
