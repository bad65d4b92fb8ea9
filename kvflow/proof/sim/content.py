"""Content of a simulated pool's places. It identifies a request, and an index among its places of
all spaces.
"""

from __future__ import annotations

import ctypes
import hashlib

import numpy as np
from numpy.typing import NDArray

from kvflow.proof.rules.places import spaces_of_places
from kvflow.protocols.pages.coverage import served_of, spans_served
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.pages.plan import Pairing
from kvflow.testing.shards import placed_at_zero


def content(digest: bytes, index: int, size_bytes: int, version: int = 0) -> bytes:
    """Return bytes that depend on the request, on the index of the place, and on `version`."""
    salt = index.to_bytes(4, "little") + version.to_bytes(4, "little")
    block = hashlib.blake2b(digest, digest_size=32, salt=salt).digest()
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


class PlaceBytes:
    """Bytes of a page-first pool, by place."""

    def __init__(self, layout: PoolLayout, whole: PoolLayout | None = None) -> None:
        """Access a pool with `layout`. If `whole` is given, the pool is one rank's share of it."""
        # A page-first pool has one buffer for each space.
        addresses = {buffer.space: buffer.address for buffer in layout.buffers}
        self._spaces = spaces_of_places(layout.counts)
        self._sizes = layout.place_bytes
        # The address at which the place with index 0 would begin, if each space had it.
        self._starts = [
            addresses[space] - base * self._sizes[space] for space, base in enumerate(layout.bases)
        ]
        self._whole = whole or layout
        self._shares = None if self._whole is layout else _shares(self._whole, layout)

    def size(self, place: int) -> int:
        return self._sizes[self._spaces[place]]

    def read(self, place: int) -> bytes:
        return ctypes.string_at(*self._at(place))

    def write(self, place: int, data: bytes) -> None:
        address, size_bytes = self._at(place)
        ctypes.memmove(address, data, size_bytes)

    def fill(self, place: int, digest: bytes, index: int) -> None:
        space = self._spaces[place]
        data = content(digest, index, self._whole.place_bytes[space])
        if self._shares is not None:
            data = np.frombuffer(data, dtype=np.uint8)[self._shares[space]].tobytes()
        self.write(place, data)

    def _at(self, place: int) -> tuple[int, int]:
        space = self._spaces[place]
        size_bytes = self._sizes[space]
        return self._starts[space] + place * size_bytes, size_bytes


def _shares(whole: PoolLayout, part: PoolLayout) -> list[NDArray[np.int64]]:
    """Return, for a place of each space, an array of the indices of `part`'s bytes in `whole`."""
    only = spans_served(served_of(part))
    pairing = Pairing(placed_at_zero(whole), placed_at_zero(part), only=only)
    found = []
    for base, size_bytes in zip(part.bases, part.place_bytes, strict=True):
        share = np.zeros(size_bytes, dtype=np.int64)
        if size_bytes:
            first = np.array([base], dtype=np.int32)
            blocks = pairing.blocks(first, first, max_block_bytes=size_bytes)
            for source, target, size in zip(*(column.tolist() for column in blocks), strict=True):
                share[target : target + size] = np.arange(source, source + size)
        found.append(share)
    return found
