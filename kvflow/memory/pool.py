"""A paged pool: memory for every buffer of a layout, and typed views of it that share its bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.memory.shared import SharedSegment
from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.layout import DTYPE_BYTES, Buffer, Component, PageIndices, PoolLayout

if TYPE_CHECKING:
    import torch

_BUFFER_ALIGNMENT = 4096


class PagedPool:
    """Owns (`allocate`) or borrows (`over`) the bytes of one pool. `layout.buffers` carry this process's addresses."""

    def __init__(self, layout: PoolLayout, memory: SharedSegment | None, tensors: dict[str, torch.Tensor]) -> None:
        self.layout = layout
        self._memory, self._tensors = memory, tensors
        self._components = {c.name: c for c in layout.components}

    @classmethod
    def allocate(cls, layout: PoolLayout, shared: bool = True) -> PagedPool:
        """Pre-faulted memory for every buffer, in one segment; `shared` lets peers of this machine open it.

        Raises: LayoutError when the layout does not hold or there is not enough memory.
        """
        layout.check()
        offsets: list[int] = []
        end = 0
        for buffer in layout.buffers:
            offsets.append(end)
            end += -(-buffer.size_bytes // _BUFFER_ALIGNMENT) * _BUFFER_ALIGNMENT
        memory = SharedSegment.create(end) if shared else SharedSegment.private(end)
        placed = tuple(
            msgspec.structs.replace(b, address=memory.address + offset)
            for b, offset in zip(layout.buffers, offsets, strict=True)
        )
        return cls(msgspec.structs.replace(layout, buffers=placed), memory, {})

    @classmethod
    def over(cls, tensors: Mapping[str, torch.Tensor], page_size: int) -> PagedPool:
        """Wrap a user's tensors, each [num_pages, page_size, *shape], without a copy: one contiguous tensor per stream
        (layer-first), or views into one page-first tensor. The pool keeps them alive.

        Raises: LayoutError when a page of a stream is not contiguous, or shapes disagree.
        """
        layout = _describe(dict(tensors), page_size)
        layout.check()
        return cls(layout, None, dict(tensors))

    @property
    def segment(self) -> SharedSegment | None:
        """What a peer of this machine can open; None for private memory and for a user's own tensors."""
        return self._memory if self._memory is not None and self._memory.fd >= 0 else None

    @property
    def on_host(self) -> bool:
        """The CPU can read every buffer at its address."""
        return all(tensor.device.type == "cpu" for tensor in self._tensors.values())

    def tensor(self, component_name: str) -> torch.Tensor:
        """View [num_pages, page_size, *shape] of one component; strided for page-first pools.

        Raises: LayoutError for an unknown name, or a place in memory its dtype cannot be read from.
        """
        found = self._tensors.get(component_name)
        if found is None:
            found = self._tensors[component_name] = self._view(self._component(component_name))
        return found

    def pages_bytes(self, pages: PageIndices) -> NDArray[np.uint8]:
        """A copy [n, page_bytes] of whole pages, component after component (CPU memory only; for tests)."""
        pages = np.asarray(pages, dtype=np.int64)
        columns: list[NDArray[np.uint8]] = []
        for c in self.layout.components:
            b = self.layout.buffers[c.buffer]
            whole = (self.layout.num_pages - 1) * b.page_bytes + c.offset + c.size_bytes
            flat = np.ctypeslib.as_array((ctypes.c_uint8 * whole).from_address(b.address))
            shape, strides = (self.layout.num_pages, c.size_bytes), (b.page_bytes, 1)
            rows = np.lib.stride_tricks.as_strided(flat[c.offset :], shape=shape, strides=strides, writeable=False)
            columns.append(rows[pages])
        return np.concatenate(columns, axis=1)

    def close(self) -> None:
        """Give the memory back (as soon as the last tensor over it is gone). Idempotent."""
        self._tensors.clear()
        if self._memory is not None:
            self._memory.close()

    def _component(self, name: str) -> Component:
        component = self._components.get(name)
        if component is None:
            raise LayoutError(f"the pool has no component {name!r}")
        return component

    def _view(self, c: Component) -> torch.Tensor:
        import torch

        if self._memory is None:
            raise LayoutError("the pool is closed")
        itemsize = DTYPE_BYTES[c.dtype]
        b = self.layout.buffers[c.buffer]
        start = b.address - self._memory.address + c.offset
        if start % itemsize or b.page_bytes % itemsize:
            raise LayoutError(
                f"component {c.name!r}: {c.dtype} cannot lie at {c.offset} in pages of {b.page_bytes} bytes"
            )
        flat = torch.frombuffer(self._memory.memory, dtype=torch.uint8).view(getattr(torch, c.dtype))
        shape = (self.layout.num_pages, self.layout.page_size, *c.shape)
        strides = [1] * len(shape)
        for i in range(len(shape) - 2, 0, -1):
            strides[i] = strides[i + 1] * shape[i + 1]
        strides[0] = b.page_bytes // itemsize
        return flat.as_strided(shape, strides, start // itemsize)


def _describe(tensors: dict[str, torch.Tensor], page_size: int) -> PoolLayout:
    """The layout of a user's tensors: streams whose pages interleave share a buffer."""
    if not tensors:
        raise LayoutError("a pool needs at least one tensor")
    num_pages = next(iter(tensors.values())).shape[0]
    for name, t in tensors.items():
        _check_stream(name, t, num_pages, page_size)
    components: list[Component] = []
    buffers: list[Buffer] = []
    for name, t in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        step, size = t.stride(0) * t.element_size(), t[0].numel() * t.element_size()
        if num_pages == 1:
            step = size
        last = buffers[-1] if buffers else None
        if last is None or step != last.page_bytes or t.data_ptr() + size > last.address + step:
            last = Buffer(name, step, step * num_pages, _buffer_start(name, t, step * num_pages))
            buffers.append(last)
        dtype = str(t.dtype).removeprefix("torch.")
        components.append(
            Component(name, dtype, tuple(t.shape[2:]) or (1,), len(buffers) - 1, t.data_ptr() - last.address, size)
        )
    order = {name: i for i, name in enumerate(tensors)}
    components.sort(key=lambda c: order[c.name])
    return PoolLayout(page_size, num_pages, tuple(components), tuple(buffers))


def _check_stream(name: str, t: torch.Tensor, num_pages: int, page_size: int) -> None:
    if t.dim() < 2 or t.shape[0] != num_pages or t.shape[1] != page_size or not t.numel():
        raise LayoutError(f"tensor {name!r}: shape {tuple(t.shape)} is not [{num_pages}, {page_size}, ...]")
    if not t[0].is_contiguous() or t.stride(0) < t[0].numel():
        raise LayoutError(f"tensor {name!r}: one page of it is not contiguous")


def _buffer_start(name: str, t: torch.Tensor, size_bytes: int) -> int:
    """Where the buffer that begins with `t` starts: at `t`, or earlier, so that its whole last page is real memory."""
    storage = t.untyped_storage()
    start = min(t.data_ptr(), storage.data_ptr() + storage.nbytes() - size_bytes)
    if start < storage.data_ptr():
        raise LayoutError(f"tensor {name!r}: {size_bytes} bytes of pages leave its storage of {storage.nbytes()}")
    return start
