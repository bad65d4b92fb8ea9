"""Promises of pages: first come first served, never more than there is, no deadlock."""

from __future__ import annotations

import asyncio

import pytest

from kvflow.engine.scheduler.budget import PageBudget
from kvflow.memory.allocator import PageAllocator
from kvflow.protocols.errors import AbortedError, CapacityError


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_promise_counts_whether_taken_or_not() -> None:
    pages = PageAllocator(10)
    budget = PageBudget(pages)
    first = await budget.admit(6)
    pages.take(4, "first")
    first.took(4)
    waiting = asyncio.ensure_future(budget.admit(5))
    await settled()
    assert not waiting.done() and budget.waiting == 1
    fits = await budget_soon(budget, 4)
    assert fits is None, "four pages are free, but a request that came before waits"
    pages.give_back(pages.pages_of("first"), "first")
    first.release()
    second = await waiting
    second.release()
    budget.close(AbortedError())


async def budget_soon(budget: PageBudget, total: int) -> object:
    task = asyncio.ensure_future(budget.admit(total))
    await settled()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait([task])
    return None


async def test_what_can_never_fit_is_refused_at_once() -> None:
    budget = PageBudget(PageAllocator(10, reserved=1))
    with pytest.raises(CapacityError) as caught:
        await budget.admit(10)
    assert (caught.value.asked, caught.value.limit) == (10, 9)


async def test_pages_freed_by_others_are_noticed() -> None:
    pages = PageAllocator(4)
    budget = PageBudget(pages)
    room = pages.take(3, "a room that nobody told us about")
    waiting = asyncio.ensure_future(budget.admit(4))
    await settled()
    assert not waiting.done()
    pages.give_back(room, "a room that nobody told us about")
    (await asyncio.wait_for(waiting, 5)).release()
    budget.close(AbortedError())


async def test_a_waiter_that_leaves_lets_the_next_one_in() -> None:
    pages = PageAllocator(10)
    budget = PageBudget(pages)
    first = await budget.admit(5)
    large = asyncio.ensure_future(budget.admit(9))
    small = asyncio.ensure_future(budget.admit(3))
    await settled()
    assert budget.waiting == 2
    large.cancel()
    (await asyncio.wait_for(small, 5)).release()
    first.release()
    assert (await budget.admit(10)).total == 10
    budget.close(AbortedError())


async def test_who_sits_on_pages_is_ended_when_nobody_can_free_any() -> None:
    pages = PageAllocator(10)
    budget = PageBudget(pages)
    pages.take(10, "rooms")
    with pytest.raises(CapacityError, match="pages to grow"):
        await budget.admit(7, taken=5)
    budget.close(AbortedError())


async def test_release_is_idempotent() -> None:
    budget = PageBudget(PageAllocator(4))
    admission = await budget.admit(4)
    admission.release()
    admission.release()
    (await budget.admit(4)).release()


async def test_closing_ends_those_who_wait() -> None:
    pages = PageAllocator(4)
    budget = PageBudget(pages)
    pages.take(4, "a room")
    waiting = asyncio.ensure_future(budget.admit(2))
    await settled()
    budget.close(AbortedError("closing"))
    with pytest.raises(AbortedError, match="closing"):
        await waiting
    assert budget.waiting == 0


async def test_a_release_in_the_turn_in_which_a_waiter_is_cancelled() -> None:
    budget = PageBudget(PageAllocator(4))
    first = await budget.admit(4)
    leaving = [asyncio.ensure_future(budget.admit(4)) for _ in range(2)]
    staying = asyncio.ensure_future(budget.admit(3))
    await settled()
    for waiting in leaving:
        waiting.cancel()
    first.release()
    await settled()
    assert all(waiting.cancelled() for waiting in leaving)
    (await asyncio.wait_for(staying, 5)).release()
    assert (await budget.admit(4)).total == 4


async def test_no_more_than_most_run_and_the_others_come_in_their_order() -> None:
    budget = PageBudget(PageAllocator(100), most=2)
    running = [await budget.admit(1) for _ in range(2)]
    waiting = [asyncio.ensure_future(budget.admit(1)) for _ in range(3)]
    await settled()
    assert budget.waiting == 3 and not any(task.done() for task in waiting)
    waiting[0].cancel()
    running[0].release()
    await settled()
    assert [task.done() for task in waiting] == [True, True, False]
    (await waiting[1]).release()
    (await asyncio.wait_for(waiting[2], 5)).release()
    running[1].release()
    assert budget.waiting == 0


async def test_who_waits_for_pages_that_nobody_will_free_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvflow.engine.scheduler.budget.STUCK_S", 0.05)
    pages = PageAllocator(10)
    budget = PageBudget(pages)
    running = await budget.admit(2)
    pages.take(6, "quarantine")
    waiting = asyncio.ensure_future(budget.admit(7))
    await asyncio.sleep(0.1)
    assert not waiting.done(), "a running request may free its pages"
    running.release()
    with pytest.raises(CapacityError, match=r"no running request will free more: asked for 7, limit 4"):
        await asyncio.wait_for(waiting, 5)
    (await budget.admit(4)).release()
