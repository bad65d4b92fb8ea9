"""What a paged pool looks like, in bytes: shared by the pools that own memory and the planes that move it.

A pool is `num_pages` pages of `page_size` token slots. What one page holds is a list of *components* (one layer's K,
one layer's V, a scale stream ...), each with its shape per token slot. Components lie in *buffers*: page-first pools
have one buffer in which a page is one block; layer-first pools have one buffer per component. Transfers are planned
component by component and merged where bytes are adjacent on both sides, so either kind can be copied into the other.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import LayoutError

PageIndices = NDArray[np.int32]
Order = Literal["page_first", "layer_first"]

MAX_COMPONENTS = 4096
MAX_PAGES = 1 << 26
MAX_DIFFERENCES = 5  # named in a refusal
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1, "int8": 1, "int32": 4}


class Component(msgspec.Struct, frozen=True, array_like=True):
    """One stream of a page: `page_size` slots of `shape` elements, contiguous, at `offset` in a page of `buffer`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    buffer: int
    offset: int
    size_bytes: int


class Buffer(msgspec.Struct, frozen=True, array_like=True):
    """One stretch of memory. Page p begins at `address + p * page_bytes`; the address is the owner's."""

    name: str
    page_bytes: int
    size_bytes: int
    address: int = 0


class PoolLayout(msgspec.Struct, frozen=True, array_like=True):
    """The descriptor two peers exchange once (source: design.md, section 5)."""

    page_size: int
    num_pages: int
    components: tuple[Component, ...]
    buffers: tuple[Buffer, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all components together."""
        return sum(c.size_bytes for c in self.components)

    @property
    def size_bytes(self) -> int:
        return sum(b.size_bytes for b in self.buffers)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def check(self) -> None:
        """Refuse a descriptor whose arithmetic does not hold. Called on everything that came over the wire.

        Raises: LayoutError naming the field.
        """
        if not 1 <= self.page_size <= 1 << 16:
            raise LayoutError(f"page_size {self.page_size} is outside 1..65536")
        if not 1 <= self.num_pages <= MAX_PAGES:
            raise LayoutError(f"num_pages {self.num_pages} is outside 1..{MAX_PAGES}")
        if not 1 <= len(self.components) <= MAX_COMPONENTS or not 1 <= len(self.buffers) <= MAX_COMPONENTS:
            raise LayoutError(f"components/buffers must be 1..{MAX_COMPONENTS}")
        for b in self.buffers:
            if b.page_bytes < 1 or b.address < 0 or b.size_bytes < b.page_bytes * self.num_pages:
                raise LayoutError(
                    f"buffer {b.name!r}: {b.size_bytes} bytes do not hold {self.num_pages} pages of {b.page_bytes}"
                )
        for c in self.components:
            self._check_component(c)

    def _check_component(self, c: Component) -> None:
        if c.dtype not in DTYPE_BYTES:
            raise LayoutError(f"component {c.name!r}: unknown dtype {c.dtype!r}")
        if not c.shape or min(c.shape) < 1 or c.size_bytes != slot_bytes(c.dtype, c.shape) * self.page_size:
            raise LayoutError(f"component {c.name!r}: shape {c.shape} does not make {c.size_bytes} bytes")
        if not 0 <= c.buffer < len(self.buffers):
            raise LayoutError(f"component {c.name!r}: no buffer {c.buffer}")
        if c.offset < 0 or c.offset + c.size_bytes > self.buffers[c.buffer].page_bytes:
            raise LayoutError(
                f"component {c.name!r}: bytes {c.offset}..{c.offset + c.size_bytes} leave its buffer's page"
            )


def slot_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of one token slot of a component."""
    size = DTYPE_BYTES[dtype]
    for n in shape:
        size *= n
    return size


def build_layout(
    streams: list[tuple[str, str, tuple[int, ...]]], *, page_size: int, num_pages: int, order: Order = "page_first"
) -> PoolLayout:
    """Lay out `streams` (name, dtype, shape per token slot) in one buffer (page-first) or in one each (layer-first).

    Raises: LayoutError.
    """
    if page_size < 1:
        raise LayoutError(f"page_size {page_size} is below 1")
    if num_pages < 1:
        raise LayoutError(f"num_pages {num_pages} is below 1")
    components: list[Component] = []
    offset = 0
    for i, (name, dtype, shape) in enumerate(streams):
        if dtype not in DTYPE_BYTES:
            raise LayoutError(f"component {name!r}: unknown dtype {dtype!r}")
        size = slot_bytes(dtype, shape) * page_size
        if order == "page_first":
            components.append(Component(name, dtype, shape, 0, offset, size))
            offset += size
        else:
            components.append(Component(name, dtype, shape, i, 0, size))
    if order == "page_first":
        buffers: tuple[Buffer, ...] = (Buffer("pages", offset, offset * num_pages),)
    else:
        buffers = tuple(Buffer(c.name, c.size_bytes, c.size_bytes * num_pages) for c in components)
    layout = PoolLayout(page_size, num_pages, tuple(components), buffers)
    layout.check()
    return layout


def differences(source: PoolLayout, target: PoolLayout) -> list[str]:
    """Why pages of `source` cannot be copied into `target`, in words a person can act on; empty when they can.

    The first few: two models of 32 layers differ in all of them.
    """
    found: list[str] = []
    if source.page_size != target.page_size:
        found.append(f"page_size: prefill {source.page_size}, decode {target.page_size}")
    theirs = {c.name: c for c in target.components}
    for c in source.components:
        other = theirs.pop(c.name, None)
        if other is None:
            found.append(f"{c.name}: only prefill has it")
        elif c.dtype != other.dtype:
            found.append(f"{c.name} dtype: prefill {c.dtype}, decode {other.dtype}")
        elif c.shape != other.shape:
            found.append(f"{c.name} shape (heads, dim): prefill {c.shape}, decode {other.shape}")
    found.extend(f"{name}: only decode has it" for name in theirs)
    more = len(found) - MAX_DIFFERENCES
    return found if more <= 0 else [*found[:MAX_DIFFERENCES], f"and {more} more"]


def pack_pages(pages: PageIndices) -> bytes:
    """Page indices as they travel: little-endian int32, packed."""
    return np.ascontiguousarray(pages, dtype="<i4").tobytes()


def unpack_pages(packed: bytes, num_pages: int) -> PageIndices:
    """The indices in `packed`, each checked against the pool, none twice.

    Raises: LayoutError for a ragged length, an index outside 0..num_pages-1, or a page named twice.
    """
    if len(packed) % 4:
        raise LayoutError(f"pages: {len(packed)} bytes are no int32 list")
    pages = np.frombuffer(packed, dtype="<i4")
    if pages.size:
        low, high = int(pages.min()), int(pages.max())
        if low < 0 or high >= num_pages:
            raise LayoutError(f"pages: index {low if low < 0 else high} is outside 0..{num_pages - 1}")
        if pages.size > 1 and np.unique(pages).size != pages.size:
            raise LayoutError("pages: one page is named twice")
    return pages
