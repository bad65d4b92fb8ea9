"""The identity of the pages in a store, and views of pages in host memory."""

from __future__ import annotations

import ctypes
from hashlib import sha256

import msgspec

from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError, MisuseError
from kvflow.protocols.pages.components import Buffer
from kvflow.protocols.pages.kinds import PAGE, ROW
from kvflow.protocols.pages.layout import PoolLayout

_VERSION = 1


def identity_of(layout: PoolLayout, unit: str = PAGE) -> bytes:
    """Return 32 bytes that identify the format of a page-first pool's pages, or of its rows.

    `unit` selects pages or rows. Two layouts have the same identity if and only if a page of one
    can be read as a page of the other. They then have the same model, page size, components, parts
    and byte order. The number of pages does not matter.

    Raises: LayoutError if the layout is not page-first; MisuseError if it names no model.
    """
    _buffer(layout, unit)
    if not layout.fingerprint:
        raise MisuseError("fingerprint of the pool is empty: a store must know whose KV it holds")
    components = sorted(
        (c for c in layout.components if c.in_rows == (unit == ROW)), key=lambda c: c.offset
    )
    # The buffer number depends on where the pool placed the component, not on its content.
    described = [msgspec.structs.replace(c, buffer=0) for c in components]
    content = (_VERSION, unit, layout.fingerprint, layout.tag, layout.page_size, described)
    return sha256(b"kvflow storage" + msgspec.msgpack.encode(content)).digest()


class PageViews:
    """Views of single pages (or rows) of a page-first pool in host memory, for use by a store."""

    def __init__(self, pool: PagedPool, unit: str = PAGE) -> None:
        if not pool.on_host:
            raise LayoutError(
                f"a store reads and writes host memory, and the pool is on {pool.device}"
            )
        self._buffer, self._mapped_by = _buffer(pool.layout, unit), pool.mapped_by
        self._count = pool.layout.count_of(self._buffer)
        self.value_bytes = self._buffer.page_bytes

    def __getitem__(self, index: int) -> memoryview:
        """Return a writable view of one page. The view keeps it mapped. Raises: LayoutError."""
        if not 0 <= index < self._count:
            raise LayoutError(f"{self._buffer.unit} {index} is outside 0..{self._count - 1}")
        size = self._buffer.page_bytes
        # The attribute keeps the memory mapped while the view exists, even in a call that hangs.
        memory = (ctypes.c_uint8 * size).from_address(self._buffer.address + index * size)
        memory.mapped_by = self._mapped_by  # type: ignore[attr-defined]
        return memoryview(memory).cast("B")


def _buffer(layout: PoolLayout, unit: str) -> Buffer:
    found = [b for b in layout.buffers if b.unit == unit]
    size = layout.page_bytes if unit == PAGE else layout.row_bytes
    if len(found) != 1 or found[0].page_bytes != size:
        raise LayoutError(
            f"a store takes a {unit} in one piece, and this pool has it in {len(found)} buffers: "
            "give it a page-first pool"
        )
    return found[0]
