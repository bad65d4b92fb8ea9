"""Cached pages in storage: what comes back is what was stored, whatever the store does."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvflow.protocols.cache.choices import WritePolicy
from kvflow.protocols.cache.events import Tier
from kvflow.protocols.cache.hashes import Namespace
from kvflow.serve.cache.storage.file import FileBackend
from kvflow.serve.cache.storage.guarded import GuardedStorage, Limits
from kvflow.serve.cache.storage.identity import identity_of
from kvflow.serve.cache.storage.port import Result
from tests.memory.gate import CopyGate
from tests.protocols.cache.subscriber import Subscriber
from tests.serve.cache.prefix_bench import PAGE_SIZE, PAGES, Bench, layout_of
from tests.serve.cache.storage.files import QUICK, FaultyDisk, pages_in
from tests.serve.engine.pair import until


async def opened(
    path: Path, disk: FaultyDisk | None = None, limits: Limits = QUICK
) -> GuardedStorage:
    layout = layout_of()
    made = FileBackend(str(path), identity_of(layout), layout.page_bytes, 1 << 20, disk=disk)
    return await GuardedStorage.open(made, limits)


@asynccontextmanager
async def stored(
    path: Path,
    disk: FaultyDisk | None = None,
    limits: Limits = QUICK,
    host_pages: int = 20,
    write_policy: WritePolicy = "write_through",
) -> AsyncIterator[Bench]:
    """One life of a process over this directory."""
    async with Bench(host_pages, write_policy, await opened(path, disk, limits)) as made:
        yield made


async def lived(path: Path, *pages: int) -> None:
    """An earlier life of the process, which stored this prompt."""
    async with stored(path) as b:
        await b.ran(*pages)


async def test_what_was_stored_is_there_in_the_next_life(tmp_path: Path) -> None:
    async with stored(tmp_path) as b:
        b.run(1, 2, 3, 4)
        await b.ran(1, 2, 5, namespace=Namespace("salted"))
        assert b.cache.stats().stored_pages == 7 == len(pages_in(tmp_path))
    async with stored(tmp_path) as b:
        assert await b.loaded(1, 2, 3, 9) == 3
        assert b.cache.stats().fetched_pages == 3
        await b.ran(1, 2, 3, 9)
        assert b.cache.stats().stored_pages == 1, "what came from storage is not stored again"
        assert await b.loaded(1, 2, 3, 4) == 4, "what follows on pages that are here"
        assert await b.loaded(1, 2, 5, namespace=Namespace("salted")) == 3
        assert await b.loaded(1, 2, namespace=Namespace("other")) == 0


async def test_a_hole_is_seen_and_heals(tmp_path: Path) -> None:
    await lived(tmp_path, 1, 2, 3, 4)
    victim = pages_in(tmp_path)[0]
    data = victim.read_bytes()
    victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    async with stored(tmp_path) as b:
        assert await b.loaded(1, 2, 3, 4) < 4, "a damaged page was read"
        await b.ran(1, 2, 3, 4)
    async with stored(tmp_path) as b:
        assert await b.loaded(1, 2, 3, 4) == 4


@pytest.mark.parametrize("fails", ["write", "rename", "read"])
async def test_a_store_that_fails_is_done_without_and_used_again(
    tmp_path: Path, fails: str
) -> None:
    disk = FaultyDisk()
    async with stored(tmp_path, disk) as b:
        await b.ran(1, 2)
        disk.fails[fails] = errno.EIO
        b.run(1, 2, 3, 4)
        await b.ran(5, 6)
        b.evict_all()
        assert await b.loaded(1, 2, 3, 4) == 4, "the host has it"
        disk.fails.clear()
        await until(lambda: b.storage.writable and b.storage.readable)
        b.run(1, 2, 3, 4, 7)
        await b.ran(5, 6)
        assert len(pages_in(tmp_path)) == 7, (
            "what could not be stored is stored when it is used again"
        )
    async with stored(tmp_path) as b:
        assert await b.loaded(1, 2, 3, 4, 7) == 5 and await b.loaded(5, 6) == 2


async def test_a_store_that_is_left_alone_is_asked_for_nothing(tmp_path: Path) -> None:
    disk = FaultyDisk()
    async with stored(tmp_path, disk, msgspec.structs.replace(QUICK, failures=2)) as b:
        disk.fails["write"] = errno.EIO
        for prompt in ((1, 2), (3, 4), (5, 6)):
            await b.ran(*prompt)
        stats, store = b.cache.stats(), b.storage
        assert (store.writable, store.counts.refused, store.counts.not_stored) == (False, 0, 4)
        assert (stats.saved_pages, stats.failed_copies) == (6, 2)


async def test_a_read_that_hangs_holds_its_pages_and_nobody_else(tmp_path: Path) -> None:
    await lived(tmp_path, 1, 2, 3)
    disk, limits = FaultyDisk(), msgspec.structs.replace(QUICK, stall_s=0.1)
    async with stored(tmp_path, disk, limits) as b:
        disk.hold("read")
        assert await b.loaded(1, 2, 3) == 0
        assert sum(b.on_host.owned().values()) == 3, "a thread may write to them"
        assert await b.loaded(1, 2, 3) == 0, "the store is left alone"
        b.run(1, 2, 3)
        disk.go_on()
        await b.settled()
        await until(lambda: sum(b.on_host.owned().values()) == 3)


async def test_a_write_that_hangs_holds_its_pages_though_they_are_forgotten(tmp_path: Path) -> None:
    disk, limits = FaultyDisk(), msgspec.structs.replace(QUICK, stall_s=0.1)
    async with stored(tmp_path, disk, limits) as b:
        disk.hold("write")
        b.run(1, 2, 3)
        await disk.waited()
        await until(lambda: not b.storage.writable)
        b.cache.flush()
        assert b.cache.busy and sum(b.on_host.owned().values()) == 3, "a thread reads them"
        disk.go_on()
        await until(b.on_host.at_rest)


@pytest.mark.parametrize("how", ["cancel", "flush"])
async def test_a_read_that_is_cut_off_caches_nothing(tmp_path: Path, how: str) -> None:
    await lived(tmp_path, 1, 2, 3)
    disk = FaultyDisk()
    async with stored(tmp_path, disk) as b:
        disk.hold("read")
        loading = asyncio.ensure_future(b.cache.load(b.tokens(1, 2, 3)))
        await disk.waited()
        if how == "cancel":
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
        else:
            b.cache.flush()
        disk.go_on()
        await asyncio.gather(loading, return_exceptions=True)
        await until(b.on_host.at_rest)
        assert not b.cache.stats().host_pages and not b.cache.stats().pages
        assert await b.loaded(1, 2, 3) == 3


async def test_what_the_store_has_lost_is_stored_again(tmp_path: Path) -> None:
    """It evicts by itself; what follows is no use without it. Subscribers hear of it."""
    layout = layout_of()
    file_bytes = 4096
    backend = FileBackend(str(tmp_path), identity_of(layout), layout.page_bytes, 6 * file_bytes)
    async with Bench(20, store=await GuardedStorage.open(backend, QUICK), events=True) as b:
        subscriber = Subscriber()
        for prompt in ((1, 2, 3, 4), (5, 6, 7, 8)):
            await b.ran(*prompt)
        assert len(pages_in(tmp_path)) == 6
        subscriber.replay(b.cache.take_events())
        assert len(subscriber.content()[Tier.STORAGE]) == 8, "nobody has noticed"
        await b.ran(1, 2, 3, 4, 9)
        assert b.cache.stats().lost_pages == 4
        subscriber.replay(b.cache.take_events())
        assert len(subscriber.content()[Tier.STORAGE]) == 4 + 5
        await b.ran(5, 6, 7, 8, 1)
        assert b.cache.stats().lost_pages == 8, "it is asked each time"
        await b.ran(1, 2, 3, 4, 9)
    async with stored(tmp_path) as b:
        assert await b.loaded(1, 2, 3, 4, 9) == 5


@pytest.mark.parametrize("how", ["fail", "refuse"])
async def test_a_store_that_cannot_say_has_lost_nothing(tmp_path: Path, how: str) -> None:
    limits = msgspec.structs.replace(QUICK, waiting=1)
    async with stored(tmp_path, limits=limits) as b:
        await b.ran(1, 2, 3)
        store, go, asked = b.storage, threading.Event(), list[asyncio.Task[int]]()
        backend: Any = store._backend
        if how == "fail":
            backend.exists = lambda keys: [Result.FAILED] * len(keys)
        else:
            backend.exists = lambda keys: [Result.DONE] * len(keys) if go.wait(20) else []
            asked = [asyncio.ensure_future(store.exists_prefix([bytes(32)])) for _ in range(2)]
            await asyncio.sleep(0)
        await b.ran(1, 2, 3, 4)
        go.set()
        counts = b.cache.stats()
        assert (counts.lost_pages, counts.stored_pages, len(pages_in(tmp_path))) == (0, 4, 4)
        if how == "refuse":
            assert await asyncio.gather(*asked) == [1, 1]
            assert (store.counts.refused, store.counts.errors) == (1, 0)


async def test_what_has_gone_before_the_store_is_asked_is_not_asked_for(tmp_path: Path) -> None:
    async with stored(tmp_path) as b:
        await b.ran(1, 2, 3)
        b.run(1, 2, 3)
        [asking] = b.copies
        b.evict_all()
        assert b.cache._tiers is not None
        b.cache._tiers._room(20)
        assert not b.cache.stats().host_pages
        await asking
        await b.ran(1, 2, 3)
        assert await b.loaded(1, 2, 3) == 3


async def test_no_more_than_a_share_waits_for_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk()
    async with stored(tmp_path, disk) as b:
        gate = CopyGate(monkeypatch)
        for first in (10, 20, 30):
            b.run(*range(first, first + 4))
        assert b.cache.stats().unsaved_pages == PAGES // 4
        b.run(*range(30, 34))
        assert b.cache.stats().unsaved_pages == 2 * (PAGES // 4), "it is counted each time"
        assert b.pool.pages.available_pages == PAGES // 4, "what waits for its copy"
        disk.hold("write")
        gate.go.set()
        await disk.waited()
        for first in (40, 50):
            await until(lambda: b.pool.pages.reclaim(4) >= 4)
            b.run(*range(first, first + 4))
            await until(lambda: not b.cache._tiers._waiting[Tier.HOST])  # type: ignore[union-attr]
        counts = b.cache.stats()
        assert counts.host_pages == 17 and counts.unstored_pages == 2, (
            "three quarters of the host wait for the store"
        )
        disk.go_on()
        await b.settled()
        await b.ran(*range(50, 54))
        assert len(pages_in(tmp_path)) == 17, "what is left out is written when it is used again"


class OneByOne(FaultyDisk):
    """Reads of it hang from the third on, until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def read(self, path: str, header: bytearray, value: memoryview) -> int:
        if self.counted.get("read", 0) == 2:
            self.begun.release()
            assert self.go.wait(30)
        return super().read(path, header, value)


