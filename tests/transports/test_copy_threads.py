"""Several threads that copy parts of one write over the local plane."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError, MisuseError, TransferError
from kvflow.protocols.pages.layout import PageIndices, build_layout
from kvflow.protocols.ports import WriteOutcome
from kvflow.transports.data import local
from kvflow.transports.data.local import LocalPlane, LocalRoute, PartedWrite
from kvflow.transports.data.write_thread import Assignment, ThreadWrite
from tests.transports.peer_process import local_planes, until

PAGE_BYTES, NUM_PAGES = 64 << 10, 32
LAYOUT = build_layout([("k", "uint8", (PAGE_BYTES,))], page_size=1, num_pages=NUM_PAGES)
ALL = np.random.default_rng(3).permutation(NUM_PAGES).astype(np.int32)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_PART_BYTES", 2 * PAGE_BYTES)


@asynccontextmanager
async def routed(
    copy_threads: int,
) -> AsyncIterator[tuple[LocalPlane, LocalRoute, PagedPool, PagedPool]]:
    """A plane, its route, and both pools. Byte values of source pages are 1 and above."""
    async with local_planes(LAYOUT, copy_threads=copy_threads) as (plane, target, ours, theirs):
        ours.array("k")[:] = (np.arange(NUM_PAGES) + 1).reshape(-1, 1, 1)
        yield plane, await plane.connect(*target.export(theirs.layout)), ours, theirs


class Gate:
    """Stops every thread in its `stop_at`th copy, until the test lets that thread go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_at: int) -> None:
        self.copies: Counter[int] = Counter()  # by thread
        self.copied_bytes: Counter[int] = Counter()
        self.reached = threading.Event()
        self.stopped: dict[int, threading.Event] = {}
        self._stop_at, self._copy = stop_at, local._copy_releasing_gil
        # Every block is a burst of its own, so the GIL is released for each.
        monkeypatch.setattr(local, "_BURST_BYTES", 1)
        monkeypatch.setattr(local, "_LONG_S", 60.0)
        monkeypatch.setattr(local, "_copy_releasing_gil", self._gated)

    def _gated(self, target: int, source: int, size: int) -> None:
        me = threading.get_ident()
        if self.copies[me] + 1 == self._stop_at and me not in self.stopped:
            self.stopped[me] = threading.Event()
            self.reached.set()
            assert self.stopped[me].wait(20)
        self._copy(target, source, size)
        self.copies[me] += 1
        self.copied_bytes[me] += size


@pytest.mark.parametrize(("threads", "parts"), [(1, 1), (2, 2), (3, 3), (64, 16)])
async def test_every_byte_lands_by_any_number_of_threads(threads: int, parts: int) -> None:
    async with routed(threads) as (plane, route, ours, theirs):
        write = route.write(ALL, ALL[::-1].copy())
        assert isinstance(write, ThreadWrite if parts == 1 else PartedWrite)
        if isinstance(write, PartedWrite):
            assert len(write._parts) == parts and len({p._thread for p in write._parts}) == parts
        assert await write.done is WriteOutcome.LANDED and not write.error
        assert write.landed_bytes == write.total_bytes == NUM_PAGES * PAGE_BYTES
        assert (theirs.array("k")[ALL[::-1]] == ours.array("k")[ALL]).all()
        assert plane.under_way == {"writes": 0} and plane.stalled_s == 0


async def test_small_writes_go_to_the_thread_with_the_least_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch, 1)
    async with routed(2) as (_, route, _, theirs):
        writes = [route.write(ALL[n : n + 2], ALL[n : n + 2]) for n in (0, 2)]
        await until(lambda: len(gate.stopped) == 2)
        tiny = route.write(ALL[4:5], ALL[4:5])
        assert not tiny.done.done(), "it is not copied on the event loop beside other writes"
        for event in gate.stopped.values():
            event.set()
        for write in (*writes, tiny):
            assert await write.done is WriteOutcome.LANDED
        assert (theirs.array("k")[ALL[:5]] == (ALL[:5] + 1).reshape(-1, 1, 1)).all()


@pytest.mark.parametrize("stop_at", [1, 3, 6])
async def test_an_abort_in_the_middle_waits_for_every_thread_and_no_byte_lands_after_it(
    monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    gate = Gate(monkeypatch, stop_at)
    async with routed(2) as (plane, route, _, theirs):
        write = route.write(ALL, ALL)
        await until(lambda: len(gate.stopped) == 2)
        write.cancel()
        first, second = gate.stopped.values()
        first.set()
        # One thread has ended its part. The other is still inside a copy.
        await until(lambda: plane.under_way == {"writes": 1})
        assert not write.done.done()
        second.set()
        assert await write.done is WriteOutcome.CANCELLED
        assert list(gate.copies.values()) == [stop_at] * 2
        copied = sum(gate.copied_bytes.values())
        assert write.landed_bytes == copied < write.total_bytes
        # The pages have their next owner, in whose hands nothing may change.
        theirs.array("k")[:] = 255
        other = route.write(ALL[:1], ALL[:1])
        assert await other.done is WriteOutcome.LANDED
        assert (theirs.array("k")[ALL[1:]] == 255).all()


async def test_a_part_that_fails_stops_the_others_and_leaves_the_write_in_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, begin, calls = Gate(monkeypatch, 1), LocalRoute.begin, itertools.count()

    def fails(self: LocalRoute, write: Assignment) -> local._CopyJob:
        if next(calls) == 1:
            assert gate.reached.wait(20)
            raise OSError("planted")
        return begin(self, write)

    monkeypatch.setattr(LocalRoute, "begin", fails)
    async with routed(2) as (_, route, _, _):
        write = route.write(ALL, ALL)
        assert isinstance(write, PartedWrite)
        await until(lambda: any(part.cancelled for part in write._parts))
        assert len(gate.stopped) == 1 and not write.done.done(), "the other thread still copies"
        for event in gate.stopped.values():
            event.set()
        assert await write.done is WriteOutcome.UNPROVEN and "planted" in write.error
        assert list(gate.copies.values()) == [1], "the other part was cancelled"


async def test_closing_waits_for_every_thread_however_often_it_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch, 1)
    async with routed(2) as (plane, route, _, _):
        write = route.write(ALL, ALL)
        await until(lambda: len(gate.stopped) == 2)
        closing = asyncio.ensure_future(plane.close())
        first, second = gate.stopped.values()
        first.set()
        await until(lambda: plane.under_way == {"writes": 1})
        for _ in range(3):
            closing.cancel()
            await asyncio.sleep(0)
        assert not closing.done() and not write.done.done() and not route.closed
        with pytest.raises(TransferError, match="closed"):
            route.write(ALL, ALL)
        second.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert write.done.result() is WriteOutcome.CANCELLED and route.closed


async def test_pages_are_checked_before_any_part_is_copied() -> None:
    async with routed(2) as (plane, route, _, theirs):
        wrong: PageIndices = np.append(ALL, np.int32(NUM_PAGES))
        with pytest.raises(LayoutError, match=r"outside 0\.\.31"):
            route.write(wrong, wrong)
        assert plane.under_way == {"writes": 0} and not theirs.array("k").any()


def test_how_many_threads_copy() -> None:
    for threads in (1, 2, 5):
        assert len(LocalPlane(None, None, threads)._threads) == threads
    assert len(LocalPlane(None)._threads) == 1
    assert len(LocalPlane(None, 1e6)._threads) == len(LocalPlane(None, 1e6, 3)._threads) == 1
    with pytest.raises(MisuseError, match="0 copy threads"):
        LocalPlane(None, None, 0)
