"""Waiters for pages are woken when pages return, whatever the order, and for no other reason."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvflow.memory.allocator import PageAllocator
from kvflow.memory.page_waiter import PageWaiter
from kvflow.protocols.errors import CapacityError
from kvflow.protocols.pages.layout import PageIndices
from kvflow.serve.cache.prefix import PrefixCache

POINTS = ("before the look", "after the look", "after the check", "in the wait", "asleep")
PATIENCE_S = 20


class Consumer:
    def __init__(
        self, pages: PageAllocator, wanted: int, reached: Callable[[str], None] = lambda _: None
    ) -> None:
        self.pages, self.wanted, self.looks, self._reached = pages, wanted, 0, reached
        self._woken = asyncio.Event()
        self._waiter = PageWaiter(self._woken.set, pages)

    async def take(self) -> None:
        try:
            while not self._tries():
                self._waiter.wait()
                self._reached("in the wait")
                asyncio.get_running_loop().call_later(0.001, self._reached, "asleep")
                await self._woken.wait()
                self._woken.clear()
        finally:
            self._waiter.close()

    def _tries(self) -> bool:
        self.looks += 1
        self._reached("before the look")
        self._waiter.look()
        self._reached("after the look")
        try:
            self.check()
            self.pages.take(self.wanted, self)
        except CapacityError:
            self._reached("after the check")
            return False
        return True

    def check(self) -> None:
        self.pages.reclaim(self.wanted)


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def at_once(work: Callable[[], None]) -> None:
    work()


def given_back(pages: PageAllocator, page: PageIndices) -> None:
    pages.give_back(page, "others")


def read_no_more(pages: PageAllocator, page: PageIndices) -> None:
    pages.unhold(page)


def out_of_quarantine(pages: PageAllocator, page: PageIndices) -> None:
    pages.unhold(page)


def prepare(how: Callable[[PageAllocator, PageIndices], None], pages: PageAllocator) -> PageIndices:
    page = pages.take(1, "others")
    if how is read_no_more:
        pages.hold(page)
        pages.give_back(page, "others")
    elif how is out_of_quarantine:
        pages.give_back(page, "others")
        pages.withhold(page)
    return page


@pytest.mark.parametrize("runs", [at_once, in_thread])
@pytest.mark.parametrize(
    "ways", [*itertools.product([given_back, read_no_more, out_of_quarantine], repeat=2)]
)
@pytest.mark.parametrize("points", [*itertools.combinations_with_replacement(POINTS, 2)])
async def test_pages_that_return_at_any_moment_are_taken(
    points: tuple[str, str],
    ways: tuple[Callable[[PageAllocator, PageIndices], None], ...],
    runs: Callable[[Callable[[], None]], None],
) -> None:
    pages = PageAllocator(2)
    returns = [(point, how, prepare(how, pages)) for point, how in zip(points, ways, strict=True)]

    def reached(point: str) -> None:
        # Both may return at one moment, and the second one also after the first one was noticed.
        while returns and returns[0][0] == point:
            _, how, page = returns.pop(0)
            runs(functools.partial(how, pages, page))

    consumer = Consumer(pages, 2, reached)
    async with asyncio.timeout(PATIENCE_S):
        await consumer.take()
    assert not pages.waiters


class Reader(Consumer):
    def __init__(self, cache: PrefixCache, pages: PageAllocator, wanted: int) -> None:
        super().__init__(pages, wanted)
        self._cache = cache

    def check(self) -> None:
        self._cache.match(np.arange(4)).release()
        self.pages.reclaim(self.wanted)


@pytest.mark.parametrize("how", ["unlocked", "kept", "copied"])
async def test_pages_that_a_cache_can_give_up_are_taken_and_no_look_wakes_another(how: str) -> None:
    pages = PageAllocator(6)
    cache = PrefixCache(pages, 1)
    mine = pages.take(4, "mine")
    empty = cache.match(np.arange(4))
    cache.keep(np.arange(4), mine, "mine", empty)
    locked = cache.match(np.arange(4))
    held = pages.take(1, "held")
    readers = [Reader(cache, pages, 3) for _ in range(2)]
    waiting = [asyncio.create_task(reader.take()) for reader in readers]
    for _ in range(50):
        await asyncio.sleep(0)
    assert [reader.looks for reader in readers] == [1, 1]
    if how == "unlocked":
        locked.release()
    elif how == "kept":
        more = pages.take(1, "more")
        cache.keep(np.arange(100, 101), more, "more", cache.match(np.arange(100, 101)))
        pages.give_back(held, "held")
        for _ in range(50):
            await asyncio.sleep(0)
        assert all(reader.looks <= 4 for reader in readers) and not any(t.done() for t in waiting)
        locked.release()
    else:
        pages.wake_waiters()
        for _ in range(50):
            await asyncio.sleep(0)
        assert [reader.looks for reader in readers] == [2, 2], "it wakes each once, in any case"
        locked.release()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        first = next(reader for reader, task in zip(readers, waiting, strict=True) if task.done())
        pages.give_back(pages.pages_of(first), first)
        await asyncio.gather(*waiting)


async def test_threads_that_free_and_consumers_that_take_never_miss_each_other() -> None:
    pages, chance = PageAllocator(3), random.Random(5)
    returned: list[threading.Thread] = []

    async def consume() -> None:
        for _ in range(150):
            consumer = Consumer(pages, chance.randint(1, 3))
            await consumer.take()
            mine = pages.pages_of(consumer)
            late = threading.Thread(target=pages.give_back, args=(mine, consumer))
            returned.append(late)
            late.start()
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)

    async with asyncio.timeout(PATIENCE_S * 3):
        await asyncio.gather(*(consume() for _ in range(4)))
    for thread in returned:
        thread.join()
    assert pages.at_rest() and not pages.waiters


async def test_a_waiter_of_a_loop_that_is_closed_disturbs_nobody() -> None:
    pages = PageAllocator(1)
    mine = pages.take(1, "mine")

    async def waits() -> None:
        waiter = PageWaiter(lambda: None, pages)
        waiter.look()
        waiter.wait()

    in_thread(lambda: asyncio.run(waits()))
    pages.give_back(mine, "mine")
    assert pages.at_rest()


class Cache:
    """It can give up pages, and does so when nobody looks."""

    evictable_pages = 0

    def evict(self, count: int) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("which", range(3))
async def test_a_place_of_any_allocator_wakes_the_waiter(which: int) -> None:
    allocators, woken = [PageAllocator(2) for _ in range(3)], list[int]()
    taken = [allocator.take(2, "mine") for allocator in allocators]
    waiter = PageWaiter(lambda: woken.append(1), allocators[0], None, *allocators[1:])
    waiter.look()
    waiter.wait()
    allocators[which].give_back(taken[which], "mine")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert woken == [1]
    cache = Cache()
    allocators[which].reclaimables.append(cache)
    waiter.wait()
    waiter.evictable()
    cache.evictable_pages = 1
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert woken == [1], "as many pages could be evicted as before"
    waiter.evictable()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert woken == [1, 1]
    waiter.close()
    assert not any(allocator.waiters for allocator in allocators)


async def test_who_stopped_waiting_is_not_woken_and_one_return_wakes_once() -> None:
    pages, woken = PageAllocator(2), list[int]()
    waiter = PageWaiter(lambda: woken.append(1), pages)
    for wakes in (True, False):
        mine = [pages.take(1, "mine") for _ in range(2)]
        waiter.look()
        if wakes:
            waiter.wait()
        for page in mine:
            pages.give_back(page, "mine")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert woken == [1]
    waiter.wait()
    waiter.close()
    waiter.close()
    pages.give_back(pages.take(1, "mine"), "mine")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert woken == [1]
