"""Snapshots of pools in device memory: every kind of state comes back, byte for byte."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from kvflow.memory.copies import CudaCopier
from kvflow.memory.pool import PagedPool
from kvflow.memory.snapshot import SnapshotStore
from kvflow.protocols.pages.layout import Order
from kvflow.protocols.pages.plan import Blocks
from tests.memory.kinds import KINDS, give_back, layout_of, names_of, space_of, take

pytestmark = pytest.mark.gpu


def fill(pool: PagedPool, kind: str, seed: int) -> None:
    random = torch.Generator(device=pool.device).manual_seed(seed)
    for name in names_of(kind):
        view = pool.tensor(name).view(torch.uint8)
        view.copy_(
            torch.randint(
                0, 256, view.shape, dtype=torch.uint8, device=pool.device, generator=random
            )
        )
    torch.cuda.synchronize()


def contents(pool: PagedPool, kind: str) -> dict[str, torch.Tensor]:
    return {name: pool.tensor(name).view(torch.uint8).cpu().clone() for name in names_of(kind)}


@pytest.mark.parametrize("order", ["page_first", "layer_first"])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_buffer_comes_back_and_no_neighbour_is_touched(kind: str, order: Order) -> None:
    pool = PagedPool.allocate(layout_of(kind, 16, 40, 6, order), device="cuda")
    store = SnapshotStore(pool, 1 << 22, slice_bytes=4096)
    fill(pool, kind, 1)
    before = contents(pool, kind)
    mine = take(pool, 17, 2, "mine")
    held = await store.take(mine)
    give_back(pool, mine, "mine")
    fill(pool, kind, 2)
    foreign = contents(pool, kind)
    random = np.random.default_rng(3)
    theirs = tuple(
        random.permutation(allocator.take(allocator.free_pages, "again"))[: own.size]
        for allocator, own in zip(pool.allocators, mine, strict=True)
    )
    await store.restore(held, theirs)
    found = contents(pool, kind)
    for name in names_of(kind):
        here, there = mine[space_of(kind, name)], theirs[space_of(kind, name)]
        assert torch.equal(found[name][there.tolist()], before[name][here.tolist()]), name
        others = np.setdiff1d(np.arange(len(found[name])), there).tolist()
        assert torch.equal(found[name][others], foreign[name][others]), name
    held.close()
    await store.close()
    pool.close()


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("unit", [8, 1])
def test_many_small_blocks_arrive_whole_and_alone(unit: int, pinned: bool) -> None:
    """The kernel copies whole words from pinned memory; otherwise each block is a call."""
    random = np.random.default_rng(5)
    pool = PagedPool.allocate(layout_of("mha", 16, 64, 0, "layer_first"), device="cuda")
    host = PagedPool.allocate(layout_of("mha", 16, 64, 0, "page_first"), shared=False)
    fill(pool, "mha", 1)
    copier = CudaCopier(pool.device)
    if pinned:
        copier.pin(host)
    there, here = pool.layout.buffers[0], host.layout.buffers[0]
    room = min(there.size_bytes, here.size_bytes) // 2
    count = 300
    ends = np.sort(random.choice(np.arange(unit, room, unit), 2 * count, replace=False))
    starts, sizes = ends[0::2], ends[1::2] - ends[0::2]
    # The two sides are not the same distance from their starts.
    shift = unit * int(random.integers(0, room // unit))
    out = Blocks(there.address + starts, here.address + shift + starts, sizes)
    memory = torch.frombuffer(
        memoryview((ctypes.c_uint8 * here.size_bytes).from_address(here.address)), dtype=torch.uint8
    )
    memory.fill_(7)
    names = names_of("mha")
    assert copier.takes_kernel(out) == (pinned and unit == 8)
    copier.copy(out)
    source = pool.tensor(names[0]).view(torch.uint8).cpu().flatten()
    expected = torch.full_like(memory, 7)
    for start, size in zip(starts, sizes, strict=True):
        expected[shift + start : shift + start + size] = source[start : start + size]
    assert torch.equal(memory, expected)
    before = contents(pool, "mha")
    memory.copy_(torch.from_numpy(random.integers(0, 256, memory.shape, dtype=np.uint8)))
    copier.copy(Blocks(out.targets, out.sources, out.sizes))
    after = contents(pool, "mha")
    back = before[names[0]].flatten()
    for start, size in zip(starts, sizes, strict=True):
        back[start : start + size] = memory[shift + start : shift + start + size]
    assert torch.equal(after[names[0]].flatten(), back)
    assert all(torch.equal(after[name], before[name]) for name in names[1:])
    copier.close()
    host.close()
    pool.close()
