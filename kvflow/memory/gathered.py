"""The checksum of what one rank sent, for a pool that stores it in another order, or in several
copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from xxhash import xxh3_64

from kvflow.memory.copies import HostCopier
from kvflow.protocols.pages.components import by_name, copies_of
from kvflow.protocols.pages.coverage import Served, sends_all, spans_served
from kvflow.protocols.pages.kinds import StateKind
from kvflow.protocols.pages.layout import NO_PLACES, Places, PoolLayout, build_layout
from kvflow.protocols.pages.plan import Pairing

_BATCH_BYTES = 1 << 20


class GatheredSum:
    """Computes the checksum of what one rank served, in that rank's order of bytes.

    A few pages at a time are copied into that order, then summed.
    """

    def __init__(self, layout: PoolLayout, served: tuple[Served, ...]) -> None:
        """`layout` describes a pool in host memory, which must stay open.

        Raises: LayoutError if the pool lacks a part of `served`.
        """
        kinds, rows = _kinds(layout, served), int(bool(layout.row_bytes))
        self._pairings: list[Pairing] = []
        if not kinds:
            return
        one = build_layout(kinds, page_size=layout.page_size, num_pages=1, num_rows=rows)
        self._batch = max(1, _BATCH_BYTES // (one.page_bytes or 1))
        copies = max(len(each) for each in copies_of(layout.components))
        for copy in range(copies):
            wanted = [kind._replace(replica=copy, replicas=copies) for kind in kinds]
            there = build_layout(
                wanted,
                page_size=layout.page_size,
                num_pages=self._batch,
                num_rows=rows,
                fingerprint=layout.fingerprint,
            )
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
        for part in self._parts(places, there):
            if cancelled():
                return b""
            onto = [np.arange(indices.size, dtype=np.int32) for indices in part]
            lists = (part.pages, onto[0], part.rows, onto[1])
            HostCopier.copy(
                pairing.blocks(*lists, max_block_bytes=_BATCH_BYTES, target_bases=bases)
            )
            for memory, b in zip(memories, there.buffers, strict=True):
                found.update(memory[: part[b.in_rows].size * b.page_bytes].data)
        return found.digest()

    def _parts(self, places: Places, there: PoolLayout) -> Iterator[Places]:
        for start in range(0, places.pages.size if there.page_bytes else 0, self._batch):
            yield Places(places.pages[start : start + self._batch], NO_PLACES)
        for n in range(places.rows.size if there.row_bytes else 0):
            yield Places(NO_PLACES, places.rows[n : n + 1])


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
            StateKind(each.name, c.dtype, shape, c.unit, c.format, each.start, whole, axis=c.axis)
        )
    return found