async def test_who_does_not_wait_takes_what_has_come(tmp_path: Path) -> None:
    """best_effort: the pages of a call that has not ended come home when it has."""
    await lived(tmp_path, 1, 2, 3, 4, 5)
    layout, disk = layout_of(), OneByOne()
    backend = FileBackend(str(tmp_path), identity_of(layout), layout.page_bytes, 1 << 20, disk=disk)
    backend.pages_at_once = 1
    async with Bench(20, store=await GuardedStorage.open(backend, QUICK)) as b:
        fetching = asyncio.ensure_future(b.cache.fetch(b.tokens(1, 2, 3, 4, 5)))
        await disk.waited()
        await until(lambda: b.cache.stats().storage.read == 0)  # type: ignore[union-attr]
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert b.cache.stats().fetched_pages == 2
        assert sum(b.on_host.owned().values()) == 5, "a thread may write to the others"
        assert await b.loaded(1, 2, 3, 4, 5, from_storage=False) == 2
        disk.go.set()
        await until(lambda: sum(b.on_host.owned().values()) == 2)


async def test_no_more_is_asked_for_than_could_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lived(tmp_path, *range(1, 9))
    async with stored(tmp_path, host_pages=6) as b:
        store, asked = b.storage, list[int]()

        def counting(call: Callable[..., Any]) -> Callable[..., Any]:
            def counted(keys: list[bytes], *rest: Any) -> Any:
                asked.append(len(keys))
                return call(keys, *rest)

            return counted

        monkeypatch.setattr(store, "exists_prefix", counting(store.exists_prefix))
        monkeypatch.setattr(store, "get", counting(store.get))
        taken = b.on_host.take(2, "somebody")
        long = b.tokens(*range(1, 30))
        (await b.cache.load(long, most_pages=3)).release()
        assert asked == [3, 3]
        (await b.cache.load(long)).release()
        assert asked[2:] == [6, 4], "pages on the device make way on the host"
        b.on_host.give_back(taken, "somebody")
        asked.clear()
        (await b.cache.load(b.tokens(40, 41))).release()
        assert asked == [2], "nothing is read that is not there"


