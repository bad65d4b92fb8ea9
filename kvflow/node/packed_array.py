"""Arrays in a handoff, packed as bytes. Only `PackedArray.tensor` imports torch."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import MisuseError

if TYPE_CHECKING:
    import torch

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}
_IN_NUMPY = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int32": "<i4", "int64": "<i8"}
MAX_DIMENSIONS = 4


class PackedArray(msgspec.Struct, frozen=True):
    """An array of `shape` and `dtype` (float32, float16, bfloat16, int32 or int64).

    `data` has the elements in row-major order, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of(array: NDArray[Any] | torch.Tensor) -> PackedArray:
        """Pack a copy of a numpy array or a torch tensor, on any device and in any memory order.

        Raises: MisuseError for an unsupported dtype.
        """
        found = getattr(array, "dtype", type(array))
        dtype = found.name if isinstance(found, np.dtype) else str(found).removeprefix("torch.")
        if dtype not in _ITEM_BYTES:
            raise MisuseError(
                f"an array of {dtype} cannot be handed over; use one of {', '.join(_ITEM_BYTES)}"
            )
        if isinstance(array, np.ndarray):
            numbers: NDArray[Any] = array.astype(_IN_NUMPY[dtype], copy=False)
        else:
            host = array.detach().cpu().contiguous()
            numbers = (
                host.view(sys.modules["torch"].int16) if dtype == "bfloat16" else host
            ).numpy()
        return PackedArray(dtype, tuple(array.shape), numbers.tobytes())

    @property
    def fault(self) -> str:
        """Description of what is wrong with the array; empty if it is well-formed."""
        if self.dtype not in _ITEM_BYTES:
            return f"its dtype {self.dtype[:40]!r} is not one of {', '.join(_ITEM_BYTES)}"
        if not 1 <= len(self.shape) <= MAX_DIMENSIONS or min(self.shape) < 1:
            return (
                f"its shape {self.shape[: MAX_DIMENSIONS + 1]} is not 1 to {MAX_DIMENSIONS} "
                "positive numbers"
            )
        if len(self.data) != (wanted := math.prod(self.shape) * _ITEM_BYTES[self.dtype]):
            return f"{len(self.data)} bytes are given, {wanted} make {self.shape} of {self.dtype}"
        return ""

    def array(self) -> NDArray[Any]:
        """Return a read-only numpy view. bfloat16 elements appear as uint16."""
        return np.frombuffer(self.data, _IN_NUMPY[self.dtype]).reshape(self.shape)

    def floats(self) -> NDArray[np.float32]:
        """Return the elements, of any dtype, as float32."""
        found = self.array()
        # A bfloat16 is the upper half of a float32, so a shift converts it exactly.
        if self.dtype == "bfloat16":
            return (found.astype("<u4") << 16).view("<f4")
        return found.astype("<f4")

    def tensor(self) -> torch.Tensor:
        """Return a copy as a torch tensor on the CPU."""
        import torch

        found = torch.from_numpy(self.array().copy())
        return found.view(torch.bfloat16) if self.dtype == "bfloat16" else found
