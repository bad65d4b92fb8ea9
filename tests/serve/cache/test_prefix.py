"""The cache of one pool and its host tier: owners, bytes, and copies that are cut off."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import numpy as np
import pytest

from kvflow.memory.copies import HostCopier
from kvflow.memory.pool import PagedPool
from kvflow.protocols.cache.choices import WritePolicy
from kvflow.protocols.cache.hashes import Namespace
from kvflow.protocols.cache.residents import Freed
from kvflow.protocols.errors import CapacityError, MisuseError, TransferError
from kvflow.protocols.pages.kinds import ROW, SLOT, StateKind
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.pages.plan import Blocks
from kvflow.serve.cache.host import HostTier
from kvflow.serve.cache.prefix import Prefix, PrefixCache
from kvflow.serve.cache.states import StateStore
from kvflow.serve.cache.tiers import OWNER
from tests.memory.gate import CopyGate
from tests.serve.cache.prefix_bench import PAGE_SIZE, PAGES, Bench
from tests.serve.engine.pair import until


async def test_whoever_needs_pages_gets_those_that_nobody_reads() -> None:
    async with Bench() as b:
        b.run(1, 2, 3, 4)
        b.run(1, 2, 5)
        assert b.pool.pages.owned() == {OWNER: 5} and b.pool.pages.at_rest()
        assert b.pool.pages.available_pages == PAGES
        held = b.cache.match(b.tokens(1, 2, 3, 9))
        b.check(held, 1, 2, 3)
        assert b.pool.pages.available_pages == PAGES - 3 and not b.pool.pages.at_rest()
        assert b.pool.pages.reclaim(PAGES) == PAGES - 5, "nothing is evicted in vain"
        assert b.pool.pages.reclaim(PAGES - 3) == PAGES - 3
        taken = b.pool.pages.take(PAGES - 3, "all of it")
        b.check(held, 1, 2, 3)
        with pytest.raises(CapacityError):
            b.pool.pages.take(1, "more")
        held.release()
        held.release()
        assert b.pool.pages.reclaim(3) == 3
        b.pool.pages.give_back(taken, "all of it")


async def test_a_prompt_is_cached_in_whole_pages_and_once() -> None:
    async with Bench() as b:
        tokens = np.append(b.tokens(1, 2), 7)
        prefix = b.cache.match(tokens)
        own = b.pool.pages.take(3, "request")
        assert b.cache.keep(tokens, own, "request", prefix) == 2
        b.pool.pages.give_back(own[2:], "request")
        twice = b.cache.match(b.tokens(1, 2), 3)  # a page and a half
        assert twice.pages.size == 1
        own = np.concatenate((twice.pages, b.pool.pages.take(1, "request")))
        assert b.cache.keep(b.tokens(1, 2), own, "request", twice) == 2
        assert b.pool.pages.owned() == {OWNER: 2}, "a duplicate is given back"
        twice.release()


async def test_what_prompts_have_asked_for_and_found_is_counted() -> None:
    async with Bench() as b:
        for prompt in ((1, 2, 3), (1, 2, 4), (1, 2, 4, 5)):
            b.run(*prompt)
        stats = b.cache.stats()
        assert (stats.asked_tokens, stats.hit_tokens) == (10 * PAGE_SIZE, 5 * PAGE_SIZE)
        b.pool.pages.reclaim(PAGES)
        stats = b.cache.stats()
        assert (stats.pages, stats.evictable_pages, stats.evicted_pages) == (0, 0, 5)


async def test_namespaces_are_apart() -> None:
    async with Bench() as b:
        b.run(1, 2, namespace=Namespace("a"))
        assert b.found(1, 2, namespace=Namespace("b")) == 0
        assert b.run(1, 2, namespace=Namespace("a")).pages.size == 2


async def test_what_the_device_has_lost_is_loaded_from_the_host() -> None:
    async with Bench(host_pages=8) as b:
        b.run(1, 2, 3, 4)
        b.run(1, 2, 5)
        await until(lambda: b.cache.stats().saved_pages == 5)
        b.evict_all()
        assert b.found(1, 2, 5) == 0
        taken: list[int] = []
        assert await b.loaded(1, 2, 5, taking=taken.append) == 3
        assert taken == [3, -3]
        assert await b.loaded(1, 2, 3, 4, most_pages=1) == 3
        assert b.cache.stats().loaded_pages == 4


@pytest.mark.parametrize("host_pages", [0, 8])
async def test_where_there_is_nothing_to_load_that_is_no_failure(
    host_pages: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with Bench(host_pages) as b:
        await b.ran(1, 2)
        for prompt, found in (((1, 2, 3), 2), ((4, 5), 0)):
            tokens = b.tokens(*prompt)
            (prefix := await b.cache.load(tokens)).release()
            assert prefix.tokens == found * PAGE_SIZE
            await b.cache.fetch(tokens)
            assert not b.cache.lacks(tokens) and not b.cache.busy and b.cache.leaving_pages == 0
        assert not caplog.records


async def test_selective_write_through_waits_for_a_second_prompt() -> None:
    async with Bench(8, "write_through_selective") as b:
        b.run(1, 2, 3)
        assert not b.cache.stats().host_pages
        b.run(1, 2, 4)
        await until(lambda: b.cache.stats().saved_pages == 2)
        assert b.cache.stats().host_pages == 2


async def test_a_full_host_tier_takes_what_was_used_last() -> None:
    async with Bench(host_pages=4) as b:
        for first in (10, 20, 30):
            await b.ran(first, first + 1, first + 2)
        assert b.cache.stats().host_pages == 4 and not b.cache.stats().unsaved_pages
        b.evict_all()
        assert await b.loaded(30, 31, 32) == 3


async def test_a_close_begins_no_further_slice_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Bench(host_pages=8) as b:
        assert b.host is not None
        monkeypatch.setattr(b.host, "_slice_bytes", b.pool.layout.page_bytes)
        gate = CopyGate(monkeypatch)
        b.run(1, 2, 3)
        await gate.reached()
        closing = asyncio.ensure_future(b.cache.close())
        await until(lambda: all(copying.cancelling() for copying in b.copies))
        gate.go.set()
        await closing
        assert gate.begun == 1


@pytest.mark.parametrize("loading", [False, True])
@pytest.mark.parametrize("how", ["cancel", "fail", "flush", "close"])
async def test_a_copy_that_is_cut_off_leaves_nothing_behind(
    how: str, loading: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages come home when the thread has ended, not before; what it copied is not read."""
    async with Bench(host_pages=8) as b:
        if loading:
            await b.only_on_host(1, 2, 3)
        gate = CopyGate(monkeypatch, fails_at=1 if how == "fail" else 0)
        work: asyncio.Task[Any]
        if loading:
            work = asyncio.create_task(b.cache.load(b.tokens(1, 2, 3)))
        else:
            b.run(1, 2, 3)
            (work,) = b.copies
        await gate.reached()
        closing = asyncio.ensure_future(b.cache.close()) if how == "close" else None
        if how == "cancel":
            work.cancel()
        elif how == "flush":
            b.cache.flush()
        await asyncio.sleep(0)
        assert b.host is not None
        away = b.pool.pages.owned().get(OWNER, 0), b.host.pages.owned().get(OWNER, 0)
        assert away == (3, 3), "pages came home while a thread copied them"
        gate.go.set()
        await asyncio.wait([work])
        if not work.cancelled() and (loaded_prefix := work.result()) is not None:
            loaded_prefix.release()
        if closing is not None:
            await closing
            return
        await b.settled()
        left = 0 if how == "flush" or (loading and how in ("cancel", "fail")) else 3
        assert b.found(1, 2, 3) == left
        assert b.cache.stats().host_pages == (3 if loading and how != "flush" else 0)


