"""The thread of a plane: fair, quick to stop, never asleep with work and never awake without."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvflow.protocols.errors import MisuseError, TransferError
from kvflow.protocols.ports import WriteOutcome
from kvflow.transports.data import write_thread
from kvflow.transports.data.write_thread import ThreadWrite, WriteThread
from tests.transports.peer_process import end_of, pages, until

LOG = list[tuple[str, int]]


class Slices:
    pause_s = 0.0

    def __init__(self, name: str, left: int, log: LOG, gate: list[bool]) -> None:
        self.name, self.left, self.log, self.gate = name, left, log, gate
        self.landed_bytes, self.error = 0, ""
        self.outcome: WriteOutcome | None = None

    def advance(self, max_bytes: int, cancelled: bool) -> int:
        if self.left < 0:
            raise ZeroDivisionError("a bug in a back end")
        if cancelled:
            self.outcome = WriteOutcome.CANCELLED
            return 0
        if not self.gate[0] or not max_bytes:
            return -1
        moved = min(max_bytes, self.left)
        self.left -= moved
        self.landed_bytes += moved
        self.log.append((self.name, moved))
        self.outcome = None if self.left else WriteOutcome.LANDED
        return moved


class Works:
    def __init__(self, thread: WriteThread) -> None:
        self.thread, self.log, self.gate = thread, LOG(), [True]
        self.jobs = dict[ThreadWrite, Slices]()

    def write(self, name: str, size: int) -> ThreadWrite:
        return self.submit(Slices(name, size, self.log, self.gate), size)

    def submit(self, job: Slices, size: int = 10) -> ThreadWrite:
        write = ThreadWrite(self.thread, self, pages(0), pages(0), size)
        self.jobs[write] = job
        self.thread.submit(write)
        return write

    def begin(self, write: ThreadWrite) -> Slices:
        return self.jobs[write]


@asynccontextmanager
async def started(
    rate: float | None = None, slice_bytes: int = 10, inbox: Inbox | None = None
) -> AsyncIterator[Works]:
    thread = WriteThread("test", rate, slice_bytes)
    thread._inbox = inbox or thread._inbox
    thread.start()
    yield Works(thread)
    await thread.close()


@pytest.fixture
async def works() -> AsyncIterator[Works]:
    async with started() as made:
        yield made


async def test_writes_are_served_in_turn(works: Works) -> None:
    works.gate[0] = False
    writes = [works.write("a", 30), works.write("b", 10), works.write("c", 20)]
    await until(works.thread._inbox.empty)
    assert works.thread.open_writes == 3
    works.gate[0] = True
    assert {await end_of(write) for write in writes} == {WriteOutcome.LANDED}
    order = [name for name, _ in works.log]
    first = order.index("a")
    assert sorted(order[:3]) == ["a", "b", "c"] and order.count("a") == 3 and first < 3
    assert order[-1] == "a" and writes[0].landed_bytes == 30
    assert works.thread.open_writes == 0


async def test_a_cancel_takes_effect_between_two_slices() -> None:
    async with started(rate=10.0, slice_bytes=1 << 20) as works:
        assert works.thread.slice_bytes == 4096
        write = works.write("a", 1 << 20)
        await until(lambda: write.landed_bytes > 0)
        write.cancel()
        # The next slice is seven minutes away.
        assert await end_of(write) is WriteOutcome.CANCELLED
        assert write.landed_bytes == 4096
        write.cancel()


async def test_never_more_than_one_slice_early() -> None:
    rate = 2_000_000.0
    async with started(rate, 1 << 20) as works:
        began = time.monotonic()
        writes = [works.write(name, 60_000) for name in "abc"]
        while not all(write.done.done() for write in writes):
            so_far = sum(write.landed_bytes for write in writes)
            assert so_far <= rate * (time.monotonic() - began) + works.thread.slice_bytes
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.05)
        began = time.monotonic()  # idle time is not saved up
        assert await end_of(works.write("d", 60_000)) is WriteOutcome.LANDED
        assert time.monotonic() - began >= (60_000 - works.thread.slice_bytes) / rate - 0.001


async def test_no_more_than_a_slice_is_written_at_once_where_the_rate_is_limited() -> None:
    thread = WriteThread("test", 1.0)
    thread.start()
    assert thread.slice_bytes == 4096 and not thread.admit(4097, 1)
    assert thread.admit(4096, 1) and not thread.admit(1, 1), "the next one's turn is an hour away"
    await thread.close()


async def test_ends_come_back_in_batches(works: Works, monkeypatch: pytest.MonkeyPatch) -> None:
    told = 0
    call = works.thread.loop.call_soon_threadsafe

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(asyncio.get_running_loop(), name)

        def call_soon_threadsafe(self, *args: object) -> None:
            nonlocal told
            told += 1
            call(*args)  # type: ignore[arg-type]

    works.gate[0] = False
    writes = [works.write(str(i), 10) for i in range(256)]
    monkeypatch.setattr(works.thread, "loop", Counting())
    works.gate[0] = True
    time.sleep(0.2)
    await asyncio.gather(*(asyncio.shield(write.done) for write in writes))
    assert told == 1
    monkeypatch.undo()


async def test_a_bug_in_a_back_end_ends_one_write_unproven(works: Works) -> None:
    bad, good = works.write("bad", -1), works.write("good", 50)
    assert await end_of(bad) is WriteOutcome.UNPROVEN
    assert "ZeroDivisionError" in bad.error
    assert await end_of(good) is WriteOutcome.LANDED
    assert works.thread.surprises == 1


async def test_closing_drains_even_when_it_is_cancelled_twice() -> None:
    async with started(rate=1000.0) as works:
        writes = [works.write("a", 1 << 20), works.write("b", 1 << 20)]
        closing = asyncio.ensure_future(works.thread.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert {write.done.result() for write in writes} == {WriteOutcome.CANCELLED}
        with pytest.raises(TransferError, match="closed"):
            works.write("c", 1)


async def test_what_cannot_be_drained_in_time_ends_unproven(works: Works) -> None:

    class Stuck(Slices):
        def advance(self, max_bytes: int, cancelled: bool) -> int:
            return -1

    write = works.submit(Stuck("stuck", 1, works.log, works.gate), 1)
    await until(lambda: write.job is not None)
    await works.thread.close(grace_s=0.05)
    assert write.done.result() is WriteOutcome.UNPROVEN and "closed" in write.error
    assert works.thread.surprises == 0


class CountedThread(WriteThread):
    looks = 0

    def _collect(self, active: deque[ThreadWrite], wait_s: float) -> bool:
        self.looks += 1
        return super()._collect(active, wait_s)


async def test_an_idle_thread_sleeps() -> None:
    thread = CountedThread("test", None, 10)
    thread.start()
    works = Works(thread)
    assert await end_of(works.write("a", 10)) is WriteOutcome.LANDED
    before = thread.looks
    await asyncio.sleep(0.3)
    assert thread.looks <= before + 1  # the one that it sleeps in
    await thread.close()


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(MisuseError, match="rate limit"):
        WriteThread("test", rate)


async def test_a_thread_never_started_closes_at_once() -> None:
    thread = WriteThread("test")
    await thread.close()
    with pytest.raises(MisuseError, match="closed"):
        thread.start()


async def test_where_no_thread_is_to_be_had_it_closes_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    thread = WriteThread("test")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start"):
                thread.start()
    await asyncio.wait_for(thread.close(), 20)


class Hanging(Slices):
    def __init__(self, left: int) -> None:
        super().__init__("hanging", left, [], [True])
        self.hangs, self.go_on = threading.Event(), threading.Event()

    def advance(self, max_bytes: int, cancelled: bool) -> int:
        self.hangs.set()
        self.go_on.wait(20)
        return super().advance(max_bytes, cancelled)


class Frozen(Slices):
    """A job whose peer is frozen: nothing that is under way ends."""

    pause_s = 0.0005
    turns = 0

    def advance(self, max_bytes: int, cancelled: bool) -> int:
        self.turns += 1
        return super().advance(max_bytes, cancelled)


class Inbox(queue.SimpleQueue[Any]):
    def __init__(self) -> None:
        self.waits: list[float | None] = []

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self.waits.append(timeout)
        return super().get(block, timeout)


class Draining(Frozen):
    """When it is cancelled, what is under way still has to end."""

    def advance(self, max_bytes: int, cancelled: bool) -> int:
        return super().advance(max_bytes, cancelled and self.gate[0])


async def test_a_thread_that_has_grown_patient_looks_as_often_as_at_first_after_a_cancel() -> None:
    async with started(inbox=(inbox := Inbox())) as works:
        write = works.submit(Draining("draining", 10, [], gate := [False]))
        await until(lambda: 0.01 in inbox.waits)
        before = len(inbox.waits)
        write.cancel()
        await until(lambda: Frozen.pause_s in inbox.waits[before:])
        gate[0] = True
        assert await end_of(write) is WriteOutcome.CANCELLED


class Paced(Slices):
    """For each turn: what it submitted, and how long it says to wait."""

    def __init__(self, *turns: tuple[int, float]) -> None:
        super().__init__("paced", len(turns), [], [True])
        self.turns = list(turns)

    def advance(self, max_bytes: int, cancelled: bool) -> int:
        moved, self.pause_s = self.turns.pop(0)
        self.outcome = None if self.turns else WriteOutcome.LANDED
        return moved


async def test_the_thread_waits_as_a_job_says_longer_each_time_that_nothing_has_moved() -> None:
    async with started(inbox=(inbox := Inbox())) as works:
        begin = (-1, 0.0005), (-1, 0.0005), (10, 0.0005)
        write = works.submit(Paced(*begin, (10, 0.0), (10, 0.0), (-1, 0.002), (10, 0.0)))
        assert await end_of(write) is WriteOutcome.LANDED
        assert [wait for wait in inbox.waits if wait] == [0.0005, 0.00075, 0.0005, 0.002]


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(write_thread, "time", clock := Clock())
    return clock


class Brief(Slices):
    """A job whose block may land at any moment. Each turn takes 50 us, and the last one ends it."""

    pause_s = 0.00001

    def __init__(self, clock: Clock, turns: int) -> None:
        super().__init__("brief", turns, [], [True])
        self.clock, self.turns = clock, turns

    def advance(self, max_bytes: int, cancelled: bool) -> int:
        self.clock.now += 0.00005
        first, self.left = not self.landed_bytes, self.left - 1
        self.landed_bytes += 1
        self.outcome = None if self.left else WriteOutcome.LANDED
        return 1 if first else -1


@pytest.mark.parametrize(
    ("idle_s", "turns", "waits"),
    [
        (1.0, 4, []),
        # It spins for 200 us, and sleeps from then on.
        (1.0, 7, [0.00005, 0.000075]),
        # After a shorter idle time it never spins.
        (0.0003, 3, [0.00005, 0.000075]),
    ],
)
async def test_after_an_idle_time_the_thread_spins_for_a_brief_write(
    clock: Clock, idle_s: float, turns: int, waits: list[float]
) -> None:
    async with started(inbox=(inbox := Inbox())) as works:
        await until(lambda: bool(inbox.waits))
        clock.now += idle_s
        assert await end_of(works.submit(Brief(clock, turns))) is WriteOutcome.LANDED
        assert [wait for wait in inbox.waits if wait] == pytest.approx(waits)


async def test_the_thread_spins_for_no_write_that_has_company(clock: Clock) -> None:
    class Crowded(Brief):
        def advance(self, max_bytes: int, cancelled: bool) -> int:
            # The second write arrives while the thread spins for the first one.
            if self.turns - self.left == 1:
                works.thread._inbox.put(second)
            return super().advance(max_bytes, cancelled)

    async with started(inbox=(inbox := Inbox())) as works:
        second = ThreadWrite(works.thread, works, pages(0), pages(0), 10)
        works.jobs[second] = Brief(clock, 2)
        await until(lambda: bool(inbox.waits))
        clock.now += 1.0
        write = works.submit(Crowded(clock, 3))
        assert [await end_of(write), await end_of(second)] == [WriteOutcome.LANDED] * 2
        assert [wait for wait in inbox.waits if wait] == pytest.approx([0.00005])


class Together(Inbox):
    """What arrives at an idle thread waits for `complete`, so that the thread finds all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.complete = threading.Event()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        self.complete.wait(20)
        return item


