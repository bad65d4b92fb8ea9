"""Saved model states at page boundaries: copies of rows in host memory, for later prompts.

The model's thread makes the copies as part of a step. So no other step changes a row while it is
copied, and all copies of a step are complete when the step ends (I13).
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec
import numpy as np

from kvflow.memory.allocator import PageAllocator
from kvflow.memory.copies import copier_for, copy_slices
from kvflow.memory.pool import PagedPool
from kvflow.memory.snapshot import DEVICE_SLICE_BYTES, SLICE_BYTES
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.layout import resized
from kvflow.protocols.pages.plan import Pairing
from kvflow.protocols.pages.spaces import MAX_ROWS, NO_PLACES, PageIndices, Places


class StateStore:
    """Host memory for states copied from one pool's rows. Only a slot's owner may access it."""

    def __init__(self, pool: PagedPool, limit_bytes: int, most: int = MAX_ROWS) -> None:
        """Allocate and pre-fault memory for at most `most` states. Call this in a thread.

        Raises: LayoutError if memory is short or cannot be pinned for the pool's device;
        MisuseError if the limit is too small for one state, or the pool has no rows.
        """
        row_bytes, space = pool.layout.row_bytes, pool.layout.row_space
        if space is None:
            raise MisuseError("the pool has no rows: its requests keep no states")
        count = min(limit_bytes // row_bytes, most, MAX_ROWS)
        if count < 1:
            raise MisuseError(
                f"{limit_bytes} bytes do not hold the state of one request, which is {row_bytes} "
                "bytes"
            )
        rows = tuple(c for c in pool.layout.components if c.space == space)
        layout = msgspec.structs.replace(pool.layout, components=rows)
        counts = tuple(count if i == space else 0 for i in range(len(layout.spaces)))
        self._copier, self._counts = copier_for(pool), counts
        self.memory = PagedPool.allocate(resized(layout, counts), shared=False)
        self._copier.pin(self.memory)
        self.slots = PageAllocator(count, unit="state")
        self._out = Pairing(layout, self.memory.layout, ("pool", "host memory"))
        self._in = Pairing(self.memory.layout, layout, ("host memory", "pool"))
        self._slice_bytes = SLICE_BYTES if pool.on_host else DEVICE_SLICE_BYTES

    def save(self, row: PageIndices, slot: int) -> None:
        """Copy one row, which must not change meanwhile, to a slot. Raises: TransferError."""
        self._copy(self._out, row, _one(slot))

    def restore(self, slot: int, row: PageIndices) -> None:
        """Copy a slot to one row of the pool. Raises: TransferError."""
        self._copy(self._in, _one(slot), row)

    def free(self, states: tuple[int, ...], owner: Hashable) -> None:
        """Free slots of `owner`. A slot that a running step uses becomes free after the step."""
        if states:
            self.slots.give_back(np.array(states, np.int32), owner)

    def close(self) -> None:
        """Free the memory. No copy may be running."""
        self._copier.close()
        self.memory.close()

    def _copy(self, pairing: Pairing, source: PageIndices, target: PageIndices) -> None:
        copy_slices(
            pairing,
            self._places(source),
            self._places(target),
            self._slice_bytes,
            self._copier,
            lambda: False,
        )

    def _places(self, rows: PageIndices) -> Places:
        return tuple(rows if count else NO_PLACES for count in self._counts)


def _one(slot: int) -> PageIndices:
    return np.array([slot], np.int32)