@pytest.mark.parametrize(
    ("unit", "size_bytes", "said"),
    [(SLOT, 1, "do not hold a page"), (ROW, 1 << 20, "those of this pool hold nothing")],
)
def test_host_memory_that_holds_nothing_is_refused(unit: str, size_bytes: int, said: str) -> None:
    pool = small_pool(StateKind("state", "int8", (8,), unit))
    with pytest.raises(MisuseError, match=said):
        HostTier(pool, size_bytes)
    pool.close()


def small_pool(*kinds: StateKind, page_size: int = 2) -> PagedPool:
    rows = int(any(kind.unit == ROW for kind in kinds))
    layout = build_layout(kinds, page_size=page_size, num_pages=8, num_rows=rows)
    return PagedPool.allocate(layout, shared=False)


async def test_one_cached_state_makes_way_for_another_and_none_that_a_request_has() -> None:
    kinds = StateKind("k", "int8", (4,)), StateKind("state", "int8", (8,), ROW)
    pool = small_pool(*kinds, page_size=1)
    store = StateStore(pool, 2 * pool.layout.row_bytes)
    cache = PrefixCache(pool.pages, 1, states=store)
    tokens = np.arange(4)
    prefix = cache.match(tokens)
    cache.keep(tokens, pool.pages.take(4, "request"), "request", prefix)
    slots = {count: slot for count in (2, 4) if (slot := cache.take_state("request")) is not None}
    assert len(slots) == 2 and cache.take_state("request") is None
    cache.keep_states(tokens, slots, "request", prefix)
    other = cache.take_state("other")
    stats = cache.stats()
    assert (stats.states, stats.limit_states, stats.evicted_states, stats.pages) == (1, 2, 1, 4)
    assert other is not None
    store.free((other,), "other")
    await cache.close()
    assert not store.slots.owned()
    pool.close()


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
async def test_any_order_of_requests_copies_and_ends(
    write_policy: WritePolicy, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a prompt finds is what was written for its tokens; at rest nothing is away."""
    rng, faults = random.Random(seed), random.Random(seed + 1)
    copy = HostCopier.copy

    def failing(blocks: Blocks) -> None:
        if faults.random() < 0.1:
            raise TransferError("a copy of this test failed")
        copy(blocks)

    monkeypatch.setattr(HostCopier, "copy", staticmethod(failing))
    async with Bench(30, write_policy) as b:
        held: list[tuple[Prefix, tuple[int, ...]]] = []
        loads: list[asyncio.Task[int]] = []

        for step in itertools.count():
            stats = b.cache.stats()
            if step >= 600 and stats.loaded_pages and stats.failed_copies:
                break
            prompt = tuple(rng.choices((1, 2, 3), k=rng.randint(1, 5)))
            kind = rng.random()
            if kind < 0.4 and b.pool.pages.available_pages >= 6:
                b.run(*prompt)
            elif kind < 0.55 and len(held) < 2:
                prefix = b.cache.match(b.tokens(*prompt))
                held.append((prefix, prompt[: prefix.pages.size]))
            elif kind < 0.65 and held:
                prefix, pages = held.pop(rng.randrange(len(held)))
                b.check(prefix, *pages)
                prefix.release()
            elif kind < 0.8:
                load = b.loaded(*prompt, most_pages=rng.randint(1, 9))
                loads.append(asyncio.ensure_future(load))
            elif kind < 0.85 and loads:
                loads.pop(rng.randrange(len(loads))).cancel()
            elif kind < 0.87:
                b.pool.pages.reclaim(rng.randint(1, PAGES))
            elif kind < 0.875:
                b.cache.flush()
            else:
                await asyncio.sleep(rng.choice((0, 0.0005, 0.001)))
            for prefix, pages in held:
                b.check(prefix, *pages)
        for ended in await asyncio.gather(*loads, return_exceptions=True):
            assert isinstance(ended, int | asyncio.CancelledError), ended
        for prefix, _ in held:
            prefix.release()


async def test_a_prompt_is_counted_once_however_often_it_looks() -> None:
    async with Bench(8, "write_through_selective") as b:
        b.run(1, 2)
        for looks in range(5):
            prefix = b.cache.match(b.tokens(1, 2, 3))
            assert prefix.end is not None and prefix.tokens == 4
            hits = [prefix.end.hits]
            if looks == 4:
                b.cache.count(6, prefix)
            hits.append(prefix.end.hits)
            assert (hits, b.cache.busy) == ([0, int(looks == 4)], looks == 4), (
                "it is worth a copy from then on"
            )
            prefix.release()


async def test_prompts_wait_for_what_another_one_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Bench(host_pages=8) as b:
        await b.only_on_host(1, 2, 3)
        gate = CopyGate(monkeypatch)
        loads = [asyncio.ensure_future(b.cache.load(b.tokens(1, 2, 3, n))) for n in range(3)]
        await gate.reached()
        await asyncio.sleep(0)
        assert not any(load.done() for load in loads)
        gate.go.set()
        for loaded in await asyncio.gather(*loads):
            b.check(loaded, 1, 2, 3)
            loaded.release()
        assert b.found(1, 2, 3) == b.cache.stats().loaded_pages == 3


async def test_pages_are_promised_again_as_the_copy_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever counts what is available in that turn of the loop must not find them twice."""
    async with Bench(host_pages=8) as b:
        await b.only_on_host(1, 2, 3)
        taken: list[int] = []
        honest = b.cache._free
        seen: list[tuple[int, int]] = []

        def free(freed: Freed) -> None:
            honest(freed)
            asyncio.get_running_loop().call_soon(
                lambda: seen.append((sum(taken), b.pool.pages.available_pages))
            )

        monkeypatch.setattr(b.cache._tiers, "_free", free)
        loading = b.cache.load(
            b.tokens(1, 2, 3), taking=taken.append, locked=lambda p: taken.append(p.pages.size)
        )
        (await loading).release()
        assert taken == [3, -3, 3] and seen == [(3, PAGES - 3)]


async def test_a_cache_that_cannot_load_has_not_got_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Bench(host_pages=8) as b:
        await b.only_on_host(1, 2, 3)
        with monkeypatch.context() as broken:
            broken.setattr(b.cache._index, "arrives", lambda end: 1 // 0)
            assert await b.loaded(1, 2, 3) == 0


async def test_a_cache_goes_on_giving_pages_when_the_one_before_it_closes() -> None:
    """As a worker has two while it exchanges its role."""
    async with Bench() as b:
        b.run(1, 2, 3)
        other = PrefixCache(b.pool.pages, 2)
        assert b.pool.pages.available_pages == PAGES
        await b.cache.close()
        tokens, own = b.tokens(4, 5), b.pool.pages.take(2, "request")
        prefix = other.match(tokens)
        other.keep(tokens, own, "request", prefix)
        assert (b.pool.pages.free_pages, b.pool.pages.reclaim(PAGES)) == (PAGES - 2, PAGES)
        await other.close()
        assert not b.pool.pages.reclaimables


@pytest.mark.parametrize("how", ["copies have not begun", "a copy begins", "it is cancelled"])
async def test_a_cache_that_closes_ends_its_copies(how: str) -> None:
    """The task of a copy that begins meanwhile would do nothing at all if it were cancelled."""
    async with Bench(host_pages=6) as b:
        if how != "a copy begins":
            b.run(1, 2, 3)
            assert b.copies
        closing = asyncio.create_task(b.cache.close())
        await asyncio.sleep(0)
        if how == "a copy begins":
            b.run(1, 2, 3)
        elif how == "it is cancelled":
            closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled() == (how == "it is cancelled") and not b.copies
        assert b.pool.pages.free_pages == PAGES and not b.pool.pages.owned()


async def test_what_host_pages_follow_can_be_evicted_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first pages failed to be copied; those that a later prompt added were copied."""
    async with Bench(host_pages=6) as b:
        assert b.host is not None
        honest, fail = b.host.copy, asyncio.Event()

        async def failing(*args: Any) -> bool:
            await fail.wait()
            raise TransferError("planted")

        monkeypatch.setattr(b.host, "copy", failing)
        b.run(1, 2)
        await asyncio.sleep(0)
        monkeypatch.setattr(b.host, "copy", honest)
        b.run(1, 2, 3, 4)
        await until(lambda: b.cache.stats().saved_pages == 2)
        fail.set()
        await until(lambda: b.cache.stats().failed_copies == 1)
        assert b.pool.pages.available_pages == PAGES
        assert b.pool.pages.reclaim(PAGES) == PAGES
