"""A pool filled by cached prefixes: who gets its pages, and that nobody waits in vain."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvflow.memory.allocator import PageAllocator
from kvflow.serve.cache.prefix import PrefixCache
from kvflow.serve.cache.tiers import OWNER
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.scheduler.budget import PageBudget
from tests.serve.engine.pair import EnginePair, greedy, prompt_of, until
from tests.serve.engine.test_optimistic import Early
from tests.serve.engine.tiny_models import Generated

PAGE = 4


def filled(num_pages: int, *prompts: int) -> tuple[PageAllocator, PrefixCache]:
    pages = PageAllocator(num_pages)
    cache = PrefixCache(pages, PAGE)
    for i, count in enumerate(prompts):
        tokens = np.arange(count * PAGE) + 1000 * i
        empty = cache.match(tokens)
        assert cache.keep(tokens, pages.take(count, i), i, empty) == count
    return pages, cache


def test_of_evicted_pages_that_a_step_still_reads_others_are_asked_for_beside() -> None:
    pages, cache = filled(10, 3, 5)
    busy = pages.pages_of(OWNER)[:3]
    pages.hold(busy)
    assert pages.reclaim(5) == 5
    assert pages.returning_pages == 3, "the least recently used went first, and one of them is free"
    pages.unhold(busy)
    assert pages.free_pages == 8 and cache.evictable_pages == 2
    assert pages.reclaim(11) == 8, "nothing is evicted for what can never be free"
    assert cache.evictable_pages == 2


async def test_nothing_is_evicted_for_steps_ahead_that_find_no_pages_anyway(
    llama: LoadedModel,
) -> None:
    pages, cache = filled(10, 4)
    budget = PageBudget(pages)
    budget.reclaim(11)
    assert cache.evictable_pages == 4 and budget.most_spare == 10
    budget.reclaim(8)
    assert budget.spare == 8 and cache.evictable_pages == 2


async def test_where_nobody_runs_who_waits_lets_go_of_cached_pages() -> None:
    pages, cache = filled(10, 8)
    prefix = cache.match(np.arange(8 * PAGE))
    asked = []

    def release_cached() -> bool:
        asked.append(prefix.held)
        prefix.release()
        return asked[-1]

    budget = PageBudget(pages, release_cached=release_cached)
    admission = await asyncio.wait_for(budget.admit(6), 20)
    assert asked == [True] and pages.free_pages >= 6
    with pytest.raises(TimeoutError):  # one is live: it will free what it has
        await asyncio.wait_for(budget.admit(6), 0.05)
    assert asked == [True]
    admission.release()


async def test_requests_that_are_away_do_not_starve_the_one_that_runs(
    llama: LoadedModel, generated: Generated
) -> None:
    prompts = [prompt_of(48, 3 * i + 1) for i in range(3)]
    expected = [generated("llama", prompt, 60) for prompt in prompts]
    small = {"page_size": PAGE, "num_pages": 46, "source_pages": 256, "new_token_ratio": 0.1}
    for host in ({"host_pages": 200}, {}):
        async with EnginePair(llama, cache="lru", **small, **host) as pair:
            for prompt in prompts:
                await pair.tokens(prompt, greedy(1))
            # Half of the time after which who is short would be failed.
            async with asyncio.timeout(60):
                assert await pair.tokens_of_all(prompts, greedy(60)) == expected
            report = pair.decode.retraction
            assert report.retracts == report.resumes + report.recomputes and report.recomputes
            assert pair.caches[1].stats().asked_tokens == 6 * 48, "no return is counted"


@pytest.mark.parametrize(
    ("cached", "early", "matched"),
    [
        (40, 44, 60),  # of the early one's 11 pages 10 are cached, and locked by it alone
        (20, 40, 72),  # the early one's 10, and 5 that nobody reads, are just enough
    ],
)
async def test_nobody_waits_for_an_early_prompt_because_of_cached_pages(
    cached: int, early: int, matched: int, llama: LoadedModel
) -> None:
    options = {"page_size": PAGE, "num_pages": 256, "source_pages": 20, "optimistic_tries": 1}
    async with EnginePair(llama, cache="lru", **options) as pair:
        begun = Early(pair)
        await pair.tokens(prompt_of(cached), greedy(1))
        begun.steps.clear()
        shares = early > cached + PAGE - 1 and cached == 40
        prompt = prompt_of(cached) + prompt_of(early - cached, 7) if shares else prompt_of(early, 7)
        room, leg = begun.begin(prompt)
        await begun.computed(early - cached if shares else early)
        assert begun.counts == (1, 0, 0, 1)
        async with asyncio.timeout(20):
            await pair.tokens(prompt_of(matched, 3), greedy(1))
        assert begun.counts[2] == 1, "it gave way"
        room.meet()
        await leg


async def test_a_prompt_that_waits_is_looked_up_once(llama: LoadedModel) -> None:
    async with EnginePair(
        llama, page_size=PAGE, num_pages=256, source_pages=12, cache="lru"
    ) as pair:
        blocker = pair.room(prompt_of(40, 5))
        blocker.gate.clear()
        leg = pair.send(blocker, prompt_of(40, 5), greedy(1))
        await blocker.sent()
        waits = asyncio.ensure_future(pair.tokens(prompt_of(20), greedy(1)))
        await until(lambda: pair.prefill.load().waiting == 1)
        for _ in range(5):
            pair.prefill.wake()
            await asyncio.sleep(0)
        before, index = pair.caches[0].stats().asked_tokens, pair.caches[0]._index
        blocker.gate.set()
        await leg
        await waits
        assert (before, pair.caches[0].stats().asked_tokens) == (40, 60)
        assert not any(
            child.hits
            for root in index._residents.roots.values()
            for child in root.children.values()
        )


class SlowStore:
    """Stands in for `PrefixCache.fetch`, and ends once it was cancelled and `may_end`."""

    def __init__(self) -> None:
        self.reads: list[asyncio.Task[None]] = []
        self.cancelled, self.may_end = asyncio.Event(), asyncio.Event()

    async def fetch(self, *_: object, **__: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.reads.append(task)
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
            await self.may_end.wait()


@pytest.mark.parametrize("leaves", ["", "in the queue", "once admitted"])
async def test_with_best_effort_storage_is_read_while_a_request_waits_and_no_longer(
    leaves: str, llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"cache": "lru", "cache_host_pages": 8, "prefetch": "best_effort", "num_pages": 8}
    async with EnginePair(llama, page_size=PAGE, **options) as pair:
        store, budget = SlowStore(), pair.decode._budget
        first = await pair.decode.admit(prompt_of(20), greedy(4))
        monkeypatch.setattr(pair.decode.cache, "fetch", store.fetch)
        waiting = asyncio.ensure_future(pair.decode.admit(prompt_of(20), greedy(4)))
        await until(lambda: bool(store.reads))
        if leaves != "in the queue":
            first.release()
            await store.cancelled.wait()
            assert budget.admitted == 1 and not waiting.done(), "what is read is drained first"
        if leaves:
            waiting.cancel()
        store.may_end.set()
        await asyncio.wait([waiting, store.reads[0]], timeout=20)
        assert store.reads[0].cancelled() and waiting.cancelled() is bool(leaves)
        for admission in (first, *(() if leaves else (waiting.result(),))):
            admission.release()
        assert not budget.admitted and not budget.waiting


async def test_with_write_back_a_request_begins_when_pages_have_left(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a copy wakes those that wait; nothing polls."""
    options = {
        "cache": "lru",
        "cache_host_pages": 64,
        "num_pages": 16,
        "cache_options": {"write_policy": "write_back"},
    }
    async with EnginePair(llama, page_size=PAGE, **options) as pair:
        first, second = prompt_of(40, 1), prompt_of(40, 2)
        expected = await pair.tokens(first, greedy(4))
        await until(lambda: pair.home)
        async with asyncio.timeout(20):
            await pair.tokens(second, greedy(4))
        await until(lambda: pair.home)
        assert all(cache.stats().saved_pages for cache in pair.caches)
        async with asyncio.timeout(20):
            assert await pair.tokens(first, greedy(4)) == expected
