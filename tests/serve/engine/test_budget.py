"""Promises of pages: first come first served, never more than there is, no deadlock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvflow.memory.allocator import PageAllocator
from kvflow.protocols.errors import AbortedError, CapacityError
from kvflow.serve.engine.scheduler.budget import (
    MOST_TOKENS_AHEAD,
    Admission,
    NewTokenRatio,
    PageBudget,
    Shortage,
)
from kvflow.serve.engine.scheduler.growth import Growth


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def asking(budget: PageBudget, *totals: int, **more: Any) -> list[asyncio.Task[Admission]]:
    asked = [asyncio.create_task(budget.admit(total, **more)) for total in totals]
    await settled()
    return asked


async def granted(waiting: asyncio.Task[Admission]) -> None:
    (await asyncio.wait_for(waiting, 20)).release()


async def test_a_promise_counts_whether_taken_or_not() -> None:
    pages = PageAllocator(10)
    budget = PageBudget(pages)
    first = await budget.admit(6)
    pages.take(4, "first")
    first.took(4)
    [waiting] = await asking(budget, 5)
    assert not waiting.done() and budget.waiting == 1
    fits = await budget_soon(budget, 4)
    assert fits is None, "four pages are free, but a request that came before waits"
    pages.give_back(pages.pages_of("first"), "first")
    for _ in range(2):
        first.release()
    await granted(waiting)
    budget.close(AbortedError())


async def budget_soon(budget: PageBudget, total: int) -> object:
    [task] = await asking(budget, total)
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
    [waiting] = await asking(budget, 4)
    assert not waiting.done()
    pages.give_back(room, "a room that nobody told us about")
    await granted(waiting)
    budget.close(AbortedError())


async def test_a_waiter_that_leaves_lets_the_next_one_in() -> None:
    pages = PageAllocator(10)
    budget = PageBudget(pages)
    first = await budget.admit(5)
    large, small = await asking(budget, 9, 3)
    assert budget.waiting == 2
    large.cancel()
    await granted(small)
    first.release()
    assert (await budget.admit(10)).total == 10
    budget.close(AbortedError())


async def test_who_sits_on_pages_is_ended_when_nobody_can_free_any() -> None:
    pages = PageAllocator(10)
    budget = PageBudget(pages)
    pages.take(10, "rooms")
    with pytest.raises(CapacityError, match="free pool tokens to grow"):
        await budget.admit(7, taken=5)
    budget.close(AbortedError())


async def test_a_release_in_the_turn_in_which_a_waiter_is_cancelled() -> None:
    budget = PageBudget(PageAllocator(4))
    first = await budget.admit(4)
    *leaving, staying = await asking(budget, 4, 4, 3)
    for waiting in leaving:
        waiting.cancel()
    first.release()
    await settled()
    assert all(waiting.cancelled() for waiting in leaving)
    await granted(staying)
    assert (await budget.admit(4)).total == 4


async def test_no_more_than_most_run_and_the_others_come_in_their_order() -> None:
    budget = PageBudget(PageAllocator(100), most=2)
    running = [await budget.admit(1) for _ in range(2)]
    waiting = await asking(budget, 1, 1, 1)
    assert budget.waiting == 3 and not any(task.done() for task in waiting)
    waiting[0].cancel()
    running[0].release()
    await settled()
    assert [task.done() for task in waiting] == [True, True, False]
    await granted(waiting[1])
    await granted(waiting[2])
    running[1].release()
    assert budget.waiting == 0


async def test_who_waits_for_pages_that_nobody_will_free_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvflow.serve.engine.scheduler.budget.STUCK_S", 0.05)
    pages = PageAllocator(10)
    budget = PageBudget(pages)
    running = await budget.admit(2)
    pages.take(6, "quarantine")
    waiting = asyncio.ensure_future(budget.admit(7))
    await asyncio.sleep(0.1)
    assert not waiting.done(), "a running request may free its pages"
    running.release()
    with pytest.raises(
        CapacityError, match=r"no running request will free more: asked for 7, limit 4"
    ):
        await asyncio.wait_for(waiting, 20)
    (await budget.admit(4)).release()


async def test_a_shortage_that_has_ended_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvflow.serve.engine.scheduler.budget.STUCK_S", 0.02)
    shortage = Shortage()
    for _ in range(2):
        assert shortage.left_s() > 0, "it begins here"
        await asyncio.sleep(0.03)
        assert shortage.left_s() == 0
        shortage.ended()


async def test_below_the_worst_case_a_share_is_promised() -> None:
    ratio = NewTokenRatio(0.25)
    pages = PageAllocator(100)
    budget = PageBudget(pages, ratio=ratio, page_size=MOST_TOKENS_AHEAD // 32)
    first = await budget.admit(34, base=10)  # promised 10 and a quarter of 24
    second = await budget.admit(90, base=10)  # of 80 pages 32 count: 10 and a quarter of these
    assert (first.outstanding(0.25, 32), second.outstanding(0.25, 32)) == (16, 18)
    third = await budget.admit(66, base=66)
    assert await budget_soon(budget, 1) is None
    ratio.now = 0.0
    fourth = await budget.admit(14, base=14)
    assert budget.spare == 0, "what others need to begin is not for growing"
    pages.take(10, "first")
    first.took(10)
    assert (first.opening, budget.spare) == (0, 0)
    for admission in (first, second, third, fourth):
        admission.release()
    assert budget.spare == 90


async def test_priority_then_arrival_and_whoever_was_retracted_first() -> None:
    budget = PageBudget(PageAllocator(10))
    running = [await budget.admit(5), await budget.admit(5)]
    order: list[str] = []

    async def wait(name: str, priority: int) -> None:
        admission = await budget.admit(10, priority=priority)
        order.append(name)
        admission.release()

    waiting = [
        asyncio.ensure_future(wait(name, p)) for name, p in (("a", 0), ("b", 5), ("c", 0), ("d", 5))
    ]
    await settled()
    budget.retract(running[0], 5)
    assert running[0].granted.done(), "it comes first, and there is room"
    running[0].release()
    running[1].release()
    await asyncio.wait_for(asyncio.gather(*waiting), 20)
    assert order == ["b", "d", "a", "c"]


async def test_a_retracted_request_waits_for_its_pages_and_the_others_for_it() -> None:
    pages = PageAllocator(10)
    budget = PageBudget(pages, ratio=NewTokenRatio(0.0))
    first, second = [await budget.admit(10, base=2) for _ in range(2)]
    for admission, owner in ((first, "first"), (second, "second")):
        pages.take(5, owner)
        admission.took(5)
    budget.retract(second, 5)
    [later] = await asking(budget, 1)
    assert not second.granted.done() and not later.done(), "its pages are not free yet"
    pages.give_back(pages.pages_of("second"), "second")
    await asyncio.wait_for(second.granted, 20)
    assert budget.waiting == 1 or later.done()
    pages.take(5, "second")
    second.took(5)
    first.release()
    pages.give_back(pages.pages_of("first"), "first")
    await granted(later)
    second.release()


async def test_every_request_needs_a_row_of_a_pool_that_has_some() -> None:
    rows = PageAllocator(2, unit="row")
    budget = PageBudget(PageAllocator(100), rows=rows)
    first, second = [await budget.admit(1) for _ in range(2)]
    assert await budget_soon(budget, 1) is None
    rows.take(1, "first")
    first.took(1)
    assert await budget_soon(budget, 1) is None, "the other row is promised"
    second.release()
    (await budget.admit(1)).release()
    rows.give_back(rows.pages_of("first"), "first")
    first.release()


async def test_a_retracted_request_needs_a_row_again() -> None:
    rows = PageAllocator(1, unit="row")
    budget = PageBudget(PageAllocator(100), rows=rows)
    first = await budget.admit(1)
    first.took(1)
    taken = rows.take(1, "first")
    budget.retract(first, 1)
    await settled()
    assert not first.granted.done(), "its row is not free yet"
    rows.give_back(taken, "first")
    await asyncio.wait_for(first.granted, 20)
    assert await budget_soon(budget, 1) is None, "the row is promised to it"
    first.release()


async def test_who_has_a_row_already_waits_for_none() -> None:
    rows, pages = PageAllocator(1, unit="row"), PageAllocator(4)
    for store in (rows, pages):
        store.take(1, "a room that has landed")
    budget = PageBudget(pages, rows=rows)
    (await asyncio.wait_for(budget.admit(4, 1), 20)).release()
    budget.close(AbortedError())


async def test_nobody_gives_cached_pages_up_for_a_row() -> None:
    asked: list[int] = []
    rows = PageAllocator(1, unit="row")
    taken = rows.take(1, "a room")

    def release_cached() -> bool:
        asked.append(1)
        return False

    budget = PageBudget(PageAllocator(4), rows=rows, release_cached=release_cached)
    [waiting] = await asking(budget, 4)
    assert not waiting.done() and not asked
    rows.give_back(taken, "a room")
    await granted(waiting)


async def test_rows_that_nobody_will_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvflow.serve.engine.scheduler.budget.STUCK_S", 0.05)
    rows = PageAllocator(1, unit="row")
    rows.take(1, "quarantine")
    with pytest.raises(
        CapacityError,
        match="free rows, and no running request will free more: asked for 1, limit 0",
    ):
        await asyncio.wait_for(PageBudget(PageAllocator(4), rows=rows).admit(1), 20)


class Growing:
    """A request that lacks `now` pages for one step, and `ahead` for more."""

    def __init__(self, now: int, ahead: int) -> None:
        self._now, self._ahead, self.taken = now, ahead, 0
        self.sequence: Any = self
        self.resident: Any = self
        self.admission: Any = self
        self.owner = id(self)

    def pages_missing(self, steps: int) -> int:
        return self._ahead if steps > 1 else self._now

    def add_pages(self, pages: Any) -> None:
        self.taken += pages.size

    def add(self, pages: Any) -> None:
        """To the resident."""

    def took(self, count: int) -> None:
        """Of the promise."""


def growing(free: int, *needs: tuple[int, int]) -> tuple[Growth, list[Any]]:
    pages = PageAllocator(8)
    pages.take(8 - free, "others")
    return Growth(PageBudget(pages), pages, lambda request, error: None), [
        Growing(*n) for n in needs
    ]


async def test_who_needs_no_page_for_one_step_takes_it_in_the_fullest_pool() -> None:
    pages = PageAllocator(4)
    budget = PageBudget(pages)
    admission = await budget.admit(4)
    pages.take(2, "lost")
    assert budget.spare == -2
    growth = Growth(budget, pages, lambda request, error: None)
    request: Any = Growing(0, 1)
    assert growth.grow([request], 8) == ([request], 1)
    assert not growth.short
    admission.release()


@pytest.mark.parametrize(
    ("free", "needs", "steps", "taken", "short"),
    [
        (1, [(0, 1), (1, 1), (0, 0)], 1, [0, 1, 0], {}),
        (2, [(0, 1), (1, 1)], 8, [1, 1], {}),
        (1, [(1, 2), (1, 2), (0, 1)], 1, [1, 0, 0], {1: 1}),
    ],
    ids=["needed now before later", "enough for all steps", "one is short and the others step"],
)
async def test_who_takes_pages_for_the_next_steps(
    free: int, needs: list[Any], steps: int, taken: list[int], short: dict[int, int]
) -> None:
    growth, requests = growing(free, *needs)
    ready = [request for i, request in enumerate(requests) if i not in short]
    assert growth.grow(requests, 8) == (ready, steps)
    assert [request.taken for request in requests] == taken
    assert growth.short == {requests[i]: count for i, count in short.items()}


async def test_what_a_request_begins_with_is_promised_to_it_no_more_and_once() -> None:
    budget = PageBudget(PageAllocator(10))
    admission = await budget.admit(8, base=6)
    for _ in range(2):
        admission.cover(4)
        assert (admission.opening, admission.total) == (2, 4)
    admission.cover(1)
    assert (admission.opening, admission.total) == (5, 7)
    admission.release()


async def test_closing_spares_those_whose_wait_was_cancelled_in_the_same_turn() -> None:
    budget = PageBudget(PageAllocator(10))
    held = await budget.admit(10)
    gone, waits = await asking(budget, 5, 5)
    assert budget.waiting == 2
    gone.cancel()
    budget.close(AbortedError("closing"))
    await asyncio.wait([gone, waits])
    assert gone.cancelled() and isinstance(waits.exception(), AbortedError)
    assert budget.waiting == 0
    held.release()


async def test_who_is_short_is_ended_only_where_nothing_may_come_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed: list[Any] = []
    pages = PageAllocator(8)
    pages.take(8, "others")
    growth = Growth(PageBudget(pages), pages, lambda request, error: failed.append(request))
    monkeypatch.setattr(growth._shortage, "left_s", lambda: 0.0)
    request: Any = Growing(1, 1)
    assert growth.grow([request], 8)[0] == [] and growth.short == {request: 1}
    growth.fail_stuck(may_come=True)
    assert failed == []
    growth.fail_stuck(may_come=False)
    assert failed == [request] and growth.short == {}
