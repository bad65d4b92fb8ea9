"""The identity of the pages in a store, and views of pages in host memory."""

from __future__ import annotations

import ctypes
from hashlib import sha256

import msgspec

from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError, MisuseError
from kvflow.protocols.pages.components import Buffer
from kvflow.protocols.pages.layout import PoolLayout

_VERSION = 2


def identity_of(layout: PoolLayout, space: int = 0) -> bytes:
    """Return 32 bytes that identify the format of the places in one space of a page-first pool.

    `space` is the index of the space. Two layouts have the same identity if and only if a place of
    one can be read as a place of the other. They then have the same model, components, parts and
    byte order, and their spaces have the same name, page size and window. The number of places does
    not matter.

    Raises: LayoutError if the layout is not page-first; MisuseError if it names no model.
    """
    _buffer(layout, space)
    if not layout.fingerprint:
        raise MisuseError("fingerprint of the pool is empty: a store must know whose KV it holds")
    components = sorted((c for c in layout.components if c.space == space), key=lambda c: c.offset)
    # The numbers of the buffer and the space depend on what else the pool has, not on the content.
    described = [msgspec.structs.replace(c, buffer=0, space=0) for c in components]
    kept = msgspec.structs.replace(layout.spaces[space], count=0)
    content = (_VERSION, kept, layout.fingerprint, layout.tag, described)
    return sha256(b"kvflow storage" + msgspec.msgpack.encode(content)).digest()


class PageViews:
    """Views of single places, of one space of a page-first pool in host memory, for a store."""

    def __init__(self, pool: PagedPool, space: int = 0) -> None:
        if not pool.on_host:
            raise LayoutError(
                f"a store reads and writes host memory, and the pool is on {pool.device}"
            )
        self._buffer, self._mapped_by = _buffer(pool.layout, space), pool.mapped_by
        self._space = pool.layout.spaces[space]
        self.value_bytes = self._buffer.page_bytes

    def __getitem__(self, index: int) -> memoryview:
        """Return a writable view of one place. The view keeps it mapped. Raises: LayoutError."""
        if not 0 <= index < self._space.count:
            raise LayoutError(f"{self._space.unit} {index} is outside 0..{self._space.count - 1}")
        size = self._buffer.page_bytes
        # The attribute keeps the memory mapped while the view exists, even in a call that hangs.
        memory = (ctypes.c_uint8 * size).from_address(self._buffer.address + index * size)
        memory.mapped_by = self._mapped_by  # type: ignore[attr-defined]
        return memoryview(memory).cast("B")


def _buffer(layout: PoolLayout, space: int) -> Buffer:
    found = [b for b in layout.buffers if b.space == space]
    if len(found) != 1 or found[0].page_bytes != layout.place_bytes[space]:
        raise LayoutError(
            f"a store takes a {layout.spaces[space].unit} in one piece, and this pool has it in "
            f"{len(found)} buffers: give it a page-first pool"
        )
    return found[0]
