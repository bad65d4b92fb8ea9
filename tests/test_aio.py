"""Blocking work in threads: bounded, in order, to its end (I12); arrivals go on in turns."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable

import pytest

from kvflow.aio import Job, Threads, Turnstile, in_thread, run_to_end, wait_or_cancel
from tests.transports.peer_process import until


class Gate:
    def __init__(self, result: int = 0) -> None:
        self.entered, self.opened, self.result = threading.Event(), threading.Event(), result

    def __call__(self, *_: object) -> int:
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


@pytest.mark.parametrize("run", [Threads("test", 1).run, in_thread])
async def test_a_cancelled_caller_waits_for_the_end_and_the_result_is_undone(
    run: Callable[..., Awaitable[int]],
) -> None:
    gate, undone = Gate(5), list[int]()
    task = asyncio.ensure_future(run(gate, undone.append))
    await until(gate.entered.is_set)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone == [5] and await run(gate, undone.append) == 5 and undone == [5]


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
    "error",
    [
        ZeroDivisionError("the work's own"),
        TimeoutError("the work's own"),
        GeneratorExit("the work's own"),
    ],
)
async def test_the_works_own_error_is_raised_and_nothing_is_undone(error: BaseException) -> None:
    def work() -> int:
        raise error

    threads, undone = Threads("test", 1), list[int]()
    for _ in range(2):
        with pytest.raises(type(error), match="the work's own"):
            await threads.run(work, undone.append, within_s=10)
    assert not undone and threads.hung == 0


async def test_where_no_thread_is_to_be_had_the_next_call_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = Threads("test", 2)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            await threads.run(lambda: 7)
    first = await threads.run(threading.get_ident, within_s=10)
    gate = Gate()
    busy = threads.start(gate)
    await until(gate.entered.is_set)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _no_thread)
        waits = asyncio.ensure_future(threads.run(threading.get_ident, within_s=10))
        await asyncio.sleep(0)
        gate.opened.set()
        assert await waits == first, "the one thread that there is does all the work"
    assert await busy.ended == 0


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_a_call_that_hangs_delays_none_that_a_free_thread_could_do() -> None:
    rng = random.Random(7)
    threads = Threads("test", 3)
    for _ in range(200):
        quick = [
            asyncio.ensure_future(threads.run(lambda: 7)) for _ in range(rng.choice((0, 1, 2, 5)))
        ]
        await asyncio.gather(*quick[: rng.randint(0, len(quick))])
        gates = [Gate(), Gate()]
        hang = [asyncio.ensure_future(threads.run(gate)) for gate in gates]
        assert await threads.run(lambda: 5, within_s=20) == 5
        for gate in gates:
            gate.opened.set()
        await asyncio.gather(*hang, *quick)
    threads.close()


async def test_one_thread_works_in_the_order_in_which_work_comes() -> None:
    threads, gate, done = Threads("test"), Gate(), list[int]()
    threads.start(gate)
    jobs = [threads.start(lambda n, _: done.append(n), n) for n in range(9)]
    dropped = [jobs.pop(n) for n in (7, 3, 0)]
    assert [job.cancel() for job in dropped] == [True] * 3
    gate.opened.set()
    await jobs[-1].ended
    assert done == [1, 2, 4, 5, 6, 8]
    assert all(job.ended.done() for job in jobs)


class Slices:
    def __init__(self) -> None:
        self.slices, self.entered, self.go_on = 0, threading.Event(), threading.Semaphore(0)

    def __call__(self, is_cancelled: Callable[[], bool]) -> bool:
        while not is_cancelled():
            self.entered.set()
            assert self.go_on.acquire(timeout=20)
            self.slices += 1
        return False


async def test_a_job_that_is_cancelled_stops_between_slices_and_is_awaited() -> None:
    threads, work = Threads("test"), Slices()
    job = threads.start(work)
    waiting = asyncio.ensure_future(run_to_end(job.ended, stop=job.cancel))
    await until(work.entered.is_set)
    for _ in range(3):  # a second cancellation skips no drain
        waiting.cancel()
        await asyncio.sleep(0)
    assert not waiting.done() and job.is_cancelled() and not job.ended.done()
    work.go_on.release()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert work.slices == 1 and job.ended.result() is False


async def test_a_job_that_has_not_begun_is_over_at_once_and_holds_nothing() -> None:
    class Memory:
        pass

    threads, gate, memory = Threads("test"), Gate(), Memory()
    running = threads.start(gate)
    await until(gate.entered.is_set)
    job: Job[None] = threads.start(lambda *_: None, memory)
    kept = weakref.ref(memory)
    del memory
    assert kept() is not None
    assert job.cancel() and job.ended.cancelled() and not job.cancel()
    assert kept() is None
    gate.opened.set()
    assert await running.ended == 0 and not running.cancel()
    assert await threads.run(lambda: 7) == 7


async def test_what_is_done_holds_nothing_while_its_thread_waits_for_more() -> None:
    class Memory:
        pass

    threads, memory = Threads("test"), Memory()
    job = threads.start(lambda *_: None, memory)
    kept = weakref.ref(memory)
    del memory
    await job.ended
    await until(lambda: kept() is None)


async def test_who_asks_leaves_at_once_and_what_has_not_begun_never_begins() -> None:
    threads, gate, done = Threads("test"), Gate(5), list[int]()
    asking = [asyncio.ensure_future(threads.ask(work)) for work in (gate, lambda: done.append(1))]
    await until(gate.entered.is_set)
    for asked in asking:
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    gate.opened.set()
    assert await threads.ask(lambda: 7) == 7 and not done
    with pytest.raises(ZeroDivisionError):
        await threads.ask(lambda: 1 // 0)


async def test_an_error_after_the_caller_left_is_not_logged() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    threads, gate = Threads("test"), Gate(0)
    asked = asyncio.ensure_future(threads.ask(lambda: 1 // gate()))
    await until(gate.entered.is_set)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    gate.opened.set()
    assert await threads.ask(lambda: 7) == 7
    gc.collect()
    assert not reported


@pytest.mark.parametrize("how", ["closed", "forgotten"])
async def test_threads_end_after_the_work_that_waits(how: str) -> None:
    threads, gate = Threads(f"test-{how}", 2), Gate(5)
    jobs = [threads.start(work) for work in (gate, gate, lambda _: 7)]
    await until(gate.entered.is_set)
    if how == "forgotten":
        del threads
        gc.collect()
    else:
        threads.close()
        with pytest.raises(RuntimeError, match="after shutdown"):
            await threads.run(lambda: 7)
    gate.opened.set()
    assert [await job.ended for job in jobs] == [5, 5, 7]
    await until(
        lambda: not any(t.name.startswith(f"kvflow-test-{how}") for t in threading.enumerate())
    )


@pytest.mark.parametrize(
    "call",
    [
        "Threads('test').run(hangs, within_s=0.05)",
        "asyncio.wait_for(Threads('test').ask(hangs), 0.05)",
        "asyncio.wait([Threads('test').start(lambda _: hangs()).ended], timeout=0.05)",
    ],
)
def test_a_call_that_hangs_does_not_hold_up_the_end_of_the_process(call: str) -> None:
    role = f"""
import asyncio, contextlib, threading
from kvflow.aio import Threads
def hangs():
    threading.Event().wait()
async def main():
    with contextlib.suppress(TimeoutError):
        await {call}
    print("over")
asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", role],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0 and ended.stdout == "over\n", ended.stderr


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
    """Of 20 that come at once: their order, and how many go on in each turn of the loop."""
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