async def test_the_thread_spins_once_and_not_for_its_rate_limit(clock: Clock) -> None:
    """Each slice moves at its time, and what has moved has landed by the next look."""

    class Limited(Slices):
        looks = 0

        def advance(self, max_bytes: int, cancelled: bool) -> int:
            clock.now += 0.00005
            self.looks += 1
            moved = super().advance(max_bytes, cancelled)
            self.pause_s = 0.0
            return moved

    class Sleeping(Inbox):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            clock.now += timeout or 0.0
            return super().get(block, timeout and 0.0001)

    async with started(1e6, 5000, inbox := Sleeping()) as works:
        await until(lambda: bool(inbox.waits))
        clock.now += 1.0
        write = works.submit(job := Limited("limited", 100_000, [], [True]))
        assert await end_of(write) is WriteOutcome.LANDED
        # Two looks at each slice. Spinning at each of them took 96.
        assert job.looks <= 45


async def test_the_thread_spins_for_no_writes_that_arrive_together(clock: Clock) -> None:
    async with started(inbox=(inbox := Together())) as works:
        await until(lambda: bool(inbox.waits))
        clock.now += 1.0
        writes = [works.submit(Brief(clock, turns)) for turns in (2, 3)]
        inbox.complete.set()
        assert [await end_of(write) for write in writes] == [WriteOutcome.LANDED] * 2
        assert [wait for wait in inbox.waits if wait] == pytest.approx([0.00005] * 2)


