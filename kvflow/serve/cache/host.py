"""The host tier: cached pages in host memory, and the copies between it and an engine's pool."""

from __future__ import annotations

import msgspec

from kvflow.aio import Threads, run_to_end
from kvflow.memory.copies import copier_for, copy_slices, host_layout
from kvflow.memory.pool import PagedPool
from kvflow.memory.snapshot import DEVICE_SLICE_BYTES, SLICE_BYTES
from kvflow.protocols.cache.events import Tier
from kvflow.protocols.cache.nodes import PAGED
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.layout import PageIndices, PoolLayout
from kvflow.protocols.pages.plan import Pairing


class HostTier:
    """Host memory for the pages of one pool, laid out page-first. Use it on one event loop."""

    def __init__(self, pool: PagedPool, limit_bytes: int) -> None:
        """Allocate and pre-fault the memory. This takes a long time, so call it in a thread.

        Raises: LayoutError if memory is short or cannot be pinned for the pool's device;
        MisuseError if the limit is too small for one page, or pages of the pool hold no bytes.
        """
        layout = _of_first_space(pool.layout)
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
        # One thread per direction, so that copies to the host do not delay prompts that load pages.
        self._threads = {to: Threads(f"cache-to-{to.name}") for to in PAGED}

    async def copy(self, source: PageIndices, target: PageIndices, to: Tier) -> bool:
        """Copy pages `source` to pages `target` (int32 [n]) of the tier `to`, device or host.

        Return True if all were copied. The copy has stopped by the time this returns or raises,
        even if the caller is cancelled. Raises: TransferError.
        """
        copy = self._threads[to].start(
            copy_slices,
            self._pairings[to],
            (source,),
            (target,),
            self._slice_bytes,
            self._copier,
        )
        return await run_to_end(copy.ended, stop=copy.cancel)

    def close(self) -> None:
        """Free the memory. No call of `copy` may be running."""
        for thread in self._threads.values():
            thread.close()
        self._copier.close()
        self.memory.close()


def _of_first_space(layout: PoolLayout) -> PoolLayout:
    """Return the layout of the first space alone, whose pages are those that a cache keeps."""
    numbers = [i for i, b in enumerate(layout.buffers) if not b.space]
    components = tuple(
        msgspec.structs.replace(c, buffer=numbers.index(c.buffer))
        for c in layout.components
        if not c.space
    )
    return msgspec.structs.replace(
        layout,
        spaces=layout.spaces[:1],
        components=components,
        buffers=tuple(layout.buffers[i] for i in numbers),
    )
