"""Device memory, allocated by torch, for pools that the CPU does not access."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvflow.memory.available import Available
from kvflow.protocols.errors import LayoutError, MisuseError
from kvflow.protocols.pages.components import Component
from kvflow.protocols.pages.kinds import DTYPE_BYTES, OPAQUE, SLOT
from kvflow.protocols.pages.layout import PoolLayout

if TYPE_CHECKING:
    import torch

HOST = "cpu"


def memory_on(device: torch.device | str, size_bytes: int) -> torch.Tensor:
    """Return `size_bytes` zeroed bytes on `device`, uint8 [size_bytes].

    Raises: LayoutError if there is not enough memory, MisuseError without torch.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise MisuseError(
            f"a pool on {device} needs torch, which is not installed: pip install 'kvflow[engine]'"
        ) from None
    try:
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        # torch.OutOfMemoryError is a RuntimeError.
        line = str(error).partition("\n")[0]
        raise LayoutError(
            f"no memory for a pool of {size_bytes} bytes on {device}: {line}"
        ) from error


def memory_of(device: torch.device) -> Available:
    """Return the free memory of a CUDA device."""
    import torch

    free_bytes, _ = torch.cuda.mem_get_info(device)
    return Available(free_bytes, f"memory of {device}")


def stream_in(memory: torch.Tensor, layout: PoolLayout, c: Component) -> torch.Tensor:
    """Return a view of one component of a pool in `memory`. `PagedPool.array` describes its shape.

    Raises: LayoutError if the component is not aligned for its dtype.
    """
    import torch

    b = layout.buffers[c.buffer]
    start, item_bytes = b.address - memory.data_ptr() + c.offset, DTYPE_BYTES.get(c.dtype, 1)
    if start % item_bytes or b.page_bytes % item_bytes:
        raise misplaced(c, b.page_bytes)
    in_slots = c.unit == SLOT and c.dtype != OPAQUE
    shape = (layout.spaces[c.space].page_size, *c.shape) if in_slots else c.shape
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    typed = memory.view(torch.uint8 if c.dtype == OPAQUE else getattr(torch, c.dtype))
    sizes, steps = (layout.count_of(c), *shape), (b.page_bytes // item_bytes, *reversed(strides))
    return typed.as_strided(sizes, steps, start // item_bytes)


def misplaced(c: Component, page_bytes: int) -> LayoutError:
    return LayoutError(
        f"component {c.name!r}: {c.dtype} cannot lie at {c.offset} in pages of {page_bytes} bytes"
    )
