"""write_back: pages leave the pool when they are needed, after their copy landed on the host."""

from __future__ import annotations

import asyncio

import pytest

from kvflow.protocols.cache.events import Tier
from kvflow.serve.cache.tiers import OWNER
from tests.memory.gate import CopyGate
from tests.protocols.cache.subscriber import Subscriber
from tests.serve.cache.prefix_bench import PAGES, Bench
from tests.serve.engine.pair import until


async def made_free(b: Bench, count: int) -> None:
    """As who waits for pages asks for them, again and again."""
    await until(lambda: b.pool.pages.reclaim(count) >= count)


async def test_nothing_is_copied_before_pages_are_needed_and_nothing_goes_before_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Bench(16, "write_back") as b:
        b.run(1, 2, 3, 4)
        b.run(1, 2, 5, 6)
        b.run(7, 8, 9)
        assert not b.cache.busy and not b.cache.stats().host_pages and b.pool.pages.free_pages == 3
        assert b.pool.pages.available_pages == PAGES
        gate = CopyGate(monkeypatch)
        assert b.pool.pages.reclaim(5) == 3, "pages went before they were copied"
        assert b.cache.leaving_pages == 2, "the ends of the prompt that was used last but two"
        await gate.reached()
        assert b.pool.pages.reclaim(5) == 3 and b.cache.leaving_pages == 2, "they are copied once"
        assert b.pool.pages.owned() == {OWNER: 9}
        gate.go.set()
        await b.settled()
        assert b.pool.pages.free_pages == 3, "they stay until they are asked for again"
        assert b.pool.pages.reclaim(5) == 5
        assert b.cache.stats().saved_pages == 4, "with what comes before them"
        await made_free(b, PAGES)
        for name in ("k", "v"):
            b.pool.array(name)[:] = -1
        for prompt in ((1, 2, 3, 4), (1, 2, 5, 6), (7, 8, 9)):
            assert await b.loaded(*prompt) == len(prompt)
        assert not b.cache.stats().unsaved_pages


async def test_no_more_is_copied_than_is_needed_beside_what_goes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Bench(16, "write_back") as b:
        b.run(1, 2, 3, 4)
        b.cache.evict(PAGES)
        await b.settled()
        for page in (5, 6, 7):
            b.run(page)
        gate = CopyGate(monkeypatch)
        prefix = b.cache.match(b.tokens(1, 2, 3, 4))
        b.cache.evict(1)
        prefix.release()
        assert (b.pool.pages.free_pages, b.cache.leaving_pages) == (PAGES - 7, 1)
        b.cache.evict(5)
        assert (b.pool.pages.free_pages, b.cache.leaving_pages) == (PAGES - 4, 2)
        gate.go.set()


async def test_pages_leave_beside_each_other_but_for_a_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What waits for its copy cannot be evicted: so a quarter does not wait."""
    async with Bench(16, "write_back") as b:
        for page in range(PAGES):
            b.run(page)
        gate = CopyGate(monkeypatch)
        for wanted, leaving in ((1, 1), (2, 2), (PAGES, PAGES * 3 // 4)):
            b.cache.evict(wanted)
            assert (b.pool.pages.free_pages, b.cache.leaving_pages) == (0, leaving)
        gate.go.set()


async def test_a_parent_is_told_of_before_its_child_in_every_tier() -> None:
    async with Bench(16, "write_back", events=True) as b:
        subscriber = Subscriber()  # it refuses a child without its parent
        for last in range(4, 8):
            b.run(1, 2, 3, last)
            await made_free(b, PAGES - 2)
            subscriber.replay(b.cache.take_events())
        await b.settled()
        subscriber.replay(b.cache.take_events())
        counts = b.cache.stats()
        held = subscriber.content()
        assert len(held[Tier.HOST]) == counts.host_pages == 7
        assert len(held[Tier.DEVICE]) == counts.pages == 2


@pytest.mark.parametrize("how", ["fail", "cancel", "flush", "close"])
async def test_a_copy_that_is_cut_off_keeps_nobody_waiting(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Bench(16, "write_back") as b:
        b.run(1, 2, 3)
        gate = CopyGate(monkeypatch, fails_at=1 if how == "fail" else 0)
        assert b.pool.pages.reclaim(PAGES) == PAGES - 3
        await gate.reached()
        closing = asyncio.ensure_future(b.cache.close()) if how == "close" else None
        if how == "cancel":
            (copying,) = b.copies
            copying.cancel()
        elif how == "flush":
            b.cache.flush()
        await asyncio.sleep(0)
        assert b.pool.pages.owned() == {OWNER: 3}, "pages came home while a thread read them"
        gate.go.set()
        if closing is not None:
            await closing
            return
        await b.settled()
        assert b.pool.pages.reclaim(PAGES) == PAGES, "it was tried once"
        assert b.cache.stats().unsaved_pages == (0 if how == "flush" else 3)
        assert not b.cache.stats().host_pages


async def test_what_the_host_cannot_take_is_given_up() -> None:
    async with Bench(2, "write_back") as b:
        b.run(1, 2, 3, 4, 5)
        await made_free(b, PAGES)
        assert b.cache.stats().unsaved_pages == 3
        assert await b.loaded(1, 2) == 2


async def test_a_prompt_that_is_loaded_waits_for_what_leaves() -> None:
    async with Bench(30, "write_back") as b:
        b.run(*range(1, 9))
        await made_free(b, PAGES)
        b.run(*range(20, 20 + PAGES))
        assert b.pool.pages.free_pages == 0
        assert await b.loaded(*range(1, 9)) == 8
        assert b.cache.stats().loaded_pages == 8
        assert await b.loaded(*range(20, 20 + PAGES)) == PAGES


async def test_who_reads_a_page_keeps_it_while_it_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Bench(16, "write_back") as b:
        b.run(1, 2, 3)
        gate = CopyGate(monkeypatch)
        b.pool.pages.reclaim(PAGES)
        await gate.reached()
        prefix = b.cache.match(b.tokens(1, 2, 3))
        gate.go.set()
        await b.settled()
        assert b.pool.pages.reclaim(PAGES) == PAGES - 3
        b.check(prefix, 1, 2, 3)
        prefix.release()
        assert b.pool.pages.reclaim(PAGES) == PAGES


async def test_a_page_that_is_on_the_device_alone_goes_with_what_follows_it_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where more copies have failed than pages could be given up."""
    async with Bench(30, "write_back") as b:
        b.run(21, 22, 23)
        with monkeypatch.context() as patch:
            gate = CopyGate(patch, fails_at=1)
            b.pool.pages.reclaim(PAGES)
            gate.go.set()
            await b.settled()
        prefix = b.cache.match(b.tokens(21, 22, 23))
        b.run(*range(21, 28))  # what is read is copied with it after all
        await made_free(b, PAGES - 3)
        prefix.release()
        await made_free(b, PAGES)
        b.run(1, 2, 3)
        b.run(1, 2, 4)
        b.run(*range(31, 35))
        gate = CopyGate(monkeypatch, fails_at=1)  # of 1, 2 and 3; that of 4 lands
        b.pool.pages.reclaim(PAGES)
        gate.go.set()
        await b.settled()
        await made_free(b, PAGES)
