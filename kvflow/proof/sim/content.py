"""Content of a simulated pool's places. It identifies a request, and an index among its places."""

from __future__ import annotations

import ctypes
import hashlib

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.pages.coverage import served_of, spans_served
from kvflow.protocols.pages.layout import NO_PLACES, PoolLayout
from kvflow.protocols.pages.plan import Pairing
from kvflow.testing.shards import placed_at_zero


def content(digest: bytes, index: int, size_bytes: int, version: int = 0) -> bytes:
    """Return bytes that depend on the request, on the index of the place, and on `version`."""
    salt = index.to_bytes(4, "little") + version.to_bytes(4, "little")
    block = hashlib.blake2b(digest, digest_size=32, salt=salt).digest()
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


class PlaceBytes:
    """Bytes of a page-first pool, by place. Rows are numbered after the pages."""

    def __init__(self, layout: PoolLayout, whole: PoolLayout | None = None) -> None:
        """Access a pool with `layout`. If `whole` is given, the pool is one rank's share of it."""
        (self._pages,) = (b for b in layout.buffers if not b.in_rows)
        self._rows = next((b for b in layout.buffers if b.in_rows), None)
        self.num_pages = layout.num_pages
        self.page_bytes, self.row_bytes = layout.page_bytes, layout.row_bytes
        self._whole = whole or layout
        self._shares = None if self._whole is layout else _shares(self._whole, layout)

    def size(self, place: int) -> int:
        return self.page_bytes if place < self.num_pages else self.row_bytes

    def read(self, place: int) -> bytes:
        return ctypes.string_at(*self._at(place))

    def write(self, place: int, data: bytes) -> None:
        address, size_bytes = self._at(place)
        ctypes.memmove(address, data, size_bytes)

    def fill(self, place: int, digest: bytes, index: int) -> None:
        in_rows = place >= self.num_pages
        data = content(digest, index, self._whole.row_bytes if in_rows else self._whole.page_bytes)
        if self._shares is not None:
            data = np.frombuffer(data, dtype=np.uint8)[self._shares[in_rows]].tobytes()
        self.write(place, data)

    def _at(self, place: int) -> tuple[int, int]:
        if place < self.num_pages:
            return self._pages.address + place * self.page_bytes, self.page_bytes
        assert self._rows is not None
        return self._rows.address + (place - self.num_pages) * self.row_bytes, self.row_bytes


def _shares(whole: PoolLayout, part: PoolLayout) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for a page and for a row, an array of the indices of `part`'s bytes in `whole`."""
    first, none = np.zeros(1, dtype=np.int32), NO_PLACES
    only = spans_served(served_of(part))
    pairing = Pairing(placed_at_zero(whole), placed_at_zero(part), only=only)
    found = []
    for size_bytes, lists in (
        (part.page_bytes, (first, first)),
        (part.row_bytes, (none, none, first, first)),
    ):
        share = np.zeros(size_bytes, dtype=np.int64)
        if size_bytes:
            blocks = pairing.blocks(*lists, max_block_bytes=size_bytes)
            for source, target, size in zip(*(column.tolist() for column in blocks), strict=True):
                share[target : target + size] = np.arange(source, source + size)
        found.append(share)
    return found[0], found[1]
