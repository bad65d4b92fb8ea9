"""Blocking work in threads: bounded, to its end, and what hangs hangs alone.

What arrives at once goes on in turns.
"""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvflow.aio import Threads, Turnstile, run_to_end, wait_or_cancel
from tests.transports.peer_process import until


class Gate:
    """Work that hangs until it is let go."""

    def __init__(self, result: int = 0) -> None:
        self.entered, self.opened, self.result = threading.Event(), threading.Event(), result

    def __call__(self) -> int:
        self.entered.set()
        assert self.opened.wait(20)
        return self.result


async def test_no_more_run_than_the_limit() -> None:
    threads, gates = Threads("test", 2), [Gate(), Gate(), Gate()]
    running = [asyncio.ensure_future(threads.run(gate)) for gate in gates]
    await until(lambda: gates[0].entered.is_set() and gates[1].entered.is_set())
    with pytest.raises(TimeoutError):  # the wait for a thread counts
        await threads.run(lambda: 7, within_s=0.05)
    assert threads.hung == 0 and not gates[2].entered.is_set()
    for gate in gates:
        gate.opened.set()
    await asyncio.gather(*running)


async def test_what_takes_too_long_is_left_alone_and_undone() -> None:
    threads, gate, undone = Threads("test", 1), Gate(5), list[int]()
    with pytest.raises(TimeoutError):
        await threads.run(gate, undone.append, within_s=0.05)
    assert threads.hung == 1 and "1 hung" in repr(threads) and not undone
    with pytest.raises(TimeoutError):  # its thread is not free
        await threads.run(lambda: 7, within_s=0.05)
    gate.opened.set()
    await until(lambda: undone == [5])
    assert threads.hung == 0 and await threads.run(lambda: 7) == 7


async def test_a_cancelled_caller_waits_for_the_end_and_the_result_is_undone() -> None:
    threads, gate, undone = Threads("test", 1), Gate(5), list[int]()
    task = asyncio.ensure_future(threads.run(gate, undone.append))
    await until(gate.entered.is_set)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: undone == [5])


async def test_a_caller_that_is_cancelled_waits_no_longer_than_it_would_have() -> None:
    threads, gate, undone = Threads("test", 1), Gate(5), list[int]()
    task = asyncio.ensure_future(threads.run(gate, undone.append, within_s=0.2))
    await until(gate.entered.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert threads.hung == 1
    gate.opened.set()
    await until(lambda: undone == [5])


async def test_a_caller_that_is_cancelled_while_it_waits_for_a_thread_takes_none() -> None:
    threads, gate = Threads("test", 1), Gate()
    running = asyncio.ensure_future(threads.run(gate))
    await until(gate.entered.is_set)
    waiting = asyncio.ensure_future(threads.run(lambda: 1 // 0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.opened.set()
    await running
    assert await threads.run(lambda: 7) == 7


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("the work's own"), TimeoutError("the work's own")]
)
async def test_the_works_own_error_is_raised_and_nothing_is_undone(error: Exception) -> None:
    def work() -> int:
        raise error

    threads, undone = Threads("test", 1), list[int]()
    for _ in range(2):
        with pytest.raises(type(error), match="the work's own"):
            await threads.run(work, undone.append, within_s=10)
    assert not undone and threads.hung == 0


async def test_where_no_thread_is_to_be_had_the_place_is_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = Threads("test", 1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            await threads.run(lambda: 7)
    assert await threads.run(lambda: 7, within_s=10) == 7


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


class Draining:
    """Work that, cancelled, goes on until it is let go; then it ends as `how` says."""

    def __init__(self, how: str) -> None:
        self.how, self.last_part = how, asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await run_to_end(self.last_part)
            if self.how == "cancelled":
                raise
            if self.how == "fails":
                raise OSError("in the last part") from None
        return 5


@pytest.mark.parametrize("how", ["cancelled", "fails", "finishes"])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancellation_is_passed_on_and_raised_when_the_work_has_ended(
    how: str, times: int
) -> None:
    work, undone = Draining(how), list[int]()
    running = asyncio.create_task(work.run())
    waiting = asyncio.create_task(wait_or_cancel(running, undone.append))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for _ in range(times):
        waiting.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert running.cancelling() and not running.done() and not waiting.done() and not undone
    work.last_part.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert running.done() and undone == ([5] if how == "finishes" else [])


@pytest.mark.parametrize("how", ["cancelled", "fails", "finishes"])
async def test_work_that_ends_by_itself_is_left_to_its_owner(how: str) -> None:
    running, undone = asyncio.get_running_loop().create_future(), list[int]()
    waiting = asyncio.create_task(wait_or_cancel(running, undone.append))
    await asyncio.sleep(0)
    assert not waiting.done()
    if how == "cancelled":
        running.cancel()
    elif how == "fails":
        running.set_exception(OSError("for its owner"))
    else:
        running.set_result(5)
    await waiting
    assert not undone
    assert running.cancelled() or running.exception() is not None or running.result() == 5


async def turns_of_a_crowd(
    turnstile: Turnstile, cancelled: range = range(0)
) -> tuple[list[int], list[int]]:
    """Of 20 that come at once: in which order they go on, and how many of them in each turn of the
    loop.
    """
    order: list[int] = []

    async def one(number: int) -> None:
        await turnstile.passed()
        order.append(number)

    tasks = [asyncio.create_task(one(i)) for i in range(20)]
    await asyncio.sleep(0)
    for i in cancelled:
        tasks[i].cancel()
    by_turn = [len(order)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        by_turn.append(len(order) - sum(by_turn))
    assert [task.cancelled() for task in tasks] == [i in cancelled for i in range(20)]
    return order, by_turn


async def test_a_crowd_goes_on_in_turns_in_the_order_of_its_arrival() -> None:
    turnstile = Turnstile(3)
    for _ in range(2):
        order, by_turn = await turns_of_a_crowd(turnstile)
        assert order == list(range(20))
        assert max(by_turn) == 3
        assert len(by_turn) < 12  # without a turn that is wasted in between


async def test_those_that_are_cancelled_while_they_wait_take_no_turn() -> None:
    turnstile = Turnstile(3)
    order, by_turn = await turns_of_a_crowd(turnstile, cancelled=range(5, 18))
    assert order == [0, 1, 2, 3, 4, 18, 19]
    assert len(by_turn) < 6
    assert (await turns_of_a_crowd(turnstile))[0] == list(range(20))


async def test_one_that_is_cancelled_as_its_turn_comes_keeps_no_other_waiting() -> None:
    turnstile = Turnstile(1)
    await turnstile.passed()
    crowd = [asyncio.create_task(turnstile.passed()) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the next one may go on in the turn that follows
    chosen = next(task for task in crowd if not task.done())
    chosen.cancel()
    await asyncio.wait_for(crowd[-1], 20)
    assert chosen.cancelled() and chosen is not crowd[-1]


async def test_one_that_comes_alone_does_not_wait() -> None:
    turnstile = Turnstile(1)
    for _ in range(3):
        with pytest.raises(StopIteration):  # it ends without a turn of the loop
            turnstile.passed().send(None)
        for _ in range(3):
            await asyncio.sleep(0)
