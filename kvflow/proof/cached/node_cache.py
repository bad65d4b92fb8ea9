"""Prefix cache of one node process, over watched memory and with a subscriber."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

from kvflow.memory.pool import PagedPool
from kvflow.proof.cached.copies import CopyThread
from kvflow.proof.cached.disk import DiskFaults, FaultyDisk, StoreThreads, files_in
from kvflow.proof.cached.texts import Texts, page_bytes
from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.oracle import Oracle
from kvflow.proof.sim.pages import Books, watch
from kvflow.proof.sim.variety import PAGE_SIZE
from kvflow.proof.sim.virtual_thread import LockStep
from kvflow.protocols.cache.events import Tier
from kvflow.protocols.cache.nodes import PAGED, Node
from kvflow.protocols.machines.cached_run import RunPhase
from kvflow.serve.cache.host import HostTier
from kvflow.serve.cache.prefix import Prefix, PrefixCache
from kvflow.serve.cache.storage.file import FileBackend
from kvflow.serve.cache.storage.guarded import GuardedStorage, Limits
from kvflow.serve.cache.storage.identity import identity_of
from kvflow.serve.cache.stored import StorageTier
from kvflow.serve.cache.tiers import OWNER
from kvflow.testing.subscriber import Subscriber

LIMITS = Limits(stall_s=0.5, pause_s=0.2, max_pause_s=0.8)
# A run never fills a store of this size.
_STORE_BYTES = 16 << 20


class CachePlan(NamedTuple):
    policy: str
    write_policy: Any
    host_pages: int  # 0 if there is no host tier
    stores: bool


def draw_plan(rng: random.Random) -> CachePlan:
    host_pages = rng.choice((0, 6, 16, 40, 40))
    return CachePlan(
        rng.choice(("lru", "lru", "lfu", "slru", "priority", "depth")),
        rng.choice(("write_through", "write_through", "write_through_selective", "write_back")),
        host_pages,
        bool(host_pages) and rng.random() < 0.7,
    )


class NodeCache:
    """Shipped prefix cache with its tiers. Schedulers use `cache`."""

    def __init__(
        self,
        who: str,
        pool: PagedPool,
        books: Books,
        plan: CachePlan,
        folder: Path,
        texts: Texts,
        oracle: Oracle,
        faults: Faults,
        disk_faults: DiskFaults,
        workers: list[LockStep[Any]],
    ) -> None:
        self._who, self._books, self._texts, self._oracle = who, books, texts, oracle
        self._host_books: Books | None = None
        self._disk = FaultyDisk(disk_faults)
        self._backend: FileBackend | None = None
        self.host: HostTier | None = None
        self.folder, self.lost = folder, False
        self._heard = False
        storage = None
        if plan.host_pages:
            self.host = host = HostTier(pool, plan.host_pages * pool.layout.page_bytes)
            self._host_books = watch(host.memory, f"host memory of {who}", oracle, lambda: False)
            host.pages = host.memory.pages
            copies = {Tier.HOST: (books, self._host_books), Tier.DEVICE: (self._host_books, books)}
            for to, both in copies.items():
                host._threads[to].executor = CopyThread(*both, oracle, faults)
            if plan.stores:
                storage = StorageTier(self._store(host, workers), host)
        self.cache = PrefixCache(
            pool.pages,
            PAGE_SIZE,
            plan.policy,
            now=oracle.loop.time,
            host=self.host,
            write_policy=plan.write_policy,
            events=True,
            storage=storage,
        )
        self.subscriber = Subscriber()
        # A cache only notifies its publisher that there are events, so this object can act as one.
        self.cache.publisher = self  # type: ignore[assignment]

    def _store(self, host: HostTier, workers: list[LockStep[Any]]) -> GuardedStorage:
        layout = host.memory.layout
        self._backend = backend = FileBackend(
            str(self.folder), identity_of(layout), layout.page_bytes, _STORE_BYTES, disk=self._disk
        )
        backend.open()
        self._disk.whole.update(
            bytes.fromhex(file.name.partition(".")[0]) for file in files_in(self.folder)
        )
        store = GuardedStorage(backend, LIMITS)
        for part in (store._puts, store._gets, store._lookups, store._reads, store._writes):
            part.threads.executor = StoreThreads(self._oracle.loop, workers)
        return store

    def die(self) -> None:
        """End the cache because its process died. Its threads never finish their work."""
        self.lost = self._disk.dead = True
        if self._host_books is not None:
            self._host_books.lost = True
        if self._backend is not None:
            # A process that dies releases its lock on the folder.
            self._backend.close()

    async def close(self) -> None:
        if not self.lost:
            await self.cache.close()

    def unmap(self) -> None:
        if self.host is not None:
            self.host.memory.close()

    # --- the subscriber

    def notify(self) -> None:
        if not self._heard:
            self._heard = True
            self._oracle.loop.call_soon(self._hear)

    def _hear(self) -> None:
        """Pass new events to the subscriber, and verify that it knows only existing pages (I10)."""
        self._heard = False
        if self.lost or self._oracle.over:
            return
        try:
            self.subscriber.replay(self.cache.take_events())
        except AssertionError as error:
            return self._oracle.broken("I10", f"{self._who}: {str(error).removeprefix('I10: ')}")
        for tier, there in zip(Tier, self._truth(), strict=True):
            if over := self.subscriber.blocks[tier].keys() - there:
                text = f"{len(over)} pages are told of that {tier.name.lower()} has not got"
                return self._oracle.broken("I10", f"{self._who}: {text}")
        return None

    def _truth(self) -> list[set[int]]:
        """Return, for each tier, the names of the pages that events may advertise.

        On the device and in host memory, these are pages that the cache owns and that hold the
        right bytes. In the store, they are pages whose files were completed.
        """
        found: list[set[int]] = []
        for books in (self._books, self._host_books):
            names: set[int] = set()
            if books is not None:
                owners = enumerate(books.owners)
                held = {books.bytes.read(page) for page, owner in owners if owner == OWNER}
                size = books.bytes.size(0)
                names = {n for d, n in self._texts.names.items() if page_bytes(d, size) in held}
            found.append(names)
        return [*found, {n for d, n in self._texts.names.items() if d in self._disk.whole}]

    # --- what is found

    def check(self, prefix: Prefix, prompt: list[int], when: str) -> None:
        """Verify that the pages of a prefix hold the content of its tokens (I14)."""
        digests, size = self._texts.add(prompt), self._books.bytes.size(0)
        for index, page in enumerate(prefix.pages.tolist()):
            if self._books.bytes.read(page) != page_bytes(digests[index], size):
                text = f"cached page {page} {when} is not page {index} of its prompt"
                self._oracle.broken("I14", f"{self._who}: {text}")

    def counted(self) -> dict[str, int]:
        stats = self.cache.stats()
        return {
            "evicted pages": stats.evicted_pages,
            "saved pages": stats.saved_pages,
            "loaded pages": stats.loaded_pages,
            "stored pages": stats.stored_pages,
            "fetched pages": stats.fetched_pages,
            "failed copies": stats.failed_copies,
        }

    def left(self) -> list[str]:
        if self.lost:
            return []
        stats, found = self.cache.stats(), []
        if self.cache.busy:
            found.append("copies are under way")
        if stats.evictable_pages != stats.pages:
            pinned = stats.pages - stats.evictable_pages
            found.append(f"{pinned} of {stats.pages} cached pages are pinned")
        if (owned := self._books.owners.count(OWNER)) != stats.pages:
            found.append(f"{owned} pages are the cache's, and it knows of {stats.pages}")
        out = {} if self.host is None else self.host.pages.owned()
        if self.host is not None and sum(out.values()) != stats.host_pages:
            found.append(f"{out} of host memory are out, and {stats.host_pages} cached")
        return [f"{self._who}: {what}" for what in found]

    def check_told(self) -> None:
        """Verify that the subscriber of a cache at rest knows each tier's readable pages (I10).

        A page is readable in a tier if the page and all pages before it are present there.
        """
        if self.lost:
            return
        self._hear()
        there: list[set[int]] = [set(), set(), set()]
        # Bit n stands for tier n. A root has no pages, so it counts as present in all three.
        waiting: list[tuple[Node, int]] = [
            (root, 7) for root in self.cache._index._residents.roots.values()
        ]
        while waiting:
            node, above = waiting.pop()
            bits = above
            if node.parent is not None:
                present = [tier for tier in Tier if node.phase[tier] is RunPhase.PRESENT]
                bits = above & sum(1 << tier for tier in present)
                assert bits == 0 or node.digests is not None
                for tier in Tier:
                    if bits & 1 << tier and node.digests is not None:
                        there[tier].update(node.digests[:, 0].tolist())
            waiting.extend((child, bits) for child in node.children.values())
        for tier, told in zip(Tier, self.subscriber.blocks, strict=True):
            if told.keys() != there[tier]:
                text = f"{tier.name.lower()} has {len(there[tier])} pages, {len(told)} are told"
                self._oracle.broken("I10", f"{self._who}: {text}")

    def empty(self) -> list[str]:
        """Evict everything, and return a line if pages remain although the node is at rest."""
        if self.lost:
            return []
        # An index node can be evicted only after its children, so repeat until nothing changes.
        for _ in range(len(self._books.owners)):
            before = self.cache.stats()
            for tier in PAGED:
                self.cache._free(self.cache._index.evict(tier, len(self._books.owners)))
            if (after := self.cache.stats()) == before:
                break
        else:
            after = self.cache.stats()
        if after.pages or after.host_pages:
            pages = f"{after.pages} and {after.host_pages} pages"
            return [f"{self._who}: {pages} cannot be evicted at rest"]
        return []
