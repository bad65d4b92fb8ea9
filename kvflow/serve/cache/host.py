"""The host tier: cached pages in host memory, and the copies between it and an engine's pool, in a
thread.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kvflow.aio import run_to_end
from kvflow.memory.copies import copier_for, copy_slices, host_layout
from kvflow.memory.pool import PagedPool
from kvflow.memory.snapshot import DEVICE_SLICE_BYTES, SLICE_BYTES
from kvflow.protocols.cache.events import Tier
from kvflow.protocols.cache.nodes import PAGED
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices, Places, PoolLayout
from kvflow.protocols.pages.plan import Pairing


class HostTier:
    """Host memory with what a pool keeps in pages, page-first. Used on one event loop."""

    def __init__(self, pool: PagedPool, limit_bytes: int) -> None:
        """Allocates the memory, pre-faulted: make it in a thread.

        Raises: LayoutError when there is not enough memory, or it cannot be pinned for the pool's
        device; MisuseError for a limit that holds no page, or a pool whose pages hold nothing.
        """
        layout = _without_rows(pool.layout)
        if not layout.page_bytes:
            raise MisuseError(
                "the host tier of the prefix cache holds pages, and those of this pool hold nothing"
            )
        self._copier = copier_for(pool)
        self.memory = PagedPool.allocate(host_layout(layout, limit_bytes), shared=False)
        self._copier.pin(self.memory)
        self.pages = self.memory.pages
        self._pairings = {
            Tier.HOST: Pairing(layout, self.memory.layout, ("pool", "host memory")),
            Tier.DEVICE: Pairing(self.memory.layout, layout, ("host memory", "pool")),
        }
        self._slice_bytes = SLICE_BYTES if pool.on_host else DEVICE_SLICE_BYTES
        self._threads = {
            to: ThreadPoolExecutor(1, thread_name_prefix=f"kvflow-cache-to-{to.name}")
            for to in PAGED
        }

    async def copy(self, source: PageIndices, target: PageIndices, to: Tier) -> bool:
        """Copy pages `source` to pages `target` (int32 [n]) of the tier `to`, device or host.

        Returns whether all were copied. Nothing of the copy runs on when this has returned or
        raised, cancelled or not.

        Raises: TransferError.
        """
        stop = threading.Event()
        queued = self._threads[to].submit(
            copy_slices,
            self._pairings[to],
            Places(source, NO_PLACES),
            Places(target, NO_PLACES),
            self._slice_bytes,
            stop.is_set,
            self._copier,
        )
        running = asyncio.wrap_future(queued)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            stop.set()
            if not queued.cancel():  # it has begun
                await run_to_end(running)
            raise

    def close(self) -> None:
        """Free the memory; no copy may run any more."""
        for thread in self._threads.values():
            thread.shutdown(wait=True)
        self._copier.close()
        self.memory.close()


def _without_rows(layout: PoolLayout) -> PoolLayout:
    """Its pages, where they are."""
    pages = tuple(c for c in layout.components if not c.in_rows)
    return msgspec.structs.replace(layout, components=pages, num_rows=0)
