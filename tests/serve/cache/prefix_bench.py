"""A prefix cache over a small pool, whose requests write into pages which tokens they are for."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import numpy as np

from kvflow.memory.allocator import PageAllocator
from kvflow.memory.pool import PagedPool
from kvflow.protocols.cache.choices import WritePolicy
from kvflow.protocols.cache.hashes import ANY, Namespace
from kvflow.protocols.pages.layout import PoolLayout, build_layout
from kvflow.serve.cache.host import HostTier
from kvflow.serve.cache.prefix import Prefix, PrefixCache
from kvflow.serve.cache.storage.guarded import GuardedStorage
from kvflow.serve.cache.storage.port import Storage
from kvflow.serve.cache.stored import StorageTier
from tests.serve.engine.pair import until

PAGE_SIZE, PAGES = 2, 12


def layout_of() -> PoolLayout:
    streams = [("k", "int32", (3,)), ("v", "int32", (1,))]
    return build_layout(streams, page_size=PAGE_SIZE, num_pages=PAGES, fingerprint="a model")


class Bench:
    """A pool whose pages say which tokens they were computed for. Its block closes its store."""

    def __init__(
        self,
        host_pages: int = 0,
        write_policy: WritePolicy = "write_through",
        store: Storage | None = None,
        *,
        events: bool = False,
    ) -> None:
        layout = layout_of()
        self.pool = PagedPool.allocate(layout, shared=False)
        self.host = HostTier(self.pool, host_pages * layout.page_bytes) if host_pages else None
        storage = None if store is None or self.host is None else StorageTier(store, self.host)
        self.cache = PrefixCache(
            self.pool.pages,
            PAGE_SIZE,
            now=iter(range(1 << 30)).__next__,
            host=self.host,
            write_policy=write_policy,
            storage=storage,
            events=events,
        )

    def tokens(self, *pages: int) -> np.ndarray:
        return np.array([token for page in pages for token in (page, page + 100)])

    def write(self, page: int, where: int) -> None:
        for name in ("k", "v"):
            self.pool.array(name)[where] = page

    def check(self, prefix: Prefix, *pages: int) -> None:
        assert prefix.pages.size == len(pages)
        for where, page in zip(prefix.pages, pages, strict=True):
            assert all((self.pool.array(name)[where] == page).all() for name in ("k", "v"))

    def run(self, *pages: int, namespace: Namespace = ANY) -> Prefix:
        """One request that computes its prompt, and ends. Without enough pages it does nothing."""
        tokens = self.tokens(*pages)
        prefix = self.cache.match(tokens, namespace=namespace)
        self.check(prefix, *pages[: prefix.pages.size])
        self.cache.count(len(tokens), prefix)
        missing = len(pages) - prefix.pages.size
        if self.pool.pages.reclaim(missing) < missing:  # host pages below them are being copied
            prefix.release()
            return prefix
        own = self.pool.pages.take(missing, "request")
        for page, where in zip(pages[prefix.pages.size :], own, strict=True):
            self.write(page, int(where))
        kept = self.cache.keep(tokens, np.concatenate((prefix.pages, own)), "request", prefix)
        assert kept == len(pages)
        prefix.release()
        return prefix

    def evict_all(self) -> None:
        """Evict all pages from the device, and poison them."""
        self.cache.evict(PAGES)
        assert self.pool.pages.free_pages == PAGES
        for name in ("k", "v"):
            self.pool.array(name)[:] = -1

    async def settled(self) -> None:
        await until(lambda: not self.cache.busy)

    async def ran(self, *pages: int, namespace: Namespace = ANY) -> None:
        """One request, and all copies that it begins."""
        self.run(*pages, namespace=namespace)
        await self.settled()

    async def only_on_host(self, *pages: int) -> None:
        """A prompt that was computed, and that the device has lost."""
        saved = self.cache.stats().saved_pages
        self.run(*pages)
        await until(lambda: self.cache.stats().saved_pages == saved + len(pages))
        self.evict_all()

    def found(self, *pages: int, namespace: Namespace = ANY) -> int:
        """How many pages of a prompt are on the device; each is checked."""
        prefix = self.cache.match(self.tokens(*pages), namespace=namespace)
        count = int(prefix.pages.size)
        self.check(prefix, *pages[:count])
        prefix.release()
        return count

    async def loaded(self, *pages: int, namespace: Namespace = ANY, **how: Any) -> int:
        (await self.cache.load(self.tokens(*pages), namespace=namespace, **how)).release()
        return self.found(*pages, namespace=namespace)

    @property
    def storage(self) -> GuardedStorage:
        assert self.cache._tiers is not None and self.cache._tiers.storage is not None
        store = self.cache._tiers.storage.store
        assert isinstance(store, GuardedStorage)
        return store

    @property
    def on_host(self) -> PageAllocator:
        assert self.host is not None
        return self.host.pages

    @property
    def copies(self) -> set[asyncio.Task[None]]:
        return set() if self.cache._tiers is None else self.cache._tiers._copies

    def home(self) -> bool:
        self.cache.flush()
        host = self.host is None or (self.host.pages.at_rest() and not self.host.pages.owned())
        return self.pool.pages.free_pages == PAGES and not self.pool.pages.owned() and host

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                await self.settled()
                await until(self.home)  # calls to a store that were cancelled may still run
        finally:
            await self.cache.close()
            self.pool.close()
