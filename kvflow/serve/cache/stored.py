"""The storage tier: transfers of pages between host memory and a store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from kvflow.protocols.pages.layout import PageIndices
from kvflow.serve.cache.host import HostTier
from kvflow.serve.cache.storage.identity import PageViews
from kvflow.serve.cache.storage.port import Storage, StorageCall, StorageState


class StorageTier:
    """A store and the host memory that it reads from and writes to. Use it on one event loop."""

    def __init__(self, store: Storage, host: HostTier) -> None:
        """Use `store` for pages of `host`. The cache closes the store. Raises: LayoutError."""
        self.store, self._views = store, PageViews(host.memory)

    async def put(self, keys: Sequence[bytes], pages: PageIndices) -> bool:
        """Store host pages (int32 [n]) under their digests. Return True if all are in the store.

        This call returns once the store no longer reads the pages, so a store that hangs delays it.
        Do not cancel the call before the store is closed.
        """
        # If the store stalls, it may still read the pages after `done` completes.
        call = self.store.put(keys, self._buffers(pages))
        stored = await asyncio.shield(call.done)
        await asyncio.shield(call.released)
        return all(stored)

    def get(self, keys: Sequence[bytes], pages: PageIndices) -> StorageCall:
        """Begin to read into host pages (int32 [n]), which the store may write until `released`."""
        return self.store.get(keys, self._buffers(pages))

    def state(self) -> StorageState:
        store = self.store
        counts = msgspec.structs.asdict(store.counts)
        return StorageState(
            name=store.name, readable=store.readable, writable=store.writable, **counts
        )

    def _buffers(self, pages: PageIndices) -> list[memoryview]:
        return [self._views[page] for page in pages.tolist()]
