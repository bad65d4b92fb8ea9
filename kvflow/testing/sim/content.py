"""What a place of a simulated pool holds: every byte tells whose it is, and in which place."""

from __future__ import annotations

import ctypes
import hashlib

from kvflow.protocols.pages.layout import PoolLayout


def content(digest: bytes, index: int, size_bytes: int, version: int = 0) -> bytes:
    """The request, the place's number among those of the request, and how often it was rewritten decide every byte."""
    salt = index.to_bytes(4, "little") + version.to_bytes(4, "little")
    block = hashlib.blake2b(digest, digest_size=32, salt=salt).digest()
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


def handoff_of(digest: bytes) -> bytes:
    return b"handoff " + digest[:8]


class PlaceBytes:
    """The bytes of a page-first pool by place: its pages, and its rows numbered on from them."""

    def __init__(self, layout: PoolLayout) -> None:
        (self._pages,) = (b for b in layout.buffers if not b.in_rows)
        self._rows = next((b for b in layout.buffers if b.in_rows), None)
        self.num_pages, self.page_bytes, self.row_bytes = layout.num_pages, layout.page_bytes, layout.row_bytes

    def size(self, place: int) -> int:
        return self.page_bytes if place < self.num_pages else self.row_bytes

    def read(self, place: int) -> bytes:
        return ctypes.string_at(*self._at(place))

    def write(self, place: int, data: bytes) -> None:
        address, size_bytes = self._at(place)
        ctypes.memmove(address, data, size_bytes)

    def _at(self, place: int) -> tuple[int, int]:
        if place < self.num_pages:
            return self._pages.address + place * self.page_bytes, self.page_bytes
        assert self._rows is not None
        return self._rows.address + (place - self.num_pages) * self.row_bytes, self.row_bytes
