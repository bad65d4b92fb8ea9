"""A Triton kernel that copies many small blocks between a CUDA device and pinned host memory.

It replaces one call of cudaMemcpyAsync per block. Such a call takes about 2 us, and delays what
other threads queue. Measured on an H100, with 512 pages of 2 MiB in a layer-first pool (65,536
blocks of 32 KiB): the calls move 8 GB/s, and the kernel moves 36 GB/s. During the calls, the steps
of a small model take 65 times as long, and during the kernel 1.8 times. One large copy moves 53
GB/s.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
from triton import language as tl

from kvflow.protocols.errors import TransferError
from kvflow.protocols.pages.plan import Blocks

# For blocks of this average size or more, cudaMemcpyAsync is as fast, and needs no multiprocessor.
LARGE_BYTES = 256 << 10
_MIN_BLOCKS = 16
_WORD_BYTES = 8
# A program of the kernel moves this many words at once.
_WORDS = 2048
# 16 programs are as fast as 128, and leave most of the device to the model.
_PROGRAMS = 16


class BlockKernel:
    """The kernel, compiled for one device."""

    def __init__(self, device: torch.device) -> None:
        """Compile the kernel. This takes about a second the first time."""
        self._device = device
        words = torch.zeros(2, device=device, dtype=torch.int64)
        address = np.array([words.data_ptr()], dtype=np.int64)
        self.queue(
            Blocks(address, address + _WORD_BYTES, np.array([_WORD_BYTES])),
            torch.cuda.current_stream(device),
        )
        torch.cuda.current_stream(device).synchronize()

    def suits(self, blocks: Blocks) -> bool:
        """Return True if the blocks are many and small, and their addresses and sizes are multiples
        of a word.
        """
        count = blocks.sizes.size
        if count < _MIN_BLOCKS or blocks.total_bytes >= count * LARGE_BYTES:
            return False
        return not any(int(np.bitwise_or.reduce(column)) % _WORD_BYTES for column in blocks)

    def queue(self, blocks: Blocks, stream: torch.cuda.Stream) -> None:
        """Queue the copies of all blocks on `stream`. Raises: TransferError if CUDA refuses."""
        table = np.stack([blocks.sources, blocks.targets, blocks.sizes // _WORD_BYTES])
        try:
            with torch.cuda.stream(stream):
                on_device = torch.from_numpy(table).to(self._device)
                _copy_blocks[(_PROGRAMS,)](on_device, blocks.sizes.size, _WORDS)
        except RuntimeError as error:
            raise TransferError(
                f"a copy of {blocks.sizes.size} blocks was refused: {error}"
            ) from error


@triton.jit  # type: ignore[untyped-decorator]
def _copy_blocks(table, count, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Copy the blocks of `table`, int64 [3, count]: source addresses, target addresses, sizes in
    words.

    Program p of n copies blocks p, p + n, p + 2n, ...
    """
    for block in range(tl.program_id(0), count, tl.num_programs(0)):
        source = tl.load(table + block).to(tl.pointer_type(tl.int64))
        target = tl.load(table + count + block).to(tl.pointer_type(tl.int64))
        words = tl.load(table + 2 * count + block)
        for start in range(0, words, WORDS):
            at = start + tl.arange(0, WORDS)
            tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)
