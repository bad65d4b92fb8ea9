"""Engines over a disk that is full, fails or hangs: it costs time, once, and never a token."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from kvflow.serve.cache.storage.file import FileBackend
from kvflow.serve.cache.storage.guarded import GuardedStorage, Limits
from kvflow.serve.cache.stored import StorageTier
from kvflow.serve.engine.model.load import LoadedModel
from tests.serve.cache.storage.files import FaultyDisk, pages_in
from tests.serve.engine.pair import EnginePair, greedy, until
from tests.serve.engine.test_prefix_storm import MOST_TOKENS, expected_of, prompts

LIMITS = Limits(pause_s=0.05, max_pause_s=0.2)  # the waits that users have; asked again more often
PATIENT = msgspec.structs.replace(LIMITS, slow_s=20, stall_s=20)


class Serving:
    """A pair whose caches store pages, each in its own folder."""

    def __init__(
        self, pair: EnginePair, expected: list[list[int]], stores: list[GuardedStorage]
    ) -> None:
        self.pair, self.expected, self.stores = pair, expected, stores

    async def ask(self) -> None:
        async def one(number: int) -> None:
            assert (
                await self.pair.tokens(prompts()[number], greedy(MOST_TOKENS))
                == self.expected[number]
            )

        for first in range(0, len(self.expected), 4):
            await asyncio.gather(*map(one, range(first, min(first + 4, len(self.expected)))))

    async def forget(self) -> None:
        await until(lambda: not any(cache.busy for cache in self.pair.caches))
        for cache in self.pair.caches:
            cache.flush()


@asynccontextmanager
async def serving(
    model: LoadedModel, path: Path, disk: FaultyDisk, limits: Limits
) -> AsyncIterator[Serving]:
    expected = await expected_of(model)
    options = {
        "page_size": 4,
        "chunk_tokens": 16,
        "num_pages": 300,
        "cache": "lru",
        "cache_host_pages": 300,
    }
    async with EnginePair(model, **options, prefetch="timeout") as pair:
        stores = []
        for name, cache, host in zip(
            ("prefill", "decode"), pair.caches, pair.host_tiers, strict=True
        ):
            identity = sha256(name.encode()).digest()
            backend = FileBackend(
                str(path), identity, host.memory.layout.page_bytes, 64 << 20, disk=disk
            )
            stores.append(await GuardedStorage.open(backend, limits))
            assert cache._tiers is not None
            cache._tiers.storage = StorageTier(stores[-1], host)
        yield Serving(pair, expected, stores)


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["full", "failing", "hanging"])
async def test_a_disk_in_trouble_costs_time_once_and_no_token(
    trouble: str, llama: LoadedModel, tmp_path: Path
) -> None:
    disk, go = FaultyDisk(), threading.Event()
    limits = LIMITS if trouble == "hanging" else PATIENT
    async with serving(llama, tmp_path, disk, limits) as s:
        if trouble != "full":  # it has something that cannot be read
            await s.ask()
            await s.forget()
            assert pages_in(tmp_path)
        if trouble == "hanging":
            disk.waits = dict.fromkeys(("write", "read"), go)
        else:
            disk.fails = (
                {"write": errno.ENOSPC}
                if trouble == "full"
                else dict.fromkeys(("write", "read"), errno.EIO)
            )
        for _ in range(2):
            await s.ask()
        stalls = [store.counts.stalls for store in s.stores]
        await until(lambda: all(store.counts.trips for store in s.stores))
        disk.fails.clear()
        disk.waits.clear()
        go.set()
        await until(lambda: all(store.readable and store.writable for store in s.stores))
        await s.ask()  # what could not be stored is
        await s.forget()
        before = [cache.stats().fetched_pages for cache in s.pair.caches]
        await s.ask()
        after = [cache.stats().fetched_pages for cache in s.pair.caches]
        assert all(count > n for count, n in zip(after, before, strict=True))
        print(f"{[store.counts for store in s.stores]}; calls that waited in vain: {stalls}")
        # A store that hangs is left alone after that: of each kind of call no more than have a
        # thread have met it.
        assert max(stalls) <= (2 * LIMITS.threads + 1 if trouble == "hanging" else 0)
        await until(lambda: s.pair.home)
