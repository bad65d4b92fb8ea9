"""SGLang's KV cache in a shared segment, so that prefills on this machine can write into it.

SGLang allocates one tensor per layer. The local data plane needs all of them in one segment, whose
size must be known first. So the allocation runs twice: once to count the bytes, once in the
segment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvflow.connectors.sglang.version import NAME
from kvflow.memory.shared import SharedSegment

_POOLS = "sglang.srt.mem_cache.memory_pool"
ALLOCATORS = (
    f"{_POOLS}.MHATokenToKVPool._create_buffers_normal",
    f"{_POOLS}.MLATokenToKVPool._create_buffers",
)
_ALIGNMENT = 4096
_segments: list[SharedSegment] = []


def segment_with(address: int) -> SharedSegment | None:
    """Return the segment that contains an address; None if no pool was allocated there."""
    for segment in _segments:
        if segment.address <= address < segment.address + segment.size_bytes:
            return segment
    return None


def allocate_in_segment(original: Callable[..., Any], pool: Any, *args: Any, **kwargs: Any) -> None:
    """Run `original`, an allocation of SGLang's `pool`, with its tensors in a shared segment.

    Only a decode with this backend receives pages, so all others allocate as usual. So does a
    decode on a device, which receives pages in its staging.
    """
    if not _receives() or str(pool.device) != "cpu":
        original(pool, *args, **kwargs)
        return
    with _Counted() as counted:
        original(pool, *args, **kwargs)
    segment = SharedSegment.create(counted.size_bytes)
    with _InSegment(segment):
        original(pool, *args, **kwargs)
    _segments.append(segment)


def _receives() -> bool:
    from sglang.srt.runtime_context import get_disagg

    disagg = get_disagg()
    return bool(
        disagg.disaggregation_transfer_backend == NAME and disagg.disaggregation_mode == "decode"
    )


class _Allocations(TorchFunctionMode):
    """A mode in which `_zeros` makes the tensors of `torch.zeros`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") != "zeros":
            return func(*args, **kwargs)
        shape = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
        return self._zeros(tuple(shape), kwargs["dtype"])

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError


class _Counted(_Allocations):
    """Counts the bytes of all tensors. The tensors themselves have no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        found = torch.empty(shape, dtype=dtype, device="meta")
        self.size_bytes += _aligned(found.nbytes)
        return found


class _InSegment(_Allocations):
    """Places the tensors in a segment, one after the other. Its memory is zero at the start."""

    def __init__(self, segment: SharedSegment) -> None:
        super().__init__()
        self._segment, self._end = segment, 0

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = 1
        for length in shape:
            count *= length
        found = torch.frombuffer(
            self._segment.memory, dtype=dtype, count=count, offset=self._end
        ).reshape(shape)
        self._end += _aligned(found.nbytes)
        return found


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