async def test_a_thread_that_is_closing_admits_nothing() -> None:
    thread = WriteThread("test")
    thread.start()
    assert thread.admit(1, 1)
    closing = asyncio.ensure_future(thread.close())
    await asyncio.sleep(0)
    assert [thread.is_closing, closing.done(), thread.admit(1, 1)] == [True, False, False]
    await closing
    assert [thread.is_closing, thread.admit(1, 1)] == [True, False]


async def test_a_hanging_back_end_is_seen_and_an_idle_thread_is_none(works: Works) -> None:
    assert works.thread.stalled_s == 0
    await end_of(works.write("a", 10))
    assert works.thread.stalled_s == 0
    hanging = Hanging(10)
    write = works.submit(hanging)
    await until(hanging.hangs.is_set)
    before = works.thread.stalled_s
    await until(lambda: works.thread.stalled_s > before + 0.02)
    hanging.go_on.set()
    assert await end_of(write) is WriteOutcome.LANDED
    assert works.thread.stalled_s == 0


async def test_a_frozen_peer_is_no_stall_of_ours(works: Works) -> None:
    works.gate[0] = False
    frozen = Frozen("frozen", 10, works.log, works.gate)
    works.submit(frozen)
    submitted_at = time.monotonic()
    await until(lambda: frozen.turns > 20)
    assert works.thread.stalled_s < time.monotonic() - submitted_at
    works.gate[0] = True


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_dead_thread_is_seen_and_its_writes_end_unproven(works: Works) -> None:
    works.gate[0] = False
    write = works.write("a", 10)
    assert works.thread.stalled_s < float("inf")
    works.thread._inbox.put(object())  # type: ignore[arg-type]
    await until(lambda: works.thread.stalled_s == float("inf"))
    await works.thread.close()
    assert write.done.result() is WriteOutcome.UNPROVEN and "died" in write.error
    assert works.thread.stalled_s == 0
