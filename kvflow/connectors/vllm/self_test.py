"""The self-test at every start. After a move, a block must read back as vLLM wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvflow.memory.copies import copier_for, copy_slices
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.layout import NO_PLACES
from kvflow.protocols.pages.plan import Pairing

if TYPE_CHECKING:
    import torch

_SLICE_BYTES = 1 << 30
_SHOWN = 3  # layers that an error names


def check_moves(
    caches: Mapping[str, torch.Tensor], pool: PagedPool, num_blocks: int, space: int = 0
) -> None:
    """Move one block of a space and check that vLLM's layers read it back unchanged.

    The test writes a block through `caches`, vLLM's layers in the space, and moves it by the layout
    in `pool`, which data planes use to compute addresses. The target block must then equal the
    source, and the blocks around both must be unchanged. No block is in use yet. If the layout
    passes, the test restores every byte that it changed.

    Raises: LayoutError naming the layers that do not pass.
    """
    for name, cache in caches.items():
        if cache.shape[0] != num_blocks:
            shape = tuple(cache.shape)
            raise LayoutError(
                f"KV cache of {name}, {shape}: its first dimension is not vLLM's {num_blocks} "
                "blocks"
            )
    if num_blocks < 2:
        return
    source, target = num_blocks - 1, num_blocks // 2 - 1
    # Bytes that are written to a wrong place would probably show in the neighbours or in block 0.
    near = sorted(
        {n for at in (source, target) for n in (at - 1, at, at + 1) if 0 <= n < num_blocks} | {0}
    )
    kept = {name: _read(cache, near) for name, cache in caches.items()}
    try:
        for seed, cache in enumerate(caches.values()):
            # Every block has a different pattern, so that a byte from another block is detected.
            for block in near:
                cache[block].copy_(_pattern(cache, seed * num_blocks + block))
        wanted = {name: _read(cache, near) for name, cache in caches.items()}
        for blocks in wanted.values():
            blocks[target] = blocks[source]
        _move(pool, space, source, target)
        wrong = [
            name
            for name, cache in caches.items()
            if not _are_alike(_read(cache, near), wanted[name])
        ]
    finally:
        for name, cache in caches.items():
            for block, content in kept[name].items():
                cache[block].copy_(content)
        _settle(pool)
    if wrong:
        names = ", ".join(wrong[:_SHOWN]) + (
            f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        )
        raise LayoutError(
            "self-test: a block of vLLM's KV cache that was moved does not read back as it was "
            f"written, in {names}: kvflow's connector does not know this layout"
        )


def _move(pool: PagedPool, space: int, source: int, target: int) -> None:
    here, there = [NO_PLACES] * len(pool.layout.spaces), [NO_PLACES] * len(pool.layout.spaces)
    here[space], there[space] = (np.array([block], np.int32) for block in (source, target))
    copier = copier_for(pool)
    _settle(pool)
    try:
        copy_slices(
            Pairing(pool.layout, pool.layout),
            tuple(here),
            tuple(there),
            _SLICE_BYTES,
            copier,
            lambda: False,
        )
    finally:
        copier.close()
    _settle(pool)


def _settle(pool: PagedPool) -> None:
    """Wait for the device, because kvflow's copies are not synchronized with vLLM's work."""
    if not pool.on_host:
        import torch

        torch.accelerator.synchronize()


def _pattern(cache: torch.Tensor, seed: int) -> torch.Tensor:
    import torch

    size = cache[0].numel() * cache.element_size()
    drawn = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return torch.from_numpy(drawn).view(cache.dtype).reshape(cache.shape[1:]).to(cache.device)


def _read(cache: torch.Tensor, blocks: Iterable[int]) -> dict[int, torch.Tensor]:
    return {block: cache[block].clone() for block in blocks}


def _are_alike(one: Mapping[int, torch.Tensor], other: Mapping[int, torch.Tensor]) -> bool:
    """Compare byte by byte, because a NaN does not equal itself."""
    import torch

    pairs = ((one[block].contiguous(), other[block].contiguous()) for block in one)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
