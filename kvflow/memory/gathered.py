"""The checksum of what one rank sent, for a pool that stores it in another order, or in several
copies.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from xxhash import xxh3_64

from kvflow.memory.copies import HostCopier
from kvflow.memory.places import batches
from kvflow.protocols.pages.components import by_name, copies_of
from kvflow.protocols.pages.coverage import Served, sends_all, spans_served
from kvflow.protocols.pages.kinds import StateKind
from kvflow.protocols.pages.layout import Counts, Places, PoolLayout, build_layout
from kvflow.protocols.pages.plan import Pairing

_BATCH_BYTES = 1 << 20


class GatheredSum:
    """Computes the checksum of what one rank served, in that rank's order of bytes.

    A few places of one space at a time are copied into that order, then summed.
    """

    def __init__(self, layout: PoolLayout, served: tuple[Served, ...]) -> None:
        """`layout` describes a pool in host memory, which must stay open.

        Raises: LayoutError if the pool lacks a part of `served`.
        """
        kinds = _kinds(layout, served)
        self._pairings: list[Pairing] = []
        if not kinds:
            return
        # A space of which the rank served nothing has a batch of 0 places.
        self._batch: Counts = tuple(
            size and max(1, _BATCH_BYTES // size)
            for size in build_layout(kinds, spaces=layout.spaces).place_bytes
        )
        spaces = [
            msgspec.structs.replace(space, count=count or 1)
            for space, count in zip(layout.spaces, self._batch, strict=True)
        ]
        copies = max(len(each) for each in copies_of(layout.components))
        for copy in range(copies):
            wanted = [kind._replace(replica=copy, replicas=copies) for kind in kinds]
            there = build_layout(wanted, spaces=spaces, fingerprint=layout.fingerprint)
            self._pairings.append(
                Pairing(layout, there, ("pool", "rank"), only=spans_served(served))
            )

    def sum(self, places: Places, cancelled: Callable[[], bool]) -> bytes:
        """Return the checksum of `places`, or an empty result if cancelled.

        The call blocks, so make it in a thread.
        """
        digests = [self._sum(pairing, places, cancelled) for pairing in self._pairings] or [
            xxh3_64().digest()
        ]
        if not all(digests):
            return b""
        # If the copies differ, at least one is not what the rank sent, so the result must match no
        # checksum.
        return digests[0] if len(set(digests)) == 1 else xxh3_64(b"".join(digests)).digest()

    def _sum(self, pairing: Pairing, places: Places, cancelled: Callable[[], bool]) -> bytes:
        found, there = xxh3_64(), pairing.target
        memories = [np.empty(b.size_bytes, dtype=np.uint8) for b in there.buffers]
        bases = np.array([memory.ctypes.data for memory in memories], dtype=np.int64)
        for part in batches(places, self._batch):
            if cancelled():
                return b""
            onto = [np.arange(indices.size, dtype=np.int32) for indices in part]
            blocks = pairing.blocks(
                pairing.source.numbered(part),
                there.numbered(onto),
                max_block_bytes=_BATCH_BYTES,
                target_bases=bases,
            )
            HostCopier.copy(blocks)
            for memory, b in zip(memories, there.buffers, strict=True):
                found.update(memory[: part[b.space].size * b.page_bytes].data)
        return found.digest()


def is_as_it_lies(layout: PoolLayout, served: tuple[Served, ...]) -> bool:
    """Return True if one rank served every part of the pool, and the pool stores each part once."""
    return sends_all(layout, served) and all(
        len(copies) == 1 for copies in copies_of(layout.components)
    )


def _kinds(layout: PoolLayout, served: tuple[Served, ...]) -> list[StateKind]:
    found, known = [], by_name(layout.components)
    for each in sorted(served, key=lambda each: (len(each.name), each.name, each.start)):
        c = known[each.name][0]
        shape = (*c.shape[: c.axis], each.end - each.start, *c.shape[c.axis + 1 :])
        whole = c.whole or c.shape[c.axis]
        found.append(
            StateKind(
                each.name,
                c.dtype,
                shape,
                c.unit,
                c.format,
                each.start,
                whole,
                axis=c.axis,
                space=layout.spaces[c.space].name,
            )
        )
    return found