async def test_a_host_with_little_room_takes_what_fits(tmp_path: Path) -> None:
    await lived(tmp_path, *range(1, 9))
    async with stored(tmp_path, host_pages=3) as b:
        assert await b.loaded(*range(1, 9)) == 3
        assert await b.loaded(*range(1, 9)) >= 3


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
async def test_any_order_of_requests_faults_and_lives(
    tmp_path: Path, write_policy: WritePolicy, seed: int
) -> None:
    """Whatever a prompt finds was written for its tokens, in this life or one before."""
    rng = random.Random(seed)
    fetched = 0
    for _ in range(6):
        disk = FaultyDisk()
        async with stored(
            tmp_path, disk, host_pages=rng.choice((6, 24)), write_policy=write_policy
        ) as b:
            loads: list[asyncio.Task[int]] = []
            for _ in range(80):
                prompt = tuple(rng.choices((1, 2, 3), k=rng.randint(1, 6)))
                kind = rng.random()
                if kind < 0.4 and b.pool.pages.available_pages >= len(prompt):
                    b.run(*prompt)
                elif kind < 0.65:
                    loads.append(asyncio.ensure_future(b.loaded(*prompt)))
                elif kind < 0.7 and loads:
                    loads.pop(rng.randrange(len(loads))).cancel()
                elif kind < 0.75:
                    b.pool.pages.reclaim(rng.randint(1, PAGES))
                elif kind < 0.76:
                    b.cache.flush()
                elif kind < 0.8:
                    disk.fails = {rng.choice(("write", "rename", "read")): errno.EIO}
                elif kind < 0.85:
                    disk.fails = {}
                else:
                    await asyncio.sleep(rng.choice((0, 0.001, 0.003)))
            for ended in await asyncio.gather(*loads, return_exceptions=True):
                assert isinstance(ended, int | asyncio.CancelledError), ended
            fetched += b.cache.stats().fetched_pages
    assert fetched, f"pages of {PAGE_SIZE} tokens never came from storage"
