"""Copies of planned blocks, with memmove between two host memories, or by CUDA to and from a
device.

A copy returns when every block is copied. If it fails, no part of it is still running.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvflow.memory.device import HOST
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError, MisuseError, TransferError
from kvflow.protocols.pages.layout import PageIndices, Places, PoolLayout, resized
from kvflow.protocols.pages.plan import Addresses, Blocks, Pairing
from kvflow.protocols.pages.spaces import MAX_PAGES

if TYPE_CHECKING:
    import torch

    from kvflow.memory.block_kernel import BlockKernel

# Releasing the GIL costs more than copying a small block, so a copier holds it until it has copied
# this many bytes, which takes some 150 us.
_HELD_BYTES = 1 << 20
# Blocks up to this average size are copied by numpy, if there are at least `_FEW_BLOCKS`.
SMALL_BYTES = 512
_FEW_BLOCKS = 64
# The GIL is released once per this many calls of cudaMemcpyAsync.
_HELD_CALLS = 64
# cudaHostRegisterPortable, cudaHostRegisterMapped, cudaMemcpyDefault.
_PORTABLE, _MAPPED, _ANY_TO_ANY = 1, 2, 4
_SAME_ADDRESS = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem

_copy_holding_gil = ctypes.PyDLL(None).memmove
_copy_releasing_gil = ctypes.CDLL(None).memmove
for _function in (_copy_holding_gil, _copy_releasing_gil):
    _function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    _function.restype = None


class Copier(Protocol):
    """A way to copy blocks. Several threads may use one copier at once."""

    def copy(self, blocks: Blocks) -> None:
        """Copy all blocks. Raises: TransferError if a block could not be copied."""

    def pin(self, pool: PagedPool) -> None:
        """Pin a pool of host memory until `close`, so that a device can access it directly.

        Raises: LayoutError if the memory cannot be pinned.
        """

    def close(self) -> None:
        """Unpin all pools. Call it before the pools are closed, while no copy runs. Idempotent."""


def copier_for(pool: PagedPool) -> Copier:
    """Return a copier for copies between `pool` and host memory.

    Raises: LayoutError if the memory of the pool's device cannot be copied.
    """
    return HostCopier() if pool.device == HOST else CudaCopier(pool.device)


def copy_slices(
    pairing: Pairing,
    source: Places,
    target: Places,
    slice_bytes: int,
    copier: Copier,
    stopped: Callable[[], bool],
) -> bool:
    """Copy places of all spaces slice by slice, and call `stopped` before each slice.

    The call blocks, so make it in a thread. Returns False if `stopped` ended the copy. Raises:
    TransferError.
    """
    return copy_listed(
        pairing,
        pairing.source.numbered(source),
        pairing.target.numbered(target),
        slice_bytes,
        copier,
        stopped,
    )


def copy_listed(
    pairing: Pairing,
    source: PageIndices,
    target: PageIndices,
    slice_bytes: int,
    copier: Copier,
    stopped: Callable[[], bool],
) -> bool:
    """Copy places that are given in one list for all spaces; see `copy_slices`."""
    blocks = pairing.blocks(source, target, max_block_bytes=slice_bytes)
    ends = np.cumsum(blocks.sizes)
    start, done_bytes = 0, 0
    while start < ends.size:
        if stopped():
            return False
        end = max(start + 1, int(np.searchsorted(ends, done_bytes + slice_bytes, side="right")))
        copier.copy(Blocks(*(column[start:end] for column in blocks)))
        start, done_bytes = end, int(ends[end - 1])
    return True


def host_layout(layout: PoolLayout, limit_bytes: int, num_rows: int | None = None) -> PoolLayout:
    """Return `layout` with as many places as fit into `limit_bytes` of host memory.

    The spaces with rows have `num_rows` rows each. By default they take at most half of the memory,
    and have at most as many rows as in `layout`. The spaces with pages share the rest, in the
    proportion of their pages in `layout`. Raises: MisuseError if not even one place of each space
    fits.
    """
    one_page, one_row = one_bytes(layout)
    rows = num_rows
    if rows is None:
        share = limit_bytes // 2 if one_page else limit_bytes
        rows = share // one_row if one_row else 0
    counts = list(layout.counts)
    left = limit_bytes
    for i, (space, size) in enumerate(zip(layout.spaces, layout.place_bytes, strict=True)):
        if space.in_rows and (size or num_rows is not None):
            counts[i] = rows if num_rows is not None else min(rows, space.count)
            left -= counts[i] * size
    if left < one_page or (one_row and rows < 1):
        raise MisuseError(_too_little(layout, limit_bytes, num_rows))
    paged = [i for i, space in enumerate(layout.spaces) if not space.in_rows]
    whole = sum(layout.counts[i] * layout.place_bytes[i] for i in paged)
    for i in paged:
        if layout.place_bytes[i]:
            more = (left - one_page) * layout.counts[i] // whole
            counts[i] = min(MAX_PAGES, 1 + more)
    return resized(layout, tuple(counts))


def one_bytes(layout: PoolLayout) -> tuple[int, int]:
    """Return the bytes of one page of every space with pages, and of one row of every space with
    rows.
    """
    both = [0, 0]
    for space, size in zip(layout.spaces, layout.place_bytes, strict=True):
        both[space.in_rows] += size
    return both[0], both[1]


def least_bytes(layout: PoolLayout, num_rows: int | None = None) -> int:
    """Return a limit that is enough for `host_layout`."""
    one_page, one_row = one_bytes(layout)
    if num_rows is None and one_page and one_row:
        return 2 * max(one_page, one_row)
    return one_page + (num_rows or 1) * one_row


def _too_little(layout: PoolLayout, limit_bytes: int, num_rows: int | None) -> str:
    sizes = [
        size
        for space, size in zip(layout.spaces, layout.place_bytes, strict=True)
        if size and not space.in_rows
    ]
    pages = " and one of ".join(f"{size} bytes" for size in sizes or [0])
    _, one_row = one_bytes(layout)
    rows = f" and {num_rows or 1} x {one_row} bytes of rows" if one_row else ""
    return (
        f"{limit_bytes} bytes of host memory do not hold a page of {pages}{rows}; "
        f"{least_bytes(layout, num_rows)} are enough"
    )


def are_small(blocks: Blocks) -> bool:
    """Return True if `copy_small` is faster than one memmove per block.

    Blocks are that small if two pools divide heads differently. Each block then contains a few
    heads of one token slot.
    """
    count = blocks.sizes.size
    return count >= _FEW_BLOCKS and int(blocks.sizes.sum()) <= SMALL_BYTES * count


def copy_small(blocks: Blocks) -> None:
    """Copy many small blocks. numpy gathers and scatters all blocks of one size in one call.

    Measured on two busy cores, scattered blocks of 64, 128, 256 and 512 bytes move at 0.8, 1.4, 1.9
    and 2.4 GB/s, and with one memmove each at 0.1, 0.3, 0.5 and 0.9 GB/s. For data planes that
    transfer block by block, such blocks should be gathered in staging first
    (`transports.data.slices`).
    """
    sizes = np.unique(blocks.sizes).tolist()
    for size in sizes:
        alike = blocks if len(sizes) == 1 else _of_size(blocks, size)
        (here, from_here), (there, onto) = (
            _elements(alike.sources, size),
            _elements(alike.targets, size),
        )
        there[onto] = here[from_here]


def _of_size(blocks: Blocks, size: int) -> Blocks:
    return Blocks(*(column[blocks.sizes == size] for column in blocks))


class _Memory:
    """Memory as an array for numpy: `count` overlapping elements of `size` bytes, one at each byte
    from `address` on.
    """

    def __init__(self, address: int, count: int, size: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "strides": (1,),
            "typestr": f"|V{size}",
            "version": 3,
        }


def _elements(addresses: Addresses, size: int) -> tuple[NDArray[np.void], Addresses]:
    """Return overlapping elements of `size` bytes, and the indices of those at `addresses`."""
    low = int(addresses.min())
    return np.asarray(_Memory(low, int(addresses.max()) - low + 1, size)), addresses - low


class HostCopier:
    """A copier between host memories, with memmove or, for many small blocks, numpy."""

    @staticmethod
    def copy(blocks: Blocks) -> None:
        """Copy all blocks.

        With memmove, the GIL is released every `_HELD_BYTES` bytes, and for the last block.
        """
        if are_small(blocks):
            for start in range(0, blocks.sizes.size, _HELD_BYTES // SMALL_BYTES):
                copy_small(
                    Blocks(
                        *(column[start : start + _HELD_BYTES // SMALL_BYTES] for column in blocks)
                    )
                )
            return
        sources, targets, sizes = (column.tolist() for column in blocks)
        held = 0
        for left, source, target, size in zip(
            range(len(sizes) - 1, -1, -1), sources, targets, sizes, strict=True
        ):
            held += size
            if left and held < _HELD_BYTES:
                _copy_holding_gil(target, source, size)
            else:
                _copy_releasing_gil(target, source, size)
                held = 0

    def pin(self, pool: PagedPool) -> None:
        """Do nothing: the CPU can copy memory that is not pinned."""

    def close(self) -> None:
        """Do nothing: no memory is pinned."""


class CudaCopier:
    """A copier with a CUDA stream of its own.

    It uses cudaMemcpyAsync and, if Triton is installed, a kernel for many small blocks.
    """

    def __init__(self, device: str) -> None:
        """Create a copier for a CUDA device.

        Raises: LayoutError if `device` is not a CUDA device, or torch loaded no CUDA runtime.
        """
        import torch

        if torch.device(device).type != "cuda" or torch.version.cuda is None:
            raise LayoutError(
                f"memory of {device} cannot be copied: only that of CUDA devices and the host can"
            )
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)
        self._runtime = Runtime(_loaded_library("libcudart.so"))
        self._pinned: list[tuple[int, int]] = []  # (address, size in bytes)
        same_address = self._runtime.attribute(_SAME_ADDRESS, self._device.index or 0)
        self._kernel = _block_kernel(self._device) if same_address else None

    def copy(self, blocks: Blocks) -> None:
        with _on(self._device):
            try:
                if self._kernel is not None and self.takes_kernel(blocks):
                    self._kernel.queue(blocks, self._stream)
                else:
                    self._runtime.queue(blocks, self._stream.cuda_stream)
            finally:
                # No part of a copy may run after this method, even if a block is refused.
                self._synchronize()

    def takes_kernel(self, blocks: Blocks) -> bool:
        """Return True if the kernel copies these blocks. The kernel needs pinned host memory."""
        if self._kernel is None or not self._kernel.suits(blocks):
            return False
        sources, targets, sizes = blocks
        return any(
            address <= column.min() and (column + sizes).max() <= address + size_bytes
            for address, size_bytes in self._pinned
            for column in (sources, targets)
        )

    def _synchronize(self) -> None:
        try:
            self._stream.synchronize()
        except RuntimeError as error:
            raise TransferError(f"copies on {self._device} failed: {error}") from error

    def pin(self, pool: PagedPool) -> None:
        # All buffers of a host pool are in one allocation, which is pinned as a whole.
        first, last = pool.layout.buffers[0], pool.layout.buffers[-1]
        address, size_bytes = first.address, last.address + last.size_bytes - first.address
        with _on(self._device):
            if status := self._runtime.register(address, size_bytes, _PORTABLE | _MAPPED):
                text = self._runtime.explain(status)
                raise LayoutError(
                    f"{size_bytes} bytes of host memory cannot be pinned for {self._device}: {text}"
                )
        self._pinned.append((address, size_bytes))

    def close(self) -> None:
        while self._pinned:
            with _on(self._device):
                self._runtime.unregister(self._pinned.pop()[0])


class Runtime:
    """Functions of the CUDA runtime that torch loads but does not expose."""

    def __init__(self, path: str | None) -> None:
        """Open the library at `path`; None means that torch loaded none. Raises: LayoutError."""
        if path is None:
            raise LayoutError(
                "torch has loaded no CUDA runtime (libcudart.so): memory of a device cannot be "
                "copied"
            )
        self._queue_holding_gil = _typed(ctypes.PyDLL(path).cudaMemcpyAsync)
        self._queue_releasing_gil = _typed(ctypes.CDLL(path).cudaMemcpyAsync)
        library: Any = ctypes.CDLL(path)
        self._register, self._unregister = library.cudaHostRegister, library.cudaHostUnregister
        self._register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._unregister.argtypes = [ctypes.c_void_p]
        self._attribute = library.cudaDeviceGetAttribute
        self._attribute.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int]
        self._explain = library.cudaGetErrorString
        self._explain.argtypes, self._explain.restype = [ctypes.c_int], ctypes.c_char_p

    def queue(self, blocks: Blocks, stream: int) -> None:
        """Queue the copy of every block, in order. The GIL is released every `_HELD_CALLS` calls.

        Raises: TransferError at the first block that CUDA refuses.
        """
        sources, targets, sizes = (column.tolist() for column in blocks)
        for n, (source, target, size) in enumerate(zip(sources, targets, sizes, strict=True), 1):
            queue = self._queue_holding_gil if n % _HELD_CALLS else self._queue_releasing_gil
            if status := queue(target, source, size, _ANY_TO_ANY, stream):
                raise TransferError(f"a copy of {size} bytes was refused: {self.explain(status)}")

    def register(self, address: int, size_bytes: int, flags: int) -> int:
        return int(self._register(address, size_bytes, flags))

    def unregister(self, address: int) -> int:
        return int(self._unregister(address))

    def attribute(self, which: int, device: int) -> int:
        """Return the device attribute with number `which`, or 0 if the runtime does not know it."""
        value = ctypes.c_int()
        return 0 if self._attribute(ctypes.byref(value), which, device) else value.value

    def explain(self, status: int) -> str:
        return f"{self._explain(status).decode(errors='replace')} (cudaError {status})"


def _typed(function: Any) -> Any:
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    function.restype = ctypes.c_int
    return function


def _block_kernel(device: torch.device) -> BlockKernel | None:
    """Return the kernel for `device`, or None without Triton (torch's CUDA builds include it)."""
    try:
        from kvflow.memory.block_kernel import BlockKernel
    except ImportError:
        return None
    return BlockKernel(device)


def _on(device: torch.device) -> Any:
    import torch

    return torch.cuda.device(device)


def _loaded_library(name: str) -> str | None:
    """Return the path of a loaded library whose file name starts with `name`, or None."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        for line in file:
            path = line.partition("/")[2].rstrip("\n")
            if path.rpartition("/")[2].startswith(name):
                return f"/{path}"
    return None
